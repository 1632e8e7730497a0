"""Where a low-precision pass leaves the range of its format."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fragility_core.arithmetic.lowering import LowPrecision
from fragility_core.arithmetic.nested import tensors


@torch.no_grad()
def first_nonfinite(low: LowPrecision, run: Callable[[nn.Module], object]) -> str | None:
    """Path of the first module whose forward gives a value that is not finite while ``run`` calls the model.

    Modules count when their forward ends, so the innermost one is named; None if all is finite.
    """
    finite: list[tuple[str, Tensor]] = []

    def look(path: str):
        def hook(module: nn.Module, args: tuple, output) -> None:
            with low.paused():
                finite.extend((path, x.isfinite().all()) for x in tensors(output))

        return hook

    with ExitStack() as stack:
        for path, module in low.model.named_modules():
            stack.callback(module.register_forward_hook(look(path)).remove)
        with low.running():
            run(low.model)
    ok = torch.stack([x for _, x in finite]).tolist()
    return next((path for (path, _), fine in zip(finite, ok) if not fine), None)
