"""Loading what a request names: the model, whole or offloaded, and its windows, checked before any work."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fragility_adjoint.mixed_precision import KEEPABLE_SITES
from fragility_adjoint.mixed_precision.structure import stored_parameters
from fragility_core.models.paths import block_paths
from fragility_lab.diagnosis.given import load_rounded, require_same_architecture
from fragility_lab.diagnosis.needs import fits_several_gpus, whole_fits
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.settings import require_same_settings
from fragility_lab.inputs.checkpoints import SPREAD, stored_dtypes
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.loading import load as load_inputs
from fragility_lab.inputs.offloaded import on_meta
from fragility_numerics.internals import attention_of


def load(request: Request) -> tuple[Inputs, Tensor]:
    """Load the model with its head, and the windows (B, T) on its device. In the streamed form the model is offloaded.

    A whole model that does not fit one GPU is spread over all GPUs, if it fits these together.

    With a reference model, ``Inputs.model`` is the reference, and ``Inputs.rounded`` the model itself. Raises the
    errors of ``inputs.loading.load`` and of ``given``, and ValueError for a budget larger than the model or below its
    least size, for an attention implementation that the model lacks, or for the target "flips" in the streamed form.
    """
    name, given = request.reference_model or request.model, bool(request.reference_model)
    if given:
        require_same_architecture(request.model, name)
    offloaded, device, made = request.form == "streamed", None, on_meta(name)
    require_enough(request, made)
    if not offloaded and not whole_fits(request, made):
        device = SPREAD if fits_several_gpus(request, made) else None
        offloaded = request.form == "auto" and device is None
    if offloaded and request.target == "flips":
        raise ValueError(
            "changed tokens are predicted with all weights in memory, but the model is streamed, got TARGET=flips: use "
            "TARGET=kl, or FORM=whole where memory suffices"
        )
    loaded = load_inputs(name, request.data, [request.length], request.windows, device, AutoModelForCausalLM, offloaded)
    set_attention(loaded.model, request)
    _, tokens = loaded.windows(request.length, request.windows, request.seed)
    tokens = tokens.to(loaded.device)
    if given:
        require_same_settings(request.model, name, loaded.model, tokens)
        dtypes = {request.model: stored_dtypes(request.model)} | loaded.dtypes
        rounded = load_rounded(request.model, loaded.model)
        loaded = replace(loaded, rounded=rounded, dtypes=dtypes)
        set_attention(rounded, request)
    (count, unit), modules = request.parsed_budget, [m.parameters(recurse=False) for m in loaded.model.modules()]
    owning = sum(next(parameters, None) is not None for parameters in modules)
    most = {"blocks": len(block_paths(loaded.model)), "sites": len(KEEPABLE_SITES), "modules": owning}.get(unit, count)
    if count > most:
        raise ValueError(f"the budget must be between 0 and the {most} {unit} of the model, got {count}")
    require_causal(loaded.model, request.model)
    return loaded, tokens


def require_enough(request: Request, made: Any) -> None:
    """Raises ValueError for a budget below what the weights of a model take, of which ``made`` has the shapes."""
    amount, unit = request.parsed_budget
    if not request.mixes or unit == "kl":
        return
    stored = [*zip(*(stored_parameters(made, recipe) for recipe in request.schemes))]
    linear, fixed = ([each for each in stored if each[0].linear == own] for own in (True, False))
    bits = sum(each[0].entries * min(one.bits for one in each) for each in linear)
    if unit == "bits":
        least, words = bits / max(1, sum(each[0].entries for each in linear)), "bits, those of the smallest scheme"
    else:
        least = (bits + sum(each[0].entries * each[0].bits for each in fixed)) / 8e6
        amount, words = amount / 1e6, "MB, which the model takes with the smallest schemes"
    if amount < least * (1 - 1e-9):
        raise ValueError(f"the budget must be at least {math.ceil(least * 1e3) / 1e3:g} {words}, got {amount:g}")


def set_attention(model: Any, request: Request) -> None:
    """Set ``model`` to the attention of ``request``; "auto" is sdpa if the model has it, else the model's own.

    Raises ValueError for an attention that the model lacks.
    """
    asked = "sdpa" if request.attention == "auto" else request.attention
    try:
        model.set_attn_implementation(asked)
        if (runs := attention_of(model)) != asked:  # some only log that they refuse
            raise ValueError(f"it runs {runs}")
    except ValueError as cause:
        if request.attention != "auto":
            raise ValueError(
                f"{request.model!r} must have the attention that it is to run with, but has no {asked} attention: "
                "use ATTENTION=auto"
            ) from cause


@torch.no_grad()
def require_causal(model: Any, name: str) -> None:
    """Raises ValueError if the logits of ``model`` at a position depend on later tokens, or its own code fails."""
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]], device=model.device)
    try:
        a, b = model(tokens, use_cache=False).logits[:, :-1]
    except (OSError, MemoryError, torch.OutOfMemoryError):  # these say by themselves what is missing
        raise
    except Exception as error:
        raise ValueError(
            f"a diagnosis needs a model that runs over tokens alone, got {name!r}, whose own code fails in fp32: "
            f"{type(error).__name__}: {error}"
        ) from error
    known = a[a.isfinite()]
    if not len(known) or not (a.isfinite() | (a == -torch.inf)).all():  # -inf leaves a token out
        raise ValueError(f"a model must give finite logits in fp32, but those of {name!r} are NaN or infinite")
    if not torch.allclose(a, b, rtol=1e-2, atol=1e-4 * float(known.abs().max())):
        raise ValueError(
            f"a diagnosis needs a model that predicts each token from those before it, got {name!r}, an encoder whose "
            "logits depend on later tokens"
        )
