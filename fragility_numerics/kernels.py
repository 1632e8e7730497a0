"""Tables of what kernels and functions of torch do to numbers, for emulation and for differentiated passes.

``emulation.Emulation`` sees kernels (ATen ops). The predictor, ``predictor.arithmetic``, sees the functions that call
them. Both go by the name without its namespace: ``aten.mm`` and ``torch.mm`` are "mm".
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# These only move or select values, without rounding error. They run as they are, which also keeps views views. To leave
# one out costs time, never accuracy: rounding twice changes nothing.
EXACT = {
    "clone", "cat", "stack", "index", "index_select", "gather", "embedding", "where", "masked_fill", "neg", "abs",
    "relu", "copy_", "fill_", "zero_", "masked_fill_", "empty_like", "zeros_like", "ones_like", "new_zeros", "new_ones",
    "new_empty", "empty", "empty_strided", "zeros", "ones", "eye", "constant_pad_nd", "repeat", "flip", "roll", "topk",
    "amax", "tril_", "tril", "triu", "_local_scalar_dense", "equal", "argmax", "sort", "_unsafe_view", "set_",
}  # fmt: skip
BOUNDING = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "clip_"}
EXACT_FUNCTIONS = EXACT | BOUNDING | {
    "contiguous", "reshape", "flatten", "concat", "dropout", "__getitem__", "__setitem__", "index_copy_", "detach",
    "scatter", "scatter_", "take_along_dim", "repeat_interleave", "tile", "max", "min", "maximum", "minimum", "pad",
}  # fmt: skip

# Some of these may write a constant that is no number of the format: then the result is rounded. In a format that torch
# computes in, the kernel itself rounds the constant.
FILLING = {"where", "masked_fill", "masked_fill_", "fill_", "constant_pad_nd", "__setitem__", "scatter", "scatter_"}
FILLING_FUNCTIONS = FILLING | BOUNDING | {"pad"}

# Their results may be numbers of the format already: a sum with something tiny or with an empty row, a product with 1.
OFTEN_EXACT = {
    "add", "add_", "radd", "__iadd__", "sub", "sub_", "rsub", "__rsub__", "__isub__", "mul", "mul_", "rmul", "__imul__",
    "div", "div_", "true_divide", "__truediv__", "__itruediv__", "index_add", "index_add_", "scatter_add",
    "scatter_add_",
}  # fmt: skip

# Products of which one factor may be a weight.
WEIGHT_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm"}
PRODUCTS = WEIGHT_PRODUCTS | {"scaled_dot_product_attention"}

# Positions of the factors of a matrix product among the arguments of its kernel.
FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 1), "addmv": (1, 2),
    "addbmm": (1, 2), "convolution": (0, 1), "_grouped_mm": (0, 1), "_trilinear": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2), "_scaled_dot_product_flash_attention": (0, 1, 2),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
}  # fmt: skip

SOFTMAXES = {"_softmax", "_log_softmax"}

CAST = "_to_copy"  # the kernel of every cast
CASTS = {  # the functions that cast, with the dtype, None where an argument names it
    Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16, Tensor.to: None, Tensor.type: None, Tensor.type_as: None,
}  # fmt: skip


def deciding(operands: Iterable[Tensor]) -> list[Tensor]:
    """Operands whose dtypes decide a result's: floating ones, zero-dimensional ones only if all are."""
    floating = [x for x in operands if x.is_floating_point()]
    return [x for x in floating if x.ndim] or floating
