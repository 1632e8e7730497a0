"""Predictions: tables of contributions and of windows, and the number that any of their rows give."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fragility_adjoint.predictor.targets import Target
from fragility_quantization.recipes import Recipe


@dataclass(frozen=True)
class Prediction:
    """The prediction for every window, from one forward pass and one backward pass per probe.

    ``contributions`` has one row per window, probe and place where values are rounded (``recorder.Place``), with its
    number ``place``, its contribution ``c2`` to the squared error of the target's output, its ``signed`` contribution
    <gradient, error> to the probe's product with that error (``coherence``; NaN where signs of errors are not known),
    and the columns of ``sites.Sites.table``. Rows of any selection may be summed. ``windows`` has one row per window:

    - ``predicted``, in the target's unit, and its ``standard_error`` over the probes (NaN for one probe);
    - ``norm``, by whose square the sum of contributions is divided: ||X_L|| for the target "hidden";
    - only with secant slopes: ``measured``, the error of the same pass, in the same unit; and ``remainder``, by how
      much signed contributions miss the products of the probes with that error, root mean square, relative to it;
    - ``overflow``, the kernel that first left the range, in words ("" if none did). ``predicted`` is then NaN.

    ``recipe`` and ``target`` say what was predicted. ``length`` is the number of tokens of a window. ``ran`` has the
    paths of the modules that ran. Changes in a mixture's choice of experts do not count.
    """

    contributions: pd.DataFrame
    windows: pd.DataFrame
    recipe: Recipe
    target: Target
    length: int
    ran: frozenset[str]

    @property
    def finite(self) -> set[int]:
        """The numbers of the windows that do not overflow."""
        return {*self.windows.window[np.isfinite(self.windows.predicted)]}

    def of(self, numbers: Collection[int]) -> "Prediction":
        """The prediction for the windows with these ``numbers`` alone."""
        rows, windows = (table[table.window.isin(numbers)] for table in (self.contributions, self.windows))
        return replace(self, contributions=rows, windows=windows)


def joined(first: Prediction, second: Prediction) -> Prediction:
    """The prediction from the probes of both, which are of the same passes but with other seeds."""
    later = second.contributions.assign(probe=second.contributions.probe + first.contributions.probe.max() + 1)
    rows = pd.concat([first.contributions, later], ignore_index=True)
    windows = predict(rows, first.windows, first.target.squared)
    return replace(first, contributions=rows, windows=windows)


def predict(contributions: pd.DataFrame, windows: pd.DataFrame, squared: bool = False) -> pd.DataFrame:
    """``windows`` with ``predicted`` and ``standard_error`` computed from these ``contributions`` alone.

    Both are tables of a ``Prediction``, whose target may be ``squared``. Leave out rows of ``contributions`` to predict
    without those roundings, and rows of ``windows`` to leave out windows. The prediction is sum of c^2 / norm^2, the
    sum averaged over probes, or its root. Its standard error is that of the average, to first order: NaN with one.
    """
    probe, distinct = pd.factorize(contributions.probe)
    probes = max(1, len(distinct))
    totals = np.zeros((len(windows), probes))  # a NaN in it stays, which pandas would skip
    rows = pd.Index(windows.window).get_indexer(contributions.window)
    known = rows >= 0
    np.add.at(totals, (rows[known], probe[known]), contributions.c2[known])
    square, norm = totals.mean(1), windows.norm
    spread = totals.std(1, ddof=1) / probes**0.5 if probes > 1 else np.nan
    if squared:
        return windows.assign(predicted=square / norm**2, standard_error=spread / norm**2)
    return windows.assign(predicted=square**0.5 / norm, standard_error=spread / (2 * square**0.5 * norm))
