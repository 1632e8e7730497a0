"""Hollow models whose parameters are read from memory-mapped safetensors files."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.arithmetic.internals import fill_buffers
from fragility_core.models.hollow import hollow_parameter, load_when_running


class Checkpoint:
    """The tensors in safetensors ``files``, by the names that they have there."""

    def __init__(self, files: Iterable[Path]):
        """Reads the names in ``files``; their entries stay on the disk."""
        self.files: dict[str, Path] = {}
        self.checked: set[str] = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self.files |= dict.fromkeys(opened.keys(), file)

    def read(self, name: str, shape: torch.Size, device: torch.device) -> Tensor:
        """The tensor called ``name`` in fp32, in memory of its own on ``device``.

        A file is mapped to memory as long as the tensor is copied. Raises ValueError for another ``shape``, and for
        entries that are not finite.
        """
        with safe_open(self.files[name], framework="pt") as opened:
            stored = opened.get_tensor(name)
            if stored.shape != shape:
                found = f"{name} of {tuple(stored.shape)} for {tuple(shape)}"
                raise ValueError(f"a checkpoint must fit its model, got {found}")
            tensor = stored.to(device).to(torch.float32, copy=device.type == "cpu")
        if name not in self.checked:
            if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                raise ValueError(f"weights must be finite in fp32, but those of {name} are not")
            self.checked.add(name)
        return tensor

    def name_of(self, paths: Iterable[str], prefix: str) -> str | None:
        """The name of the parameter that a model has at ``paths``: one of them, with or without the base's ``prefix``.

        None where the files do not hold it.
        """
        for path in paths:
            names = path, f"{prefix}.{path}", path.removeprefix(f"{prefix}.")
            if found := next((name for name in names if name in self.files), None):
                return found
        return None


def open_hollow(made: PreTrainedModel, files: Iterable[Path], device: torch.device | str = "cpu") -> PreTrainedModel:
    """The fp32 model ``made`` on the device "meta", changed in place: a hollow model on ``device`` in eval mode.

    Its parameters are read from the safetensors ``files`` when they are needed. Raises OSError for files that lack
    some, such as those whose names transformers changes when it loads them (mixtures of experts).
    """
    checkpoint, device = Checkpoint(files), torch.device(device)
    fill_buffers(made, device)
    paths: dict[int, list[str]] = {}  # tied parameters have several
    state = dict(made.named_parameters(remove_duplicate=False))
    state |= {path: x for path, x in made.named_buffers() if x.device.type == "meta"}
    for path, x in state.items():
        paths.setdefault(id(x), []).append(path)
    names = {number: checkpoint.name_of(found, made.base_model_prefix) for number, found in paths.items()}
    if missing := [paths[number][0] for number, name in names.items() if name is None]:
        raise OSError(
            f"a checkpoint must hold all weights of its model under the model's names, but the files lack "
            f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}: load the whole model"
        )
    new: dict[int, Tensor] = {}
    for path, x in state.items():
        read = partial(checkpoint.read, names[id(x)], x.shape, device)
        owner, _, name = path.rpartition(".")
        if not isinstance(x, nn.Parameter):
            made.get_submodule(owner).register_buffer(name, read().to(x.dtype))
            continue
        if id(x) not in new:
            new[id(x)] = hollow_parameter(x.shape, torch.float32, device, read)
        setattr(made.get_submodule(owner), name, new[id(x)])
    load_when_running(made)
    return made.eval()
