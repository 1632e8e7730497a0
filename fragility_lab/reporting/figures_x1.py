"""The figures of X1: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

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
    """Share of the error variance by kind of site, one bar per format and window length. Small shares are one."""
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
    """Every plan, relative to none: measured over predicted mismatch, and measured mismatch over the price.

    The price is the share of the model's products that the plan moves to fp32; means over runs, by chooser.
    """
    run = ["precision", "length", "seed"]
    none = plans[plans.chosen_by == "none"].set_index(run).measured.rename("none").reset_index()
    table = plans[plans.chosen_by != "none"].merge(none, on=run)
    table = table.assign(chosen_by=table.chosen_by.replace({"each": "each kind of site"}))
    table = table.assign(predicted=table.predicted / table.none, measured=table.measured / table.none)
    present = [name for name in CHOOSERS if name in set(table.chosen_by)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    colours = dict(zip(CHOOSERS, COLOURS)) | {"random": "0.75", "each kind of site": "0.45"}
    chosen = {"hue": "chosen_by", "hue_order": present, "palette": colours, "linewidth": 0}
    sns.scatterplot(table, x="predicted", y="measured", s=14, alpha=0.6, legend=False, ax=left, **chosen)
    left.axline((0, 0), slope=1, **DASHED)
    left.set(xlim=(0, None), ylim=(0, None))
    finished(left, "predicted mismatch, of that without a plan", "measured, of that without a plan", "predicted")
    means = table.groupby(["chosen_by", "unit", "budget", "label"], as_index=False)[["flops", "measured"]].mean()
    sns.scatterplot(
        means.assign(flops=means.flops / 1e6), x="flops", y="measured", style="chosen_by", style_order=present, s=60,
        alpha=0.85, ax=right, **chosen,
    )  # fmt: skip
    right.set(ylim=(0, None))
    finished(right, "operations in fp32 (millions a token)", None, "price")
    right.get_legend().set_title("chosen by")
    figure.suptitle("X1: what a plan buys", fontsize="medium")
    return left
