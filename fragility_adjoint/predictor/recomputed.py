"""The costly parts of a pass, each as one autograd function: products, eager attention, elementwise activations.

Products are the library's own, but their gradients take less time than the library's:

- Products with weights: gradients are multiplied in bf16 where the device does that fastest. Each then has a relative
  error of up to 2^-9. These errors average out in a contribution, a sum of squares over all entries.
- Fused attention, on a CPU: gradients are computed in fp32, without the keys that a row cannot see.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from fragility_adjoint.internals import mark_stored, stored_as
from fragility_adjoint.predictor.blockwise import BlockwiseAttention
from fragility_adjoint.predictor.probes import over_probes
from fragility_adjoint.predictor.recorder import LARGE, ErrorRecorder
from fragility_numerics.attention import observed_attention, prepared
from fragility_numerics.formats import chunks, get_format, has_native_kernels
from fragility_numerics.internals import without_function_modes
from fragility_numerics.lookup import entries, every_number, look_up, row_of
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.modes import current_function_mode
from fragility_numerics.rounding_errors import local_error

RECOMPUTED_EAGER = "recomputed_eager"


class RecomputedAttention(torch.autograd.Function):
    """The context (B, H, T, d_v) of heads (B, H, T, d). The backward pass forms scores and probabilities again.

    With a ``recorder`` it is that of eager attention, whose roundings are recorded. The product of query and key and
    the scaled product are both rounded, and count as one place, "scores". Without one it is that of the fused kernel.
    """

    @staticmethod
    def forward(
        ctx, recorder: ErrorRecorder | None, blockwise: BlockwiseAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.blockwise, ctx.record = blockwise, None
        if recorder is None:
            ctx.save_for_backward(query, key, value)
            mask, causal, scale = blockwise.mask, blockwise.causal, blockwise.scaling
            return functional.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)
        products = {"scores": "values", "softmax": "", "context": "values"}
        places = {name: recorder.kernel(name, product) for name, product in products.items()}
        record = recorder.bound_record()
        ctx.record = lambda name, weighted, probe=0: record(places[name], weighted, probe)
        with without_function_modes():
            context, error = blockwise.context(*(x.flatten(0, 1) for x in (query, key, value)))
            ctx.save_for_backward(query, key, value, error)
            return context.unflatten(0, query.shape[:2])

    @staticmethod
    @over_probes
    def backward(ctx, gradient: Tensor):
        query, key, value, *errors = ctx.saved_tensors
        heads, gradient = [x.flatten(0, 1) for x in (query, key, value)], gradient.flatten(1, 2)
        gradients = ctx.blockwise.gradients(*heads, gradient, ctx.record)
        for error in errors:
            ctx.record("context", error * gradient)
        return None, None, *(x.unflatten(1, query.shape[:2]) for x in gradients)


def recomputed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """``attention.observed_attention`` inside of a ``LowArithmetic``, as one autograd function."""
    arithmetic = current_function_mode()
    arithmetic.recorder.mark_module("attention")
    if stored_as(query) is None:  # kept in fp32
        return observed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
    key, value, scaling, causal = prepared(module, query, key, value, attention_mask, scaling, dropout, options)
    blockwise = BlockwiseAttention(scaling, attention_mask, causal, arithmetic.format, arithmetic.exact)
    context = RecomputedAttention.apply(arithmetic.recorder, blockwise, query, key, value)
    return mark_stored(context).transpose(1, 2), None


def tabulate(low: LowPrecision, function: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """An elementwise ``function`` of every 16-bit number, (3, 65536): its result in ``low``, local error and slope."""
    numbers = every_number(low.format.compute_dtype, device)
    with without_function_modes():
        x = numbers.float().requires_grad_()
        with torch.enable_grad():
            exact = function(x)
        (slope,) = torch.autograd.grad(exact.sum(), x)
        with torch.no_grad(), low.running():
            stored = function(numbers).float()
        return torch.stack([stored, local_error(exact.detach(), stored), slope])


class Tabulated(torch.autograd.Function):
    """Entries of a ``table`` (see ``tabulate``) for the 16-bit numbers ``low``; fp32 ``x`` has the same values."""

    @staticmethod
    def forward(ctx, recorder: ErrorRecorder, place: int, table: Tensor, low: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(low)
        ctx.record, ctx.place, ctx.table = recorder.bound_record(), place, table
        with without_function_modes():
            return look_up(table[0], low)

    @staticmethod
    @over_probes
    def backward(ctx, gradient: Tensor):
        (low,) = ctx.saved_tensors
        _, error, slope = ctx.table
        to_x = torch.empty(gradient.shape, device=low.device)
        gradients, outs, first = gradient.reshape(len(gradient), -1), to_x.view(len(to_x), -1), 0
        for (numbers,) in chunks(low):
            row, found = row_of(numbers), torch.empty(numbers.shape, device=low.device)
            given, out = (x[:, first : first + len(numbers)] for x in (gradients, outs))
            ctx.record(ctx.place, entries(error, row, found) * given)
            torch.mul(entries(slope, row, found), given, out=out)
            first += len(numbers)
        return None, None, None, None, to_x


class Activation:
    """The forward of an elementwise module that counts as one kernel and is read from a table.

    The module's own forward runs where its input is not of the low dtype.
    """

    def __init__(self, low: LowPrecision, recorder: ErrorRecorder, module: nn.Module):
        self.low, self.recorder, self.function, self.type = low, recorder, module.forward, type(module)
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if stored_as(x) is None or not x.requires_grad or current_function_mode().exact:
            return self.function(x)
        if self.table is None or self.table.device != x.device:
            self.table = tabulate(self.low, self.function, x.device)
        with without_function_modes():
            low = x.detach().to(self.low.format.compute_dtype).contiguous()
            place = self.recorder.kernel(self.type.__name__)
            return mark_stored(Tabulated.apply(self.recorder, place, self.table, low, x))


class WeightProduct(torch.autograd.Function):
    """bias + ``x`` (n, d_in) times ``weight`` (d_in, d_out). The backward pass gets ``x`` in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @over_probes
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        low = gradient.bfloat16()
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            (low @ weight.bfloat16().mT).float() if to_x else None,
            of_weight(x, low, weight) if to_weight else None,
            gradient.sum(-2) if to_bias else None,
        )


def of_weight(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ``weight``. For a large weight its memory has the weight's order, in which it will be read."""
    if weight.numel() > LARGE and weight.mT.is_contiguous():
        return (gradient.mT @ x).float().mT
    return (x.mT @ gradient).float()


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The result of ``torch.addmm`` for a bias, values and weights."""
    if (beta, alpha) != (1, 1) or input.ndim != 1:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return WeightProduct.apply(mat1, mat2, input)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The result of ``torch.nn.functional.linear``."""
    if input.ndim < 2:
        return functional.linear(input, weight, bias)
    return WeightProduct.apply(input.flatten(0, -2), weight.mT, bias).unflatten(0, input.shape[:-1])


class Lookup(torch.autograd.Function):
    """Rows (..., d) of a ``table`` (V, d). The recorder gets their gradient, not the table's, which is mostly 0."""

    @staticmethod
    def forward(ctx, recorder: ErrorRecorder, table: Tensor, indices: Tensor) -> Tensor:
        ctx.recorder, ctx.table, ctx.indices = recorder, table, indices
        return functional.embedding(indices, table)

    @staticmethod
    @over_probes
    def backward(ctx, gradient: Tensor):
        ctx.recorder.look_up(ctx.table, ctx.indices.flatten(), gradient.flatten(1, -2))
        return None, None, None


def look_up_rows(recorder: ErrorRecorder, table: Tensor, indices: Tensor, *options) -> Tensor:
    """The result of ``torch.embedding`` for a leaf; if it is large, the ``recorder`` takes the gradients of its rows.

    The row of the padding gets no gradient in training, but gets one here, since it is rounded as others are.
    """
    if recorder.takes_rows(table):
        return Lookup.apply(recorder, table, indices)
    return torch.embedding(table, indices)


def hides_keys(mask: Tensor) -> bool:
    """True if ``mask`` (B, 1 or H, T, T_kv) says which keys are seen, and each query sees one (sliding windows)."""
    return mask.dtype == torch.bool and mask.ndim == 4 and bool(mask.any(-1).all())


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The result of ``torch.nn.functional.scaled_dot_product_attention``."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    alike = query.shape == key.shape == value.shape and query.ndim == 4
    if attn_mask is not None and alike:
        attn_mask = attn_mask.expand(len(query), -1, query.shape[2], -1) if attn_mask.ndim == 4 else attn_mask
    if alike and dropout_p == 0 and (attn_mask is None or hides_keys(attn_mask)):
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return RecomputedAttention.apply(None, BlockwiseAttention(scaling, attn_mask, is_causal), query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


@cache
def fast_products(device: torch.device) -> dict[tuple[str, str], Callable[..., Tensor]]:
    """Replacements of functions of torch on ``device``, by the name of the function and ``Place.product``."""
    fast: dict[tuple[str, str], Callable[..., Tensor]] = {}
    if has_native_kernels(get_format("bf16"), device):
        fast |= {("addmm", "weights"): addmm, ("linear", "weights"): linear}
    if device.type == "cpu":
        fast["scaled_dot_product_attention", "values"] = scaled_dot_product_attention
    return fast
