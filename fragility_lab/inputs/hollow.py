"""Hollow models by hub name or local path: their weights are read whenever they are needed."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fragility_core.models.files import Checkpoint, Device, open_hollow
from fragility_lab.inputs.checkpoints import (
    default_device,
    load_config,
    located,
    require_exact_products,
)
from fragility_lab.inputs.described import require_described_weights
from fragility_lab.inputs.names import not_found
from fragility_lab.inputs.stored import require_numbers, weight_files


def on_meta(
    name: str, auto_class: type = AutoModelForCausalLM, config: PreTrainedConfig | None = None
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` without weights, on the device "meta"; raises the errors of ``load_config``.

    ``config`` is its own unless given.
    """
    with torch.device("meta"):
        return auto_class.from_config(config or load_config(name), dtype=torch.float32)


def load_hollow(
    name: str, device: Device | Mapping[str, Device] | None = None, auto_class: type = AutoModelForCausalLM,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` as a hollow one (``models.hollow``), on one ``device`` or on several by module.

    ``config`` is its own unless given.

    Raises the errors of ``checkpoints.load_model``; those of shapes, and of weights that are not finite, when the
    weights are read.
    """
    require_exact_products()
    folder = Path(located(name, weights=True))
    require_numbers(folder, name)
    made = on_meta(name, auto_class, config)
    try:
        checkpoint = Checkpoint(weight_files(folder, name), made)
        model = open_hollow(made, checkpoint, default_device() if device is None else device)
    except (OSError, ValueError, SafetensorError) as cause:
        raise not_found("model", name, "MODEL", cause) from cause
    found = {"mismatched_keys": [], "missing_keys": [], "unexpected_keys": checkpoint.unexpected}
    require_described_weights(model, name, found)
    return model
