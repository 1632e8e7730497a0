"""The figures of X2 and of its rivals: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import re
from collections.abc import Iterable

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, named, plain_log_ticks, style

NAMES = {
    "kl": "KL", "logprob": "log-probability", "changed": "changed tokens", "length": "length of equal greedy texts",
}  # fmt: skip


KINDS = {
    r"^(bf|fp)16$": "16-bit formats", r"^w\da16": "weights in integers", r"^w\da8": "weights and inputs in integers",
    "^fp8": "weights and inputs in fp8", "^(mx|nvfp4)": "blocks with shared scales (MX, NVFP4)",
    "^kv": "cache of keys and values", "": "other",
}  # fmt: skip
SHOWN = (0.45, 2.2)  # ratios beyond are written at the edge


def places_of(recipes: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The heights of ``recipes``, ordered by kind, and those of the headings of the kinds, from the top down."""
    kind = {recipe: next(name for pattern, name in KINDS.items() if re.search(pattern, recipe)) for recipe in recipes}
    rows: dict[str, float] = {}
    headings: dict[str, float] = {}
    for recipe in sorted(kind, key=lambda name: [*KINDS.values()].index(kind[name])):
        headings.setdefault(kind[recipe], len(rows) + 1.5 * len(headings))
        rows[recipe] = len(rows) + 1.5 * len(headings) - 0.5
    return rows, headings


@style()
def x2_recipes(table: pd.DataFrame, title: str = "X2: recipes, predicted over measured") -> Axes:
    """Predicted over measured means of recipes with their intervals: a panel a quantity, rows in kinds, one scale."""
    quantities, (places, headings) = list(dict.fromkeys(table.quantity)), places_of(dict.fromkeys(table.recipe))
    size = (3.6 * len(quantities) + 1.6, 0.26 * max(places.values()) + 1.7)
    figure, grid = plt.subplots(1, len(quantities), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, quantity in zip(grid.flat, quantities):
        rows = table[(table.quantity == quantity) & table.ratio.notna()]
        inside, at, near = rows.ratio.clip(*SHOWN), rows.recipe.map(places), (rows.ratio - 1).abs() <= 0.1
        axes.hlines(at, rows.low.clip(*SHOWN), rows.high.clip(*SHOWN), color="0.6", linewidth=1.5)
        axes.scatter(inside, at, s=30, color=[COLOURS[0] if close else COLOURS[3] for close in near], zorder=3)
        for row in rows.index[rows.ratio != inside]:
            side = -1 if inside[row] > 1 else 1
            named(axes, f"{rows.ratio[row]:.2g}", (inside[row], at[row]), (14 * side, 0), va="center")
        axes.axvline(1, **DASHED)
        axes.axvspan(0.9, 1.1, color="0.9", zorder=0)
        axes.set(xlim=(SHOWN[0] * 0.97, SHOWN[1] * 1.03), xscale="log")
        axes.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
        axes.set_title(f"{NAMES[quantity]}\n{near.sum()} of {len(rows)} within 10 %", fontsize="medium")
    for kind, height in headings.items():
        grid[0, 0].text(SHOWN[0], height, kind, va="center", fontsize="small", fontweight="bold", color="0.3")
    grid[0, 0].set_yticks([*places.values()], [*places], fontsize="small")
    grid[0, 0].set_ylim(max(places.values()) + 0.8, -0.8)
    figure.supxlabel("predicted / measured (grey: within 10 %)", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    return grid[0, 0]


@style()
def x2_layers(layers: pd.DataFrame) -> Axes:
    """Measured against predicted KL, one point for each group of layers rounded alone, and one colour per recipe."""
    axes = canvas(5.0, 4.4)
    sns.scatterplot(layers, x="predicted", y="measured", hue="recipe", style="recipe", s=30, ax=axes)
    values = layers[["predicted", "measured"]]
    ends = [0.8 * values.min().min(), 1.25 * values.max().max()]
    axes.plot(ends, ends, **DASHED)
    return finished(axes, "predicted KL (nats)", "measured KL (nats)", "X2: one group of layers alone", log=True)


@style()
def x2_plans(plans: pd.DataFrame) -> Axes:
    """KL over bits a weight: predicted as lines, measured as points, beside random choices.

    A ladder of schemes is named by its smallest.
    """
    axes = canvas(6.4, 4.4)
    best = plans[plans.chosen_by == "prediction"]
    chance = plans[plans.chosen_by == "chance"]
    axes.plot(chance.bits, chance.measured, "x", color="0.6", ms=4, label="random choice")
    for colour, (schemes, rows) in zip(COLOURS, best.groupby("schemes", sort=False)):
        axes.plot(rows.bits, rows.predicted, color=colour)
        axes.plot(rows.bits, rows.measured, "o", color=colour, ms=4, label=f"{schemes.split()[0]} and larger")
    axes.set(yscale="log")
    axes.legend(fontsize="x-small")
    return finished(axes, "bits a weight", "KL (nats a token)", "X2: plans (line: predicted, dot: measured)")


# --- Rivals ----------------------------------------------------------------------

LINES = {"oracle": "0.55", "rival_kl": COLOURS[3], "ours": COLOURS[0]}
LABELS = (  # each stands where a line is farthest above another
    ("rival_kl", "rival_kl", "ours", "library"), ("ours", "rival_kl", "ours", "ours"),
    ("oracle", "ours", "oracle", "best possible"),
)  # fmt: skip
LEGEND = {"ours": "ours is better", "rival": "the rival is better", "open": "undecided", "same": "the same plan"}
MARKS = {"ours": COLOURS[2], "rival": COLOURS[3], "open": "0.5", "same": "0.8"}


def titled(row: pd.Series) -> str:
    """The title of a panel: the ladder, and the method whose plans it shows."""
    return f"{row.ladder}, {row.rival}" if isinstance(row.rival, str) and row.rival else row.ladder


@style()
def x2_rivals(table: pd.DataFrame) -> Axes:
    """KL of plans as a share of that of random ones, over bits a weight on held-out windows: one scale of KL.

    There is a panel for each ladder and rival, and a line for each way of choosing.
    """
    shown = table.assign(panel=table.apply(titled, axis=1))
    shares = shown[["panel", "bits"]].join(shown[[*LINES]].div(shown.random, axis=0))
    grid = sns.relplot(
        shares.melt(["panel", "bits"], [*LINES], "who", "share"), x="bits", y="share", hue="who", style="who",
        palette=LINES, col="panel", kind="line", markers=["s", "o", "o"], dashes=False, legend=False, errorbar=None,
        col_wrap=min(3, shown.panel.nunique()), height=2.2, aspect=1.3, facet_kws={"sharex": False},
    )  # fmt: skip
    for who, upper, lower, label in LABELS:
        ratio = (shares[upper] / shares[lower]).dropna()
        if ratio.empty:  # no plans were chosen so
            continue
        at = shares.loc[ratio.idxmax()]
        named(grid.axes_dict[at.panel], label, (at.bits, at[who]), (-4, -17), color=LINES[who], ha="right")
    grid.set(yscale="log").set_titles("{col_name}", size="x-small").refline(y=1, **DASHED)
    grid.set_axis_labels("bits a weight", "share of random's KL")
    plain_log_ticks(grid.axes.flat[0].yaxis)
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
