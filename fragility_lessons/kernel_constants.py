"""The constants of the emulated kernels, and the slack of the paper's statements with them."""

from functools import cache

import pandas as pd

from fragility_lessons import shipped
from fragility_lessons.pictures import FORMATS, SMALL_BESIDE, Picture, finish, panels, strength


@cache
def constants() -> pd.DataFrame:
    """The constants of the emulated kernels by name and format, measured and a priori."""
    kinds = ["measured", "a priori"]
    table = shipped.constants().set_index(["constant", "format"])[kinds].unstack("format", sort=False)
    return table.swaplevel(axis=1)[[(name, kind) for name in FORMATS for kind in kinds]]


# The statements of the table (``bound_slack``) and the names that readers see.
STATEMENTS = {
    "Lemma 1": "Lemma 1 (scores)",
    "Lemma 2": "Lemma 2 (product PV)",
    "Lemma 3": "Lemma 3 (softmax)",
    "Proposition 1": "Proposition 1 (LayerNorm)",
    "Theorem 1": "Theorem 1 (attention)",
    "Theorem 3": "Theorem 3 (linear stacks)",
}


@cache
def slack_quantiles(format: str) -> pd.DataFrame:
    """Quantiles of the slack, one column for each statement; infinite for draws without any error."""
    table = shipped.slack_quantiles()
    wide = table[table.format == format].pivot(index="share", columns="statement", values="slack")
    return wide.rename(columns=STATEMENTS)


@cache
def summary() -> pd.DataFrame:
    """``summarize_slack`` by statement and format, with the statements' names that readers see."""
    table = shipped.slack_summary().replace({"statement": STATEMENTS})
    return table.drop(columns="execution").set_index(["statement", "format"])


def medians() -> pd.DataFrame:
    """The median slack of each statement, one column for each format."""
    table = summary()["median"].unstack("format", sort=False)[list(FORMATS)]
    return table.map("{:.2g}".format).rename_axis(columns=None)


def statements(exponent: float, statement: str, format: str) -> Picture:
    """The share of draws over the slack that they do not exceed, one line for each statement."""
    quantiles = slack_quantiles(format)
    (axes,) = panels(8.2, height=4.2, right=2.6, here=10**exponent)
    for style, name in zip(["-", "--", "-.", ":", "-", "--"], STATEMENTS.values()):
        strong = strength(name == statement)
        axes.plot(quantiles[name].clip(upper=1e9), quantiles.index, style, label=name, **strong)
    axes.axvline(1, color="C3", linewidth=2)
    labels = ("bound / observed error (red: equal)", "share of draws", f"{format}: the slack of the statements")
    finish(axes, *labels, "x", SMALL_BESIDE, xlim=(0.3, 1e6), ylim=(0, 1))
    own, here = quantiles[statement], summary().loc[statement, format]
    return [axes], (
        f"{format}, {statement}: {(own <= 10**exponent).mean():.0%} of {here.draws:.0f} draws have a bound at most "
        f"{10**exponent:.3g} times the error, {here.exact:.0%} have no error at all; of the others the "
        f"smallest slack is {here.smallest:.3g}, the median {here['median']:.3g}"
    )
