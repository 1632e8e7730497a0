"""Notebook 2: rounding errors of one attention head beside the bound of Theorem 1 (`thm:attn`)."""

import math
from functools import cache

import numpy as np
import pandas as pd
import torch

from fragility_lab.lessons import pictures
from fragility_lab.lessons.head import DRAWS, KEYS, errors, ladder, normal, peaked, stored
from fragility_lab.lessons.pictures import BESIDE, HERE, LIMIT, TWO_COLUMNS, Picture, finish, panels, strength
from fragility_lab.lessons.widgets import exercises

EXERCISES = exercises("attention_error")
FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
MARGINS = torch.linspace(0.25, 10, 40, dtype=torch.float64)
MEASURES = {"absolute": ("observed", "bound"), "relative": ("relative", "relative_bound")}


@cache
def sweep(value_exponent: int, format: str) -> pd.DataFrame:
    """``head.errors`` of heads with each of MARGINS, and the column ``margin``."""
    table = errors(stored(peaked(MARGINS, 2.0**value_exponent), format), format)
    return table.assign(margin=MARGINS.repeat_interleave(DRAWS).numpy())


def sharpness(margin: float, value_exponent: int, format: str, measure: str) -> Picture:
    """Left: error and bound over the margin. Right: the terms in the bracket of the bound."""
    table = sweep(value_exponent, format)
    observed, bound = MEASURES[measure]
    mean = table.groupby("margin").mean()
    here = mean.iloc[np.abs(mean.index - margin).argmin()]
    curve, terms = panels(height=3.8)

    curve.plot(table.margin, table[observed], ".", color="C0", markersize=4, label="observed")
    curve.plot(mean.index, mean[bound], color="C3", label="bound")
    decades = math.floor(math.log10(table[observed].min())), math.ceil(math.log10(table[bound].max()))
    labels = ("margin", f"{measure} error", f"{format}: error of the head")
    finish(curve, *labels, "y", TWO_COLUMNS, ylim=[10.0**decade for decade in decades])

    heights = [np.ones(len(mean)), np.ones(len(mean)), mean["κ_softmax"], mean["χ_score"]]
    names = ["value product", "softmax kernel", "κ_softmax", "χ_score"]
    terms.stackplot(mean.index, heights, labels=names, colors=["0.75", "0.55", "C0", "C1"])
    terms.axvline(math.log(KEYS - 1), **LIMIT)
    finish(terms, "margin", "", "terms in the bound's bracket", legend="upper right", ylim=(0, None))
    for axes in (curve, terms):
        axes.axvline(margin, **HERE)
    return [curve, terms], (
        f"{format}, margin {margin:g}, values × 2^{value_exponent}: {measure} error {here[observed]:.2g}, "
        f"bound {here[bound]:.2g}, {here[bound] / here[observed]:.2g} times as large; "
        f"κ_softmax = {here['κ_softmax']:.2g}, χ_score = {here['χ_score']:.2g}"
    )


def looseness(spread: float, format: str) -> Picture:
    """``pictures.looseness`` of the bound of 200 random heads."""
    table = ladder(stored(normal(spread, 200), format), format)
    axes, told = pictures.looseness(table, format, "heads", height=3.4)
    return axes, f"{format}, spread {spread:g}: {told}"


EXPONENTS = np.arange(-30, 21, 2)


def beyond_range(margin: float, format: str) -> Picture:
    """Observed error over the bound for values of every magnitude, one line a format. Storing the values counts too."""
    queries, keys, values = peaked(torch.tensor([margin]))
    scaled = values * torch.tensor(2.0**EXPONENTS)[:, None, None, None]
    inputs = queries.expand_as(scaled), keys.expand_as(scaled), scaled
    (axes,) = panels(8.2, height=3.8, right=1.5)
    held, allowed = {}, {}
    for marker, name in zip("osD^", FORMATS):
        table = errors(inputs, name)
        # An overflow leaves inf or NaN, which counts as an infinite error.
        ratio = np.nan_to_num(table.observed / table.bound, nan=np.inf).reshape(-1, DRAWS).max(1)
        held[name], allowed[name] = ratio <= 1, table.relative_bound.mean()
        strong = strength(name == format)
        axes.plot(EXPONENTS, ratio.clip(max=1e6), marker=marker, markersize=4, label=name, **strong)
    axes.axhline(1, **LIMIT)
    axes.text(-30, 0.4, "bound", fontsize="small")
    title = "the theorem holds while nothing over- or underflows"
    finish(axes, "log2 of the value scale", "largest error / bound", title, "y", BESIDE, ylim=(1e-3, 1e6))
    broken = EXPONENTS[~held[format]]
    stretches = np.split(broken, np.flatnonzero(np.diff(broken) > 2) + 1) if len(broken) else []
    where = " and ".join(f"2^{s[0]}" + f" to 2^{s[-1]}" * (len(s) > 1) for s in stretches)
    return [axes], (
        f"{format}, margin {margin:g}: the bound "
        + (f"fails for values of {where}" if where else f"holds from 2^{EXPONENTS[0]} to 2^{EXPONENTS[-1]}")
        + f"; it is {allowed[format]:.2g} ‖A‖"
    )
