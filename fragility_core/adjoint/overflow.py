"""Where a low-precision pass overflows."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fragility_core.arithmetic.lowering import LowPrecision
from fragility_core.arithmetic.nested import tensors, together


@torch.no_grad()
def first_nonfinite(low: LowPrecision, run: Callable[[nn.Module], object]) -> str | None:
    """The path of the first module that returns a nonfinite value while ``run`` calls the model; None if none does.

    Modules count in the order in which they return: the innermost one is named.
    """
    finite: list[tuple[str, Tensor]] = []

    def recorder(path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            with low.paused():
                finite.extend((path, x.isfinite().all()) for x in tensors(output))

        return hook

    with ExitStack() as stack:
        for path, module in low.model.named_modules():
            stack.callback(module.register_forward_hook(recorder(path)).remove)
        with low.running():
            run(low.model)
    flags = torch.stack(together(x for _, x in finite)).tolist()  # one transfer from the device
    return next((path for (path, _), flag in zip(finite, flags) if not flag), None)
