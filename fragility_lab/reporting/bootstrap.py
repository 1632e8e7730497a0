"""Confidence intervals of means by resampling."""

import numpy as np
import pandas as pd
from scipy import stats

RESAMPLES = 9999


def spread(values: pd.Series) -> dict[str, float]:
    """Mean, standard deviation and number of the ``values``, and a 95 % bootstrap interval of the mean (BCa).

    NaNs are left out. The interval is NaN for fewer than three values or if all are equal.
    """
    values = values.dropna().to_numpy()
    low = high = np.nan
    if len(values) > 2 and np.ptp(values) > 0:
        interval = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, rng=0).confidence_interval
        low, high = interval.low, interval.high
    return {
        "mean": values.mean() if len(values) else np.nan,
        "sd": values.std(ddof=1) if len(values) > 1 else np.nan,
        "low": low,
        "high": high,
        "runs": len(values),
    }
