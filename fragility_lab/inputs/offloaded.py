"""Offloaded models by hub name or local path: their weights are read whenever they are needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fragility_lab.inputs.checkpoints import default_device, load_config, load_model, located, require_exact_products
from fragility_lab.inputs.names import Wanted, local
from fragility_lab.inputs.stored import require_described_weights, require_numbers, weight_files
from fragility_offload.files import Checkpoint, Device, open_offloaded
from fragility_offload.offloaded import is_offloaded

UNREADABLE = (OSError, ValueError, SafetensorError)  # what files raise that do not hold the model


def on_meta(
    name: str, auto_class: Any = AutoModelForCausalLM, config: PreTrainedConfig | None = None
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` without weights, on the device "meta"; raises the errors of ``load_config``.

    ``config`` is the model's own unless given.
    """
    config = config or load_config(name)
    with Wanted("model", name), torch.device("meta"):
        return auto_class.from_config(config, dtype=torch.float32)


def require_fitting(name: str, auto_class: type = AutoModelForCausalLM) -> None:
    """Raises OSError or ValueError unless the files of the model ``name`` hold what its configuration describes.

    Names, shapes and dtypes are read, no weights. Files of a hub are checked once they are here.
    """
    if local(name) is not None:
        fitted(name, auto_class)


def fitted(
    name: str, auto_class: type, config: PreTrainedConfig | None = None
) -> tuple[PreTrainedModel, Checkpoint]:  # fmt: skip
    """The model ``name`` without weights, and the checkpoint with its weights, which are not read.

    Raises OSError or ValueError if the two do not fit each other.
    """
    folder = Path(located(name, weights=True))
    stored = require_numbers(folder, name)
    made = on_meta(name, auto_class, config)
    with Wanted("model", name, *UNREADABLE):
        checkpoint = Checkpoint(weight_files(folder, name), made)
    tied: dict[int, list[str]] = {}
    for path, x in made.named_parameters(remove_duplicate=False):
        tied.setdefault(id(x), []).append(path)
    single = {path: stored[part.sources[0][0]] for path, part in checkpoint.made.items() if part.converter is None}
    shapes = {path: x.shape for path, x in made.state_dict().items()}
    differing = {(path, x.shape, shapes[path]) for path, x in single.items() if x.shape != tuple(shapes[path])}
    missing = {paths[0] for paths in tied.values() if not checkpoint.made.keys() & {*paths}}
    found = {"mismatched_keys": differing, "missing_keys": missing, "unexpected_keys": checkpoint.unexpected}
    require_described_weights(made, name, found)
    return made, checkpoint


def load_offloaded(
    name: str, device: Device | Mapping[str, Device] | None = None, auto_class: type = AutoModelForCausalLM,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` as an offloaded one (``fragility_offload``), on one ``device`` or on several by module.

    ``config`` is the model's own unless given.

    Raises the errors of ``checkpoints.load_model``. The error of weights that are not finite comes when they are read.
    """
    require_exact_products()
    made, checkpoint = fitted(name, auto_class, config)
    with Wanted("model", name, *UNREADABLE):
        return open_offloaded(made, checkpoint, default_device() if device is None else device)


def load_beside(original: PreTrainedModel, name: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """The fp32 model ``name`` with its head, on the device or devices of ``original``, and offloaded if that is.

    ``config`` is the model's own unless given. Raises the errors of ``checkpoints.load_model``.
    """
    device: Any = getattr(original, "hf_device_map", None) or str(next(original.parameters()).device)
    load = load_offloaded if is_offloaded(original) else load_model
    return load(name, device, AutoModelForCausalLM, config)
