"""Every figure of the project: tidy DataFrame in, matplotlib Axes out."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

sns.set_theme(context="notebook", style="whitegrid", palette="colorblind")

PNG_DPI = 110


def save_figure(axes: Axes, folder: Path, name: str) -> None:
    """Write the figure of ``axes`` as PNG and PDF, the same bytes for the same data."""
    figure = axes.get_figure()
    figure.savefig(folder / f"{name}.png", dpi=PNG_DPI, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(folder / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})


def _canvas(width: float = 5.6, height: float = 4.0) -> Axes:
    _, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return axes


def e1_attention(table: pd.DataFrame) -> Axes:
    """Perturbation measured against the proxy; colour value scale, marker margin."""
    axes = _canvas()
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
        _plain_log_ticks(axis)
    _legend_outside(axes)
    return axes


def e1_layernorm(table: pd.DataFrame) -> Axes:
    """Measured change and M_LN over epsilon, each relative to its largest value."""
    relative = table.assign(**{name: table[name] / table[name].max() for name in ("measured", "theory")})
    curves = relative.melt("epsilon", ["measured", "theory"], "curve", "value")
    curves["curve"] = curves["curve"].map({"measured": "measured change", "theory": r"theory $M_{LN}$"})
    axes = _canvas()
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
    axes = _canvas()
    sns.lineplot(curves, x="rho", y="value", hue="curve", style="curve", markers=True, ax=axes)
    axes.set(xlabel=r"residual gain $\rho$", ylabel="amplification over 6 blocks", title="E1: residual transport")
    axes.legend(title=None)
    return axes


def e2_transport(runs: pd.DataFrame) -> Axes:
    """Pearson with transport against without, one point a run; above the diagonal transport helps."""
    axes = _canvas()
    sns.scatterplot(
        _named(runs), x="no_transport_pearson", y="combined_pearson", hue="precision", style="window length",
        s=80, ax=axes,
    )  # fmt: skip
    values = runs[["no_transport_pearson", "combined_pearson"]]
    low, high = min(0.0, values.min().min()) - 0.05, values.max().max() + 0.05
    axes.plot([low, high], [low, high], color="0.4", linestyle="--", linewidth=1, zorder=0)
    axes.set(
        xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="Pearson of no_transport",
        ylabel="Pearson of combined", title="E2: does transport help?",
    )  # fmt: skip
    _legend_outside(axes)
    return axes


def e2_delta(runs: pd.DataFrame) -> Axes:
    """Gain in Pearson by transport, run by run."""
    table = _named(runs).sort_values(["precision", "length", "seed"])
    table["run"] = table.precision + " T=" + table.length.astype(str) + " seed " + table.seed.astype(str)
    axes = _canvas(6.4, max(2.2, 0.27 * len(table) + 1.2))
    sns.barplot(table, y="run", x="delta_pearson", hue="precision", dodge=False, ax=axes)
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set(ylabel=None, xlabel="Pearson of combined minus no_transport", title="E2: gain by transport")
    _legend_outside(axes)
    return axes


def e2_trend(bins: pd.DataFrame) -> Axes:
    """Mean mismatch over mean predicted risk in bins of equal count."""
    axes = _canvas()
    sns.lineplot(bins, x="combined", y="mismatch", marker="o", ax=axes)
    axes.set(
        xscale="log", yscale="log", xlabel="predicted risk (mean of bin)", ylabel="mismatch (mean of bin)",
        title="E2: mismatch over predicted risk",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        _plain_log_ticks(axis)
    return axes


def training_curve(log: pd.DataFrame) -> Axes:
    """Training, validation and evaluation loss over tokens seen."""
    losses = log.melt("tokens", [name for name in log if name.endswith("_loss")], "text", "loss")
    losses["text"] = losses["text"].str.removesuffix("_loss")
    axes = _canvas(6.4, 3.6)
    sns.lineplot(losses, x="tokens", y="loss", hue="text", style="text", ax=axes)
    axes.set(xlabel="training tokens", ylabel="cross entropy (nats per token)")
    return axes


def _named(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.assign(**{"window length": runs.length.astype(str)})


def _plain_log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out: readable over one or two decades."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend_outside(axes: Axes) -> None:
    sns.move_legend(axes, "center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
