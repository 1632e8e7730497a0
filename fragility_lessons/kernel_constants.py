"""The constants of the emulated kernels, and the slack of the paper's statements with them."""

from functools import cache

import numpy as np
import pandas as pd

from fragility_lab.experiments.constants import (
    CONSTANTS,
    a_priori_constants,
    bound_slack,
    constant_values,
    measure_constants,
)
from fragility_lessons.pictures import FORMATS, SMALL_BESIDE, Picture, finish, panels, strength

# The largest dimensions in the sample (``kernel_samples``). A priori constants grow with the dimensions.
LARGEST = {"keys": 64, "head_width": 128, "features": 768}


@cache
def constants() -> pd.DataFrame:
    """The constants of the emulated kernels by name and format, measured and a priori."""
    columns = {}
    for name in FORMATS:
        found = measure_constants(name, execution="emulated")
        columns[name, "measured"] = constant_values(found)
        columns[name, "a priori"] = a_priori_constants(name, **LARGEST)
    return pd.DataFrame(columns).loc[list(CONSTANTS)]


@cache
def slack_rows(format: str) -> pd.DataFrame:
    """``bound_slack`` of the emulated kernels with the a priori constants."""
    known = a_priori_constants(format, **LARGEST)
    rows = bound_slack(format, execution="emulated", constants=known)
    return rows.assign(statement=rows.statement.replace(STATEMENTS))


# The statements of the table (``bound_slack``) and the names that readers see.
STATEMENTS = {
    "Lemma 1": "Lemma 1 (scores)",
    "Lemma 2": "Lemma 2 (product PV)",
    "Lemma 3": "Lemma 3 (softmax)",
    "Proposition 1": "Proposition 1 (LayerNorm)",
    "Theorem 1": "Theorem 1 (attention)",
    "Theorem 3": "Theorem 3 (whole model)",
}


@cache
def slack_quantiles(format: str) -> pd.DataFrame:
    """Quantiles of the slack, one column for each statement; infinite for draws without any error."""
    grouped = slack_rows(format).groupby("statement").slack
    return grouped.quantile(np.linspace(0, 1, 301), interpolation="lower").unstack("statement")


def statements(exponent: float, statement: str, format: str) -> Picture:
    """The share of draws over the slack that they do not exceed, one line for each statement."""
    quantiles = slack_quantiles(format)
    (axes,) = panels(8.2, height=4.2, right=2.6, here=10**exponent)
    for style, name in zip(["-", "--", "-.", ":", "-", "--"], STATEMENTS.values()):
        strong = strength(name == statement)
        axes.plot(quantiles[name].clip(upper=1e9), quantiles.index, style, label=name, **strong)
    axes.axvline(1, color="C3", linewidth=2)
    labels = ("bound / observed error", "share of draws", f"{format}: the slack of the statements")
    finish(axes, *labels, "x", SMALL_BESIDE, xlim=(0.3, 1e6), ylim=(0, 1))
    rows = slack_rows(format)
    chosen = rows.slack[rows.statement == statement]
    return [axes], (
        f"{format}, {statement}: {(chosen <= 10**exponent).mean():.0%} of {len(chosen)} draws have a bound at most "
        f"{10**exponent:.3g} times the error, {np.isinf(chosen).mean():.0%} have no error at all; of the others the "
        f"smallest slack is {chosen.min():.3g}, the median {chosen[np.isfinite(chosen)].median():.3g}"
    )
