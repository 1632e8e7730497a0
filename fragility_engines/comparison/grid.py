"""The grid of a log: an engine that rounded the log-probabilities themselves, which can be seen from the log alone."""

from collections.abc import Iterator

import numpy as np

from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.slopes import Slope
from fragility_engines.suspects.suspect import Suspect

MANY, OFF = 32, 0.01  # numbers other than 0 that must lie on a grid, and how far off it, in steps, they may be
NOTICED = 0.01  # of the predicted square: rounding that adds less may be left as it is
BITS = {"bf16": 8, "fp16": 11}
DECIMALS = (1, 2, 3, 4)
MEND = (
    "the dtype of the log-softmax, whose sums may be rounded as well, and of what writes the log: both should be fp32"
)


def grids(gap: Gap) -> Iterator[Slope]:
    """The suspect that the numbers of the log, or of the other log, were rounded, if they were and it is noticed."""
    exact, change = gap.tokens.exact.to_numpy(), gap.tokens.change.to_numpy()
    own, other = coarsest(exact + change), coarsest(exact if gap.two else exact[:0])
    if own[0] == other[0] or not change.any():  # the grid of both is none between them
        return
    for size, (name, square) in ((1.0, own), (-1.0, other)):
        if square > NOTICED * gap.predicted**2:
            suspect = Suspect(f"rounding of the log to {name}", MEND, slope=True, in_log=True)
            yield Slope(suspect, size, 0.0, min(1.0, square / float((change**2).mean())), len(change), gap.two)


def coarsest(values: np.ndarray) -> tuple[str, float]:
    """The name of the coarsest grid on which all ``values`` (N,) lie, and the mean square that it adds; "" and 0."""
    values = values[values != 0]
    if len(values) < MANY:
        return "", 0.0
    steps = {f"{count} decimals": np.full(len(values), 10.0**-count) for count in DECIMALS}
    steps |= {name: 2.0 ** (np.frexp(values)[1] - bits) for name, bits in BITS.items()}
    on = {name: (step**2).mean() / 12 for name, step in steps.items() if on_grid(values / step)}
    return max(on.items(), key=lambda each: each[1], default=("", 0.0))


def on_grid(counts: np.ndarray) -> bool:
    """True if ``counts`` of steps are integers other than 0, up to errors of single precision."""
    return bool(((np.abs(counts - counts.round()) < OFF) & (counts.round() != 0)).all())
