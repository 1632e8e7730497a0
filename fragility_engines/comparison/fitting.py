"""Numbers fitted to a gap: which value of an epsilon, a scale, RoPE's base or a window explains most of it."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize_scalar

from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.slopes import Directions, Slope, slope, slopes
from fragility_engines.suspects.numbers import Number
from fragility_engines.suspects.suspect import Suspect

STEPS = 12  # passes over the part of a gap between the two values beside the best
SURE = 0.95  # share of the gap beyond rounding that a suspect explains, if the engine does just what it says
HOPE = 0.1  # share of a sequence's gap that must go with one of the usual values, for others to be tried


def fitted(gap: Gap, part: Gap, directed: Directions) -> list[Slope]:
    """The slopes of a gap along the numbers of ``directed``, each at the value that explains most of its ``part``.

    The usual values are tried over the sequence with the larger gap, and values between over both. Numbers of which
    none is in line with HOPE of the gap are left out, and those after one that explains SURE of it. The one that
    explains most is tested over all tokens of ``gap``.
    """
    first, found = part.only([part.largest]), []
    in_line = {
        number: max(slope(first, suspect, directed(first, suspect)).share for suspect in number.usual)
        for number in directed.numbers
    }
    for number in sorted(in_line, key=in_line.__getitem__, reverse=True):
        if in_line[number] > HOPE:
            left = [unexplained(first, suspect, directed) for suspect in number.usual]
            suspect = number.at(nearest(part, number, left, directed))
            found.append(slope(part, suspect, directed(part, suspect)))
            if found[-1].share > SURE:
                break
    found.sort(key=lambda each: each.share, reverse=True)
    return [*slopes(gap, [each.suspect for each in found[:1]], directed), *found[1:]]


def nearest(part: Gap, number: Number, left: Sequence[float], directed: Directions) -> float:
    """The value of ``number`` that leaves least of ``part``, between the neighbours of the best known one.

    ``left`` is what the usual values leave; the model's own leaves all.
    """
    known = sorted([*zip(number.values, left), (number.own, 1.0)])
    best = min(range(len(known)), key=lambda place: known[place][1])
    bounds = known[max(best - 1, 0)][0], known[min(best + 1, len(known) - 1)][0]

    def leaving(log: float) -> float:
        return unexplained(part, number.at(float(np.exp(log))), directed)

    options = {"maxiter": STEPS, "xatol": 0.01}
    value = float(np.exp(minimize_scalar(leaving, bounds=np.log(bounds), method="bounded", options=options).x))
    if number.whole:
        value = stepped(part, number, round(value), directed)
    usual = known[best][0]
    return value if leaving(np.log(value)) < leaving(np.log(usual)) else usual


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
