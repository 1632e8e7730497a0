"""Normalization layers, recognised by what they compute, not by the name of their class."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

EPSILONS = ("eps", "variance_epsilon")  # the names under which transformers' norms keep epsilon


@dataclass(eq=False)
class Norm:
    """A layer that computes gamma (x - mu) / sqrt(sigma^2 + eps).

    If it is not ``centred`` (RMSNorm), mu is 0 and sigma^2 the mean square. gamma is the module's weight plus
    ``offset``: 0, or 1 in Gemma, which stores gamma - 1.
    """

    module: Any  # an ``nn.Module``
    centred: bool
    offset: float

    @property
    def gamma(self) -> Tensor:
        """The scale (d_model,): the weight as it is, or plus the offset, in fp32."""
        weight = self.module.weight.detach()
        return weight.float() + self.offset if self.offset else weight

    @property
    def eps(self) -> float:
        """The module's present epsilon."""
        return getattr(self.module, self.epsilon_name)

    @eps.setter
    def eps(self, epsilon: float) -> None:
        setattr(self.module, self.epsilon_name, epsilon)

    @property
    def epsilon_name(self) -> str:
        """The name of the attribute of the module that holds its epsilon."""
        return str(epsilon_name(self.module))


def epsilon_name(module: nn.Module) -> str | None:
    """The name of the attribute that holds the epsilon of ``module``; None where there is none."""
    return next((name for name in EPSILONS if isinstance(getattr(module, name, None), int | float)), None)


@torch.no_grad()
def known_norm(module: nn.Module) -> Norm | None:
    """``module`` as a LayerNorm or RMSNorm, or None if it is neither.

    The module is run on one vector of mean 1, for which the candidates differ. The nearest candidate must agree up to
    roundings in the module's dtype. One that takes more than a vector, as gated norms do, is neither.
    """
    weight = getattr(module, "weight", None)
    if epsilon_name(module) is None or not torch.is_tensor(weight) or weight.ndim != 1:
        return None
    x = torch.linspace(-1, 3, weight.numel(), dtype=torch.float64).to(weight)
    bias = 0.0 if getattr(module, "bias", None) is None else module.bias.double()
    try:
        computed, x = module(x[None])[0].double() - bias, x.double()
    except (AttributeError, TypeError):  # no gate was given, or it is None
        return None
    candidates = [Norm(module, centred, offset) for centred in (True, False) for offset in (0.0, 1.0)]

    def distance(norm: Norm) -> float:
        centred = x - x.mean() if norm.centred else x
        path = norm.gamma.double() * centred / (centred.square().mean() + norm.eps).sqrt()
        return (torch.linalg.vector_norm(computed - path) / torch.linalg.vector_norm(path)).item()

    nearest = min(candidates, key=distance)
    return nearest if distance(nearest) < 8 * torch.finfo(weight.dtype).eps else None
