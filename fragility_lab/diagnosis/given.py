"""A model whose weights somebody else has rounded, and the fp32 model that it was made from."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_core.models.hollow import entries, is_hollow
from fragility_lab.inputs import checkpoints
from fragility_lab.inputs.hollow import load_hollow, on_meta


def require_same_architecture(model: str, reference: str) -> None:
    """Raises ValueError unless the models of these names have the same parameters.

    Configurations are read, no weights. Raises the errors of ``inputs.checkpoints.load_config``.
    """
    models = [on_meta(name) for name in (model, reference)]
    shapes = [{path: tuple(p.shape) for path, p in made.named_parameters()} for made in models]
    if differing := sorted({*shapes[0].items()} ^ {*shapes[1].items()}):
        path = differing[0][0]
        found = " and ".join(str(known.get(path, "no such parameter")) for known in shapes)
        raise ValueError(
            "REFERENCE_MODEL= must be the model before its weights were rounded, of the same shapes, but "
            f"{path} has {found} in {model!r} and {reference!r}"
        )


def load_rounded(name: str, original: nn.Module) -> PreTrainedModel:
    """The fp32 model ``name`` on the device of ``original``, or on its several devices; hollow if that is.

    Raises the errors of ``inputs.checkpoints.load_model``, and ValueError if all weights are those of ``original``.
    """
    device = getattr(original, "hf_device_map", None) or str(next(original.parameters()).device)
    load = load_hollow if is_hollow(original) else checkpoints.load_model
    rounded = load(name, device, AutoModelForCausalLM)
    pairs = zip(rounded.parameters(), original.parameters(), strict=True)
    if all(torch.equal(entries(a), entries(b)) for a, b in pairs):
        raise ValueError(f"MODEL= must have other weights than REFERENCE_MODEL=, got the same ones in {name!r}")
    return rounded
