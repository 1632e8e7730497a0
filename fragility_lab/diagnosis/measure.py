"""Comparison of two passes: the final state, the residual stream after each block, the probabilities of tokens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.arithmetic.lowering import LowPrecision
from fragility_core.arithmetic.nested import tensors, together
from fragility_core.models.beside import forward_hook, side_by_side
from fragility_core.models.hollow import entries, is_hollow
from fragility_core.models.tree import block_paths, hidden_and_logits
from fragility_core.theory import mismatch

Result = TypeVar("Result")


@dataclass(frozen=True)
class ObservedPass:
    """Logits (B, T, vocabulary); the final hidden state and the output of every block, each (B, T, d_model)."""

    logits: Tensor
    final: Tensor
    blocks: list[Tensor]


@contextmanager
def block_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that a pass inside of this context fills with the output of each block, (B, T, d_model)."""
    seen: list[Tensor] = []
    with ExitStack() as stack:
        for path in block_paths(model):
            hook = forward_hook(model.get_submodule(path), lambda m, i, out: seen.append(next(tensors(out))))
            stack.callback(hook.remove)
        yield seen


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor, low: LowPrecision | None = None) -> ObservedPass:
    """One pass of ``model`` over ``tokens`` (B, T); in the format of ``low``, if given."""
    with block_outputs(model) as blocks, nullcontext() if low is None else low.running():
        final, logits = hidden_and_logits(model, tokens)
    return ObservedPass(logits, final, blocks)


def each(run: Callable[[Tensor], Result], windows: Tensor, model: PreTrainedModel, low: LowPrecision | None) -> list:
    """What ``run`` returns for each of the ``windows`` (B, T) by itself; if ``model`` is streamed, side by side."""
    passes = [partial(run, window) for window in windows.split(1)]
    if not is_hollow(model):
        return [one() for one in passes]
    with nullcontext() if low is None else low.running():  # settings of the process stay until all have ended
        return side_by_side(passes)


def observe_each(model: PreTrainedModel, windows: Tensor, low: LowPrecision | None = None) -> list[ObservedPass]:
    """As ``observe``, for ``each`` of the ``windows`` (B, T)."""
    return each(lambda window: observe(model, window, low), windows, model, low)


def compare(low: ObservedPass, reference: ObservedPass, tokens: Tensor) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables: one row per window of ``tokens`` (B, T), and one row per window and block.

    The columns of a window are ``mismatch``, that of the final state; ``kl`` and ``largest_kl``, mean and largest
    Kullback-Leibler divergence of the low-precision next-token distribution from the reference's, in nats;
    ``logprob``, the root mean square change of the log probability of the text's next token, in nats;
    ``changed``, the share of tokens whose most probable next token differs; ``loss`` and ``reference_loss``, the mean
    next-token cross entropy in nats. The column of a block is ``error``, the relative error of its output.
    """
    exact, rounded = (torch.log_softmax(p.logits.float(), -1) for p in (reference, low))
    kl = (exact.exp() * (exact - rounded)).sum(-1)  # (B, T)
    changed = exact.argmax(-1) != rounded.argmax(-1)
    columns = {
        "mismatch": mismatch(low.final, reference.final),
        "kl": kl.mean(-1),
        "largest_kl": kl.amax(-1),
        "logprob": (next_token(rounded, tokens) - next_token(exact, tokens)).square().mean(-1).sqrt(),
        "changed": changed.float().mean(-1),
        "loss": cross_entropy(rounded, tokens),
        "reference_loss": cross_entropy(exact, tokens),
    }
    windows = pd.DataFrame(torch.stack(together(columns.values()), 1).cpu().double().numpy(), columns=list(columns))
    apart = (mismatch(a, b) for a, b in zip(low.blocks, reference.blocks, strict=True))
    errors = torch.stack(together(apart), 1)  # (B, L)
    drift = pd.DataFrame(errors.cpu().double().numpy()).rename_axis(index="window", columns="block").stack()
    return windows.rename_axis("window").reset_index(), drift.rename("error").reset_index()


def ratio(predicted: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """The ratio of the means over windows with its 95 % interval: Student's, of residuals (Cochran 1977, chapter 6)."""
    mean = predicted.mean() / found.mean() if found.mean() else np.nan
    if len(found) < 2 or np.isnan(mean):
        return {"ratio": mean, "low": np.nan, "high": np.nan}
    error = (predicted - mean * found).std(ddof=1) / len(found) ** 0.5 / found.mean()
    half = stats.t.ppf(0.975, len(found) - 1) * error
    return {"ratio": mean, "low": mean - half, "high": mean + half}


def numbered(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """One table of ``tables`` of one window or more, which each number theirs from 0 in the column ``window``."""
    found, first = [], 0
    for table in tables:
        found.append(table.assign(window=table.window + first))
        first = found[-1].window.max() + 1
    return pd.concat(found, ignore_index=True)


def cross_entropy(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy (B,) in nats, of log probabilities (B, T, vocabulary)."""
    return -next_token(log_probabilities, tokens).mean(-1)


def next_token(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The log probability (B, T - 1) of each next token of the text, from those of all tokens (B, T, vocabulary)."""
    return log_probabilities[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


class Ranges:
    """Counts, by module, the values of a low-precision model that leave the range of its format."""

    def __init__(self, low: LowPrecision):
        self.low = low
        self.counts: dict[str, list[Tensor]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in all passes inside of this context. With rounded weights only, results need not fit the format."""
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
        """The modules, and parameters of the fp32 model ``exact``, with their numbers of values out of range.

        ``nonfinite`` values are infinite or NaN, ``saturated`` ones equal the format's largest number. Modules are in
        the order in which their first pass ended, so the first one is where the overflow began.
        """
        paths = list(self.counts)
        counts = torch.stack(together(sum(self.counts[path]) for path in paths)).cpu().numpy() if paths else []
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
