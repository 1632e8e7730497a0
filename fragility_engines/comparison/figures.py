"""The figures of a comparison, as ``fragility_lab.reporting.figures`` makes them."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fragility_engines.comparison.gap import LESS, MORE, Gap
from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, plain_log_ticks, style

LEAST = 1e-3  # a ratio below this is no rounding at all, and left out
BIN = 16  # positions that share a point


@style()
def spread(gap: Gap) -> Axes:
    """The share of tokens whose log-probability changes by more than x: observed, and in an emulated pass."""
    axes = canvas(4.6, 3.6)
    shares = 1 - np.arange(len(gap.tokens)) / len(gap.tokens)
    for name, colour, label in (("emulated", COLOURS[0], "the recipe, emulated"), ("change", COLOURS[1], "the engine")):
        if gap.tokens[name].any():
            axes.plot(np.sort(gap.tokens[name].abs()), shares, color=colour, label=label)
    words = "change of the log-probability, at least (nats)", "share of the tokens"
    return drawn(axes, *words, xscale="log", yscale="log")


def drawn(axes: Axes, x: str, y: str, **scales: str) -> Axes:
    """``axes`` with labels, and with a legend and ``scales`` if there is a curve: two equal logs have no change."""
    if there := bool(axes.get_legend_handles_labels()[1]):
        axes.set(**scales)
    return finished(axes, x, y, inside=there)


@style()
def positions(gap: Gap) -> Axes:
    """The RMS change by position, BIN positions a point, observed and emulated; the prediction as a line."""
    axes = canvas(4.6, 3.6)
    tokens = gap.tokens.assign(at=gap.tokens.position // BIN * BIN + BIN / 2)
    for name, colour, label in (("emulated", COLOURS[0], "the recipe, emulated"), ("change", COLOURS[1], "the engine")):
        if gap.tokens[name].any():
            by: pd.Series = (tokens[name] ** 2).groupby(tokens["at"]).mean() ** 0.5
            axes.plot(by.index, by, "o-", color=colour, label=label)
    axes.axhline(gap.predicted, **DASHED)
    return drawn(axes, "position in the sequence", "RMS change (nats)", yscale="log")


@style()
def verdicts(table: pd.DataFrame) -> Axes:
    """Observed over predicted RMS of engines with known truth, its interval and verdict, a line each (``proving``)."""
    table = table.sort_values(["harmless", "ratio"], ascending=[False, False]).reset_index(drop=True)
    axes = canvas(6.4, 0.2 * len(table) + 1.0)
    axes.axvspan(LESS, MORE, color="0.9", zorder=0)
    for (wrong, verdict), rows in table[table.ratio > LEAST].groupby([~table.right, "verdict"]):
        ends, label = [rows.ratio - rows.low, rows.high - rows.ratio], f"{verdict}: {'wrong' if wrong else 'right'}"
        form, colour = {"more": ">", "less": "<", "few": "D"}.get(verdict, "o"), COLOURS[int(wrong)]
        axes.errorbar(rows.ratio, rows.index, xerr=ends, fmt=form, color=colour, label=label, markersize=5)
    axes.set_yticks(table.index, table.engine, fontsize=7)
    axes.set(xscale="log", ylim=(len(table) - 0.5, -0.5))
    axes.axhline(table.harmless.sum() - 0.5, **DASHED)
    for told, side in (("above: harmless", "bottom"), ("below: faults", "top")):
        place = (0.36, table.harmless.sum() - 0.5)
        axes.text(*place, told, transform=axes.get_yaxis_transform(), va=side, fontsize="small")
    plain_log_ticks(axes.xaxis)
    left_out = "\n(no point: no change at all)" * bool((table.ratio <= LEAST).any())
    title = "X3: grey is what rounding explains, unless a cause is named" + left_out
    return finished(axes, "observed / predicted change of log-probabilities (RMS)", None, title, inside=True)
