"""The figures of the experiments and of the diagnosis: tidy DataFrame in, matplotlib Axes out.

Importing this module changes no setting of matplotlib. seaborn, whose import takes most of a second, is loaded by the
first function that needs it, and not by the first cells of lessons. Functions that draw run inside of ``style``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import data_uri
from fragility_lab.running.files import write_whole

# "C0", "C1", ... as RGB, for pictures made of cells: seaborn's palette "colorblind".
PALETTE = "#0173b2 #de8f05 #029e73 #d55e00 #cc78bc #ca9161 #fbafe4 #949494 #ece133 #56b4e9"
COLOURS = [mpl.colors.to_rgb(colour) for colour in PALETTE.split()]
HALO = withStroke(linewidth=2.5, foreground="white")  # letters on marks
DASHED: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1, "zorder": 0}
PNG_DPI = 110
UNDATED = {"CreationDate": None}  # the same bytes for the same data

# Matplotlib searches the height of a title unless it is fixed, which takes time.
STYLE = {
    **mpl.rc_params_from_file(ASSETS / "figures.mplstyle", use_default_template=False),
    "axes.prop_cycle": cycler(color=COLOURS), "axes.titley": 1.0,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """The settings of every figure, as a context or a decorator. Drawing needs them, and so does saving.

    ``mpl.rc_context`` would also undo a setting of a notebook's first figure: that the backend shows figures.
    """
    before = {name: mpl.rcParams[name] for name in STYLE}
    mpl.rcParams.update(STYLE)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


@style()
def figure_of(axes: Axes) -> Figure:
    """The figure that ``axes`` are drawn in."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def save_figure(axes: Axes, folder: Path, name: str) -> None:
    """Write the figure of ``axes`` as PNG and PDF, the same bytes for the same data."""
    figure = figure_of(axes)
    for form, options in (("png", {"dpi": PNG_DPI, "metadata": {"Software": None}}), ("pdf", {"metadata": UNDATED})):
        content = BytesIO()
        figure.savefig(content, format=form, bbox_inches="tight", **options)
        write_whole(folder / f"{name}.{form}", content.getbuffer())


@style()
def png(axes: Axes) -> bytes:
    """The figure of ``axes``, drawn and packed as fast as possible: ``savefig`` would draw it twice for its layout."""
    figure, buffer = figure_of(axes), BytesIO()
    figure.dpi = PNG_DPI
    FigureCanvasAgg(figure).print_png(buffer, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def uri(axes: Axes) -> str:
    """The figure of ``axes`` as a data address; the figure is closed."""
    image = png(axes)
    plt.close(figure_of(axes))
    return data_uri(image)


def canvas(width: float = 5.6, height: float = 4.0) -> Axes:
    """New Axes in a figure of ``width`` by ``height`` inches."""
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def finished(
    axes: Axes, x: str | None, y: str | None, title: str = "", log: bool = False, inside: bool = False
) -> Axes:
    """``axes`` with labels, title and a legend, beside or ``inside``. With ``log`` both axes are logarithmic."""
    axes.set(xlabel=x, ylabel=y, title=title, **({"xscale": "log", "yscale": "log"} if log else {}))
    for axis in (axes.xaxis, axes.yaxis) if log else ():
        plain_log_ticks(axis)
    if inside:
        axes.legend(title=None)
    elif axes.get_legend():
        import seaborn as sns

        sns.move_legend(axes, "center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return axes


def plain_log_ticks(axis: Axis) -> None:
    """Set ticks at 1, 2 and 5 times powers of ten; fewer over a wide range, more where one is left.

    Numbers are written out below 10,000, and end in k and M above.
    """
    low, high = axis.get_view_interval()
    powers = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)

    def inside(subs: tuple[int, ...]) -> int:
        return sum(low <= sub * power <= high for sub in subs for power in powers)

    long = low < 1e-3  # 0.0002
    if high >= 100 * low or (long and inside((1,)) >= 2):
        subs: tuple[int, ...] = (1,)
    else:
        subs = (1, 2, 5) if inside((1, 2, 5)) >= 2 else tuple(range(1, 10))
    # LogLocator alone would fill a narrow range with long numbers.
    axis.set_major_locator(LogLocator(subs=subs) if inside(subs) >= 2 or len(subs) < 9 else MaxNLocator(3))
    axis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x >= 1e4 else f"{x:g}")
    axis.set_minor_formatter(NullFormatter())


def with_length(runs: pd.DataFrame) -> pd.DataFrame:
    """``runs`` with the window length as text, for legends."""
    return runs.assign(**{"window length": runs.length.astype(str)})


def square(axes: Axes, low: float, high: float) -> None:
    """Set equal axes from ``low`` to ``high``, with a line of equality."""
    axes.plot((low, high), (low, high), **DASHED)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")


def curves(table: pd.DataFrame, x: str, names: dict[str, str]) -> Axes:
    """Axes with one curve for each column in ``names``, over column ``x``; ``names`` has their names in the legend."""
    import seaborn as sns

    lines = table[[x, *names]].rename(columns=names).melt(x, None, "curve")
    return sns.lineplot(lines, x=x, y="value", hue="curve", style="curve", markers=True, ax=canvas())


@style()
def e1_attention(table: pd.DataFrame) -> Axes:
    """Measured change of the output over the proxy; colour is the value scale, marker the margin."""
    import seaborn as sns

    axes, table = canvas(), table.rename(columns={"value_scale": "value scale"})
    several = table["value scale"].nunique() > 1
    crest = sns.color_palette("crest", as_cmap=True) if several else None  # its light end shows on white
    sns.scatterplot(
        table, x="proxy", y="measured", hue="value scale", style="margin", s=70, palette=crest, ax=axes
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
def e1_residual(table: pd.DataFrame, depth: int = 6) -> Axes:
    """Amplification over ``depth`` blocks, below the transport bound."""
    axes = curves(table, "rho", {"measured": "measured", "bound": rf"bound $(1+\rho)^{{{depth}}}$"})
    labels = (r"residual gain $\rho$", f"amplification over {depth} blocks", "E1: residual transport")
    return finished(axes, *labels, inside=True)


@style()
def e2_transport(runs: pd.DataFrame) -> Axes:
    """Pearson with transport over Pearson without, one point a run; above the diagonal transport helps.

    Runs whose windows overflow have no point.
    """
    import seaborn as sns

    values = runs[["no_transport_pearson", "combined_pearson"]]
    shown = with_length(runs.dropna(subset=[*values]))
    if shown.empty:
        raise ValueError("figures of E2 need a run with correlations, got none: nearly all windows overflowed")
    points = {"hue": "precision", "style": "window length", "s": 80}
    axes = sns.scatterplot(shown, x="no_transport_pearson", y="combined_pearson", ax=canvas(), **points)
    square(axes, min(0.0, values.min().min()) - 0.05, values.max().max() + 0.05)
    return finished(
        axes, "correlation without residual transport", "correlation of the score", "E2: does transport help?"
    )


@style()
def e2_windows(windows: pd.DataFrame) -> Axes:
    """Mismatch over score of every window, by window length, one panel a format; column ``name`` labels points."""
    import seaborn as sns

    kept = windows[~windows.overflow].assign(**{"window length": lambda table: table.length.astype(str)})
    panels, lengths = list(kept.groupby("precision")), [str(length) for length in sorted(kept.length.unique())]
    figure, grid = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels) + 1, 3.6), layout="constrained", squeeze=False
    )
    for axes, (precision, shown) in zip(grid.flat, panels):
        points = {"hue": "window length", "hue_order": lengths, "s": 18, "linewidth": 0, "alpha": 0.7}
        sns.scatterplot(shown, x="combined", y="mismatch", legend=axes is grid.flat[-1], ax=axes, **points)
        finished(axes, "score", "mismatch" if axes is grid.flat[0] else "", precision, log=True)
        named = shown[shown.name != ""].sort_values("combined")
        axes.scatter(named.combined, named.mismatch, s=60, facecolor="none", edgecolor="0.1", linewidth=1)
        for window, place in zip(named.itertuples(), cycle(((-10, 3), (0, 11), (10, -3), (0, -11)))):
            at = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": "small"}
            axes.annotate(
                window.name.rpartition("-")[2], (window.combined, window.mismatch), place, **at, path_effects=[HALO]
            )
    figure.suptitle("E2: every window", fontsize="medium")
    return grid[0, 0]


@style()
def e2_trend(bins: pd.DataFrame) -> Axes:
    """Mean mismatch over mean predicted risk: a point for each bin of equally many windows, by format and together."""
    axes, several = canvas(5.6, 3.8), bins.precision.nunique() > 2
    for colour, (name, rows) in zip(COLOURS, bins[bins.precision != "all"].groupby("precision")):
        axes.scatter(rows.combined, rows.mismatch, s=45, color=[colour], label=name)
        named(axes, name, tuple(rows.loc[rows.mismatch.idxmax(), ["combined", "mismatch"]]), (0, 9), color=colour)
    both = bins[bins.precision == "all"] if several else bins[:0]
    axes.scatter(both.combined, both.mismatch, s=130, facecolor="none", edgecolor="0.3")
    axes.margins(0.12, 0.16)
    title = "E2: does a higher score mean a larger error?" + "\n(rings: all formats together)" * several
    return finished(axes, "score (mean of a bin)", "measured error (mean of a bin)", title, log=True)


def named(axes: Axes, text: str, at: Any, offset: tuple[float, float], **how: Any) -> None:
    """Write ``text`` beside the point ``at``, ``offset`` by points."""
    axes.annotate(text, at, offset, textcoords="offset points", **{"ha": "center", "fontsize": "small"} | how)


@style()
def e3_ranks(counts: pd.DataFrame) -> Axes:
    """Shares of blocks by rank by the score (rows) and rank by the exact effect (columns), beside those of chance."""
    import seaborn as sns

    axes, share = canvas(5.6, 4.6), counts / counts.stack().mean()
    colours = {"cmap": "vlag", "norm": mpl.colors.TwoSlopeNorm(1, 0, max(2.0, share.max(axis=None)))}
    label = {"label": "times as often as by chance"}
    sns.heatmap(share, square=True, linewidths=0.5, cbar_kws=label, ax=axes, **colours)
    axes.tick_params(axis="y", rotation=0)
    labels = ("rank by exact effect (1: largest)", "rank by the score (1: largest)")
    return finished(axes, *labels, "E3: where the score puts the blocks")


FIDELITY = {
    "spearman": "Spearman", "pairwise_accuracy": "pairwise accuracy", "top1_hit": "top-1 hit",
    "top3_overlap": "top-3 overlap", "top5_overlap": "top-5 overlap",
}  # fmt: skip


@style()
def e3_fidelity(runs: pd.DataFrame) -> Axes:
    """Agreement of the rankings of score and exact effect, in five measures: a point a run, a line at chance."""
    import seaborn as sns

    table = with_length(runs).melt(["window length"], [*FIDELITY], "measure", "value")
    axes, points = canvas(6.4, 3.2), {"palette": "colorblind", "dodge": True, "jitter": False, "size": 6}
    sns.stripplot(table, x="value", y="measure", hue="window length", ax=axes, **points)
    layers = runs.layers.mean()
    for row, chance in enumerate((0, 0.5, 1 / layers, min(1, 3 / layers), min(1, 5 / layers))):
        axes.plot([chance, chance], [row - 0.4, row + 0.4], **DASHED | {"linewidth": 2})
    axes.set_yticks(range(len(FIDELITY)), FIDELITY.values())
    return finished(axes, "value in a run (dashed: chance)", None, "E3: fidelity of the score")


@style()
def e3_noise_floor(windows: pd.DataFrame) -> Axes:
    """Spearman's correlation of the score with the exact effects, over that of a second measurement of the effects."""
    import seaborn as sns

    axes, points = canvas(5.4, 4.0), {"hue": "window length", "style": "window length", "s": 70}
    sns.scatterplot(with_length(windows), x="noise_floor", y="spearman", ax=axes, **points)
    square(axes, min(0.0, windows[["spearman", "noise_floor"]].min(axis=None)) - 0.05, 1.0)
    labels = ("Spearman of the effects in another rounding", "Spearman of the score")
    return finished(axes, *labels, "E3: score and noise floor, by window")


@style()
def training_curve(log: pd.DataFrame) -> Axes:
    """Training, validation and evaluation loss over tokens seen."""
    import seaborn as sns

    losses = log.melt("tokens", [name for name in log if name.endswith("_loss")], "text", "loss")
    losses["text"] = losses["text"].str.removesuffix("_loss")
    axes = canvas(6.4, 3.6)
    sns.lineplot(losses, x="tokens", y="loss", hue="text", style="text", ax=axes)
    axes.set(xlabel="training tokens", ylabel="cross entropy (nats per token)")
    return axes
