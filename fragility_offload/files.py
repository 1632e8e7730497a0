"""Offloaded models whose parameters are read from memory-mapped safetensors files."""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fragility_core.models.paths import within
from fragility_offload.internals import fill_buffers, is_ignored
from fragility_offload.offloaded import load_when_running, offloaded_parameter

Device = torch.device | str | int


class CheckpointTensors:
    """Tensors that a ``converter`` of transformers makes of those in the files, as for a layer's experts.

    Without a converter it is one tensor as the files have it.
    """

    def __init__(self, path: str, converter: WeightConverter | None):
        self.path, self.converter = path, converter
        self.sources: list[tuple[str, Any]] = []  # names in the files, with the converter's patterns

    def paths(self) -> list[str]:
        """The paths of the tensors in the model."""
        first, *others = [""] if self.converter is None else self.converter.target_patterns
        return [self.path, *(self.path.replace(first, other) for other in others)]

    def tensor(self, path: str, stored: dict[str, Tensor], model: nn.Module) -> Tensor:
        """The tensor at ``path`` of ``model``, from those that are ``stored`` in the files."""
        if self.converter is None:
            return next(iter(stored.values()))
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            read: Any = partial(stored.__getitem__, name)  # asked for as a Future is
            converter.add_tensor(self.path, name, pattern, read)
        made = converter.convert(self.path, model=model, config=model.config)[path]
        return made[0] if isinstance(made, list) else made


class Checkpoint:
    """The tensors in safetensors ``files``, by the paths that they have in ``model``, which may be on "meta".

    transformers renames tensors, and joins those of experts, when it loads a model. Its own rules are followed here.
    ``unexpected`` has the names of tensors that the model does not have.
    """

    def __init__(self, files: Iterable[Path], model: PreTrainedModel):
        """Reads the names in ``files``; their entries stay on the disk."""
        self.model = model
        self.files: dict[str, Path] = {}
        self.made: dict[str, CheckpointTensors] = {}
        self.unexpected: list[str] = []
        self.checked: set[str] = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self.files |= dict.fromkeys(opened.keys(), file)
        rules, known = get_model_conversion_mapping(model), model.state_dict()
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = model.base_model_prefix
        for name in sorted(self.files, key=dot_natural_key):  # experts are joined in the order of their numbers
            path, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if path not in known:
                path, pattern = rename_source_key(name, [], [], prefix, known)
            if path not in known:
                self.unexpected += [] if is_ignored(model, name) else [name]
                continue
            made = self.made.get(path) or CheckpointTensors(path, by_pattern.get(pattern or ""))
            made.sources.append((name, pattern))
            self.made |= dict.fromkeys(made.paths(), made)

    def read(self, path: str, shape: torch.Size, device: torch.device) -> Tensor:
        """The tensor at ``path`` in fp32, in memory of its own on ``device``.

        A file is mapped to memory as long as the tensor is copied. Raises ValueError for another ``shape``, and for
        entries that are not finite.
        """
        made, stored = self.made[path], {}
        for name, _ in made.sources:
            with safe_open(self.files[name], framework="pt") as opened:
                stored[name] = opened.get_tensor(name).to(device, copy=made.converter is not None)
        tensor = made.tensor(path, stored, self.model)
        if tensor.shape != shape:
            raise ValueError(f"a checkpoint must fit its model, got {path} of {tuple(tensor.shape)} for {tuple(shape)}")
        part = tensor.untyped_storage().nbytes() > tensor.nbytes  # of a tensor in the files that holds several
        mapped = made.converter is None and device.type == "cpu"
        tensor = tensor.to(torch.float32, copy=part or mapped).contiguous()
        if path not in self.checked:
            if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                raise ValueError(f"weights must be finite in fp32, but those of {path} are not")
            self.checked.add(path)
        return tensor


def device_of(places: Mapping[str, Device], path: str) -> torch.device:
    """The device of the parameter or buffer at ``path``: that of the innermost module among ``places``."""
    around = [module for module in places if not module or within(path, module)]
    if not around:
        raise ValueError(f"every parameter must have a device, but no module around {path} is in the map of devices")
    return torch.device(places[max(around, key=len)])


def open_offloaded(
    model: PreTrainedModel, checkpoint: Checkpoint, device: Device | Mapping[str, Device] = "cpu"
) -> PreTrainedModel:  # fmt: skip
    """The fp32 ``model`` on the device "meta", changed in place: an offloaded model on ``device`` in eval mode.

    Its parameters are read from its ``checkpoint`` when they are needed. ``device`` may give several devices by the
    paths of modules, as a ``device_map`` of transformers does; what a part receives is moved to the part's device.
    Tied parameters that the files hold with other values each are untied, as transformers does it.
    Raises OSError for a checkpoint that lacks parameters, and ValueError for a parameter without a device.
    """
    places = device if isinstance(device, Mapping) else {"": device}
    fill_buffers(model, partial(device_of, places))
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state |= {path: x for path, x in model.named_buffers() if x.device.type == "meta"}
    # Tied parameters have several paths, of which the first counts.
    first = {id(x): path for path, x in reversed(state.items())}
    stored_at = {id(x): path for path, x in reversed(state.items()) if path in checkpoint.made}
    untied = {
        path for path, x in state.items()
        if path in checkpoint.made and path != (other := stored_at[id(x)])
        and not torch.equal(*(checkpoint.read(each, x.shape, torch.device("cpu")) for each in (path, other)))
    }  # fmt: skip
    if missing := [path for path, x in state.items() if path == first[id(x)] and id(x) not in stored_at]:
        raise OSError(
            f"a checkpoint must hold all weights of its model, but the files lack "
            f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}: load the whole model"
        )
    new: dict[int | str, Tensor] = {}
    for path, x in state.items():
        place = device_of(places, path)
        read = partial(checkpoint.read, path if path in untied else stored_at[id(x)], x.shape, place)
        owner, _, name = path.rpartition(".")
        if not isinstance(x, nn.Parameter):
            model.get_submodule(owner).register_buffer(name, read().to(x.dtype))
            continue
        key = path if path in untied else id(x)
        if key not in new:
            new[key] = offloaded_parameter(x.shape, torch.float32, place, read)
        setattr(model.get_submodule(owner), name, new[key])
    load_when_running(model)
    return model.eval()
