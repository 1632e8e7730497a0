"""Verdicts on the paper's claims: one table, with the same few tests for every experiment.

A claim about a mean is decided by Student's 95 % interval of the mean over runs. An interval that includes the bound
decides nothing. An interval that is nowhere farther from the bound than the smallest effect of interest shows that
there is no difference that matters (two one-sided tests, Schuirmann 1987). Runs of several formats on the same windows
count as one. A claim about most runs holds if Wilson's interval of their share lies above 1/2. It does not hold if at
most half of these runs agree with it.

E5's claims are judged by a sequential plan: after 8 seeds, 16, and so on to 64. The first look that decides a claim
gives its verdict. A claim about every run is judged at the last look, since one counterexample refutes it. The
intervals of all looks together keep 95 % (Bonferroni): each has confidence 1 - 0.05/8.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import optimize, stats

from fragility_lab.reporting.claims import QUANTITIES, Quantity

HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED, NOT_RUN = VERDICTS = (
    "holds", "does not hold", "no difference that matters", "undecided", "not run",
)  # fmt: skip
CONFIDENCE = 0.95
LOOKS = range(8, 65, 8)  # numbers of seeds after which E5's claims are judged
SEEDS = {"e5_runs": "e5_seeds", "e5_scarce_seeds": "e5_scarce_seeds"}  # tables with the runs of all seeds
LEAST = 3  # with fewer independent runs nothing is shown to hold
FEW = 6  # with fewer runs a verdict is weak: 5 runs agree by chance 1 time in 16
DECIDED = (HOLDS, FAILS, NO_DIFFERENCE)
REFUTED = ("every", "equal")  # tests that one counterexample refutes
WINDOWS = ["length", "seed"]  # what determines the windows of a run

# The tests in words: of the mean, or of the runs.
TESTS = {
    "above": "mean above {}", "below": "mean below {}", "at most": "mean not above {}",
    "equal": "{} in every run", "every": "true every time", "most": "true in more than half of the runs",
}  # fmt: skip


def judge(test: str, values: np.ndarray, low: float, high: float, bound: float, smallest: float = 0.0) -> str:
    """The verdict of ``test`` on ``values`` (runs,), whose mean has the interval from ``low`` to ``high``.

    An interval, not a point, within ``smallest`` of the bound shows that no difference matters. Without an
    interval (NaN) no claim holds, but one counterexample refutes a claim about every run. If all values equal the
    bound, only "equal" holds: if no run differs, nothing is better.
    """
    holds, fails = {
        "above": (low > bound, high < bound),
        "below": (high < bound, low > bound),
        "at most": (low < high <= bound or high < bound, low > bound),
        "equal": (low == high == bound, (values != bound).any()),
        "every": (not np.isnan(low) and values.all(), not values.all()),
        "most": (low > 0.5, not np.isnan(low) and values.mean() <= 0.5),
    }[test]
    if bound - smallest < low < high < bound + smallest:
        return NO_DIFFERENCE
    return HOLDS if holds else FAILS if fails else UNDECIDED


def interval(
    values: np.ndarray, quantity: Quantity, windows: np.ndarray | None = None, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of the mean of ``values`` (runs,): Student's, or Wilson's for counts; NaN for too few runs.

    The runs with equal ``windows`` (runs,) count as one, by their mean. Without ``windows``, all runs differ.
    """
    if not quantity.sampled:
        return values.mean(), values.mean()
    trial_means = pd.Series(values).astype(float).groupby(np.arange(len(values)) if windows is None else windows).mean()
    trials = len(trial_means)
    if trials < LEAST:
        return np.nan, np.nan
    if quantity.counted:
        return wilson(trial_means.sum(), trials, confidence)
    if np.ptp(values) == 0:
        return values[0], values[0]
    return student(trial_means, confidence)


def student(values: pd.Series, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student's interval of the mean of ``values`` without NaNs; NaN for fewer than three or equal ones.

    A bootstrap of few values with a heavy tail is too narrow: for E5's largest mismatches it would exclude a mean of 0
    many times as often as its confidence says (``tests/lab/test_agreement.py``).
    """
    values = values.dropna().to_numpy()
    if len(values) < LEAST or np.ptp(values) == 0:
        return np.nan, np.nan
    found = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    return found.low, found.high


def wilson(successes: float, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval of a share (Wilson 1927); ``successes`` may be fractional if a trial is a mean."""
    z = stats.norm.ppf((1 + confidence) / 2)
    share = successes / trials
    centre, half = share + z**2 / (2 * trials), z * np.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    low, high = ((centre + sign * half) / (1 + z**2 / trials) for sign in (-1, 1))
    return (low if share > 0 else 0.0), (high if share < 1 else 1.0)  # exact in spite of rounding


def runs_needed(values: np.ndarray, smallest: float, confidence: float = CONFIDENCE) -> float:
    """The number of runs, scattered as ``values`` (runs,), whose interval is at most ``smallest`` wide on either side.

    This number of runs can show that there is no difference that matters. NaN without scatter or ``smallest``.
    """
    values = values[np.isfinite(values)].astype(float)
    if len(values) < LEAST or np.ptp(values) == 0 or smallest <= 0:
        return np.nan
    ratio = values.std(ddof=1) / smallest

    def excess(runs: float) -> float:
        return stats.t.ppf((1 + confidence) / 2, runs - 1) * ratio / runs**0.5 - 1

    if excess(LEAST) <= 0:
        return LEAST
    return math.ceil(optimize.brentq(excess, LEAST, max(10, (20 * ratio) ** 2)))


def by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of E5 with one row per seed: column ``onsets`` of policy ``bgss`` is ``onsets_bgss``."""
    wide = runs.pivot(index="seed", columns="policy")
    wide.columns = [
        f"{column}_{policy.removesuffix('_same_budget').removesuffix('_global')}" for column, policy in wide.columns
    ]
    return wide


@dataclass(frozen=True)
class Measured:
    """The measurement of a quantity in the runs; without values if there is no run of it."""

    values: np.ndarray = field(default_factory=lambda: np.empty(0))  # (runs,)
    windows: np.ndarray = field(default_factory=lambda: np.empty(0))  # (runs,), numbers of their sets of windows
    left_out: int = 0  # runs that are not finite
    bound: float = np.nan  # of the claim
    smallest: float = 0.0  # effect of interest


def measured(quantity: Quantity, table: pd.DataFrame | None) -> Measured:
    """The values of ``quantity`` in ``table``; none if it is missing or lacks a column that they need."""
    if table is None:
        return Measured()
    table = by_seed(table) if "policy" in table else table
    used = [name for name in table if re.search(rf"\b{name}\b", quantity.values)]
    finite = table[np.isfinite(table[used]).all(axis=1)]
    if finite.empty:
        return Measured(left_out=len(table))
    texts = quantity.values, quantity.bound, quantity.smallest
    try:
        values, bound, smallest = (np.atleast_1d(finite.eval(text)) for text in texts)
    except pd.errors.UndefinedVariableError:  # a policy or statistic that this profile does not have
        return Measured()
    shared = len(values) == len(finite) and {*WINDOWS} <= {*finite}
    windows = finite.groupby(WINDOWS).ngroup().to_numpy() if shared else np.arange(len(values))
    return Measured(values, windows, len(table) - len(finite), float(np.mean(bound)), float(np.mean(smallest)))


def compare(tables: Mapping[str, pd.DataFrame], quantities: Sequence[Quantity] = QUANTITIES) -> pd.DataFrame:
    """The paper beside the run, one row per quantity: values, difference, interval, runs, and the claim's verdict.

    A row is that of the first look that decides the claim, or of the last one. ``tables`` are those of a run by name
    (``e2_runs`` ...); a quantity without its table is "not run". A count is given as its share of the runs;
    ``paper_runs`` is the number of runs of the paper.
    """
    found = []
    for quantity in quantities:
        looks = by_look(quantity, tables)
        deciding = [] if quantity.test in REFUTED else [row for row in looks if row["verdict"] in DECIDED]
        found.append([*deciding, looks[-1]][0])
    return pd.DataFrame(found)


def by_look(quantity: Quantity, tables: Mapping[str, pd.DataFrame]) -> list[dict]:
    """The row of ``quantity`` after every look of the plan; there is one look where no plan was run.

    A plan was run where ``tables`` have the runs of all seeds (``SEEDS``). The runs of fewer seeds than the first look
    needs are one look.
    """
    seeds = tables.get(SEEDS.get(quantity.table, ""))
    if seeds is None:
        return [_row(quantity, measured(quantity, tables.get(quantity.table)))]
    known = sorted(seeds.seed.unique())
    counts = [count for count in LOOKS if count <= len(known)] or [len(known)]
    looks = (seeds[seeds.seed.isin(known[:count])] for count in counts)
    return [_row(quantity, measured(quantity, look), 1 - (1 - CONFIDENCE) / len(LOOKS)) for look in looks]


def _row(quantity: Quantity, found: Measured, confidence: float = CONFIDENCE) -> dict:
    """The row of ``quantity`` from its measurement."""
    values, windows, bound = found.values, found.windows, found.bound
    runs = len(values)
    paper, second = quantity.paper or (np.nan, None)
    paper = paper / second if quantity.counted and second else paper
    low, high = interval(values, quantity, windows, confidence) if runs else (np.nan, np.nan)
    decided = judge(quantity.test, values, low, high, bound, found.smallest) if runs and quantity.test else ""
    compared = runs and not quantity.counted and quantity.sampled
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
        "bound": bound,
        "smallest": found.smallest,
        "runs_needed": runs_needed(values, found.smallest, confidence) if compared else np.nan,
        "excludes_paper": bool(low > paper or high < paper),
        "tested": TESTS[quantity.test].format(f"{bound:.3g}") if decided else "",
        "verdict": decided if runs else NOT_RUN,
        "remark": remark(quantity, values, len(np.unique(windows)), found.left_out, decided, bound),
    }


def remark(quantity: Quantity, values: np.ndarray, independent: int, left_out: int, decided: str, bound: float) -> str:
    """The reason why a claim is undecided or its verdict weak; ``independent`` counts different sets of windows."""
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
