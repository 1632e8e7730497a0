"""Notebook 2: rounding errors of one attention head beside the bound of Theorem 1 (`thm:attn`)."""

import math
from functools import cache

import numpy as np
import pandas as pd
import torch

from fragility_core.arithmetic.formats import get_format
from fragility_lab.lessons import slack
from fragility_lab.lessons.head import DRAWS, KEYS, STEPS, errors, ladder, normal, peaked, stored
from fragility_lab.lessons.widgets import Exercise
from fragility_lab.reporting import figures
from fragility_lab.reporting.figures import Axes

FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
MARGINS = torch.linspace(0.25, 10, 40, dtype=torch.float64)
MEASURES = {"absolute": ("observed", "bound"), "relative": ("relative", "relative_bound")}


@cache
def sweep(value_exponent: int, format: str) -> pd.DataFrame:
    """``head.errors`` of heads with each of MARGINS, and the column ``margin``."""
    table = errors(stored(peaked(MARGINS, 2.0**value_exponent), format), format)
    return table.assign(margin=MARGINS.repeat_interleave(DRAWS).numpy())


def sharpness(margin: float, value_exponent: int, format: str, measure: str) -> tuple[list[Axes], str]:
    """Left: error and bound over the margin. Right: the terms in the bracket of the bound."""
    table = sweep(value_exponent, format)
    observed, bound = MEASURES[measure]
    mean = table.groupby("margin").mean()
    here = mean.iloc[np.abs(mean.index - margin).argmin()]
    curve, terms = figures.panels(height=3.8)

    curve.plot(table.margin, table[observed], ".", color="C0", markersize=4, label="observed")
    curve.plot(mean.index, mean[bound], color="C3", label="bound")
    figures.log_scale(curve, "y")
    low, high = table[observed].min(), table[bound].max()
    curve.set(
        ylim=(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))), xlabel="margin",
        ylabel=f"{measure} error", title=f"{format}: error of the head",
    )  # fmt: skip
    curve.legend(frameon=False, ncols=2, loc="upper right", fontsize="small")

    heights = [np.ones(len(mean)), np.ones(len(mean)), mean["κ_softmax"], mean["χ_score"]]
    names = ["value product", "softmax kernel", "κ_softmax", "χ_score"]
    terms.stackplot(mean.index, heights, labels=names, colors=["0.75", "0.55", "C0", "C1"])
    terms.axvline(math.log(KEYS - 1), color="0.2", linestyle="--", linewidth=1)
    terms.set(xlabel="margin", ylim=(0, None), title="terms in the bound's bracket")
    terms.legend(frameon=False, fontsize="small", loc="upper right")
    for axes in (curve, terms):
        axes.axvline(margin, color="0.2", linestyle=":")
    return [curve, terms], (
        f"{format}, margin {margin:g}, values × 2^{value_exponent}: {measure} error {here[observed]:.2g}, "
        f"bound {here[bound]:.2g}, {here[bound] / here[observed]:.2g} times as large; "
        f"κ_softmax = {here['κ_softmax']:.2g}, χ_score = {here['χ_score']:.2g}"
    )


def looseness(spread: float, format: str) -> tuple[list[Axes], str]:
    """Left: bound over observed error of 200 random heads. Right: the factor that each step of the proof loses."""
    table = ladder(stored(normal(spread, 200), format), format)
    ratio = table[STEPS[-1]] / table[STEPS[0]]
    count, steps = figures.panels(height=3.4)
    slack.histogram(count, ratio, f"{format}: how loose the bound is")
    count.set(ylabel="heads")
    slack.given_away(steps, table)
    return [count, steps], f"{format}, spread {spread:g}: {slack.describe(ratio, 'heads')}"


EXPONENTS = np.arange(-30, 21, 2)


def beyond_range(margin: float, format: str) -> tuple[list[Axes], str]:
    """Observed error over the bound for values of every magnitude, one line a format. Storing the values counts too."""
    queries, keys, values = peaked(torch.tensor([margin]))
    scaled = values * torch.tensor(2.0**EXPONENTS)[:, None, None, None]
    inputs = queries.expand_as(scaled), keys.expand_as(scaled), scaled
    (axes,) = figures.panels(8.2, height=3.8, right=1.5)
    held, allowed = {}, {}
    for marker, name in zip("osD^", FORMATS):
        table = errors(inputs, name)
        # An overflow leaves inf or NaN, which counts as an infinite error.
        ratio = np.nan_to_num(table.observed / table.bound, nan=np.inf).reshape(-1, DRAWS).max(1)
        held[name], allowed[name] = ratio <= 1, table.relative_bound.mean()
        strong = {"linewidth": 2.5} if name == format else {"linewidth": 1, "alpha": 0.55}
        axes.plot(EXPONENTS, ratio.clip(max=1e6), marker=marker, markersize=4, label=name, **strong)
    axes.axhline(1, color="0.2", linestyle="--", linewidth=1)
    axes.text(-30, 0.4, "bound", fontsize="small")
    figures.log_scale(axes, "y")
    axes.set(
        ylim=(1e-3, 1e6), xlabel="log2 of the value scale", ylabel="largest error / bound",
        title="the theorem holds while nothing over- or underflows",
    )  # fmt: skip
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    broken = EXPONENTS[~held[format]]
    stretches = np.split(broken, np.flatnonzero(np.diff(broken) > 2) + 1) if len(broken) else []
    where = " and ".join(f"2^{s[0]}" + f" to 2^{s[-1]}" * (len(s) > 1) for s in stretches)
    return [axes], (
        f"{format}, margin {margin:g}: the bound "
        + (f"fails for values of {where}" if where else f"holds from 2^{EXPONENTS[0]} to 2^{EXPONENTS[-1]}")
        + f"; it is {allowed[format]:.2g} ‖A‖"
    )


# --- Exercises ------------------------------------------------------------------------------------

EXERCISES = (
    Exercise(
        "The same head in bf16 instead of fp16: by what factor does the bound of Theorem 1 (attention) grow?",
        get_format("bf16").unit_roundoff / get_format("fp16").unit_roundoff,
        "Only one factor of the bound depends on the format.",
        "The bracket and ‖P‖ ‖V‖₂ belong to the exact head, so only u changes: from 2⁻¹¹ to 2⁻⁸, a factor of 8.",
    ),
    Exercise(
        "All values are multiplied by 4, far from the ends of the range. What do absolute and relative error do?",
        "absolute × 4, relative stays",
        "Move the slider of the value scale in the first figure, and change its error from absolute to relative.",
        "A and its error are both linear in V, and a common factor cancels in κ_val = ‖P‖ ‖V‖₂ / ‖A‖. As 4 is a "
        "power of two, every rounding error is exactly four times as large.",
        ("both stay", "absolute × 4, relative stays", "both × 4", "absolute stays, relative / 4"),
    ),
    Exercise(
        "One key is ahead of 64 equal ones by a margin. At which margin is d_smx largest?",
        math.log(64),
        "There the key has the probability 1/2.",
        "d_smx is largest where the one key weighs as much as all others together: p = 1/2, hence e^margin = 64, and "
        "the margin is ln 64 = 4.16. The longer the context, the larger the margin at which a head is fragile.",
    ),
    Exercise(
        "Two keys tie, P = (1/2, 1/2), and their values are +1 and −1. What does the relative form of the theorem say?",
        "nothing: A = 0",
        "How large is A = PV?",
        "The values cancel, so A = 0 and κ_val = ‖P‖ ‖V‖₂ / ‖A‖ is undefined. The absolute form still holds.",
        ("the relative error is at most u", "the relative error is at most 1", "nothing: A = 0"),
    ),
    Exercise(
        "In fp8_e5m2, how large may bracket × κ_val be before the bound allows an error as large as A itself?",
        1 / get_format("fp8_e5m2").unit_roundoff,
        "The relative bound is bracket × u κ_val. How large is u?",
        "The relative bound is bracket × u κ_val with u = 1/8. It reaches 1 at bracket × κ_val = 8; above, the bound "
        "says nothing.",
    ),
)
