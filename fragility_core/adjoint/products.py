"""Products whose gradients take less time than the library's. The products themselves are the library's own.

- Products with weights: gradients are multiplied in bf16 where the device does that fastest. Each of them then has a
  relative error of up to 2^-9. These errors are independent, and average out in the sum of squares over all entries
  that a contribution is.
- Fused attention, on a CPU: gradients are computed in fp32, without the keys that a row cannot see.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fragility_core.adjoint.blockwise import BlockwiseAttention
from fragility_core.arithmetic.formats import get_format, has_native_kernels


class WeightProduct(torch.autograd.Function):
    """bias + ``x`` (n, d_in) times ``weight`` (d_in, d_out). The backward pass gets ``x`` in bf16."""

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
    """As ``torch.addmm``, of a bias, values and weights."""
    if (beta, alpha) != (1, 1) or input.ndim != 1:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return WeightProduct.apply(mat1, mat2, input)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``torch.nn.functional.linear``."""
    if input.ndim < 2:
        return functional.linear(input, weight, bias)
    return WeightProduct.apply(input.flatten(0, -2), weight.mT, bias).unflatten(0, input.shape[:-1])


class FusedAttention(torch.autograd.Function):
    """The context (B, H, T, d) by the library's fused kernel, the gradients by ``BlockwiseAttention``."""

    @staticmethod
    def forward(ctx, blockwise: BlockwiseAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.blockwise = blockwise
        options = {"is_causal": blockwise.causal, "scale": blockwise.scaling}
        return functional.scaled_dot_product_attention(query, key, value, **options)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        heads = (x.flatten(0, 1) for x in (*ctx.saved_tensors, gradient))
        gradients = ctx.blockwise.gradients(*heads)
        return None, *(x.view_as(like) for x, like in zip(gradients, ctx.saved_tensors))


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """As ``torch.nn.functional.scaled_dot_product_attention``."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is None and dropout_p == 0 and query.shape == key.shape == value.shape and query.ndim == 4:
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return FusedAttention.apply(BlockwiseAttention(scaling, None, is_causal), query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def fast_products(device: torch.device) -> dict[tuple[str, str], Callable[..., Tensor]]:
    """What replaces functions of torch on ``device``, by the name of the function and ``Place.product``."""
    fast: dict[tuple[str, str], Callable[..., Tensor]] = {}
    if has_native_kernels(get_format("bf16"), device):
        fast |= {("addmm", "weights"): addmm, ("linear", "weights"): linear}
    if device.type == "cpu":
        fast["scaled_dot_product_attention", "values"] = scaled_dot_product_attention
    return fast
