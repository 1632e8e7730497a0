"""Growth of the output's error with the errors inside: in proportion, as a prediction to first order assumes?

The pass is repeated with half of every rounding error. In proportion, the mismatch is half as large, and the KL
divergence a quarter. If the errors are too large for proportion, predictions may be off by a similar factor.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_lab.measurement.comparison import compare, numbered, observe, ratio
from fragility_lab.running.environment import progress

TOLERANCE = 0.1  # a ratio this far from 1 still counts as 1


@dataclass(frozen=True)
class Growth:
    """Four times the squared error with half of every rounding error, over the whole squared error: means over windows.

    ``low`` and ``high`` are the 95 % interval. The ``ratio`` is 1 if the error grows in proportion.
    """

    ratio: float
    low: float
    high: float

    @property
    def exponent(self) -> float:
        """The power of the size of the errors inside with which the squared error grows, from half to whole errors."""
        return 2 - float(np.log2(self.ratio)) if self.ratio > 0 else np.nan

    @property
    def in_proportion(self) -> bool:
        """True if the interval does not show that the ratio is off by more than TOLERANCE."""
        return not (self.high < 1 - TOLERANCE or self.low > 1 + TOLERANCE)


def half_errors(realisations: ErrorSamples, model: PreTrainedModel, tokens: Tensor) -> pd.DataFrame:
    """``comparison.compare`` by window: passes with half of every rounding error against those of ``model`` in fp32."""
    tables = []
    for x in progress(tokens.split(1), desc="half of every error"):
        half = realisations.scaled(partial(observe, tokens=x), 0.5)
        tables.append(compare(half, observe(model, x), x)[0])
    return numbered(tables)


def squared(windows: pd.DataFrame, target: str) -> np.ndarray:
    """The squared error of the ``target`` by window, from a table of ``comparison.compare``; KL is a square already."""
    if target in ("hidden", "logprob"):
        return windows["mismatch" if target == "hidden" else target].to_numpy() ** 2
    return windows.kl.to_numpy()


def growth(
    realisations: ErrorSamples, model: PreTrainedModel, tokens: Tensor, whole: pd.DataFrame, target: str
) -> Growth | None:  # fmt: skip
    """Measure the growth of the error over ``tokens`` (B, T); ``whole`` is ``comparison.compare`` with all errors.

    Windows with nonfinite errors do not count. The result is None if no other window is left.
    """
    measured = np.stack([4 * squared(half_errors(realisations, model, tokens), target), squared(whole, target)])
    finite = measured[:, np.isfinite(measured).all(0)]
    return Growth(**ratio(*finite)) if finite.size else None
