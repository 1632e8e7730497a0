"""Several probes in one backward pass: what a pass does once, it does for all of them.

``torch.func.vmap`` runs the backward pass over a batch of gradients. In it a gradient looks like that of one probe.
Hooks and custom autograd functions see through this. They get all probes as the first dimension P, so that values of
the forward pass are formed again once, not once a probe.
"""

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from fragility_core.arithmetic.internals import (
    batched,
    outside_of_vmap,
    unbatched,
    vmap_level,
    without_vmap_fallback,
)


def backward(output: Tensor, leaves: Sequence[Tensor], gradients: Tensor) -> None:
    """One backward pass from ``output`` to ``leaves``, for all P ``gradients`` (P, *output.shape); keeps the graph.

    Raises RuntimeError for P > 1 if PyTorch cannot compute the gradient of a kernel for several probes at once, or
    memory does not suffice.
    """

    def run(gradient: Tensor) -> Tensor:
        torch.autograd.grad(output, leaves, gradient, retain_graph=True, allow_unused=True)
        return gradient.new_zeros(())

    if len(gradients) == 1:
        run(gradients[0])
    else:
        with without_vmap_fallback():
            torch.func.vmap(run)(gradients)


def of_probes(function: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """A hook that gives ``function`` the gradient of all probes, (P, ...)."""

    @wraps(function)
    def hook(gradient: Tensor) -> None:
        with outside_of_vmap():
            function(unbatched(gradient))

    return hook


def over_probes(function: Callable) -> Callable:
    """The ``backward`` of a custom autograd function, from one that takes and returns gradients (P, ...)."""

    @wraps(function)
    def for_any(ctx, gradient: Tensor):
        level = vmap_level()
        with outside_of_vmap():
            results = function(ctx, unbatched(gradient))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(None if x is None else batched(x, level) for x in results)

    return for_any
