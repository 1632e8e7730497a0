"""The figures of X1: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, style, swarms, with_length

SITE_ORDER = (
    "residual", "norm", "projection", "mlp", "scores", "softmax", "context", "attention", "router", "embedding", "head",
)  # fmt: skip
SMALL_SHARE = 0.02


@style()
def x1_calibration(windows: pd.DataFrame) -> Axes:
    """Predicted against measured mismatch of every window: one panel a format, with the line where they are equal."""
    kept = with_length(windows[~windows.overflow])
    grid = sns.relplot(
        kept, x="adjoint", y="mismatch", col="precision", hue="window length", s=18, linewidth=0, alpha=0.6, height=3.6,
        facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    for precision, axes in grid.axes_dict.items():
        ends = kept[kept.precision == precision][["adjoint", "mismatch"]].stack().agg(["min", "max"])
        axes.plot(ends, ends, **DASHED)
    grid.set_axis_labels("predicted mismatch (adjoint)", "measured mismatch").set_titles("{col_name}")
    grid.figure.suptitle("X1: predicted and measured, by window", y=1.02)
    return grid.axes.flat[0]


@style()
def x1_agreement(runs: pd.DataFrame) -> Axes:
    """Pearson with the mismatch of the prediction and of the score, one point a run, by window length."""
    columns = {
        "adjoint_pearson": "adjoint",
        "combined_pearson": "score",
        "no_transport_pearson": "score without transport",
    }
    table = runs[["length", *columns]].rename(columns=columns).melt("length", None, "signal", "pearson")
    return swarms(table, "pearson", "signal", "Pearson with the mismatch", "X1: who predicts which window is hit")


@style()
def x1_ranking(runs: pd.DataFrame) -> Axes:
    """Spearman with the patched effect, averaged over realisations, of prediction and score, one point a run."""
    columns = {"adjoint_average": "adjoint", "score_average": "score"}
    table = runs[["length", *columns]].rename(columns=columns).melt("length", None, "ranked by", "spearman")
    return swarms(table, "spearman", "ranked by", "Spearman with the averaged effect", "X1: who names the right blocks")


@style()
def x1_realisations(table: pd.DataFrame) -> Axes:
    """Spearman with the effect averaged over 1, 2, ... realisations: of prediction, score and another measurement."""
    axes, shown = canvas(6.4, 4.0), with_length(table).rename(columns={"ranked_by": "ranked by"})
    sns.lineplot(
        shown, x="realisations", y="spearman", hue="ranked by", style="window length", markers=True, errorbar=None,
        ax=axes,
    )  # fmt: skip
    counts = sorted(table.realisations.unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(ylim=(None, 1))
    labels = ("realisations averaged", "Spearman with the averaged effect")
    return finished(axes, *labels, "X1: how much of the disagreement is noise")


@style()
def x1_sites(shares: pd.DataFrame) -> Axes:
    """Share of the error variance by kind of site, one bar per format and window length; small ones together."""
    ordered = shares[[site for site in SITE_ORDER if site in shares]]
    small = ordered.columns[ordered.max() < SMALL_SHARE]
    ordered = ordered.drop(columns=small).assign(**({"other": ordered[small].sum(axis=1)} if len(small) else {}))
    ordered.index = [f"{precision}, T = {length}" for precision, length in shares.index]
    axes = canvas(7.0, 3.6)
    ordered.iloc[::-1].plot.barh(stacked=True, width=0.75, linewidth=0, ax=axes, color=[*COLOURS, "0.3"])
    axes.set(xlim=(0, 1))
    axes.grid(axis="y", visible=False)
    return finished(axes, "share of the predicted error variance", axes.get_ylabel(), "X1: where the error comes from")


CHOOSERS = (
    "adjoint", "greedy", "patching", "score", "first", "last", "random", "head and norms", "each kind of site",
)  # fmt: skip


@style()
def x1_plans(plans: pd.DataFrame) -> Axes:
    """Predicted against measured mismatch of every plan, relative to none: a panel for each way of choosing."""
    run = ["precision", "length", "seed"]
    none = plans[plans.chosen_by == "none"].set_index(run).measured.rename("none").reset_index()
    table = plans.merge(none, on=run).assign(chosen_by=lambda t: t.chosen_by.replace({"each": "each kind of site"}))
    table = table.assign(predicted=table.predicted / table.none, measured=table.measured / table.none)
    table = table.rename(columns={"chosen_by": "chosen by", "unit": "unit kept"})
    present = [name for name in CHOOSERS if name in set(table["chosen by"])]
    grid = sns.relplot(
        table, x="predicted", y="measured", col="chosen by", col_order=present, col_wrap=min(5, len(present)),
        hue="unit kept", style="unit kept", height=1.9, s=35, linewidth=0, alpha=0.7,
    )  # fmt: skip
    for axes in grid.axes.flat:
        axes.axline((0, 0), slope=1, **DASHED)
    ends = (0, 1.05 * max(1.0, table[["predicted", "measured"]].max(axis=None)))
    grid.set(xlim=ends, ylim=ends).set_titles("{col_name}").set_axis_labels("", "")
    grid.figure.supxlabel("predicted mismatch / mismatch measured without a plan", fontsize="medium", y=0.04)
    grid.figure.supylabel("measured / measured without", fontsize="medium", x=0.03)
    grid.figure.suptitle("X1: what a plan buys, predicted and measured", y=1.03)
    return grid.axes.flat[0]
