"""Attention and its gradients on one block of query rows after the other: no T x T tensor exists."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fragility_core.adjoint.rounding import finite_error, has_short_range, local_error
from fragility_core.arithmetic.attention import future, row_blocks
from fragility_core.arithmetic.formats import Format

WORKING_SET = 4  # fp32 buffers that a block fills, where observed attention fills one of 16 bits


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def causal_cap(rows: int, device: torch.device) -> Tensor:
    """-inf above the diagonal of a (rows, rows) matrix of +inf: taking the minimum is faster than filling."""
    return torch.full((rows, rows), torch.inf, device=device).masked_fill_(future(rows, device), -torch.inf)


class Rows:
    """Attention on one block of query rows after the other, in fp32.

    Tensors (N, T, d) hold all heads of all windows, N = B H; ``mask`` (B, 1 or H, T, T_kv) is True where
    a key may be seen. With a ``format`` scores and probabilities are rounded, as by
    ``attention.observed_attention``; without one they are not, as in a fused kernel.
    """

    def __init__(self, scaling: float, mask: Tensor | None, causal: bool, format: Format | None = None):
        self.scaling, self.mask, self.causal, self.format = scaling, mask, causal, format

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

    def probabilities(self, query: Tensor, key: Tensor, rows: slice, out: Tensor) -> None:
        """P of the ``query`` ``rows`` as it is stored."""
        torch.bmm(query, key.mT, out=out)
        scores = self.store_scores(out, out=out) if self.format else out.mul_(self.scaling)
        torch.softmax(self.hide(scores, rows), -1, out=out)
        if self.format:
            out.copy_(self.format.round(out))

    def probabilities_and_errors(
        self, query: Tensor, key: Tensor, rows: slice, out: Tensor, score_errors: Tensor, errors: Tensor
    ) -> None:
        """As ``probabilities``, with the local errors of scores and of P."""
        torch.bmm(query, key.mT, out=score_errors)
        scores = self.store_scores(score_errors, out=out)
        torch.sub(scores, score_errors, alpha=self.scaling, out=score_errors)
        if has_short_range(self.format):
            finite_error(score_errors)
        torch.softmax(self.hide(scores, rows), -1, out=errors)
        out.copy_(self.format.round(errors))
        errors.sub_(out)

    def context(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The context (N, T, d_v) as it is stored, and its local error."""
        alike = query.shape[-1] == value.shape[-1]
        exact = torch.empty_like(query) if alike else query.new_empty(*query.shape[:2], value.shape[-1])
        for rows, keys, (p,) in self.blocks(query, key, 1):
            self.probabilities(query[:, rows], key[:, keys], rows, p)
            torch.bmm(p, value[:, keys], out=exact[:, rows])
        stored = self.format.round(exact).float()
        return stored, local_error(exact, stored)

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor,
        read: Callable[[str, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Those of query, key and value from that of the context.

        ``read`` is given the products of local error and gradient of each rounded tensor, by block of rows.
        """
        to_query = torch.empty_like(query)
        to_key, to_value = torch.zeros_like(key.mT), torch.zeros_like(value.mT)  # (N, d, T): the faster way round
        for rows, keys, (p, back, *errors) in self.blocks(query, key, 4 if self.format else 2):
            form = self.probabilities_and_errors if errors else self.probabilities
            form(query[:, rows], key[:, keys], rows, p, *errors)
            to_value[..., keys].baddbmm_(gradient[:, rows].mT, p)
            torch.bmm(gradient[:, rows], value[:, keys].mT, out=back)
            if errors:
                read("softmax", errors[1].mul_(back))
            torch._softmax_backward_data(back, p, -1, back.dtype, grad_input=back)
            if errors:
                read("scores", errors[0].mul_(back))
            torch.bmm(back, key[:, keys], out=to_query[:, rows])
            to_key[..., keys].baddbmm_(query[:, rows].mT, back)
        return to_query.mul_(self.scaling), to_key.mul_(self.scaling).mT, to_value.mT
