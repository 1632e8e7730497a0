"""Products with weights whose gradients are computed in bf16, where the device multiplies fastest.

The estimate squares gradients and sums millions of them: their relative errors of 2^-9, independent of
each other, do not show in it. The products themselves are formed in fp32, as their rounding is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fragility_core.formats import get_format, has_native_kernels


class WeightProduct(torch.autograd.Function):
    """bias + ``x`` (n, d_in) times ``weight`` (d_in, d_out); ``x`` is kept in bf16 for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        low = gradient.bfloat16()
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            (low @ weight.bfloat16().mT).float() if to_x else None,
            (x.mT @ low).float() if to_weight else None,
            gradient.sum(0) if to_bias else None,
        )


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.addmm`` of a bias, values and weights."""
    if (beta, alpha) != (1, 1):
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return WeightProduct.apply(mat1, mat2, input)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    return WeightProduct.apply(input.flatten(0, -2), weight.mT, bias).unflatten(0, input.shape[:-1])


def fast_products(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """What replaces functions of torch, by their name; nothing where bf16 is not multiplied natively."""
    return {"addmm": addmm, "linear": linear} if has_native_kernels(get_format("bf16"), device) else {}
