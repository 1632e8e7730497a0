"""Every figure of the project: tidy DataFrame in, matplotlib Axes out."""

import textwrap
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

# A title of fixed height is one that need not be searched for: the same picture, sooner.
sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", rc={"axes.titley": 1.0})

COLOURS = sns.color_palette()  # "C0", "C1", ... as RGB, for pictures made of cells

PNG_DPI = 110


def save_figure(axes: Axes, folder: Path, name: str) -> None:
    """Write the figure of ``axes`` as PNG and PDF, the same bytes for the same data."""
    figure = axes.get_figure()
    figure.savefig(folder / f"{name}.png", dpi=PNG_DPI, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(folder / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})


def detached(columns: int = 1, width: float = 9.6, height: float = 3.6, right: float = 0.25) -> list[Axes]:
    """Axes side by side for a figure that a slider redraws; ``width``, ``height``, margin ``right`` in inches.

    Pyplot does not know the figure, so callbacks leave nothing open. Margins are fixed, because
    finding them by a layout engine takes longer than drawing.
    """
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(0.95 / width, 0.65 / height, 1 - right / width, 1 - 0.4 / height, wspace=0.28)
    row = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in row:
        axes.locator_params(nbins=5)
    return row


def log_scale(axes: Axes, directions: str = "xy") -> None:
    """Few ticks at powers of ten, in plain text: mathtext takes milliseconds a label."""
    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = getattr(axes, f"{direction}axis")
        axis.set_major_locator(LogLocator(numticks=5))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())


def png(axes: Axes) -> bytes:
    """The figure of ``axes``, drawn and packed as fast as can be."""
    buffer = BytesIO()
    axes.get_figure().savefig(buffer, dpi=PNG_DPI, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def captioned_png(axes: Axes, caption: str) -> bytes:
    """The figure of ``axes`` with ``caption`` below it, to be kept."""
    figure, buffer = axes.get_figure(), BytesIO()
    lines = textwrap.fill(caption, round(12 * figure.get_figwidth()))
    figure.text(0.02, 0, lines, fontsize="small", va="top")
    figure.savefig(buffer, dpi=PNG_DPI, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def canvas(width: float = 5.6, height: float = 4.0) -> Axes:
    _, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return axes


def e1_attention(table: pd.DataFrame) -> Axes:
    """Perturbation measured against the proxy; colour value scale, marker margin."""
    axes = canvas()
    sns.scatterplot(
        table.rename(columns={"value_scale": "value scale"}),
        x="proxy",
        y="measured",
        hue="value scale",
        style="margin",
        s=70,
        palette="viridis",
        ax=axes,
    )
    axes.set(
        xscale="log", yscale="log", xlabel=r"proxy $\kappa_{softmax}\,\|P\|\,\|V\|_2$",
        ylabel="measured change of the output", title="E1: attention sensitivity",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        plain_log_ticks(axis)
    legend_outside(axes)
    return axes


def e1_layernorm(table: pd.DataFrame) -> Axes:
    """Measured change and M_LN over epsilon, each relative to its largest value."""
    relative = table.assign(**{name: table[name] / table[name].max() for name in ("measured", "theory")})
    curves = relative.melt("epsilon", ["measured", "theory"], "curve", "value")
    curves["curve"] = curves["curve"].map({"measured": "measured change", "theory": r"theory $M_{LN}$"})
    axes = canvas()
    sns.lineplot(curves, x="epsilon", y="value", hue="curve", style="curve", markers=True, ax=axes)
    axes.set(
        xscale="log", yscale="log", xlabel=r"LayerNorm $\varepsilon$", ylabel="value relative to its largest",
        title=r"E1: both fall as $\varepsilon$ grows",
    )  # fmt: skip
    axes.legend(title=None)
    return axes


def e1_residual(table: pd.DataFrame) -> Axes:
    """Amplification over six blocks, below the transport bound."""
    curves = table.melt("rho", ["measured", "bound"], "curve", "value")
    curves["curve"] = curves["curve"].map({"measured": "measured", "bound": r"bound $(1+\rho)^6$"})
    axes = canvas()
    sns.lineplot(curves, x="rho", y="value", hue="curve", style="curve", markers=True, ax=axes)
    axes.set(xlabel=r"residual gain $\rho$", ylabel="amplification over 6 blocks", title="E1: residual transport")
    axes.legend(title=None)
    return axes


def e2_transport(runs: pd.DataFrame) -> Axes:
    """Pearson with transport against without, one point a run; above the diagonal transport helps."""
    axes = canvas()
    sns.scatterplot(
        named(runs), x="no_transport_pearson", y="combined_pearson", hue="precision", style="window length",
        s=80, ax=axes,
    )  # fmt: skip
    values = runs[["no_transport_pearson", "combined_pearson"]]
    low, high = min(0.0, values.min().min()) - 0.05, values.max().max() + 0.05
    axes.plot([low, high], [low, high], color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.set(
        xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="Pearson of no_transport",
        ylabel="Pearson of combined", title="E2: does transport help?",
    )  # fmt: skip
    legend_outside(axes)
    return axes


def e2_delta(runs: pd.DataFrame) -> Axes:
    """Gain in Pearson by transport, run by run."""
    table = named(runs).sort_values(["precision", "length", "seed"])
    table["run"] = table.precision + " T=" + table.length.astype(str) + " seed " + table.seed.astype(str)
    axes = canvas(6.4, max(2.2, 0.27 * len(table) + 1.2))
    sns.barplot(table, y="run", x="delta_pearson", hue="precision", dodge=False, ax=axes)
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set(ylabel=None, xlabel="Pearson of combined minus no_transport", title="E2: gain by transport")
    legend_outside(axes)
    return axes


def e2_trend(bins: pd.DataFrame) -> Axes:
    """Mean mismatch over mean predicted risk in bins of equal count, coloured by the formats of their windows."""
    axes = canvas()
    formats = sorted(set(bins.precision), key=lambda names: (names.count(","), names))  # those of one format first
    sns.scatterplot(
        bins, x="combined", y="mismatch", hue="precision", style="precision", hue_order=formats, style_order=formats,
        s=70, ax=axes,
    )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="predicted risk (mean of bin)", ylabel="mismatch (mean of bin)",
        title="E2: mismatch over predicted risk",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        plain_log_ticks(axis)
    legend_outside(axes)
    return axes


def e3_ranks(counts: pd.DataFrame) -> Axes:
    """How often a block of each rank by the score (rows) has each rank by its exact effect (columns)."""
    axes = canvas(5.6, 4.6)
    sns.heatmap(counts, cmap="viridis", square=True, linewidths=0.5, cbar_kws={"label": "blocks"}, ax=axes)
    axes.set(
        xlabel="rank by exact effect (1: largest)", ylabel="rank by the score (1: largest)",
        title="E3: where the score puts the blocks",
    )  # fmt: skip
    axes.tick_params(axis="y", rotation=0)
    return axes


def e3_fidelity(runs: pd.DataFrame) -> Axes:
    """Spearman against pairwise accuracy, one point a run; chance at the crossing of the lines."""
    axes = canvas()
    sns.scatterplot(
        named(runs), x="spearman", y="pairwise_accuracy", hue="precision", style="window length", s=80, ax=axes
    )
    axes.axvline(0, color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.axhline(0.5, color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.set(
        xlabel="Spearman of score and exact effect", ylabel="pairwise ordering accuracy", title="E3: fidelity by run",
    )  # fmt: skip
    legend_outside(axes)
    return axes


def e3_noise_floor(windows: pd.DataFrame) -> Axes:
    """Spearman of the score beside that of a second measurement of the same effects, by window length."""
    names = {"spearman": "score", "noise_floor": "another rounding"}
    table = windows.melt(["precision", "length"], list(names), "compared with", "value")
    table["compared with"] = table["compared with"].map(names)
    axes = canvas(6.0, 4.0)
    sns.swarmplot(
        table.assign(length=table.length.astype(str)), x="length", y="value", hue="compared with", dodge=True, size=7,
        ax=axes,
    )  # fmt: skip
    axes.axhline(0, color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.set(
        xlabel="window length (tokens)", ylabel="Spearman with a measured effect",
        title="E3: the score, and what rounding noise allows",
    )  # fmt: skip
    legend_outside(axes)
    return axes


POLICY_NAMES = {
    "none": "none", "static_global": "static", "random_same_budget": "random", "risk_only_same_budget": "risk only",
    "bgss": "BGSS (released)", "bgss_printed": "BGSS (printed)", "eps_bump": "eps bump",
}  # fmt: skip


def e5_maximum(runs: pd.DataFrame) -> Axes:
    """Largest mismatch of every run, by seed, with the mean of each policy as a bar."""
    table = _with_policy_names(runs)
    axes = canvas(6.4, 3.8)
    sns.barplot(table, x="policy", y="max_mismatch", color="0.85", errorbar=None, ax=axes)
    sns.swarmplot(table, x="policy", y="max_mismatch", hue="seed", size=8, palette="colorblind", ax=axes)
    axes.set(xlabel=None, ylabel="largest mismatch of the run", title="E5: largest mismatch by seed (bar: mean)")
    axes.set_xticks(axes.get_xticks(), axes.get_xticklabels(), rotation=20, ha="right", rotation_mode="anchor")
    legend_outside(axes)
    return axes


def e5_events(runs: pd.DataFrame) -> Axes:
    """Onset events against final mismatch, mean over seeds and standard deviations."""
    quantities = ["onsets", "final_mismatch"]
    by_policy = _with_policy_names(runs).groupby("policy", observed=True)[quantities]
    means, deviations = by_policy.mean().reset_index(), by_policy.std().fillna(0)
    axes = canvas(6.4, 4.0)
    sns.scatterplot(means, x="onsets", y="final_mismatch", hue="policy", style="policy", s=110, zorder=3, ax=axes)
    for mean, deviation, colour in zip(means.itertuples(), deviations.itertuples(), sns.color_palette()):
        axes.errorbar(
            mean.onsets, mean.final_mismatch, xerr=deviation.onsets, yerr=deviation.final_mismatch, fmt="none",
            ecolor=colour, elinewidth=1, capsize=3,
        )  # fmt: skip
    axes.set(
        xlabel=f"onset events a run (ratio {runs.onset_ratio.iloc[0]:g})", ylabel="final mismatch",
        title="E5: events and final mismatch (mean ± sd)",
    )  # fmt: skip
    legend_outside(axes)
    return axes


def e5_course(steps: pd.DataFrame, title: str = "E5: mismatch over training") -> Axes:
    """Mismatch over the training steps, mean over seeds: one panel a policy, over the course of ``none``."""
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


def training_curve(log: pd.DataFrame) -> Axes:
    """Training, validation and evaluation loss over tokens seen."""
    losses = log.melt("tokens", [name for name in log if name.endswith("_loss")], "text", "loss")
    losses["text"] = losses["text"].str.removesuffix("_loss")
    axes = canvas(6.4, 3.6)
    sns.lineplot(losses, x="tokens", y="loss", hue="text", style="text", ax=axes)
    axes.set(xlabel="training tokens", ylabel="cross entropy (nats per token)")
    return axes


def named(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(**{"window length": runs.length.astype(str)})


def _with_policy_names(table: pd.DataFrame) -> pd.DataFrame:
    """Policies under the names that figures use, in the order of ``POLICY_NAMES``; others behind, unchanged."""
    names = POLICY_NAMES | {name: name for name in table.policy if name not in POLICY_NAMES}
    present = [name for policy, name in names.items() if policy in set(table.policy)]
    return table.assign(policy=pd.Categorical(table.policy.map(names), present, ordered=True))


def plain_log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out; beyond two decades at powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_outside(axes: Axes) -> None:
    sns.move_legend(axes, "center left", bbox_to_anchor=(1.02, 0.5), frameon=False)


def diagnosis_windows(windows: pd.DataFrame) -> Axes:
    """Measured mismatch over the predicted one, one point a window; ``plan`` says under which plan."""
    axes = canvas(4.6, 4.0)
    sns.scatterplot(windows, x="predicted", y="measured", hue="plan", style="plan", s=70, ax=axes)
    values = windows[["predicted", "measured"]]
    ends = [0.95 * values.min().min(), 1.05 * values.max().max()]
    axes.plot(ends, ends, color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted mismatch", ylabel="measured mismatch")
    for axis in (axes.xaxis, axes.yaxis):
        plain_log_ticks(axis)
    axes.legend(title=None)
    return axes


def diagnosis_shares(shares: pd.Series, name: str) -> Axes:
    """Shares of the squared error, one bar each, in the order given; ``name`` says what the index counts."""
    axes = canvas(4.6, max(2.0, 0.28 * len(shares) + 0.9))
    sns.barplot(x=100 * shares.to_numpy(), y=shares.index.astype(str), color=COLOURS[0], ax=axes)
    axes.set(xlabel="share of the squared error (%)", ylabel=name)
    return axes


def diagnosis_drift(drift: pd.DataFrame) -> Axes:
    """Relative error of the residual stream over the blocks, mean over windows and range; one curve a ``plan``."""
    axes = canvas(4.6, 3.6)
    sns.lineplot(
        drift, x="block", y="error", hue="plan", style="plan", markers=True, dashes=False, errorbar=("pi", 100), ax=axes
    )
    axes.set(yscale="log", xlabel="after block", ylabel="relative error of the stream")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    plain_log_ticks(axes.yaxis)
    axes.legend(title=None)
    return axes
