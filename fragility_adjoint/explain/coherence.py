"""Errors that act together: the Gram matrix of the signed contributions of groups of sites.

A prediction adds up squares, as if every rounding error were independent of the others. The errors e_i of one pass are
known with their signs, and a backward pass for a probe v gives the gradients g_i of v.X_L. The signed contribution of a
group of sites is s = sum_i g_i e_i over its errors. To first order the sum of s over all groups is v.E_L, where E_L is
the error of the pass. With random signs v the mean of s_a s_b is thus the inner product of what groups a and b do to
X_L (Hutchinson 1990, doi:10.1080/03610919008812866), so that, relative to ||X_L||^2,

- the trace of the Gram matrix G = mean s s^T is the squared error if the groups were independent;
- the sum of all its entries is the squared error of the pass, to first order;
- 2 G_ab is what the pair a, b adds: above 0 the two reinforce each other, below 0 they cancel.

With secant slopes (``secant``) the sum of s is v.E_L at any size of the error. The sum of all entries would then
estimate the measured squared error, which is known, and is used itself.

Errors that are alike within a group, as in one channel, are on the diagonal: they raise the trace over the sum of c^2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fragility_adjoint.predictor.estimator import Adjoint

GROUPS = ["layer", "last", "site", "kind"]
MOST = 150  # groups
LEVEL = 0.05  # probability that a pair is named if no pair acts together
MATTERS = 0.01  # share of the squared error from which on a pair matters


@dataclass(frozen=True)
class Coherence:
    """Joint effects of groups of sites on the squared error of a target's output, relative to the norm's square.

    ``groups`` has one row per group, K in all. ``grams`` (W, K, K) has the Gram matrix of every window, mean over
    probes. ``squares`` (W,) is the sum of c^2, the squared error if all errors were independent. ``totals`` (W,) is the
    squared error of the passes: measured with secant slopes, else the sum of all entries of G. ``remainder`` is the
    largest that secant slopes left in a window, NaN without them.
    """

    groups: pd.DataFrame
    grams: np.ndarray
    squares: np.ndarray
    totals: np.ndarray
    remainder: float = np.nan

    @property
    def gram(self) -> np.ndarray:
        """The Gram matrix (K, K), mean over windows."""
        return self.grams.mean(0)

    def between(self) -> tuple[float, float]:
        """The squared error over the trace of G, 1 if groups are independent, and its standard error over windows."""
        return quotient(self.totals, np.trace(self.grams, axis1=1, axis2=2))

    def inside(self) -> tuple[float, float]:
        """The trace of G over the sum of c^2, 1 if errors inside of groups are independent, and its standard error."""
        return quotient(np.trace(self.grams, axis1=1, axis2=2), self.squares)

    def overall(self) -> tuple[float, float]:
        """The squared error over the sum of c^2, 1 if errors are independent, and its standard error over windows."""
        return quotient(self.totals, self.squares)

    def pairs(self) -> pd.DataFrame:
        """One row per pair of groups, the largest share first.

        ``first`` and ``second`` are numbers of rows of ``groups``. ``share`` is 2 G_ab over the trace of G, below 0 for
        a pair that cancels, and ``standard_error`` is its standard error over windows. If no pair acts together, the
        probability that any share exceeds its ``limit`` is LEVEL at most. The limit is Student's quantile for LEVEL
        over the number of pairs (Bonferroni), times the standard error; it is infinite for one window. A pair
        ``matters`` if its share is larger than the limit and than MATTERS.
        """
        first, second = np.triu_indices(len(self.groups), 1)
        share, error = quotient(2 * self.grams[:, first, second], np.trace(self.grams, axis1=1, axis2=2)[:, None])
        windows = len(self.grams)
        chance = LEVEL / 2 / max(1, len(share))
        limit = stats.t.isf(chance, windows - 1) * error if windows > 1 else np.full_like(share, np.inf)
        table = pd.DataFrame({"first": first, "second": second, "share": share, "standard_error": error})
        table = table.assign(limit=limit, matters=abs(share) > np.maximum(limit, MATTERS))
        return table.sort_values("share", key=abs, ascending=False, ignore_index=True)


def quotient(part: np.ndarray, whole: np.ndarray) -> tuple[Any, Any]:
    """The ratio of the means over windows, the first dimension, and its standard error (Cochran 1977, chapter 6).

    The standard error is NaN for one window, and both are NaN where nothing contributes.
    """
    windows, mean = len(part), whole.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = part.mean(0) / mean
        residuals = part - ratio * whole
        error = residuals.std(0, ddof=1) / windows**0.5 / mean if windows > 1 else np.full_like(ratio, np.nan)
    return ratio, error


def in_bands(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` of contributions whose ``layer`` is the first of a band of blocks, and ``last`` its last block.

    Bands are the shortest that give at most MOST groups. The longest possible band has all blocks.
    """
    places, depth = rows.drop_duplicates("place"), int(rows.layer.max()) + 1 if rows.layer.notna().any() else 1

    def fits(size: int) -> bool:
        return places.assign(layer=places.layer // size, last=0).groupby(GROUPS, dropna=False).ngroups <= MOST

    size = next(filter(fits, range(1, depth)), depth)
    first = rows.layer // size * size
    return rows.assign(layer=first, last=(first + size - 1).clip(upper=depth - 1))


def coherence(adjoint: Adjoint, windows: Iterable[Tensor], by: Sequence[str] | None = None) -> Coherence:
    """Measure joint effects of errors of different sites in passes over ``windows``, tensors of tokens (T,) or (B, T).

    Windows of one tensor share each read of a streamed model. The estimate takes as long as one prediction does.
    Each window has its own sign vectors: with shared ones the error of the estimate would be alike in all windows, and
    the scatter over windows would not show it.

    Sites are grouped by the columns ``by`` of ``Prediction.contributions``, by default block, site and kind. Successive
    blocks of a deep model are one group, from ``layer`` to ``last``, to have at most MOST groups if possible. Windows
    whose prediction is not finite are left out. With gradients at the "low" point, and for secants, errors are those of
    the low-precision pass; at other points they are the errors of rounding the fp32 pass.

    Raises ValueError for errors without a known sign (stochastic rounding, or a model whose fp32 reference was not
    given), and if no window is left.
    """
    if not adjoint.knows_signs:
        raise ValueError(
            "coherence needs errors with known signs, got expected sizes of errors: round to nearest, and give Adjoint "
            "the fp32 reference"
        )
    tables, measured, first = [], [], 0
    for tokens in map(torch.atleast_2d, windows):
        prediction = adjoint(tokens, seeds=[adjoint.seed + first + number for number in range(len(tokens))])
        known = prediction.of(prediction.finite)
        rows, finite = known.contributions, known.windows
        norm = rows.window.map(finite.set_index("window").norm)
        tables.append(rows.assign(window=rows.window + first, c2=rows.c2 / norm**2, signed=rows.signed / norm))
        measured.append(finite)
        first += len(tokens)
    found: Any = pd.concat(measured) if measured else []
    if not len(found):
        raise ValueError("coherence needs a window whose prediction is finite, got none: choose a wider format")
    rows = pd.concat(tables)
    rows = rows if by else in_bands(rows)
    by_group = rows.groupby([*(by or GROUPS)], dropna=False)
    sums = rows.signed.groupby([rows.window, rows.probe, by_group.ngroup()]).sum().unstack(fill_value=0.0)
    signed = sums.to_numpy().reshape(len(found), adjoint.probes, -1)  # (W, P, K)
    grams = np.einsum("wpa,wpb->wab", signed, signed) / adjoint.probes
    squares = rows.c2.groupby(rows.window).sum() / adjoint.probes
    totals, remainder = grams.sum((1, 2)), np.nan
    if "measured" in found:
        totals = found.measured.to_numpy() ** (1 if adjoint.target.squared else 2)
        remainder = found.remainder.max()
    return Coherence(by_group.size().index.to_frame(index=False), grams, squares.to_numpy(), totals, remainder)
