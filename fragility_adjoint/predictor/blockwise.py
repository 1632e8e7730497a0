"""Attention and its gradients, one block of query rows after the other: no T x T tensor exists."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fragility_adjoint.internals import softmax_backward
from fragility_numerics.attention import future, row_blocks
from fragility_numerics.formats import NumberFormat
from fragility_numerics.rounding_errors import has_short_range, local_error

WORKING_SET = 4  # fp32 buffers that a block fills; observed attention fills one of 16 bits


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a backward pass may need a cached tensor later
def causal_cap(rows: int, device: torch.device) -> Tensor:
    """A (rows, rows) matrix of +inf, with -inf above the diagonal: a minimum with it is faster than filling."""
    return torch.full((rows, rows), torch.inf, device=device).masked_fill_(future(rows, device), -torch.inf)


class BlockwiseAttention:
    """Attention in fp32, one block of query rows after the other.

    Queries, keys and values are (N, T, d), with all heads, N = B H. ``mask`` (B, 1 or H, T, T_kv) is
    True where a key may be seen. With a ``format``, scores and probabilities are rounded as
    ``attention.observed_attention`` rounds them. Without one they are not, as in a fused kernel. If ``exact``, the
    errors of rounding are known, but results stay as they were before.
    """

    def __init__(
        self, scaling: float, mask: Tensor | None, causal: bool, format: NumberFormat | None = None, exact: bool = False
    ):
        self.scaling, self.mask, self.causal, self.exact = scaling, mask, causal, exact
        self.format: Any = format  # what rounds is called with a format alone
        self.rounds = format is not None and not exact

    def blocks(self, query: Tensor, key: Tensor, buffers: int) -> Iterator[tuple[slice, slice, list[Tensor]]]:
        """For every block its query rows, the keys that they see, and ``buffers`` of shape (N, rows, keys).

        All blocks share the memory of the buffers.
        """
        count, keys = len(query), key.shape[1]
        memory = None
        for start, stop in row_blocks(query.shape[1], WORKING_SET * count * keys, query.device):
            seen = keys - query.shape[1] + stop if self.causal else keys
            shape = count, stop - start, seen
            if memory is None:
                memory = query.new_empty(buffers, count * (stop - start) * keys)
            parts = [flat[: count * (stop - start) * seen].view(shape) for flat in memory]
            yield slice(start, stop), slice(seen), parts

    def round_scores(self, product: Tensor, out: Tensor) -> Tensor:
        """Scores from query times key: rounded, scaled in fp32 as 16-bit kernels do, and rounded again."""
        return out.copy_(self.format.round(self.format.round(product).mul_(self.scaling)))

    def hide(self, scores: Tensor, rows: slice) -> Tensor:
        """``scores`` (N, rows, keys) with hidden keys at -inf or at the lowest number, in place."""
        count = rows.stop - rows.start
        if self.causal:
            hidden = scores[..., -count:]
            torch.minimum(hidden, causal_cap(count, scores.device), out=hidden)
        elif self.mask is not None:
            hidden = ~self.mask[:, :, rows, : scores.shape[-1]]
            scores.view(len(hidden), -1, *scores.shape[1:]).masked_fill_(hidden, torch.finfo(scores.dtype).min)
        return scores

    def probabilities(self, query: Tensor, key: Tensor, rows: slice, out: Tensor) -> None:
        """The rounded probabilities of the ``query`` ``rows``."""
        torch.bmm(query, key.mT, out=out)
        scores = self.round_scores(out, out=out) if self.rounds else out.mul_(self.scaling)
        torch.softmax(self.hide(scores, rows), -1, out=out)
        if self.rounds:
            out.copy_(self.format.round(out))

    def probabilities_and_errors(
        self, query: Tensor, key: Tensor, rows: slice, out: Tensor, score_errors: Tensor, errors: Tensor
    ) -> None:
        """The result of ``probabilities``, with the local errors of the scores and of the probabilities."""
        torch.bmm(query, key.mT, out=score_errors)
        scores = self.round_scores(score_errors, out=out)
        score_errors.mul_(self.scaling)
        kept = score_errors.clone() if self.exact else scores
        score_errors.sub_(scores)
        if has_short_range(self.format):
            score_errors.nan_to_num_(0.0, 0.0, 0.0)
        torch.softmax(self.hide(kept, rows), -1, out=errors)
        rounded = self.format.round(errors)
        if self.exact:
            out.copy_(errors)
            errors.sub_(rounded)
        else:
            out.copy_(rounded)
            errors.sub_(out)

    def context(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The rounded context (N, T, d_v) and its local error."""
        alike = query.shape[-1] == value.shape[-1]
        exact = torch.empty_like(query) if alike else query.new_empty(*query.shape[:2], value.shape[-1])
        for rows, keys, (p,) in self.blocks(query, key, 1):
            self.probabilities(query[:, rows], key[:, keys], rows, p)
            torch.bmm(p, value[:, keys], out=exact[:, rows])
        stored = self.format.round(exact).float()
        return exact if self.exact else stored, local_error(exact, stored)

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, record: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of query, key and value, from the ``gradient`` (P, N, T, d_v) of the context, for P probes.

        For every block and probe ``record`` gets "softmax" and "scores", the product of local error and gradient,
        (1, N, rows, keys), and the number of the probe. It must be given if there is a format.
        """
        probes = len(gradient)
        to_query = query.new_empty(probes, *query.shape)
        to_key = key.new_zeros(probes, *key.mT.shape)  # (N, d, T) is faster than (N, T, d)
        stacked = gradient.permute(1, 0, 3, 2).flatten(1, 2)  # (N, P d, T): one product for all probes
        to_value = value.new_zeros(len(value), stacked.shape[1], value.shape[1])
        for rows, keys, (p, back, *more) in self.blocks(query, key, 5 if self.format else 2):
            errors, weighted = more[:-1], more[-1] if more else None
            form: Callable[..., None] = self.probabilities_and_errors if errors else self.probabilities
            form(query[:, rows], key[:, keys], rows, p, *errors)
            to_value[..., keys].baddbmm_(stacked[..., rows], p)
            for probe in range(probes):
                torch.bmm(gradient[probe, :, rows], value[:, keys].mT, out=back)
                if errors:
                    record("softmax", torch.mul(errors[1], back, out=weighted)[None], probe)
                softmax_backward(back, p, -1, back.dtype, grad_input=back)
                if errors:
                    record("scores", torch.mul(errors[0], back, out=weighted)[None], probe)
                torch.bmm(back, key[:, keys], out=to_query[probe, :, rows])
                to_key[probe, ..., keys].baddbmm_(query[:, rows].mT, back)
        to_value = to_value.unflatten(1, (probes, -1)).movedim(1, 0)
        return to_query.mul_(self.scaling), to_key.mul_(self.scaling).mT, to_value.mT
