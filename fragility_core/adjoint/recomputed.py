"""The costly parts of a pass, each as one autograd function: eager attention, elementwise activations."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fragility_core.adjoint.blockwise import BlockwiseAttention
from fragility_core.adjoint.rounding import local_error
from fragility_core.adjoint.tape import Tape
from fragility_core.arithmetic.attention import is_causal, observed_attention, require_plain_softmax
from fragility_core.arithmetic.formats import chunks
from fragility_core.arithmetic.internals import current_function_mode, mark_stored, stored_as, without_function_modes
from fragility_core.arithmetic.lookup import entries, every_number, look_up, row_of
from fragility_core.arithmetic.lowering import LowPrecision

RECOMPUTED_EAGER = "recomputed_eager"


class EagerAttention(torch.autograd.Function):
    """Eager attention that keeps no T x T tensor: the backward pass forms scores and probabilities again.

    The product of query and key and the scaled product are both rounded. They count as one place, "scores".
    """

    @staticmethod
    def forward(ctx, tape: Tape, blockwise: BlockwiseAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The context (N, T, d_v) of heads (N, T, d)."""
        with without_function_modes():
            context, error = blockwise.context(query, key, value)
            ctx.save_for_backward(query, key, value, error)
        ctx.tape, ctx.blockwise = tape, blockwise
        products = {"scores": "values", "softmax": "", "context": "values"}
        ctx.places = {name: tape.kernel(name, product) for name, product in products.items()}
        return context

    @staticmethod
    def backward(ctx, gradient: Tensor):
        query, key, value, error = ctx.saved_tensors
        tape, places = ctx.tape, ctx.places
        gradients = ctx.blockwise.gradients(query, key, value, gradient, lambda name, x: tape.record(places[name], x))
        tape.record(places["context"], error * gradient)
        return None, None, *gradients


def recomputed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """``attention.observed_attention`` inside of a ``LowArithmetic``, as one autograd function."""
    arithmetic = current_function_mode()
    arithmetic.tape.mark_module("attention")
    if stored_as(query) is None:  # kept in fp32: nothing is rounded
        return observed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
    require_plain_softmax(dropout, attention_mask, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = attention_mask is None and query.shape[2] > 1 and is_causal(module, options)
    blockwise = BlockwiseAttention(scaling, attention_mask, causal, arithmetic.format)
    heads = (x.flatten(0, 1) for x in (query, key, value))
    context = mark_stored(EagerAttention.apply(arithmetic.tape, blockwise, *heads))  # (B H, T, d)
    return context.unflatten(0, query.shape[:2]).transpose(1, 2), None


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
    def forward(ctx, tape: Tape, place: int, table: Tensor, low: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(low)
        ctx.tape, ctx.place, ctx.table = tape, place, table
        with without_function_modes():
            return look_up(table[0], low)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (low,) = ctx.saved_tensors
        _, error, slope = ctx.table
        to_x = torch.empty(low.shape, device=low.device)
        for numbers, given, out in chunks(low, gradient, to_x):
            row = row_of(numbers)
            ctx.tape.record(ctx.place, entries(error, row, torch.empty_like(given)).mul_(given))
            entries(slope, row, out).mul_(given)
        return None, None, None, None, to_x


class Activation:
    """The forward of an elementwise module that counts as one kernel and is read from a table.

    The module's own forward runs where its input is not of the low dtype.
    """

    def __init__(self, low: LowPrecision, tape: Tape, module: nn.Module):
        self.low, self.tape, self.function, self.type = low, tape, module.forward, type(module)
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if stored_as(x) is None or not x.requires_grad:
            return self.function(x)
        if self.table is None:
            self.table = tabulate(self.low, self.function, x.device)
        with without_function_modes():
            low = x.detach().to(self.low.format.compute_dtype).contiguous()
        return mark_stored(Tabulated.apply(self.tape, self.tape.kernel(self.type.__name__), self.table, low, x))
