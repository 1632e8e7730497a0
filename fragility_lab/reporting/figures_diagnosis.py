"""The figures of a diagnosis: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, plain_log_ticks, style

MANY = 26  # bars that lie one below the other


@style()
def windows(windows: pd.DataFrame, name: str = "mismatch") -> Axes:
    """The measured error, called ``name``, over the predicted one: a point a window, a colour a ``plan``."""
    axes = canvas(4.6, 4.0)
    sns.scatterplot(windows, x="predicted", y="measured", hue="plan", style="plan", s=70, ax=axes)
    values = windows[["predicted", "measured"]]
    ends = [0.95 * values.min().min(), 1.05 * values.max().max()]
    axes.plot(ends, ends, **DASHED)
    return finished(axes, f"predicted {name}", f"measured {name}", log=True, inside=True)


@style()
def budgets(curve: pd.DataFrame, bits: float, predicted: float, measured: float | None, name: str) -> Axes:
    """The least predicted error, called ``name``, at every number of ``bits`` a weight, and the chosen plan."""
    axes = canvas(4.6, 3.6)
    sns.lineplot(curve, x="bits", y="predicted", drawstyle="steps-post", color=COLOURS[0], label="best choice", ax=axes)
    axes.plot([bits], [predicted], "o", color=COLOURS[1], label="the plan, predicted")
    if measured is not None:
        axes.plot([bits], [measured], "s", mfc="none", color=COLOURS[2], label="the plan, measured")
    axes.set(yscale="log")
    axes.legend()
    return finished(axes, "bits a weight", name, inside=True)


@style()
def shares(shares: pd.Series, name: str) -> Axes:
    """Shares of the squared error, one bar each, in the given order; ``name`` is the label of the index.

    If there are more than MANY bars, they stand upright, and only some are labelled.
    """
    if len(shares) > MANY:
        axes = canvas(4.6, 3.6)
        axes.bar(range(len(shares)), 100 * shares.to_numpy(), color=COLOURS[0])
        shown = [*range(0, len(shares) - 1, -(-len(shares) // 10)), len(shares) - 1]
        axes.set_xticks(shown, shares.index.astype(str)[shown], rotation=60, ha="right")
        return finished(axes, name, "share of the squared error (%)")
    axes = canvas(4.6, max(2.0, 0.28 * len(shares) + 0.9))
    sns.barplot(x=100 * shares.to_numpy(), y=shares.index.astype(str), color=COLOURS[0], ax=axes)
    return finished(axes, "share of the squared error (%)", name)


@style()
def drift(drift: pd.DataFrame) -> Axes:
    """Relative error of the residual stream after each block: mean and range over windows, one curve a ``plan``."""
    axes = canvas(4.6, 3.6)
    sns.lineplot(
        drift, x="block", y="error", hue="plan", style="plan", markers=True, dashes=False, errorbar=("pi", 100), ax=axes
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if (drift.error > 0).any():
        axes.set(yscale="log")
        plain_log_ticks(axes.yaxis)
    return finished(axes, "after block", "relative error of the stream", inside=True)


@style()
def positions(tokens: pd.DataFrame, name: str) -> Axes:
    """The error of each token, called ``name``, over its position, and the medians. Tokens ``in_tail`` stand out.

    The columns are ``position``, ``known``, ``predicted`` and ``in_tail``.
    """
    axes = canvas(9.4, 3.6)
    shown = tokens[tokens.known > 0]
    for tail, colour, label in ((False, "0.6", "tokens"), (True, COLOURS[3], "tokens of the tail")):
        some = shown[shown.in_tail == tail]
        axes.plot(some.position, some.known, ".", color=colour, ms=4 if not tail else 9, label=label)
    median = shown.groupby("position")[["known", "predicted"]].median()
    axes.plot(median.index, median.known, color=COLOURS[0], lw=1, label="median, measured")
    axes.plot(median.index, median.predicted, color=COLOURS[1], lw=1, label="median, predicted")
    axes.set(yscale="log" if len(shown) else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return finished(axes, "position in the window", name)
