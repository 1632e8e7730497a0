"""Hollow models by hub name or local path: their weights are read whenever they are needed."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_core.models.files import Checkpoint, Device, open_hollow
from fragility_lab.inputs.checkpoints import (
    default_device,
    load_config,
    located,
    not_found,
    require_exact_products,
    require_own_files,
)
from fragility_lab.inputs.described import require_described_weights


def on_meta(name: str, auto_class: type = AutoModelForCausalLM) -> PreTrainedModel:
    """The fp32 model ``name`` without weights, on the device "meta"; raises the errors of ``load_config``."""
    with torch.device("meta"):
        return auto_class.from_config(load_config(name), dtype=torch.float32)


def weight_files(name: str) -> list[Path]:
    """The safetensors files of the model ``name``, from its folder or the hub.

    Raises OSError, which says how to go on, where they are not found, and for an index that names other folders.
    """
    folder = Path(located(name, weights=True))
    require_own_files(str(folder))
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / file for file in sorted(names)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise not_found("model", name, "MODEL", FileNotFoundError(f"there is no {absent[0]}"))
    return files


def load_hollow(
    name: str, device: Device | Mapping[str, Device] | None = None, auto_class: type = AutoModelForCausalLM
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` as a hollow one (``models.hollow``), on one ``device`` or on several by module.

    Raises the errors of ``checkpoints.load_model``; those of shapes, and of weights that are not finite, when the
    weights are read.
    """
    require_exact_products()
    made, files = on_meta(name, auto_class), weight_files(name)
    try:
        checkpoint = Checkpoint(files, made)
        model = open_hollow(made, checkpoint, default_device() if device is None else device)
    except (OSError, ValueError, SafetensorError) as cause:
        raise not_found("model", name, "MODEL", cause) from cause
    found = {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": checkpoint.unexpected}
    require_described_weights(model, name, found)
    return model
