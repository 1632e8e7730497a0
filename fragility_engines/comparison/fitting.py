"""Numbers fitted to a gap: which value of an epsilon, a scale, RoPE's base or a window explains most of it."""

import numpy as np
from scipy.optimize import minimize_scalar

from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.slopes import Directions, Slope, slope, slopes
from fragility_engines.suspects.numbers import Number
from fragility_engines.suspects.suspect import Suspect

STEPS = 12  # passes over the part of a gap between the two values beside the best
HOPE = 0.1  # share of a sequence's gap that the best of the usual values must explain to be followed up


def fitted(gap: Gap, part: Gap, directed: Directions) -> list[Slope]:
    """The slopes of a gap along the numbers of ``directed``, each at the value that explains most of its ``part``.

    The usual values are tried over the sequence with the larger gap, and values between over both. Numbers whose best
    value explains less than HOPE there are left out. The one that explains most is tested over all tokens of ``gap``.
    """
    first, found = part.only([part.largest]), []
    for number in directed.numbers:
        left = [unexplained(first, suspect, directed) for suspect in number.usual]
        best = int(np.argmin(left))
        if left[best] < 1 - HOPE:
            suspect = nearest(part, number, best, directed)
            found.append(slope(part, suspect, directed(part, suspect)))
    found.sort(key=lambda each: each.share, reverse=True)
    return [*slopes(gap, [each.suspect for each in found[:1]], directed), *found[1:]]


def nearest(part: Gap, number: Number, best: int, directed: Directions) -> Suspect:
    """The ``number`` at the value that leaves least of ``part``, between the neighbours of its ``best`` usual one."""
    values = np.log(number.values)

    def left(log: float) -> float:
        return unexplained(part, number.at(float(np.exp(log))), directed)

    bounds = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
    found = minimize_scalar(left, bounds=bounds, method="bounded", options={"maxiter": STEPS, "xatol": 0.01})
    value = float(np.exp(found.x)) if found.fun < left(values[best]) else number.values[best]
    return number.at(stepped(part, number, round(value), directed) if number.whole else value)


def stepped(part: Gap, number: Number, value: int, directed: Directions) -> int:
    """The integer reached from ``value`` by steps of 1, each of which leaves less of ``part``; STEPS at most."""
    left = {each: unexplained(part, number.at(each), directed) for each in (value - 1, value, value + 1)}
    for _ in range(STEPS):
        best = min(left, key=left.__getitem__)
        if all(beside in left for beside in (best - 1, best + 1)):
            return best
        for beside in (best - 1, best + 1):
            left.setdefault(beside, unexplained(part, number.at(beside), directed))
    return min(left, key=left.__getitem__)


def unexplained(gap: Gap, suspect: Suspect, directed: Directions) -> float:
    """The share of the square of ``gap`` that stays if the engine does what ``suspect`` does."""
    along = directed(gap, suspect)
    known = np.isfinite(along)
    beyond, along = (gap.tokens.change - gap.tokens.emulated).to_numpy()[known], along[known]
    sign = -1.0 if gap.two and beyond @ along < 0 else 1.0  # of two engines the reference may be the one
    return float(((beyond - sign * along) ** 2).sum() / (beyond**2).sum())
