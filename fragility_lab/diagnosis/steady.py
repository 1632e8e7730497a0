"""As many probes as a prediction needs: more of them where they scatter."""

import numpy as np
from torch import Tensor

from fragility_core.adjoint import Adjoint, Prediction
from fragility_core.adjoint.prediction import joined

SCATTER = 0.2  # standard error over a window's prediction, above which the window gets more probes
MOST = 16  # probes of a window


def steady(estimator: Adjoint, tokens: Tensor, most: int = MOST) -> Prediction:
    """The prediction of ``estimator`` for windows ``tokens`` (B, T), with twice the probes until no window scatters.

    A window scatters if the standard error of its prediction is more than SCATTER of it, as where a few tokens decide.
    All windows have as many probes, ``most`` at most unless the estimator itself has more. Of one probe the scatter is
    not known, and there are no others.
    """
    found, seed = estimator(tokens), estimator.seed
    while scatters(found) and 2 * probes_of(found) <= most:
        for _ in range(probes_of(found) // estimator.probes):
            seed += 1
            again = estimator(tokens, seeds=[seed] * len(tokens))
            found = joined(found, again)
    return found


def probes_of(prediction: Prediction) -> int:
    """The number of probes of a window."""
    return int(prediction.contributions.probe.max()) + 1


def scatters(prediction: Prediction) -> bool:
    """Whether a window's prediction is uncertain by more than SCATTER of it."""
    windows = prediction.windows
    relative = windows.standard_error / windows.predicted
    return bool((relative[np.isfinite(relative)] > SCATTER).any())
