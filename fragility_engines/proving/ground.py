"""X3: verdicts on engines with known truth, harmless ones and faulty ones (``variations``)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.models.paths import block_paths, branch_paths
from fragility_engines.comparison.eager import as_eager
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.slopes import Directions
from fragility_engines.comparison.verdict import Verdict, judge, search
from fragility_engines.logs.sequences import Scored
from fragility_engines.proving.variations import FAULTS, HARMLESS, Variation
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.stale import Checkpoint

NOTICEABLE = 0.5  # times the RMS of rounding: a fault that moves log-probabilities more must not be missed


@dataclass(frozen=True)
class Ground:
    """The fp32 ``model`` and its ``windows`` (B, T), what bf16 predicts for them, and every suspect's direction.

    If there is an ``other`` checkpoint, engines may have its weights.
    """

    model: PreTrainedModel
    windows: Tensor
    bos: int | None = None
    other: Checkpoint | None = None

    @cached_property
    def sequences(self) -> list[Scored]:
        """The windows as logs; their log-probabilities do not count."""
        return [Scored(w.cpu().numpy(), np.full(len(w), -1.0)) for w in self.windows]

    @cached_property
    def gap(self) -> Gap:
        """The gap of no engine: the prediction for bf16."""
        return measure(self.model, self.sequences, "bf16", seen=self.directed.see)

    @cached_property
    def eager(self) -> Gap:
        """The predictions for eager attention, which ``model`` must be set to when this is first read."""
        return measure(self.model, self.sequences, "bf16")

    @cached_property
    def directed(self) -> Directions:
        """The directions of all suspects; each is computed once."""
        tried = suspects(self.model, Facts.of(self.sequences, self.bos))
        return Directions(self.model, self.sequences, tried, self.other)

    def judged(self, variation: Variation) -> tuple[Gap, Verdict]:
        """The gap of the engine ``variation`` and the verdict on it."""
        every = variation.run(self.model, self.windows).cpu().numpy().reshape(len(self.windows), -1)  # (B, T - 1)
        found = every[self.gap.tokens.sequence, self.gap.tokens.position - 1]
        gap = given(self.gap, found)
        slopes, further = search(gap, self.directed)
        return as_eager(self.model, gap, judge(gap, [*slopes, *further]), lambda: given(self.eager, found))

    def row(self, variation: Variation) -> dict[str, object]:
        """The verdict on ``variation`` as a row: its kind, True if it is right, and the cause that was named.

        The ratio is the one to the prediction for the attention that the model has.
        """
        gap, verdict = self.judged(variation)
        value, low, high = verdict.fused or verdict.ratio
        cause = "" if verdict.cause is None else verdict.cause.suspect.name
        expected = expected_cause(self.model, variation.cause)
        return {
            "engine": variation.name, "harmless": variation in HARMLESS, "seen": variation.seen,
            "rms": gap.divergences()["rms"], "ratio": value, "low": low, "high": high, "verdict": verdict.kind,
            "right": verdict.kind in variation.verdicts, "cause": cause, "expected": expected,
            "named": bool(expected) and expected in cause,
        }  # fmt: skip

    def table(self, engines: Iterable[Variation] = (*HARMLESS, *FAULTS)) -> pd.DataFrame:
        """One row per engine that this model can be."""
        has_rope = any(name.endswith("inv_freq") for name, _ in self.model.named_buffers())
        return pd.DataFrame([self.row(each) for each in engines if has_rope or "RoPE" not in each.name])


def given(gap: Gap, logprobs: np.ndarray) -> Gap:
    """``gap`` for an engine that gives these ``logprobs`` (N,) of its ``tokens``."""
    tokens = gap.tokens.assign(change=logprobs - gap.tokens.exact)
    observed = (tokens.change**2).groupby(tokens.sequence).mean().to_numpy()
    return replace(gap, tokens=tokens, sequences=gap.sequences.assign(observed=observed))


def expected_cause(model: PreTrainedModel, cause: str) -> str:
    """The part of a name that ``Variation.cause`` stands for."""
    tenths, colon, branch = cause.partition(":")
    if not colon:
        return cause
    paths = block_paths(model)
    path = paths[int(tenths) * len(paths) // 10]
    inside = [each for each in branch_paths(model) if each.startswith(path + ".")]
    return inside[int(branch)] if branch else path


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """False alarms, misses and right causes of a ``table``: how many, ``of`` how many.

    A fault that moves log-probabilities by less than NOTICEABLE times the RMS of rounding is no miss. Its own change is
    what the square of the gap has beyond that of rounding.
    """
    harmless, faults = table[table.harmless], table[~table.harmless]
    large = faults[faults.ratio**2 - 1 > NOTICEABLE**2]
    caused = large[large.expected.fillna("") != ""]  # a file has no empty text
    rows = {
        "false alarms": ((harmless.verdict == "more").sum(), len(harmless)),
        "wrong verdicts on harmless engines": ((~harmless.right).sum(), len(harmless)),
        "faults missed": ((~large.right).sum(), len(large)),
        "right cause named": (caused.named.sum(), len(caused)),
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["count", "of"])
