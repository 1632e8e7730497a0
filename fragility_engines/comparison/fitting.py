"""Numbers fitted to a gap: which value of an epsilon, a scale, RoPE's base or a window explains most of it."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize_scalar

from fragility_engines.comparison.gap import SURE, Gap, beyond
from fragility_engines.comparison.slopes import Directions, Slope, slope, slopes
from fragility_engines.suspects.numbers import Number
from fragility_engines.suspects.sampling import drawn, temperature
from fragility_engines.suspects.suspect import Suspect

STEPS, CLOSE = 8, 0.003  # passes between the two values beside the best usual one, and what is close enough to stop
ALL = 16  # integers between these values that are all tried: the right one may leave far less than its neighbours
NICE, KNOWN = 0.05, 0.95  # temperatures are multiples of it, mostly; share of tokens that must be left
HOPE = 0.1  # share of a sequence's gap that must go with one of the usual values, for others to be tried


def fitted(gap: Gap, part: Gap, directed: Directions) -> list[Slope]:
    """The slopes of a gap along the numbers of ``directed``, each at the value that explains most of its ``part``.

    Usual values are tried over the sequence with the larger gap. A number is left out if none of its values explains
    the share HOPE of that gap, or if another number already explains SURE of the gap beyond rounding. The number that
    explains most is tested over all tokens of ``gap``.
    """
    first, found = part.only(part.loudest), []
    rest = 1 - float((part.tokens.rounding**2).sum() / (part.tokens.change**2).sum())
    rest = beyond(gap.ratio[0]) if gap.two else rest  # two engines have the same rounded weights
    in_line = {
        number: max(slope(first, suspect, directed(first, suspect)).share for suspect in number.usual)
        for number in directed.numbers
    }
    for number in sorted(in_line, key=in_line.__getitem__, reverse=True):
        if in_line[number] > HOPE:
            left = [unexplained(part, suspect, directed) for suspect in number.usual]
            suspect = number.at(nearest(part, number, left, directed))
            found.append(slope(part, suspect, directed(part, suspect)))
            if found[-1].share > SURE * rest:
                break
    found.sort(key=lambda each: each.share, reverse=True)
    return [*slopes(gap, [each.suspect for each in found[:1]], directed), *found[1:]]


def heated(gap: Gap, part: Gap, directed: Directions) -> list[Slope]:
    """The slope of ``gap`` along the temperature that leaves least of its ``part``, alone or with tokens left out.

    An engine gives no number to tokens that it leaves out of sampling. Tokens at the edge that only the fp32 model
    leaves out stay unexplained. If these are too many, the slope along the temperature alone is returned as well.
    """
    number = temperature()
    value = nearest(part, number, [unexplained(part, suspect, directed) for suspect in number.usual], directed)
    below = max(int(value / NICE), 1)
    tried = [number.at(value), *drawn(below * NICE), *drawn((below + 1) * NICE)]
    tried = [suspect for suspect in tried if np.isfinite(directed(part, suspect)).mean() > KNOWN]
    best = min(tried, key=lambda suspect: unexplained(part, suspect, directed))
    (found,) = slopes(gap, [best], directed)
    if found.as_tested and found.share > found.needed * beyond(gap.ratio[0]):
        return [found]
    return slopes(gap, [best, number.at(value)], directed)


def nearest(part: Gap, number: Number, left: Sequence[float], directed: Directions) -> float:
    """The value of ``number`` that leaves least of ``part``, between the neighbours of the best usual one.

    ``left`` is what the usual values leave; the model's own leaves all. Where these bracket the value, Brent's method
    needs a few passes.
    """
    known = dict(zip(map(np.log, (*number.values, number.own)), (*left, 1.0)))

    def leaving(log: float) -> float:
        if log not in known:
            known[log] = unexplained(part, number.at(float(np.exp(log))), directed)
        return known[log]

    places = sorted(known)
    at = min(range(len(places)), key=lambda place: known[places[place]])
    low, best, high = places[max(at - 1, 0)], places[at], places[min(at + 1, len(places) - 1)]
    between = range(max(1, round(np.exp(low))), round(np.exp(high)) + 1)
    if number.whole and len(between) <= ALL:
        return min(between, key=lambda value: leaving(np.log(value)))
    if known[low] > known[best] < known[high] and number.own != np.exp(best):  # beside a plateau it brackets nothing
        minimize_scalar(leaving, (low, best, high), method="brent", options={"maxiter": STEPS, "xtol": CLOSE})
    else:
        minimize_scalar(leaving, bounds=(low, high), method="bounded", options={"maxiter": 2 * STEPS, "xatol": CLOSE})
    value = float(np.exp(min(known, key=known.__getitem__)))
    return stepped(part, number, round(value), directed) if number.whole else value


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
    change, along = (gap.tokens.change - gap.tokens.emulated).to_numpy()[known], along[known]
    sign = 1.0 if gap.of_engine else -1.0  # -1: the reference of two engines does it
    return float(((change - sign * along) ** 2).sum() / (change**2).sum())
