"""The figures of X2: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

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
