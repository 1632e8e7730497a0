"""Verdicts on the paper's claims: one table, with the same few tests for every experiment.

A claim about a mean is decided by the 95 % bootstrap interval of the mean over runs; an interval that includes the
bound decides nothing. Runs of several formats on the same windows are resampled together. A claim about most runs
holds if Wilson's interval of their share lies above 1/2. It does not hold if at most half of these runs agree with it.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from fragility_lab.reporting.claims import QUANTITIES, Quantity

HOLDS, FAILS, UNDECIDED, NOT_RUN = VERDICTS = ("holds", "does not hold", "undecided", "not run")
RESAMPLES = 9999
LEAST = 3  # with fewer independent runs nothing is shown to hold
FEW = 6  # with fewer runs a verdict is weak: 5 runs agree by chance 1 time in 16
REFUTED = ("every", "equal")  # tests that one counterexample refutes
WINDOWS = ["length", "seed"]  # what determines the windows of a run

# The tests in words: of the mean, or of the runs.
TESTS = {
    "above": "mean above {}", "below": "mean below {}", "at most": "mean not above {}",
    "equal": "{} in every run", "every": "true every time", "most": "true in more than half of the runs",
}  # fmt: skip


def judge(test: str, values: np.ndarray, low: float, high: float, bound: float) -> str:
    """The verdict of ``test`` on ``values`` (runs,), whose mean has the interval from ``low`` to ``high``.

    Without an interval (NaN) no claim holds, but one counterexample refutes a claim about every run. If all values
    equal the bound, only "equal" holds: where no run differs, nothing is better.
    """
    holds, fails = {
        "above": (low > bound, high < bound),
        "below": (high < bound, low > bound),
        "at most": (low < high <= bound or high < bound, low > bound),
        "equal": (low == high == bound, (values != bound).any()),
        "every": (not np.isnan(low) and values.all(), not values.all()),
        "most": (low > 0.5, not np.isnan(low) and values.mean() <= 0.5),
    }[test]
    return HOLDS if holds else FAILS if fails else UNDECIDED


def interval(values: np.ndarray, quantity: Quantity, windows: np.ndarray | None = None) -> tuple[float, float]:
    """95 % interval of the mean of ``values`` (runs,): bootstrap, or Wilson's for counts; NaN for too few runs.

    Runs with equal ``windows`` (runs,) are resampled together, and are one trial of a count. Without ``windows``, all
    runs differ.
    """
    if not quantity.sampled:
        return values.mean(), values.mean()
    together = pd.Series(values).astype(float).groupby(np.arange(len(values)) if windows is None else windows).mean()
    trials = len(together)
    if trials < LEAST:
        return np.nan, np.nan
    if quantity.counted:
        return wilson(together.sum(), trials)
    if np.ptp(values) == 0:
        return values[0], values[0]
    return bootstrap(together)


def bootstrap(values: pd.Series) -> tuple[float, float]:
    """95 % bootstrap interval (BCa) of the mean of ``values`` without NaNs; NaN for fewer than three or equal ones."""
    values = values.dropna().to_numpy()
    if len(values) < 3 or np.ptp(values) == 0:
        return np.nan, np.nan
    found = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, rng=0).confidence_interval
    return found.low, found.high


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); ``successes`` may be fractional if a trial is a mean."""
    z = stats.norm.ppf(0.975)
    share = successes / trials
    centre, half = share + z**2 / (2 * trials), z * np.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    low, high = ((centre + sign * half) / (1 + z**2 / trials) for sign in (-1, 1))
    return (low if share > 0 else 0.0), (high if share < 1 else 1.0)  # exact in spite of rounding


def by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of E5 with one row per seed: column ``onsets`` of policy ``bgss`` is ``onsets_bgss``."""
    wide = runs.pivot(index="seed", columns="policy")
    wide.columns = [
        f"{column}_{policy.removesuffix('_same_budget').removesuffix('_global')}" for column, policy in wide.columns
    ]
    return wide


def measured(quantity: Quantity, tables: Mapping[str, pd.DataFrame]) -> tuple[np.ndarray, np.ndarray, int, float]:
    """The values (runs,) of ``quantity``, the numbers (runs,) of their sets of windows, the count of runs that are not
    finite, and the claim's bound. There are no values if ``tables`` lack a table or column that they need.
    """
    nothing = np.empty(0)
    table = tables.get(quantity.table)
    if table is None:
        return nothing, nothing, 0, np.nan
    table = by_seed(table) if "policy" in table else table
    used = [name for name in table if re.search(rf"\b{name}\b", quantity.values)]
    finite = table[np.isfinite(table[used]).all(axis=1)]
    if finite.empty:
        return nothing, nothing, len(table), np.nan
    try:
        values, bound = (np.atleast_1d(finite.eval(text)) for text in (quantity.values, quantity.bound))
    except pd.errors.UndefinedVariableError:  # a policy or statistic that this profile does not have
        return nothing, nothing, 0, np.nan
    shared = len(values) == len(finite) and {*WINDOWS} <= {*finite}
    windows = finite.groupby(WINDOWS).ngroup().to_numpy() if shared else np.arange(len(values))
    return values, windows, len(table) - len(finite), float(np.mean(bound))


def compare(tables: Mapping[str, pd.DataFrame], quantities: Sequence[Quantity] = QUANTITIES) -> pd.DataFrame:
    """The paper beside the run, one row per quantity: values, difference, interval, runs, and the claim's verdict.

    ``tables`` are those of a run by name (``e2_runs`` ...); a quantity without its table is "not run". A count is given
    as its share of the runs; ``paper_runs`` is the number of runs of the paper.
    """
    return pd.DataFrame([_row(quantity, *measured(quantity, tables)) for quantity in quantities])


def _row(quantity: Quantity, values: np.ndarray, windows: np.ndarray, left_out: int, bound: float) -> dict:
    """The row of ``quantity`` from the results of ``measured``."""
    runs = len(values)
    paper, second = quantity.paper or (np.nan, None)
    paper = paper / second if quantity.counted else paper
    low, high = interval(values, quantity, windows) if runs else (np.nan, np.nan)
    decided = judge(quantity.test, values, low, high, bound) if runs and quantity.test else ""
    return {
        "experiment": quantity.experiment,
        "quantity": quantity.name,
        "paper": paper,
        "paper_sd": np.nan if quantity.counted else second,
        "paper_runs": second if quantity.counted else np.nan,
        "mean": values.mean() if runs else np.nan,
        "sd": values.std(ddof=1) if runs > 1 and not quantity.counted else np.nan,
        "difference": values.mean() - paper if runs else np.nan,
        "low": low,
        "high": high,
        "runs": runs,
        "sampled": quantity.sampled,
        "digits": quantity.digits,
        "claim": quantity.claim,
        "tested": TESTS[quantity.test].format(f"{bound:.3g}") if decided else "",
        "verdict": decided if runs else NOT_RUN,
        "remark": remark(quantity, values, len(np.unique(windows)), left_out, decided, bound),
    }


def remark(quantity: Quantity, values: np.ndarray, independent: int, left_out: int, decided: str, bound: float) -> str:
    """Why a claim is undecided or its verdict weak; ``independent`` is the number of different sets of windows."""
    runs, reasons = len(values), []
    count = f"{runs} run{'s' * (runs != 1)}" + (f" of {independent} sets of windows" if independent != runs else "")
    if left_out:
        reasons.append(f"{left_out} of {runs + left_out} runs left out, not finite")
    if decided == UNDECIDED:
        differ = (values != bound).any()
        includes = "the interval includes one half" if quantity.test == "most" else f"the interval includes {bound:.3g}"
        reasons.append(f"too few, {count}" if independent < LEAST else includes if differ else "no run differs")
    elif decided and quantity.sampled and independent < FEW and not (quantity.test in REFUTED and decided == FAILS):
        reasons.append(f"weak, {count}")
    return "; ".join(reasons)
