"""The figures of the experiments and of the diagnosis: tidy DataFrame in, matplotlib Axes out.

Importing this module changes no setting of matplotlib. Whatever draws does so inside of ``style``.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

COLOURS = sns.color_palette("colorblind")  # "C0", "C1", ... as RGB, for pictures made of cells
DASHED = {"color": "0.4", "linestyle": "--", "linewidth": 1, "zorder": 0}
PNG_DPI = 110

# Matplotlib searches the height of a title unless it is fixed, which takes time.
STYLE = {
    **sns.axes_style("whitegrid"), **sns.plotting_context("notebook"), "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "axes.titley": 1.0,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """The settings of every figure, as a context or a decorator. Saving needs them as well as drawing.

    ``mpl.rc_context`` would also undo what the first figure of a notebook sets: that the backend shows figures.
    """
    before = {name: mpl.rcParams[name] for name in STYLE}
    mpl.rcParams.update(STYLE)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


@style()
def save_figure(axes: Axes, folder: Path, name: str) -> None:
    """Write the figure of ``axes`` as PNG and PDF, the same bytes for the same data."""
    figure = axes.get_figure()
    figure.savefig(folder / f"{name}.png", dpi=PNG_DPI, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(folder / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})


@style()
def png(axes: Axes) -> bytes:
    """The figure of ``axes``, drawn and packed as fast as possible."""
    buffer = BytesIO()
    axes.get_figure().savefig(buffer, dpi=PNG_DPI, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def canvas(width: float = 5.6, height: float = 4.0) -> Axes:
    """New Axes in a figure of ``width`` by ``height`` inches."""
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def finished(
    axes: Axes, x: str | None, y: str | None, title: str = "", log: bool = False, inside: bool = False
) -> Axes:
    """``axes`` with labels, title and a legend, beside or ``inside``; both axes logarithmic with ``log``."""
    axes.set(xlabel=x, ylabel=y, title=title, **({"xscale": "log", "yscale": "log"} if log else {}))
    for axis in (axes.xaxis, axes.yaxis) if log else ():
        plain_log_ticks(axis)
    if inside:
        axes.legend(title=None)
    elif axes.get_legend():
        sns.move_legend(axes, "center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return axes


def plain_log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out; beyond two decades at powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def with_length(runs: pd.DataFrame) -> pd.DataFrame:
    """``runs`` with the window length as text, for legends."""
    return runs.assign(**{"window length": runs.length.astype(str)})


def scatter_of_runs(runs: pd.DataFrame, x: str, y: str) -> Axes:
    """One point a run; colour is the format, shape the window length."""
    shown = with_length(runs)
    return sns.scatterplot(shown, x=x, y=y, hue="precision", style="window length", s=80, ax=canvas())


def curves(table: pd.DataFrame, x: str, names: dict[str, str]) -> Axes:
    """The columns that ``names`` lists over column ``x``, by their names in the legend."""
    lines = table[[x, *names]].rename(columns=names).melt(x, None, "curve")
    return sns.lineplot(lines, x=x, y="value", hue="curve", style="curve", markers=True, ax=canvas())


@style()
def e1_attention(table: pd.DataFrame) -> Axes:
    """Measured change of the output over the proxy; colour is the value scale, marker the margin."""
    axes, table = canvas(), table.rename(columns={"value_scale": "value scale"})
    sns.scatterplot(
        table, x="proxy", y="measured", hue="value scale", style="margin", s=70, palette="viridis", ax=axes
    )  # fmt: skip
    proxy = r"proxy $\kappa_{softmax}\,\|P\|\,\|V\|_2$"
    return finished(axes, proxy, "measured change of the output", "E1: attention sensitivity", log=True)


@style()
def e1_layernorm(table: pd.DataFrame) -> Axes:
    """Measured change and M_LN over epsilon, each relative to its largest value."""
    shares = table.assign(**{name: table[name] / table[name].max() for name in ("measured", "theory")})
    axes = curves(shares, "epsilon", {"measured": "measured change", "theory": r"theory $M_{LN}$"})
    axes.set(xscale="log", yscale="log")
    title = r"E1: both fall as $\varepsilon$ grows"
    return finished(axes, r"LayerNorm $\varepsilon$", "value relative to its largest", title, inside=True)


@style()
def e1_residual(table: pd.DataFrame) -> Axes:
    """Amplification over six blocks, below the transport bound."""
    axes = curves(table, "rho", {"measured": "measured", "bound": r"bound $(1+\rho)^6$"})
    labels = (r"residual gain $\rho$", "amplification over 6 blocks", "E1: residual transport")
    return finished(axes, *labels, inside=True)


@style()
def e2_transport(runs: pd.DataFrame) -> Axes:
    """Pearson with transport over Pearson without, one point a run; above the diagonal transport helps."""
    values = runs[["no_transport_pearson", "combined_pearson"]]
    axes, ends = scatter_of_runs(runs, *values), (min(0.0, values.min().min()) - 0.05, values.max().max() + 0.05)
    axes.plot(ends, ends, **DASHED)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    return finished(axes, "Pearson of no_transport", "Pearson of combined", "E2: does transport help?")


@style()
def e2_delta(runs: pd.DataFrame) -> Axes:
    """Gain in Pearson by transport, one bar a run."""
    table = runs.sort_values(["precision", "length", "seed"])
    table["run"] = table.precision + " T=" + table.length.astype(str) + " seed " + table.seed.astype(str)
    axes = canvas(6.4, max(2.2, 0.27 * len(table) + 1.2))
    sns.barplot(table, y="run", x="delta_pearson", hue="precision", dodge=False, ax=axes)
    axes.axvline(0, color="0.2", linewidth=1)
    return finished(axes, "Pearson of combined minus no_transport", None, "E2: gain by transport")


@style()
def e2_trend(bins: pd.DataFrame) -> Axes:
    """Mean mismatch over mean predicted risk in bins of equal count, coloured by the formats of their windows."""
    axes = canvas()
    formats = sorted(set(bins.precision), key=lambda names: (names.count(","), names))  # those of one format first
    sns.scatterplot(
        bins, x="combined", y="mismatch", hue="precision", style="precision", hue_order=formats, style_order=formats,
        s=70, ax=axes,
    )  # fmt: skip
    labels = ("predicted risk (mean of bin)", "mismatch (mean of bin)", "E2: mismatch over predicted risk")
    return finished(axes, *labels, log=True)


@style()
def e3_ranks(counts: pd.DataFrame) -> Axes:
    """How often a block of each rank by the score (rows) has each rank by its exact effect (columns)."""
    axes = canvas(5.6, 4.6)
    sns.heatmap(counts, cmap="viridis", square=True, linewidths=0.5, cbar_kws={"label": "blocks"}, ax=axes)
    axes.tick_params(axis="y", rotation=0)
    labels = ("rank by exact effect (1: largest)", "rank by the score (1: largest)")
    return finished(axes, *labels, "E3: where the score puts the blocks")


@style()
def e3_fidelity(runs: pd.DataFrame) -> Axes:
    """Pairwise accuracy over Spearman, one point a run; the dashed lines are chance."""
    axes = scatter_of_runs(runs, "spearman", "pairwise_accuracy")
    axes.axvline(0, **DASHED)
    axes.axhline(0.5, **DASHED)
    labels = ("Spearman of score and exact effect", "pairwise ordering accuracy", "E3: fidelity by run")
    return finished(axes, *labels)


@style()
def e3_noise_floor(windows: pd.DataFrame) -> Axes:
    """Spearman of the score beside that of a second measurement of the same effects, by window length."""
    table = windows.rename(columns={"spearman": "score", "noise_floor": "another rounding"})
    table = table.melt("length", ["score", "another rounding"], "compared with")
    title = "E3: the score, and what rounding noise allows"
    return swarms(table, "value", "compared with", "Spearman with a measured effect", title, size=7, inches=(6.0, 4.0))


def swarms(table: pd.DataFrame, y: str, hue: str, label: str, title: str, size=6, inches=(6.4, 4.0)) -> Axes:
    """One swarm of points for each window length and value of ``hue``, and a line at 0."""
    axes = canvas(*inches)
    table = table.assign(length=table.length.astype(str))
    sns.swarmplot(table, x="length", y=y, hue=hue, dodge=True, size=size, ax=axes)
    axes.axhline(0, **DASHED)
    return finished(axes, "window length (tokens)", label, title)


POLICY_NAMES = {
    "none": "none", "static_global": "static", "random_same_budget": "random", "risk_only_same_budget": "risk only",
    "bgss": "BGSS (released)", "bgss_printed": "BGSS (printed)", "eps_bump": "eps bump",
}  # fmt: skip


@style()
def e5_maximum(runs: pd.DataFrame) -> Axes:
    """Largest mismatch of every run, by seed, with the mean of each policy as a bar."""
    table, axes = _with_policy_names(runs), canvas(6.4, 3.8)
    sns.barplot(table, x="policy", y="max_mismatch", color="0.85", errorbar=None, ax=axes)
    sns.swarmplot(table, x="policy", y="max_mismatch", hue="seed", size=8, palette="colorblind", ax=axes)
    axes.set_xticks(axes.get_xticks(), axes.get_xticklabels(), rotation=20, ha="right", rotation_mode="anchor")
    return finished(axes, None, "largest mismatch of the run", "E5: largest mismatch by seed (bar: mean)")


@style()
def e5_events(runs: pd.DataFrame) -> Axes:
    """Final mismatch over onset events, means over seeds with standard deviations."""
    x, y = "onsets", "final_mismatch"
    by_policy = _with_policy_names(runs).groupby("policy", observed=True)[[x, y]]
    means, deviations = by_policy.mean().reset_index(), by_policy.std().fillna(0)
    axes = canvas(6.4, 4.0)
    sns.scatterplot(means, x=x, y=y, hue="policy", style="policy", s=110, zorder=3, ax=axes)
    for mean, deviation, colour in zip(means.itertuples(), deviations.itertuples(), COLOURS):
        axes.errorbar(
            mean.onsets, mean.final_mismatch, xerr=deviation.onsets, yerr=deviation.final_mismatch, fmt="none",
            ecolor=colour, elinewidth=1, capsize=3,
        )  # fmt: skip
    label = f"onset events a run (ratio {runs.onset_ratio.iloc[0]:g})"
    return finished(axes, label, "final mismatch", "E5: events and final mismatch (mean ± sd)")


@style()
def e5_course(steps: pd.DataFrame, title: str = "E5: mismatch over training") -> Axes:
    """Mismatch over the training steps, mean over seeds: one panel a policy, with policy ``none`` in grey."""
    table = _with_policy_names(steps).groupby(["policy", "step"], observed=True).mismatch.mean().unstack("policy")
    shown = [name for name in table if name != "none"] or ["none"]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.6 * columns + 0.6, 1.9 * rows + 0.7), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, name in zip(grid.flat, shown):
        for course, colour, width in (("none", "0.8", 3), (name, COLOURS[0], 1)):
            if course in table:
                axes.plot(table.index, table[course], color=colour, linewidth=width)
        axes.set(yscale="log")
        axes.set_title(name, fontsize="medium")
    for number in range(len(shown), grid.size):
        grid.flat[number].set_visible(False)
        grid.flat[number - columns].tick_params(labelbottom=True)  # the last panel of its column
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel("mismatch" if rows == 1 else "mismatch, mean over seeds", fontsize="medium")
    figure.suptitle(f"{title} (grey: none)" if len(table.columns) > 1 else title, fontsize="medium")
    return grid[0, 0]


@style()
def e5_looks(course: pd.DataFrame) -> Axes:
    """Mean and interval of each claim over the number of seeds; one panel a claim (rows of ``verdicts.by_look``)."""
    panels = list(course.groupby("quantity", sort=False))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.1 * columns, 2.1 * rows + 0.4), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (name, looks) in zip(grid.flat, panels):
        around = looks[["low", "high"]].sub(looks["mean"], axis=0).abs().to_numpy().T
        last = looks.iloc[-1]
        axes.errorbar(looks.runs, looks["mean"], yerr=around, fmt="o", markersize=4, capsize=3, color=COLOURS[0])
        axes.axhline(last.bound, **DASHED)
        if last.smallest > 0:
            axes.axhspan(last.bound - last.smallest, last.bound + last.smallest, color="0.9", zorder=0)
        axes.set(xlim=(0, course.runs.max() + course.runs.min()), xticks=sorted(course.runs.unique()))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set_title("\n".join(textwrap.wrap(name, 34)), fontsize="small")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("number of seeds", fontsize="medium")
    figure.supylabel("mean over seeds, with interval", fontsize="medium")
    figure.suptitle(f"{course.experiment.iloc[0]}: mean and interval at each look", fontsize="medium")
    return grid[0, 0]


def _with_policy_names(table: pd.DataFrame) -> pd.DataFrame:
    """Policies by the names that figures use, in the order of ``POLICY_NAMES``; others follow, unchanged."""
    names = POLICY_NAMES | {name: name for name in table.policy if name not in POLICY_NAMES}
    present = [name for policy, name in names.items() if policy in set(table.policy)]
    return table.assign(policy=pd.Categorical(table.policy.map(names), present, ordered=True))


@style()
def training_curve(log: pd.DataFrame) -> Axes:
    """Training, validation and evaluation loss over tokens seen."""
    losses = log.melt("tokens", [name for name in log if name.endswith("_loss")], "text", "loss")
    losses["text"] = losses["text"].str.removesuffix("_loss")
    axes = canvas(6.4, 3.6)
    sns.lineplot(losses, x="tokens", y="loss", hue="text", style="text", ax=axes)
    axes.set(xlabel="training tokens", ylabel="cross entropy (nats per token)")
    return axes
