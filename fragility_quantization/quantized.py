"""Models lowered by recipes: linear layers, the cache and other kernels may each store numbers in their own way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fragility_core.models.paths import embedding_paths
from fragility_numerics import lowering
from fragility_numerics.formats import NumberFormat
from fragility_numerics.internals import experts_of
from fragility_numerics.lowering import LowPrecision, Storing, refuse_bare_calls, require_module, stays_fp32
from fragility_quantization.cache import store_cache
from fragility_quantization.operands import (
    RoundedOperands,
    owner,
    rounded_weight,
    stored_weights,
    weight_schemes,
    with_known_layers,
)
from fragility_quantization.recipes import PREQUANTIZED, RECIPES, Recipe, get_recipe
from fragility_quantization.static_scales import needs_calibration


@dataclass(frozen=True)
class Quantized(LowPrecision):
    """A model in low precision by a ``recipe``; ``format`` is that of the results of its kernels."""

    recipe: Recipe = RECIPES["fp32"]

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.recipe.name

    @property
    def plain(self) -> bool:
        """True if the recipe rounds the results of kernels and nothing else."""
        return self.recipe.plain

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a call of ``model`` computes as the recipe says."""
        with super().running():
            if self.plain or self.weights_only:
                yield
                return
            with RoundedOperands(self.model, self.recipe, self.paused, self.emulation):
                yield


def recipe_of(low: LowPrecision) -> Recipe:
    """The recipe by which a model was lowered; that of its format where it was lowered by one."""
    return low.recipe if isinstance(low, Quantized) else get_recipe(low.format)


def how_stored(model: nn.Module, recipe: Recipe, widened: bool = False) -> dict[str, Storing]:
    """Ways of ``recipe`` to store each parameter of ``model``, by path; ``widened`` tensors are fp32 all the same.

    Weights with a scheme are in the dtype of the kernels, unless products run in fp32 (``Operands.wide``). All others
    are as ``lowering.how_stored`` says.
    """
    found = lowering.how_stored(model, recipe.kernels, widened)
    if recipe.plain:
        return found
    dtype = recipe.kernels.compute_dtype
    schemes = weight_schemes(model, recipe)
    weights = {id(p): path for path, p in stored_weights(model, recipe).items()}
    looked_up = {id(model.get_submodule(path).weight) for path in embedding_paths(model)}
    for path, x in model.named_parameters():
        if id(x) not in weights or not x.is_floating_point() or stays_fp32(model, path, dtype):
            continue
        operands = replace(recipe.operands(owner(weights[id(x)])), weights=schemes.get(id(x)))
        # an embedding gives rows in the kernels' dtype
        wide = operands.wide(recipe.kernels) and id(x) not in looked_up
        final = torch.float32 if wide or widened else dtype
        if operands.weights is not None:
            rounding = partial(rounded_weight, model, path, stored=operands.weights)
            found[path] = Storing(rounding, torch.float32 if wide else dtype, final)
        elif found[path].round is not None:
            found[path] = found[path]._replace(dtype=final)
    return found


def lower(model: nn.Module, recipe: str | Recipe | NumberFormat | torch.dtype, execution: str = "auto") -> Quantized:
    """``model`` in low precision, by a ``recipe`` or its name: native where its device has the kernels, else emulated.

    The name of a format, such as "bf16", is that of the recipe that stores all weights and results in it.
    ``execution`` and errors are those of ``lowering.lower``. Raises ValueError for an unknown recipe, too, for static
    scales that were not measured, for a streamed model that accelerate has spread; and the errors of
    ``operands.with_known_layers`` for layers of a recipe that the model does not have.
    """
    require_module(model)
    chosen = with_known_layers(model, get_recipe(recipe))
    if needs_calibration(chosen):
        raise ValueError(
            f"static scales must be measured before a model is lowered, got {chosen.name}: calibrate it over windows "
            "with fragility_quantization.static_scales.calibrated(model, recipe, tokens)"
        )
    if chosen.linear.inputs is not None and experts_of(model) == "batched_mm":
        raise ValueError(
            "inputs of experts are rounded where a product reads the stored weights, of which batched_mm makes copies: "
            "call model.set_experts_implementation('grouped_mm')"
        )
    storing = how_stored(model, chosen, widened=execution == "weights")
    low = lowering.lower(model, chosen.kernels, execution, storing)
    if chosen.cache is not None and not low.weights_only:
        store_cache(low.model, chosen.cache, chosen.uncached)
    if low.execution == "native" and (chosen.linear or any(chosen.layers.values())):
        refuse_bare_calls(low.model)
    return Quantized(low.model, low.format, low.emulation, low.weights_only, chosen)


def as_prequantized(rounded: nn.Module) -> Quantized:
    """A model whose weights somebody else has ``rounded``, in fp32 tensors: kernels compute in fp32.

    With the original beside it, ``Adjoint(as_prequantized(rounded), original)`` predicts what the rounding does.
    """
    recipe = get_recipe(PREQUANTIZED)
    return Quantized(rounded, recipe.kernels, None, True, recipe)
