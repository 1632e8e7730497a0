"""Other realisations of rounding: nearly the same function with other rounding errors."""

import copy
from typing import TypeVar

import torch
from torch import nn

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
