"""The figure of X4."""

import pandas as pd
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, style

CLOSE = (0.9, 1.1)


@style()
def referees(table: pd.DataFrame) -> Axes:
    """KL of each engine that rounds, predicted and emulated over what the engine has, a line each."""
    rows = table[(table.quantity == "kl") & table.ratio.notna()].reset_index(drop=True)
    axes = canvas(9.4, 0.28 * len(rows) + 1.2)
    axes.axvspan(*CLOSE, color="0.9", zorder=0)
    axes.axvline(1, **DASHED)
    ends = [rows.ratio - rows.low, rows.high - rows.ratio]
    axes.errorbar(rows.ratio, rows.index, xerr=ends, fmt="o", color=COLOURS[0], label="predicted", markersize=5)
    axes.plot(rows.emulated / rows.measured, rows.index, "x", color=COLOURS[1], label="emulated, one pass")
    axes.set_yticks(rows.index, rows.engine)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.legend()
    return finished(axes, "KL over that of the engine; grey: within 10 %", "")
