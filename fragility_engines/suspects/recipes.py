"""Suspects of recipes: an engine that stores weights, inputs of products or its cache in fewer bits than it is said to.

Each is the model quantized so, with kernels in fp32. Rounded weights are the same in every engine. Rounded inputs and
caches are not, as they depend on the results of kernels: an engine's gap is only partly along such a direction.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from fragility_engines.suspects.suspect import Suspect, logits
from fragility_offload.memory import free_memory
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe, get_recipe

CACHE, WEIGHTS = "the dtype of the KV cache that the engine was started with", "the file that the engine has loaded"
DTYPE = "the dtype that the engine was started with"
PLAIN = ("bf16", "fp16")
RUN = {
    **dict.fromkeys(("kv-fp8", "kv-int8", "kv-q4_0"), CACHE),
    **dict.fromkeys(("fp8-dynamic", "fp8-block", "fp8-tensor", "fp8-w", "fp8-tensor-w", "w8a8-int8"), WEIGHTS),
    **dict.fromkeys(("w8a16-channel", "w4a16-g128", "mxfp4-w", "ggml-q8_0", "ggml-q4_0"), WEIGHTS),
}
COPY = 4 * 1.5  # bytes for each weight of a model that is quantized beside it


def recipes(model: PreTrainedModel, own: Recipe) -> list[Suspect]:
    """The suspects of recipes that engines often run, other than their ``own``; of caches if ``model`` takes one.

    Empty if there is no memory for another copy of ``model``: a comparison must not end for want of it.
    """
    free = free_memory(next(model.parameters()).device)
    if free is not None and free < COPY * sum(p.numel() for p in model.parameters()):
        return []
    fitting = {name: look for name, look in RUN.items() if look != CACHE or takes_cache(model, name)}
    finest = own.kernels.unit_roundoff if own.plain else 1.0
    # Finer kernels make no gap larger.
    fitting |= {name: DTYPE for name in PLAIN if get_recipe(name).kernels.unit_roundoff > finest}
    return [
        Suspect(f"the recipe {name} in place of {own.name}", look, partial(lowered, name), rounds=scatters(name))
        for name, look in fitting.items() if name != own.name
    ]  # fmt: skip


@torch.no_grad()
def takes_cache(model: PreTrainedModel, recipe: str) -> bool:
    """True if the own code of ``model`` reads keys and values from a cache that rounds them as ``recipe`` says."""
    try:
        with lowered(recipe, model) as low:
            logits(low, torch.zeros(1, dtype=torch.long, device=next(model.parameters()).device))
    except ValueError:  # raised for a decoder that takes none or one of its own kind, and for heads of other widths
        return False
    return True


def scatters(name: str) -> bool:
    """True if the recipe with this ``name`` rounds more than weights, which are the same in every engine."""
    recipe = get_recipe(name)
    return recipe.plain or recipe.linear.inputs is not None or recipe.cache is not None


@contextmanager
def lowered(recipe: str, model: PreTrainedModel) -> Iterator[Any]:
    """A context with ``model`` lowered by ``recipe``. If the recipe is not plain, kernels compute in fp32."""
    low = lower(model, recipe if get_recipe(recipe).plain else f"{recipe}@fp32")
    with low.running():
        yield low.model
