"""The gap between an engine's log-probabilities and those of the fp32 model, beside what rounding alone must give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import stats

from fragility_adjoint.predictor import Prediction
from fragility_quantization.recipes import Recipe

CLIPPED = np.log(2)  # reinforcement learning clips ratios of probabilities outside of [1/2, 2], or of a narrower range
TOPS = ("kl", "kl_rounding", "flip", "flip_rounding")
FAR, ENOUGH = 4, 32  # times what rounding gives a sequence of so many tokens: it is no rounding
MORE, LESS = 1.25, 0.8  # observed over predicted RMS: harmless kernels, and the prediction's own error, stay within
SURE = 0.95  # share of the gap beyond rounding that a suspect explains, if the engine does just what it says
NOTHING = 1e-12  # times the predicted square: as good as no change


def beyond(ratio: float) -> float:
    """The share of a squared gap that rounding does not explain, for its ``ratio`` to the predicted RMS."""
    return 1 - 1 / max(ratio, 1.0) ** 2


def left(ratio: float, share: float) -> float:
    """The ratio to the predicted RMS that a gap with this ``ratio`` has once a ``share`` of its square is gone."""
    return ratio * max(1 - share, 0.0) ** 0.5


def ratio_of(sequences: pd.DataFrame, observed: str, predicted: str) -> tuple[float, float, float]:
    """The ratio of root mean squares, given two columns of mean squares, and its 95 % interval: see ``Gap.ratio``."""
    moved = sequences[sequences[observed] > NOTHING * sequences[predicted]]
    counted = moved if len(moved) else sequences
    sums = counted[[observed, predicted]].mul(counted.tokens, axis=0).groupby(pooled(counted.tokens)).sum()
    logs = np.log((sums[observed] / sums[predicted]).clip(lower=NOTHING).to_numpy()) / 2
    mean, count = logs.mean(), len(logs)
    half = stats.t.ppf(0.975, count - 1) * logs.std(ddof=1) / count**0.5 if count > 1 else np.nan
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def pooled(tokens: pd.Series) -> np.ndarray:
    """The number of the unit of each sequence, by its ``tokens``: sequences are joined until a unit has ENOUGH.

    The logarithm of a mean of few squares is too small on average: of one normal error by log 3.6.
    """
    units, unit, size = [], 0, 0
    for count in tokens:
        units.append(unit)
        size += count
        if size >= ENOUGH:
            unit, size = unit + 1, 0
    return np.minimum(units, max(unit - bool(size), 0))  # what is left at the end goes with the unit before


@dataclass(frozen=True)
class Gap:
    """An engine's log-probabilities beside those of a reference, and beside a prediction for ``recipe``.

    ``tokens`` has one row for each token that the engine scored, in sequences that do not overflow:

    - its ``sequence``, ``position`` and ``token``;
    - ``fp32``, its log-probability in the fp32 model, and ``rounding``, that of an emulated pass minus it; ``expected``
      is that of a token which the fp32 model draws there;
    - ``exact``, its log-probability in the reference, which is the fp32 model or another engine;
    - ``change``, the engine's minus ``exact``; and ``emulated``, what of it is expected with its sign: ``rounding``,
      or 0 beside another engine, which has the same rounded weights;
    - ``kl``, a lower bound on the KL of the reference from the engine at this position, and ``flip``, 1 if the most
      probable tokens differ; NaN where the log does not tell. ``kl_rounding`` and ``flip_rounding`` are those of the
      emulated pass from the fp32 model.

    ``sequences`` has one row for each: its number of scored ``tokens``, and the ``observed``, the ``predicted`` and the
    ``emulated`` mean squared change; beside another engine that is the predicted one times what an emulated pass of one
    run is to its own prediction. ``sites`` has the share of the predicted square by kind of site. ``predictions``
    are those of the sequences that do not overflow. ``two`` is True if the reference is another engine. ``repeated``
    sequences of the log have the tokens of others, and do not count: their roundings are no other draw.
    """

    recipe: Recipe
    tokens: pd.DataFrame
    sequences: pd.DataFrame
    sites: pd.Series
    predictions: tuple[Prediction, ...] = ()
    two: bool = False
    repeated: int = 0

    @cached_property
    def known(self) -> pd.DataFrame:
        """The rows of ``sequences`` that have a finite prediction, or what stands in its place if it ``fails``."""
        return self.finite.assign(predicted=self.finite.emulated) if self.fails else self.finite

    @property
    def finite(self) -> pd.DataFrame:
        """The rows of ``sequences`` that have a finite prediction."""
        return self.sequences[np.isfinite(self.sequences.predicted)]

    @cached_property
    def emulated_ratio(self) -> tuple[float, float, float]:
        """RMS of the emulated pass over the predicted one, as ``ratio`` has it."""
        return ratio_of(self.finite, "emulated", "predicted")

    def beside(self, column: str) -> tuple[float, float, float]:
        """Observed RMS over that of a ``column`` of ``sequences``, as ``ratio`` has it."""
        return ratio_of(self.finite, "observed", column)

    @cached_property
    def fails(self) -> bool:
        """True if the error of an emulated pass is clearly not the predicted one, and so replaces the prediction.

        The prediction takes errors of weights as independent, but some add up over all positions, and it does not count
        tokens that go to other experts. An error that is clearly larger needs a ratio above MORE, or to explain a gap
        that the prediction does not explain. Between two engines a smaller error means nothing.
        """
        value, low, high = self.emulated_ratio
        (left, *_), (gap, *_) = self.beside("emulated"), self.beside("predicted")
        return low > MORE or (high < LESS and not self.two) or (low > 1 and (value > MORE or left <= MORE < gap))

    def only(self, numbers: Sequence[int]) -> "Gap":
        """The gap over the tokens of the sequences with these ``numbers``; ``sequences`` stay as they are."""
        return replace(self, tokens=self.tokens[self.tokens.sequence.isin(numbers)])

    def of(self, numbers: Sequence[int]) -> "Gap":
        """The gap of the sequences with these ``numbers`` alone."""
        return replace(self.only(numbers), sequences=self.sequences[self.sequences.sequence.isin(numbers)])

    @property
    def loudest(self) -> list[int]:
        """The sequence whose tokens have the largest sum of squared changes; several, if it has fewer than ENOUGH."""
        by = (self.tokens.change**2).groupby(self.tokens.sequence).agg(["sum", "size"])
        by = by.sort_values("sum", ascending=False, kind="stable")
        return [int(number) for number in by.index[: int((by["size"].cumsum() < ENOUGH).sum()) + 1]]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Observed over predicted RMS, geometric mean over sequences, and its 95 % interval (NaN for one unit).

        Sequences of few tokens are ``pooled``.

        The interval is Student's for the logarithm of the ratio: errors have heavy tails, and one sequence may have
        most of the square. Sequences that are ``unchanged`` do not count beside others: they are no draw of rounding.
        """
        return ratio_of(self.known, "observed", "predicted")

    @property
    def unchanged(self) -> int:
        """The number of sequences in which no log-probability differs."""
        return int((self.known.observed <= NOTHING * self.known.predicted).sum())

    @property
    def far(self) -> list[int]:
        """The sequences whose own change is FAR beyond both their predicted and their emulated one."""
        times = max(1.0, (self.finite.emulated / self.finite.predicted).max())  # what one has, another may have
        more = self.known.observed > FAR**2 * np.maximum(self.finite.predicted * times, self.known.emulated)
        return [int(number) for number in self.known.sequence[more & (self.known.tokens >= ENOUGH)]]

    @property
    def predicted(self) -> float:
        """The RMS change that rounding must give, in nats: the predicted one, or the emulated one if that ``fails``."""
        return float(np.average(self.known.predicted, weights=self.known.tokens) ** 0.5)

    def divergences(self, column: str = "change") -> dict[str, float]:
        """Numbers of a ``column`` of changes x of the tokens' log-probabilities, in nats where they have a unit.

        ``rms`` and ``mean``; ``k1``, the mean of -x, and ``k3``, that of exp(x) - 1 - x, which estimate KL(reference ||
        engine) where tokens are drawn from the reference (Schulman 2020, joschu.net/blog/kl-approx.html) and compare
        two gaps on any other text; ``clipped``, the share of tokens whose ratio of probabilities leaves [1/2, 2].
        """
        x = self.tokens[column].to_numpy()
        return {
            "rms": float(np.sqrt(np.mean(x**2))), "mean": float(x.mean()), "k1": float(-x.mean()),
            "k3": float(np.mean(np.expm1(x) - x)), "clipped": float(np.mean(np.abs(x) > CLIPPED)),
        }  # fmt: skip

    @property
    def tops(self) -> dict[str, float]:
        """Means over positions of ``kl``, ``flip`` and both of the emulated pass; empty if the log has no tops."""
        columns = [name for name in TOPS if name in self.tokens and self.tokens[name].notna().any()]
        return {name: float(self.tokens[name].mean()) for name in columns}

    @cached_property
    def of_engine(self) -> bool:
        """True if the engine itself is farther from the fp32 model than the reference is."""
        own, others = (float((side.tokens.change**2).sum()) for side in self.sides)
        return not self.two or own >= others

    @property
    def sides(self) -> "tuple[Gap, Gap]":
        """The gaps of two compared engines from the fp32 model: first the engine's, then the reference's."""
        tokens = self.tokens
        base = tokens.assign(emulated=tokens.rounding, exact=tokens.fp32)
        changes = tokens.change + tokens.exact - tokens.fp32, tokens.exact - tokens.fp32
        first, second = (replace(self, tokens=base.assign(change=change), two=False) for change in changes)
        return first, second
