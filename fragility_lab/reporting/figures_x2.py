"""The figures of X2 and of its rivals: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, style

NAMES = {
    "kl": "KL", "logprob": "log-probability", "changed": "changed tokens", "length": "length of equal greedy texts",
}  # fmt: skip


@style()
def x2_recipes(table: pd.DataFrame, title: str = "X2: recipes, predicted over measured") -> Axes:
    """Predicted over measured means of every recipe with their intervals, one marker for each quantity."""
    recipes, quantities = (list(dict.fromkeys(table[column])) for column in ("recipe", "quantity"))
    axes = canvas(7.0, 0.34 * len(recipes) + 1.4)
    for number, (quantity, marker) in enumerate(zip(quantities, "os")):
        rows = table[table.quantity == quantity]
        at = [recipes.index(name) + 0.22 * (number - 0.5) for name in rows.recipe]
        ends = [rows.ratio - rows.low, rows.high - rows.ratio]
        axes.errorbar(rows.ratio, at, xerr=ends, fmt=marker, ms=4, lw=1, color=COLOURS[number], label=NAMES[quantity])
    axes.axvline(1, **DASHED)
    axes.axvspan(0.9, 1.1, color="0.9", zorder=0)
    axes.set_yticks(range(len(recipes)), recipes)
    axes.set(ylim=(len(recipes) - 0.5, -0.5), xscale="log")
    axes.set_xticks([0.5, 0.7, 1, 1.5, 2], ["0.5", "0.7", "1", "1.5", "2"])
    axes.minorticks_off()
    axes.legend(loc="lower right")
    return finished(axes, "predicted / measured", "", title)


@style()
def x2_layers(layers: pd.DataFrame) -> Axes:
    """Measured over predicted KL of every group of layers alone, one colour for each recipe."""
    axes = canvas(5.0, 4.4)
    sns.scatterplot(layers, x="predicted", y="measured", hue="recipe", style="recipe", s=30, ax=axes)
    values = layers[["predicted", "measured"]]
    ends = [0.8 * values.min().min(), 1.25 * values.max().max()]
    axes.plot(ends, ends, **DASHED)
    return finished(axes, "predicted KL (nats)", "measured KL (nats)", "X2: one group of layers alone", log=True)


@style()
def x2_plans(plans: pd.DataFrame) -> Axes:
    """KL over bits a weight: predicted as lines, measured as points, beside random choices."""
    axes = canvas(6.4, 4.4)
    best = plans[plans.chosen_by == "prediction"]
    chance = plans[plans.chosen_by == "chance"]
    axes.plot(chance.bits, chance.measured, "x", color="0.6", ms=4, label="chance, measured")
    for colour, (schemes, rows) in zip(COLOURS, best.groupby("schemes", sort=False)):
        axes.plot(rows.bits, rows.predicted, color=colour, label=f"{schemes.split()[0]} …, predicted")
        axes.plot(rows.bits, rows.measured, "o", color=colour, ms=4, label="measured")
    axes.set(yscale="log")
    axes.legend(fontsize="x-small")
    return finished(axes, "bits a weight", "KL (nats a token)", "X2: plans, predicted and measured")


# --- Rivals ----------------------------------------------------------------------

WHO = {"rival_kl": "library", "ours": "ours", "oracle": "oracle", "random": "random"}
LEGEND = {"ours": "ours is better", "rival": "the rival is better", "open": "undecided", "same": "the same plan"}
MARKS = {"ours": COLOURS[2], "rival": COLOURS[3], "open": "0.5", "same": "0.8"}


def titled(row: pd.Series) -> str:
    """The title of a panel: the ladder, and the method whose plans it shows."""
    return f"{row.ladder}, {row.rival}" if isinstance(row.rival, str) and row.rival else row.ladder


@style()
def x2_rivals(table: pd.DataFrame) -> Axes:
    """KL over bits a weight on held-out windows, a panel for each ladder and rival, a line for each way of choosing."""
    shown = table.assign(panel=table.apply(titled, axis=1)).rename(columns=WHO)
    lines = shown.melt(["panel", "bits"], list(WHO.values()), "chosen by", "KL")
    grid = sns.relplot(
        lines.dropna(), x="bits", y="KL", hue="chosen by", style="chosen by", col="panel", kind="line", markers=True,
        dashes=False, col_wrap=min(3, shown.panel.nunique()), height=2.4, aspect=1.25, errorbar=None,
        facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    grid.set(yscale="log").set_titles("{col_name}", size="small").set_axis_labels("bits a weight", "KL (nats a token)")
    grid.figure.suptitle("X2: plans under the library's own quantizers", y=1.02)
    return grid.axes.flat[0]


@style()
def x2_rivals_difference(table: pd.DataFrame) -> Axes:
    """Our plan's KL less the rival's, in shares of the rival's, with its interval; a row for each ladder and rival."""
    shown = table[table.better != ""].assign(panel=lambda t: t.apply(titled, axis=1))
    rows = list(dict.fromkeys(shown.panel))
    place = shown.panel.map(rows.index) + 0.11 * (shown.groupby("panel").cumcount() - 2.5)  # budgets from top to bottom
    axes = canvas(7.0, 0.55 * len(rows) + 1.6)
    for who, group in shown.groupby("better"):
        centre, low, high = (
            group[name] / group.rival_kl for name in ("difference", "difference_low", "difference_high")
        )
        axes.errorbar(
            centre, place[group.index], xerr=[centre - low, high - centre], fmt="o", ms=4, lw=1, color=MARKS[who],
            label=LEGEND[who],
        )  # fmt: skip
    axes.axvline(0, **DASHED)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_formatter("{x:+.0%}")
    axes.legend(fontsize="x-small")
    return finished(axes, "KL of our plan, relative to the rival's plan of the same size", "", "X2: ours and rivals")
