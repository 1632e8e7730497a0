"""Predicted and measured errors by window, and their means, in the unit of a diagnosis's target."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from fragility_lab.diagnosis.found import Diagnosis, made
from fragility_lab.diagnosis.request import Request
from fragility_lab.reporting.tables import number, percent
from fragility_lab.reporting.verdicts import student

TOLERATED = 1.1  # ratio of predicted to measured mismatch
# By target: what it is, the column of ``comparison.compare`` that measures it, and where the first order ends.
TARGETS = {
    "hidden": ("mismatch ‖X̃ − X‖ / ‖X‖ of the final hidden state", "mismatch", 0.2),
    "kl": ("KL divergence from the fp32 next-token distribution, in nats a token", "kl", 0.4),
    "logprob": ("root mean square change of the log probability of the text's next token, in nats", "logprob", 1.0),
    "flips": ("share of the tokens whose most probable next token changes", "changed", 1.0),
}


def mean_of(values: pd.Series, shares: bool = False) -> dict[str, float]:
    """The mean of finite ``values``, errors by window, and its 95 % interval from ``low``, at least 0, to ``high``.

    If all are shares, so are its ends.
    """
    finite = values[np.isfinite(values)]
    low, high = student(finite)
    return {"mean": finite.mean(), "low": max(low, 0.0), "high": min(high, 1.0) if shares else high}


def nats(x: float) -> str:
    """A number of nats."""
    return number(x, ".3g")


def estimate(found: dict[str, float], write: Callable[[float], str] = percent) -> str:
    """The mean of ``mean_of`` with its interval, each as ``write`` writes it."""
    interval = "" if np.isnan(found["low"]) else f" ({write(found['low'])} to {write(found['high'])})"
    return write(found["mean"]) + interval


def by_window(diagnosis: Diagnosis) -> pd.DataFrame:
    """The predicted and the measured error of every window, without and with the plan, as far as they are known."""
    column, flips = TARGETS[diagnosis.request.measured_in][1], diagnosis.flips
    known, planned = {}, diagnosis.planned
    if diagnosis.prediction is not None:
        known["predicted"] = diagnosis.prediction.windows.set_index("window").predicted
        if column == "changed":
            changed = pd.Series(dtype=float) if flips is None else flips.changed()
            known["predicted"] = changed.reindex(known["predicted"].index)
            planned = None if flips is None else flips.with_plan(diagnosis.prediction, planned)
    if diagnosis.measured is not None:
        known["measured"] = diagnosis.measured.set_index("window")[column]
    if planned is not None:
        known["predicted with plan"] = planned
        if diagnosis.protected is not None:
            known["measured with plan"] = diagnosis.protected.set_index("window")[column]
    return pd.DataFrame(known)


def means(diagnosis: Diagnosis) -> tuple[pd.Series, dict[str, dict]]:
    """Booleans that say which windows are compared, and the means of the columns of ``by_window`` over these.

    A window is compared if all its known errors are finite. If there is no plan, no prediction is finite, and the
    measurement alone counts. If no window can be compared, each mean is over the windows in which its column is finite.
    """
    known = by_window(diagnosis)
    compared = known if diagnosis.plan is not None else known.drop(columns="predicted", errors="ignore")
    kept = np.isfinite(compared).all(axis=1)
    shares = diagnosis.request.measured_in == "flips"
    return kept, {name: mean_of(values[kept] if kept.any() else values, shares) for name, values in known.items()}


def writer(request: Request) -> Callable[[float], str]:
    """A function that writes a number in the unit of the target."""
    return percent if TARGETS[request.measured_in][1] in ("mismatch", "changed") else nats


def in_unit(diagnosis: Diagnosis, predicted: float) -> float:
    """A mean prediction in the unit of the page: for the target "flips" the share of changed tokens."""
    if diagnosis.request.measured_in != "flips":
        return predicted
    mean = made(diagnosis.prediction).windows.predicted.mean()
    return made(diagnosis.flips).changed(predicted / (mean or 1.0)).mean()


def helps(diagnosis: Diagnosis) -> bool | None:
    """True if the plan lowers the measured error, mean over windows; None if unmeasured, or if the error is 0 anyway.

    A budget of KL is a limit: a plan for it helps if the measured KL is at most TOLERATED times the budget.
    """
    if diagnosis.protected is None or diagnosis.measured is None:
        return None
    column = TARGETS[diagnosis.request.measured_in][1]
    tables = diagnosis.measured, diagnosis.protected
    without, with_plan = (table[column].replace(np.inf, np.nan).mean() for table in tables)
    amount, unit = diagnosis.request.parsed_budget
    if unit == "kl":
        return bool(diagnosis.protected.kl.replace(np.inf, np.nan).mean() <= TOLERATED * amount)
    return bool(with_plan < without) if without else None


def disagreement(predicted: dict[str, float], measured: dict[str, float]) -> float | None:
    """The ratio of predicted to measured mean, if intervals are apart and the ratio not within TOLERATED; else None."""
    apart = predicted["low"] > measured["high"] or predicted["high"] < measured["low"]
    ratio = predicted["mean"] / measured["mean"] if measured["mean"] > 0 else 1.0
    return ratio if apart and not 1 / TOLERATED < ratio < TOLERATED else None


def agreement(mismatches: pd.DataFrame) -> pd.DataFrame:
    """The columns of ``by_window`` as rows (predicted, measured, plan), if both numbers are finite."""
    names, pairs = ["predicted", "measured"], []
    for plan, suffix in (("none", ""), ("recommended", " with plan")):
        if f"measured{suffix}" in mismatches:
            pair = mismatches[[name + suffix for name in names]]
            pairs.append(pair.set_axis(names, axis=1).assign(plan=plan))
    rows = pd.concat(pairs, ignore_index=True)
    return rows[np.isfinite(rows[["predicted", "measured"]]).all(axis=1)]
