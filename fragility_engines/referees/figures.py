"""The figure of X4, and its table in the docs."""

from collections.abc import Mapping

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


def as_markdown(tables: Mapping[str, pd.DataFrame]) -> str:
    """A table of the engines that round: KL by each of them, emulated and predicted over it; for models by name."""
    kls = {name: table[table.quantity == "kl"].set_index("engine") for name, table in tables.items()}
    rows = ["| engine | " + " | ".join(f"{name}: KL | emulated / KL | predicted / KL" for name in kls) + " |"]
    rows.append("|---" * (1 + 3 * len(kls)) + "|")
    for engine in dict.fromkeys(engine for table in kls.values() for engine in table.index):
        cells = [cell for table in kls.values() for cell in of_engine(table, engine)]
        rows.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def of_engine(table: pd.DataFrame, engine: str) -> list[str]:
    """KL, emulated over it and predicted over it, of an ``engine`` in a ``table`` by engine; of one in fp32 the KL."""
    if engine not in table.index:
        return ["not run", "", ""]
    row = table.loc[engine]
    if pd.isna(row.measured):
        return ["refused", "", ""]
    ratios = [row.emulated / row.measured, row.ratio] if pd.notna(row.ratio) else []
    return [f"{row.measured:.2e}", *(f"{ratio:.2f}" for ratio in ratios), *[""] * (2 - len(ratios))]
