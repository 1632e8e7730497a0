"""The costly parts of a pass as one autograd function each: eager attention, elementwise activations."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from fragility_core.adjoint.arithmetic import store, stored_as
from fragility_core.adjoint.rounding import finite_error, local_error
from fragility_core.adjoint.tape import Tape
from fragility_core.attention import future, is_causal, observed_attention, require_plain_softmax, row_blocks
from fragility_core.emulation import LowPrecision
from fragility_core.formats import Format, pieces
from fragility_core.lookup import every_number, look_up, row_of

IMPLEMENTATION = "recomputed_eager"
WORKING_SET = 4  # fp32 buffers that a block fills, where observed attention fills one of 16 bits


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def causal_cap(rows: int, device: torch.device) -> Tensor:
    """-inf above the diagonal of a (rows, rows) matrix of +inf: taking the minimum is faster than filling."""
    return torch.full((rows, rows), torch.inf, device=device).masked_fill_(future(rows, device), -torch.inf)


class Rows:
    """The arithmetic of ``attention.observed_attention`` on one block of query rows after the other.

    Tensors (N, T, d) hold all heads of all windows, N = B H; ``mask`` (B, 1 or H, T, T_kv) is True where
    a key may be seen.
    """

    def __init__(self, format: Format, scaling: float, mask: Tensor | None, causal: bool):
        self.format, self.scaling, self.mask, self.causal = format, scaling, mask, causal

    def blocks(self, query: Tensor, key: Tensor, buffers: int) -> Iterator[tuple[slice, slice, list[Tensor]]]:
        """Query rows, the keys that they see, and buffers (N, rows, keys) that every block uses again."""
        count, keys = len(query), key.shape[1]
        work = None
        for start, stop in row_blocks(query.shape[1], WORKING_SET * count * keys, query.device):
            seen = keys - query.shape[1] + stop if self.causal else keys
            shape = count, stop - start, seen
            if work is None:
                work = query.new_empty(buffers, count * (stop - start) * keys)
            yield slice(start, stop), slice(seen), [flat[: count * (stop - start) * seen].view(shape) for flat in work]

    def store_scores(self, product: Tensor, out: Tensor) -> Tensor:
        """Query times key as it is stored: rounded, scaled (16-bit kernels compute in fp32), rounded."""
        return out.copy_(self.format.round(self.format.round(product).mul_(self.scaling)))

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """``scores`` (N, rows, keys) with the keys that are not to be seen at the lowest number or below."""
        count = rows.stop - rows.start
        if self.causal:
            hidden = scores[..., -count:]
            torch.minimum(hidden, causal_cap(count, scores.device), out=hidden)
        elif self.mask is not None:
            hidden = ~self.mask[:, :, rows, : scores.shape[-1]]
            scores.view(len(hidden), -1, *scores.shape[1:]).masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return scores

    def context(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The context (N, T, d) as it is stored, and its local error."""
        exact = torch.empty_like(query)
        for rows, keys, (scores,) in self.blocks(query, key, 1):
            torch.bmm(query[:, rows], key[:, keys].mT, out=scores)
            torch.softmax(self.hide(self.store_scores(scores, out=scores), rows), -1, out=scores)
            torch.bmm(scores.copy_(self.format.round(scores)), value[:, keys], out=exact[:, rows])
        stored = self.format.round(exact).float()
        return stored, local_error(exact, stored, self.format)

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, felt: Callable[[str, Tensor], None]
    ) -> Iterator[Tensor]:
        """Those of query, key and value from that of the context; ``felt`` is given products of error and gradient."""
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key.mT), torch.zeros_like(value.mT)  # (N, d, T): the faster way round
        for rows, keys, (score_errors, p, p_errors, back) in self.blocks(query, key, 4):
            torch.bmm(query[:, rows], key[:, keys].mT, out=score_errors)
            scores = self.store_scores(score_errors, out=p)
            torch.sub(scores, score_errors, alpha=self.scaling, out=score_errors)
            finite_error(score_errors, self.format)
            torch.softmax(self.hide(scores, rows), -1, out=p_errors)
            p.copy_(self.format.round(p_errors))
            p_errors.sub_(p)
            to_value[..., keys].baddbmm_(gradient[:, rows].mT, p)
            torch.bmm(gradient[:, rows], value[:, keys].mT, out=back)
            felt("softmax", p_errors.mul_(back))
            torch._softmax_backward_data(back, p, -1, back.dtype, grad_input=back)
            felt("scores", score_errors.mul_(back))
            torch.bmm(back, key[:, keys], out=to_query[:, rows])
            to_key[..., keys].baddbmm_(query[:, rows].mT, back)
        return to_query.mul_(self.scaling), to_key.mul_(self.scaling).mT, to_value.mT


class EagerAttention(torch.autograd.Function):
    """Eager attention whose backward pass forms scores and probabilities again: no T x T tensor outlives a block.

    The roundings of the product and of the scaled product count as one place, "scores".
    """

    @staticmethod
    def forward(ctx, tape: Tape, rows: Rows, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Context (N, T, d) of heads (N, T, d)."""
        with torch._C.DisableTorchFunction():
            context, error = rows.context(query, key, value)
            ctx.save_for_backward(query, key, value, error)
        ctx.tape, ctx.rows = tape, rows
        products = {"scores": "values", "softmax": "", "context": "values"}
        ctx.places = {name: tape.kernel(name, product) for name, product in products.items()}
        return context

    @staticmethod
    def backward(ctx, gradient: Tensor):
        query, key, value, error = ctx.saved_tensors
        tape, places = ctx.tape, ctx.places
        gradients = ctx.rows.gradients(query, key, value, gradient, lambda name, x: tape.read(places[name], x))
        tape.read(places["context"], error * gradient)
        return None, None, *gradients


def recomputed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """``attention.observed_attention`` under a ``LowArithmetic``, see there."""
    arithmetic = _get_current_function_mode()
    arithmetic.tape.note("attention")
    if stored_as(query) is None:  # kept in fp32: nothing is rounded
        return observed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
    require_plain_softmax(dropout, attention_mask, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = attention_mask is None and query.shape[2] > 1 and is_causal(module, options)
    rows = Rows(arithmetic.format, scaling, attention_mask, causal)
    heads = (x.flatten(0, 1) for x in (query, key, value))
    context = store(EagerAttention.apply(arithmetic.tape, rows, *heads))  # (B H, T, d)
    return context.unflatten(0, query.shape[:2]).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, recomputed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def tabulate(low: LowPrecision, function: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """``function`` of every 16-bit number, elementwise (3, 65536): as ``low`` stores it, its local error, its slope."""
    numbers = every_number(low.format.carrier, device)
    with torch._C.DisableTorchFunction():
        x = numbers.float().requires_grad_()
        with torch.enable_grad():
            exact = function(x)
        (slope,) = torch.autograd.grad(exact.sum(), x)
        with torch.no_grad(), low.running():
            stored = function(numbers).float()
        return torch.stack([stored, local_error(exact.detach(), stored, low.format), slope])


class Tabulated(torch.autograd.Function):
    """A ``tabulate`` at the 16-bit numbers ``low``, which fp32 ``x`` stands for."""

    @staticmethod
    def forward(ctx, tape: Tape, place: int, table: Tensor, low: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(low)
        ctx.tape, ctx.place, ctx.table = tape, place, table
        with torch._C.DisableTorchFunction():
            return look_up(table[0], low)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (low,) = ctx.saved_tensors
        _, error, slope = ctx.table
        to_x = torch.empty(low.shape, device=low.device)
        for numbers, felt, out in pieces(low, gradient, to_x):
            row = row_of(numbers)
            ctx.tape.read(ctx.place, error.index_select(0, row).mul_(felt))
            torch.index_select(slope, 0, row, out=out).mul_(felt)
        return None, None, None, None, to_x


class Activation:
    """The forward of an elementwise module of several kernels: one kernel, where its input is of the low dtype."""

    def __init__(self, low: LowPrecision, tape: Tape, module: nn.Module):
        self.low, self.tape, self.function, self.type = low, tape, module.forward, type(module)
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if stored_as(x) is None or not x.requires_grad:
            return self.function(x)
        if self.table is None:
            self.table = tabulate(self.low, self.function, x.device)
        with torch._C.DisableTorchFunction():
            low = x.detach().to(self.low.format.carrier).contiguous()
        return store(Tabulated.apply(self.tape, self.tape.kernel(self.type.__name__), self.table, low, x))
