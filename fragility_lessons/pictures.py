"""The parts that pictures of all lessons share: panels, scales, labels and legends, and the slack of a bound."""

import math
from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from fragility_lab.reporting.figures import figure_of, style

Picture = tuple[list[Axes], str]  # the panels, and a line with the numbers to read off

FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
HERE: dict[str, Any] = {"color": "0.2", "linestyle": ":", "zorder": 2.1}  # a line above curves
LIMIT: dict[str, Any] = {"color": "0.2", "linestyle": "--", "linewidth": 1}
BESIDE = {"frameon": False, "loc": "center left", "bbox_to_anchor": (1, 0.5)}  # a legend to the right of the panel
SMALL_BESIDE = BESIDE | {"fontsize": "small"}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TWO_COLUMNS = {"frameon": False, "fontsize": "small", "loc": "upper right", "ncols": 2}


@style()
def svg(axes: Axes) -> str:
    """The figure of ``axes`` as SVG, the same for the same data. The browser's fonts draw its text."""
    buffer = BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fragility"}):
        figure_of(axes).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode("utf-8")


def alternative_text(axes: Axes) -> str:
    """A picture in words: its title, and its axes' labels or, if it has none, the text in it."""
    shown = f"{axes.get_ylabel()} over {axes.get_xlabel()}" if axes.get_xlabel() else ""
    parts = [axes.get_title(), shown or "; ".join(text.get_text() for text in axes.texts)]
    return ": ".join(part.replace("\n", " ") for part in parts if part)


@style()
def panels(*widths: float, height: float = 3.6, right: float = 0.25, here: float | None = None) -> list[Axes]:
    """One Axes for each of ``widths`` (by default 4.8 twice), in figures of their own, which narrow pages stack.

    Widths, ``height`` and the margin ``right`` are in inches. A line marks ``here``, the value of a control. Margins
    are fixed, since a layout engine takes longer than the drawing.
    """
    row = []
    for width in widths or (4.8, 4.8):
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(0.85 / width, 0.65 / height, 1 - right / width, 1 - 0.4 / height)
        row.append(figure.add_subplot())
        row[-1].locator_params(nbins=5)
        if here is not None:
            row[-1].axvline(here, **HERE)
    return row


def power(value: float, _position: int | None = None) -> str:
    """A power of ten in at most four characters, such as "0.01" or "10⁻³": the label of the axis needs room."""
    exponent = round(np.log10(value)) if value > 0 else 0
    return f"{value:g}" if abs(exponent) < 3 else f"10{str(exponent).translate(RAISED)}"


def log_scale(axes: Axes, directions: str = "xy") -> None:
    """Set few ticks at powers of ten, in plain text, since mathtext takes milliseconds a label."""
    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axis = getattr(axes, f"{direction}axis")
        axis.set_major_locator(LogLocator(numticks=5))
        axis.set_major_formatter(FuncFormatter(power))
        axis.set_minor_locator(NullLocator())


def finish(axes: Axes, x: str, y: str, title: str, log: str = "", legend: str | dict | None = None, **settings) -> None:
    """Give ``axes`` labels, a title and ``settings``, a logarithmic scale in the directions ``log``, and a legend.

    ``legend`` is the place of a small legend inside, or the arguments of ``Axes.legend``.
    """
    log_scale(axes, log)
    axes.set(xlabel=x, ylabel=y, title=title, **settings)
    if legend is not None:
        axes.legend(**legend if isinstance(legend, dict) else {"frameon": False, "fontsize": "small", "loc": legend})


def strength(chosen: bool) -> dict[str, Any]:
    """The style of a curve: the ``chosen`` one is strong, the others are pale."""
    return {"linewidth": 2.5} if chosen else {"linewidth": 1, "alpha": 0.55}


def round_ticks(largest: float) -> list[float]:
    """Few round numbers from 0 to the first that is not below ``largest``, at equal distances."""
    power = 10.0 ** math.floor(math.log10(largest))
    top, step = next((top, step) for top, step in ((1, 0.25), (2, 0.5), (5, 1), (10, 2)) if top * power >= largest)
    return [place * step * power for place in range(round(top / step) + 1)]


def looseness(ladder: pd.DataFrame, format: str, draws: str, height: float) -> Picture:
    """First panel: a histogram of bound over observed error. Second: the mean factor that each step of the proof loses.

    Each column of ``ladder`` bounds the column before it; the first is the observed error, the last the bound.
    ``draws`` is the plural noun for its rows.
    """
    slack = ladder.iloc[:, -1] / ladder.iloc[:, 0]
    count, steps = panels(height=height)
    heights, *_ = count.hist(np.log10(slack).clip(upper=3), bins=np.linspace(0, 3, 31).tolist(), color="C0")
    count.axvline(0, color="C3", linewidth=2)
    count.axvline(np.log10(slack.median()), **LIMIT)
    ticks: dict[str, Any] = {"xlim": (-0.1, 3), "xticks": [0, 1, 2, 3], "xticklabels": ["1", "10", "100", "≥ 10³"]}
    x, title = "bound / error (red: equal; dashed: median)", f"{format}: how loose the bound is"
    top = round_ticks(1.05 * np.max(heights))
    finish(count, x, draws, title, **ticks, ylim=(0, top[-1]), yticks=top, yticklabels=[f"{tick:g}" for tick in top])
    factors = np.exp(np.log(ladder).diff(axis=1).mean().iloc[1:])  # geometric means
    steps.barh(range(len(factors)), factors, color="C0", height=0.45)
    far = round_ticks(1.05 * factors.max())
    for place, (name, factor) in enumerate(factors.items()):
        steps.text(0.015 * far[-1], place - 0.3, f"{name}: × {factor:.2g}", fontsize="small")
    limits: dict[str, Any] = {"yticks": [], "ylim": (len(factors) - 0.6, -0.7), "xlim": (0, far[-1])}
    limits |= {"xticks": far, "xticklabels": [f"{tick:g}" for tick in far]}
    finish(steps, "factor (mean)", "step", "what each step of the proof loses", **limits)
    return [count, steps], (
        f"the bound holds in {(slack >= 1).sum()} of {len(slack)} {draws}; "
        f"bound / observed: smallest {slack.min():.2g}, median {slack.median():.2g}, largest {slack.max():.2g}"
    )
