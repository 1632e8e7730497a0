"""The number of probes that a prediction needs: more of them if they scatter."""

from collections.abc import Callable

import numpy as np

from fragility_adjoint.predictor import Prediction
from fragility_adjoint.predictor.prediction import joined

SCATTER = 0.2  # standard error over a window's prediction, above which the window gets more probes
MOST = 16  # probes of a window


def steady(estimate: Callable[[int], Prediction], most: int = MOST) -> Prediction:
    """The prediction of ``estimate`` for one seed of probes, then 2, 4 and so on, until no window scatters.

    A window scatters if the standard error of its prediction is more than SCATTER of the prediction, as it may if a few
    tokens decide. All windows have equally many probes, ``most`` at most unless one estimate has more. The scatter of
    a single probe is not known, and no more are taken.
    """
    found = estimate(0)
    probes = probes_of(found)
    while scatters(found) and 2 * probes_of(found) <= most:
        for seed in range(probes_of(found) // probes, 2 * probes_of(found) // probes):
            found = joined(found, estimate(seed))
    return found


def probes_of(prediction: Prediction) -> int:
    """The number of probes of a window."""
    return int(prediction.contributions.probe.max()) + 1


def scatters(prediction: Prediction) -> bool:
    """True if the standard error of some window's prediction is more than SCATTER of the prediction."""
    windows = prediction.windows
    relative = windows.standard_error / windows.predicted
    return bool((relative[np.isfinite(relative)] > SCATTER).any())
