"""The figures of X1: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, style, with_length

SITE_ORDER = (
    "residual", "norm", "projection", "mlp", "scores", "softmax", "context", "attention", "router", "embedding", "head",
)  # fmt: skip
SMALL_SHARE = 0.02


@style()
def x1_predicted(windows: pd.DataFrame) -> Axes:
    """Predicted against measured mismatch of every window: one panel a format, with the line of equality."""
    kept = with_length(windows[~windows.overflow])
    grid = sns.relplot(
        kept, x="adjoint", y="mismatch", col="precision", hue="window length", s=18, linewidth=0, alpha=0.6, height=3.6,
        facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    for precision, axes in grid.axes_dict.items():
        ends = kept[kept.precision == precision][["adjoint", "mismatch"]].stack().agg(["min", "max"])
        axes.plot(ends, ends, **DASHED)
        axes.locator_params(axis="x", nbins=3)
    grid.set_axis_labels("predicted mismatch (adjoint)", "measured mismatch").set_titles("{col_name}")
    grid.figure.suptitle("X1: predicted and measured, by window", y=1.02)
    return grid.axes.flat[0]


@style()
def x1_agreement(runs: pd.DataFrame) -> Axes:
    """Pearson's correlation of prediction and score with the mismatch, one point a run, by window length."""
    names = ("adjoint_pearson", "combined_pearson", "no_transport_pearson")
    columns = dict(zip(names, ("adjoint", "score", "score without transport")))
    labels = ("Pearson with the mismatch", "X1: who predicts which window is hit")
    return swarms(runs, columns, "signal", *labels)


@style()
def x1_ranking(runs: pd.DataFrame) -> Axes:
    """Spearman's correlation of prediction and score with the mean patched effect of realisations, one point a run."""
    columns = {"adjoint_average": "adjoint", "score_average": "score"}
    labels = ("Spearman with the averaged effect", "X1: who names the right blocks")
    return swarms(runs, columns, "ranked by", *labels)


def swarms(runs: pd.DataFrame, columns: dict[str, str], kind: str, label: str, title: str) -> Axes:
    """One swarm of points for each window length and each of ``columns``, which have their names in the legend."""
    table = runs[["length", *columns]].rename(columns=columns).melt("length", None, kind, "value")
    axes, table = canvas(6.4, 4.0), table.assign(length=table.length.astype(str))
    sns.swarmplot(table, x="length", y="value", hue=kind, dodge=True, size=6, ax=axes)
    axes.axhline(0, **DASHED)
    return finished(axes, "window length (tokens)", label, title)


@style()
def x1_realisations(table: pd.DataFrame) -> Axes:
    """Spearman's correlation of prediction, score and another measurement with the mean effect of 1, 2, ... draws."""
    shown = table.rename(columns={"ranked_by": "ranked by", "length": "tokens"})
    grid = sns.relplot(
        shown, kind="line", x="realisations", y="spearman", col="tokens", hue="ranked by", style="ranked by",
        markers=True, errorbar=None, height=2.8, aspect=0.85,
    )  # fmt: skip
    counts = sorted(table.realisations.unique())
    grid.set(xscale="log", xticks=counts, xticklabels=counts, ylim=(None, 1))
    for axes in grid.axes.flat:
        axes.xaxis.set_minor_locator(NullLocator())
    grid.set_axis_labels("", "Spearman with their mean").set_titles("{col_name} tokens")
    grid.figure.supxlabel("realisations averaged", fontsize="medium", y=0.02)
    grid.figure.suptitle("X1: how much of the disagreement is noise", y=1.04)
    return grid.axes.flat[0]


@style()
def x1_sites(shares: pd.DataFrame) -> Axes:
    """Share of the error variance by kind of site, one bar per format and window length. Small shares are summed."""
    ordered = shares[[site for site in SITE_ORDER if site in shares]]
    small = ordered.columns[ordered.max() < SMALL_SHARE]
    ordered = ordered.drop(columns=small).assign(**({"other": ordered[small].sum(axis=1)} if len(small) else {}))
    ordered.index = [f"{precision}, T = {length}" for precision, length in shares.index]
    axes = canvas(7.0, 3.6)
    ordered.iloc[::-1].plot.barh(stacked=True, width=0.75, linewidth=0, ax=axes, color=[*COLOURS, "0.3"])
    axes.set(xlim=(0, 1))
    axes.grid(axis="y", visible=False)
    return finished(axes, "share of the predicted error variance", axes.get_ylabel(), "X1: where the error comes from")


CHOOSERS = {
    "adjoint": "backward passes", "greedy": "backward passes, greedily", "patching": "measured effects of blocks",
    "score": "the paper's score", "first": "the first", "last": "the last", "random": "at random",
}  # fmt: skip


@style()
def x1_plans(plans: pd.DataFrame) -> Axes:
    """The error that plans leave, a share of that without a plan: a panel a budget, a row a way to choose, one scale.

    A dot is the mean over runs of what was measured, a line its range, a ring the mean prediction. A choice of kinds of
    site has its operations in fp32 (millions a token). What backward passes choose is blue.
    """
    run = ["precision", "length", "seed"]
    none = plans[plans.chosen_by == "none"].set_index(run).measured.rename("none").reset_index()
    table = plans[plans.chosen_by != "none"].merge(none, on=run)
    table = table.assign(
        predicted=table.predicted / table.none, measured=table.measured / table.none, best=table.chosen_by == "adjoint",
        row=table.chosen_by.map(CHOOSERS), kinds=[", ".join(sorted(label.split(", "))) for label in table.label],
    )  # fmt: skip
    sites = table[table.unit == "sites"]
    sites = sites.assign(best=sites.groupby("kinds").best.transform("any")).query("chosen_by == 'each'")
    flops = sites.groupby("kinds").flops.transform("mean") / 1e6
    sites = sites.assign(row=[f"{kinds} ({count:.0f} M)" for kinds, count in zip(sites.kinds, flops)])
    panels = [(f"{n} blocks in fp32, chosen by", rows) for n, rows in table[table.unit == "blocks"].groupby("budget")]
    panels += [(f"kinds of site in fp32: {n}", rows) for n, rows in sites.groupby("budget")]
    heights = [rows.row.nunique() + 1.5 for _, rows in panels]
    size: dict[str, Any] = {"figsize": (7.4, 0.27 * sum(heights) + 0.8), "height_ratios": heights}
    _, grid = plt.subplots(len(panels), sharex=True, squeeze=False, layout="constrained", **size)
    for axes, (title, rows) in zip(grid.flat, panels):
        by_row = rows.groupby("row")
        found = (
            by_row[["predicted", "measured"]].mean().join(by_row.measured.agg(["min", "max"])).join(by_row.best.any())
        )
        found = found.sort_values("measured")
        colours, places = [COLOURS[0] if best else "0.45" for best in found.best], range(len(found))
        axes.hlines(places, found["min"], found["max"], color=colours, linewidth=1.5, alpha=0.6)
        axes.scatter(found.measured, places, s=36, color=colours, zorder=3)
        axes.scatter(found.predicted, places, s=110, facecolor="none", edgecolor=colours)
        axes.set_yticks(places, found.index, fontsize="small")
        axes.set(xlim=(0, 1.1), ylim=(len(found) - 0.4, -0.6))
        axes.set_title(title, fontsize="medium", loc="left")
    grid[-1, 0].set_xlabel(
        "error left, as a share of that without a plan\n"
        "(dot: measured, ring: predicted, blue: chosen by backward passes)"
    )
    return grid[0, 0]
