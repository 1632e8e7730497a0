"""Other realisations of rounding: nearly the same function with other rounding errors."""

import copy
from typing import TypeVar

import torch
from torch import nn

from fragility_quantization.operands import in_rows, linear_weights, owner
from fragility_quantization.recipes import Recipe

Model = TypeVar("Model", bound=nn.Module)


def moved(model: Model, scale: float, number: int) -> Model:
    """A copy of ``model`` whose weights are multiplied by 1 + ``scale`` z, with z standard normal.

    With half a unit roundoff as ``scale``, the copy computes nearly the same function but rounds everything
    differently. ``number`` seeds the draw: each number is another realisation.
    """
    copied = copy.deepcopy(model)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(number)
    for weight in copied.parameters():
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        weight.data *= 1 + scale * noise
    return copied


def dithered(model: Model, recipe: Recipe, number: int) -> Model:
    """A copy of ``model`` whose weights are moved as far as ``recipe`` rounds them, so that it rounds them differently.

    Where the recipe gives the weights of linear layers a scheme, each moves by a uniform number of at most half the
    scheme's step there. The errors of these weights then do not depend on the weights as stored (Schuchman 1964). All
    others are moved by half a unit roundoff of the kernels, as in ``moved``. ``number`` seeds the draw.
    """
    copied = moved(model, recipe.kernels.unit_roundoff / 2, number)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(number)
    for path in linear_weights(model):
        if (scheme := recipe.operands(owner(path)).weights) is not None:
            x = in_rows(model, path)
            noise = torch.rand(x.shape, generator=generator, device=x.device) - 0.5
            in_rows(copied, path).copy_(x + noise * scheme.ulp(x))
    return copied
