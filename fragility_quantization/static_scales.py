"""Static scales of inputs: measured once over sample windows, as engines measure them before they serve."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fragility_core.models.paths import is_linear
from fragility_quantization.operands import owner, stored_weights, with_known_layers
from fragility_quantization.recipes import Operands, Recipe, get_recipe
from fragility_quantization.schemes import Scheme


def is_static(operands: Operands) -> bool:
    """True if inputs have a scale that is still to be measured."""
    inputs = operands.inputs
    return isinstance(inputs, Scheme) and inputs.static and inputs.largest_input is None


def needs_calibration(recipe: Recipe) -> bool:
    """True if ``recipe`` has static scales that are not measured yet."""
    return any(map(is_static, (recipe.linear, *recipe.layers.values())))


def require_named(model: nn.Module, recipe: Recipe) -> None:
    """Raises ValueError unless ``recipe`` is the one that its name gives ``model``, since a plan stores only the name.

    Static scales may differ: they are measured.
    """
    named = with_known_layers(model, get_recipe(recipe.name))
    if needs_calibration(named):
        named = replace(named, linear=recipe.linear, layers=recipe.layers)
    if named != recipe:
        raise ValueError(
            f"a plan has its recipe by name, but {recipe.name!r} was changed: take one by name, or add it to RECIPES"
        )


@torch.no_grad()
def calibrated(model: nn.Module, recipe: Recipe, tokens: Tensor) -> Recipe:
    """``recipe`` with static scales from the largest inputs of each linear layer in fp32 passes over ``tokens`` (B, T).

    Layers that no token reached have no scale, and are left as they are. Raises ValueError for a model in training mode
    and for experts that share one module, whose inner inputs cannot be seen from outside.
    """
    if not needs_calibration(recipe):
        return recipe
    if any(module.training for module in model.modules()):
        raise ValueError("static scales need the model in eval mode, got training mode: call model.eval()")
    static = [p for p in dict.fromkeys(map(owner, stored_weights(model, recipe))) if is_static(recipe.operands(p))]
    if together := [path for path in static if not is_linear(model.get_submodule(path))]:
        raise ValueError(
            f"static scales need linear layers that are modules, got the experts {together[0]}: choose a dynamic recipe"
        )
    largest: dict[str, float] = {}

    def record(path: str, module: nn.Module, args: tuple) -> None:
        largest[path] = max(largest.get(path, 0.0), float(args[0].abs().amax()))

    with ExitStack() as stack:
        for path in static:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(record, path))
            stack.callback(hook.remove)
        for window in tokens.split(1):
            model(window)
    layers = dict(recipe.layers)
    for path in static:
        operands = recipe.operands(path)
        scheme: Any = operands.inputs
        measured = replace(scheme, largest_input=largest[path]) if path in largest else None
        layers[path] = replace(operands, inputs=measured)
    linear = Operands(recipe.linear.weights) if is_static(recipe.linear) else recipe.linear
    return replace(recipe, layers=layers, linear=linear)
