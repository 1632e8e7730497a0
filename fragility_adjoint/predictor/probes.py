"""Several probes in one backward pass: what a pass does once, it does for all of them.

``torch.func.vmap`` runs the backward pass over a batch of gradients. In it a gradient looks like that of one probe.
Hooks and autograd functions get all P probes as the first dimension, and form values of the forward pass again once.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps

import torch
from torch import Tensor

from fragility_adjoint.internals import beyond_vmap


def backward(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor] = (),
    keep_graph: bool = False,
) -> list[Tensor]:  # fmt: skip
    """One backward pass from ``outputs`` to ``leaves`` and ``inputs``, for all P ``gradients`` (P, ...) of the outputs.

    Returns the gradients (P, ...) of the ``inputs``. Raises RuntimeError for P > 1 if PyTorch cannot compute
    the gradient of a kernel for several probes at once, or memory does not suffice.
    """

    def run(*gradients: Tensor) -> tuple[Tensor, ...]:
        ends = [*inputs, *leaves]
        found = torch.autograd.grad(outputs, ends, gradients, retain_graph=keep_graph, allow_unused=True)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found))

    if len(gradients[0]) == 1:
        return [x[None] for x in run(*(g[0] for g in gradients))]
    return list(torch.func.vmap(run)(*gradients))


def over_probes(function: Callable) -> Callable:
    """The ``backward`` of a custom autograd function, from one that takes and returns gradients (P, ...)."""

    @wraps(function)
    def for_any(ctx, *gradients: Tensor | None):
        return beyond_vmap(partial(function, ctx), *gradients)

    return for_any
