"""As many probes as a prediction needs: more of them where they scatter."""

from collections.abc import Callable

import numpy as np

from fragility_adjoint.predictor import Prediction
from fragility_adjoint.predictor.prediction import joined

SCATTER = 0.2  # standard error over a window's prediction, above which the window gets more probes
MOST = 16  # probes of a window


def steady(estimate: Callable[[int], Prediction], most: int = MOST) -> Prediction:
    """The prediction that ``estimate`` gives for seeds of probes, from 0 on, with twice as many until none scatters.

    A window scatters if the standard error of its prediction is more than SCATTER of it, as where a few tokens decide.
    All windows have as many probes, ``most`` at most unless an estimate itself has more. Of one probe the scatter is
    not known, and there are no others.
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
    """True if a window's prediction is uncertain by more than SCATTER of it."""
    windows = prediction.windows
    relative = windows.standard_error / windows.predicted
    return bool((relative[np.isfinite(relative)] > SCATTER).any())
