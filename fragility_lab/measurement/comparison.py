"""Comparison of two passes: the final state, the residual stream after each block, the probabilities of tokens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.padding import groups, padded
from fragility_core.models.paths import block_paths, forward_hook, hidden_and_logits
from fragility_core.surrogates.observation import in_order
from fragility_core.theory import mismatch
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.nested import tensors, together
from fragility_numerics.presence import entries
from fragility_offload.lockstep import side_by_side
from fragility_offload.offloaded import is_offloaded

Result = TypeVar("Result")
AT_ONCE = 2**19  # logits that are compared at once: 4 MiB in fp64, which caches hold


@dataclass(frozen=True)
class ObservedPass:
    """Logits (B, T, vocabulary); the final hidden state and the output of every block, each (B, T, d_model)."""

    logits: Tensor
    final: Tensor
    blocks: list[Tensor]

    def changed(self, change: Callable[..., Tensor], *others: "ObservedPass") -> "ObservedPass":
        """The pass whose tensors are ``change`` of its own ones and of the corresponding ones of ``others``."""
        every = (self, *others)
        blocks = [change(*tensors) for tensors in zip(*(each.blocks for each in every))]
        return ObservedPass(change(*(e.logits for e in every)), change(*(e.final for e in every)), blocks)


@contextmanager
def block_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list that a pass inside of this context fills with the output of each block, (B, T, d_model)."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        for path in block_paths(model):
            hook = forward_hook(model.get_submodule(path), lambda m, i, out: seen.append(next(tensors(out))))
            stack.callback(hook.remove)
        yield seen


@torch.no_grad()
def observe(
    model: nn.Module, tokens: Tensor, low: LowPrecision | None = None, attention_mask: Tensor | None = None
) -> ObservedPass:
    """One pass of ``model`` over ``tokens`` (B, T); in the format of ``low``, if given.

    With an ``attention_mask`` (B, T), 1 for tokens and 0 for padding, windows of one length share a pass without
    padding (``models.padding``). All tensors are 0 at padding.
    """
    if attention_mask is not None:
        alike = groups(tokens, attention_mask)
        first, *others = (observe(model, group.of(tokens), low) for group in alike)
        return first.changed(lambda *parts: padded(alike, parts, tokens.shape[1]), *others)
    with block_outputs(model) as blocks, nullcontext() if low is None else low.running():
        final, logits = hidden_and_logits(model, tokens)
    return ObservedPass(logits, final, [by_token_last(x, *tokens.shape) for x in blocks])


def by_token_last(x: Tensor, batch: int, length: int) -> Tensor:
    """``x`` as (B, T, n): some families have several streams, tokens before windows, or no axis of windows.

    A tensor without an axis of tokens stays as it is.
    """
    for axis in range(x.ndim - 1):
        if {*x.shape[axis : axis + 2]} == {batch, length}:
            later = x.shape[axis] != batch
            return x.movedim((axis + later, axis + 1 - later), (0, 1)).reshape(batch, length, -1)
    return x.reshape(batch, length, -1) if len(x) == batch * length else x


def each(run: Callable[[Tensor], Result], windows: Tensor, model: PreTrainedModel, low: LowPrecision | None) -> list:
    """Results of ``run`` for each of the ``windows`` (B, T) by itself; if ``model`` is streamed, they run together."""
    passes = [partial(run, window) for window in windows.split(1)]
    if not is_offloaded(model):
        return [one() for one in passes]
    with nullcontext() if low is None else low.running():  # settings of the process stay until all have ended
        return side_by_side(passes)


def observe_each(model: PreTrainedModel, windows: Tensor, low: LowPrecision | None = None) -> list[ObservedPass]:
    """The passes of ``observe`` for ``each`` of the ``windows`` (B, T)."""
    return each(lambda window: observe(model, window, low), windows, model, low)


def compare(
    low: ObservedPass, reference: ObservedPass, tokens: Tensor, attention_mask: Tensor | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables: one row per window of ``tokens`` (B, T), and one row per window and block.

    The columns of a window are

    - ``mismatch`` of the final state;
    - ``kl``, ``median_kl``, ``ninetieth_kl``, ``largest_kl``: mean, median, 90 % quantile and largest Kullback-Leibler
      divergence of a low-precision next-token distribution from the reference's, in nats;
    - ``logprob``: root mean square change of the log probability of the text's next token, in nats;
    - ``changed``: share of tokens whose most probable next token differs;
    - ``loss`` and ``reference_loss``: mean next-token cross entropy, in nats.

    The column of a block is ``error``, the relative error of its output. Numbers from probabilities are computed in
    fp64. Padding, where the ``attention_mask`` (B, T) is 0, counts nowhere. Raises ValueError for passes over other
    windows than ``tokens``, and the errors of ``padding.spans``.
    """
    if attention_mask is not None:
        alike = groups(tokens, attention_mask)
        parts = (compare(low.changed(g.of), reference.changed(g.of), g.of(tokens)) for g in alike)
        by_window, by_block = zip(*parts)
        return in_order(alike, by_window), in_order(alike, by_block)
    at = by_token(low.logits, reference.logits, tokens)
    columns = {
        "mismatch": mismatch(low.final, reference.final).double(),
        "kl": at.kl.mean(-1),
        "median_kl": at.kl.quantile(0.5, dim=-1),
        "ninetieth_kl": at.kl.quantile(0.9, dim=-1),
        "largest_kl": at.kl.amax(-1),
        "logprob": (at.logprob - at.exact_logprob).square().mean(-1).sqrt(),
        "changed": at.changed.double().mean(-1),
        "loss": -at.logprob.mean(-1),
        "reference_loss": -at.exact_logprob.mean(-1),
    }
    windows = pd.DataFrame(torch.stack(together(columns.values()), 1).cpu().numpy(), columns=list(columns))
    apart = (mismatch(a, b) for a, b in zip(low.blocks, reference.blocks, strict=True))
    errors = torch.stack(together(apart), 1)  # (B, L)
    drift = pd.DataFrame(errors.cpu().double().numpy()).rename_axis(index="window", columns="block").stack()
    return windows.rename_axis("window").reset_index(), drift.rename("error").reset_index()


def ratio(predicted: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """The ratio of the means over windows, and its 95 % interval: Student's, of residuals (Cochran 1977, chapter 6)."""
    mean = predicted.mean() / found.mean() if found.mean() else np.nan
    if len(found) < 2 or np.isnan(mean):
        return {"ratio": mean, "low": np.nan, "high": np.nan}
    error = (predicted - mean * found).std(ddof=1) / len(found) ** 0.5 / found.mean()
    half = stats.t.ppf(0.975, len(found) - 1) * error
    return {"ratio": mean, "low": mean - half, "high": mean + half}


def numbered(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """One table of several, with windows numbered through; each of ``tables`` numbers its windows from 0."""
    found, first = [], 0
    for table in tables:
        found.append(table.assign(window=table.window + first))
        first = found[-1].window.max() + 1
    return pd.concat(found, ignore_index=True)


class ByToken(NamedTuple):
    """Effects of low precision at every position: ``kl`` in nats, and ``changed`` for another most probable token.

    Both are (B, T). ``logprob`` and ``exact_logprob`` (B, T - 1) are the log probabilities of the text's next token, in
    low precision and in fp32. All but ``changed`` are in fp64.
    """

    kl: Tensor
    changed: Tensor
    logprob: Tensor
    exact_logprob: Tensor


def by_token(low: Tensor, exact: Tensor, tokens: Tensor) -> ByToken:
    """The comparison of logits ``low`` and ``exact`` (B, T, vocabulary) over ``tokens`` (B, T), in fp64.

    In fp32 the rounding of log probabilities alone would give a KL of 1e-8 to 1e-7, of either sign, and the KL of an
    fp16 pass may be 1e-9. At most AT_ONCE logits are in fp64 at a time. Raises ValueError for logits of other windows.
    """
    if not low.shape == exact.shape == (*tokens.shape, exact.shape[-1]):
        raise ValueError(
            f"logits must be those of the tokens, {(*tokens.shape, 'vocabulary')}, got shapes {tuple(low.shape)} and "
            f"{tuple(exact.shape)}: compare passes over the same windows"
        )
    following = tokens.roll(-1, 1).to(exact.device)  # the last one of a window has none, and is left out
    size = max(1, AT_ONCE // exact.shape[-1])
    found = []
    for a, b, token in zip(*(x.flatten(0, 1).split(size) for x in (low, exact, following[..., None]))):
        p, q = b.double().log_softmax(-1), a.double().log_softmax(-1)
        kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1)  # 0 times infinity, where a token is left out
        found.append((kl, a.argmax(-1) != b.argmax(-1), *(x.gather(-1, token)[..., 0] for x in (q, p))))
    kl, changed, *logprobs = (torch.cat(parts).view(tokens.shape) for parts in zip(*found))
    return ByToken(kl, changed, *(x[:, :-1] for x in logprobs))


class Ranges:
    """Counts, by module, the values of a low-precision model that leave the range of its format."""

    def __init__(self, low: LowPrecision):
        self.low = low
        self.counts: dict[str, list[Tensor]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in all passes inside of this context. If weights alone are rounded, results are not counted."""
        with ExitStack() as stack:
            for path, module in () if self.low.weights_only else self.low.model.named_modules():
                stack.callback(module.register_forward_hook(self._hook(path)).remove)
            yield

    def _hook(self, path: str):
        def count(module: nn.Module, args: tuple, output) -> None:
            with self.low.paused():
                for x in tensors(output):
                    if x.is_floating_point():
                        self.counts.setdefault(path, []).append(outside(x, self.low.format.largest))

        return count

    def table(self, exact: nn.Module) -> pd.DataFrame:
        """One row per module, or parameter of the fp32 model ``exact``, with values out of range: how many it has.

        ``nonfinite`` values are infinite or NaN, ``saturated`` ones equal the format's largest number. Modules are in
        the order in which their first pass ended, so that the overflow began in the first one.
        """
        paths = list(self.counts)
        summed = (torch.stack(self.counts[path]).sum(0) for path in paths)
        counts: Any = torch.stack(together(summed)).cpu().numpy() if paths else []
        rows = [("output", path or "the model", *count) for path, count in zip(paths, counts)]
        largest = self.low.format.largest
        over = {path: (entries(p).abs() > largest).sum() for path, p in exact.named_parameters()}
        counted = torch.stack(together(over.values())).cpu().numpy()
        rows = [("parameter", path, 0, count) for path, count in zip(over, counted)] + rows
        table = pd.DataFrame(rows, columns=["kind", "module", "nonfinite", "saturated"])
        return table[(table.nonfinite > 0) | (table.saturated > 0)].reset_index(drop=True)


def outside(x: Tensor, largest: float) -> Tensor:
    """The number of entries that are not finite, and of those that equal the ``largest`` number: shape (2,)."""
    finite = x.isfinite()
    return torch.stack([(~finite).sum(), (finite & (x.abs() >= largest)).sum()])
