"""Notebook 1: the numbers of a format, the error of rounding to them, and the errors that softmax passes on.

``bits`` has the fields of a number and the table of formats.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_lab.reporting.figures import figure_of
from fragility_lessons import bits, drawing
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.pictures import BESIDE, LIMIT, Picture, finish, panels, strength
from fragility_lessons.pictures import FORMATS as LOW
from fragility_numerics.formats import FORMATS, Format, get_format

EXERCISES = exercises("floating_point")
ROWS, KEYS = 400, 16


# --- A failure --------------------------------------------------------------------------------

WORDS = {"mat": 1.7, "cat": 0.0}  # the scores of two keys, up to the offset


def stored_scores(offset: float, format: str) -> Tensor:
    """The scores of WORDS with an offset, as a format stores them, in fp64."""
    return get_format(format).round(torch.tensor(list(WORDS.values())) + offset).double()


def failure(offset: float) -> Picture:
    """The probability of the better word, by format, if scores are stored with an ``offset`` that should not matter."""
    names = ("fp32", *LOW)
    scores = [stored_scores(offset, name) for name in names]
    shares = [pair.softmax(0)[0].item() for pair in scores]
    (axes,) = panels(8.2, height=3.6, right=0.4)
    figure_of(axes).subplots_adjust(bottom=0.24)
    axes.bar(
        [name.replace("_", "\n") for name in names],
        shares,
        color=["C0" if abs(share - shares[0]) < 0.02 else "C3" for share in shares],
        width=0.6,
    )
    for place, (share, pair) in enumerate(zip(shares, scores)):
        axes.text(place, share + 0.03, "{:g}\n{:g}".format(*pair.tolist()), ha="center", va="bottom", fontsize="small")
    axes.axhline(torch.tensor(list(WORDS.values())).softmax(0)[0].item(), **LIMIT)
    axes.text(4.45, 0.88, "exact", ha="right", fontsize="small")
    finish(axes, "the scores are stored in", "probability of “mat”", "above each bar: the stored scores", ylim=(0, 1.3))
    told = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, shares))
    return [axes], f"{offset:g} added to both scores; “mat” gets: {told}"


# --- The grid ---------------------------------------------------------------------------------


@cache
def all_numbers(format: str) -> np.ndarray:
    """Every finite number of a format of at most 16 bits, ascending: all bit patterns are tried."""
    storage = get_format(format).storage
    assert storage is not None
    integer = {1: torch.int8, 2: torch.int16}[storage.itemsize]
    values = torch.arange(2 ** (8 * storage.itemsize)).to(integer).view(storage).double()
    return np.unique(values[values.isfinite()].numpy())


def spacing(x: float, format: Format) -> float:
    """Distance between neighbours in ``format`` around ``x``: 2u 2^e for 2^e <= |x| < 2^{e+1}.

    Below the smallest normal number the spacing stays the same.
    """
    _, exponent = math.frexp(max(abs(x), format.smallest_normal))
    return format.spacing * 2.0 ** (exponent - 1)


def rounded(x, format: Format) -> np.ndarray:
    """fp32 numbers ``x`` rounded to ``format``, as fp64."""
    return format.round(torch.as_tensor(x, dtype=torch.float32)).double().numpy()


def relative_errors(x: np.ndarray, format: Format) -> np.ndarray:
    """|fl(x) - x| / |x| of nonzero numbers."""
    x = np.asarray(x, dtype=np.float32).astype(np.float64)
    return np.abs(rounded(x, format) - x) / np.abs(x)


def neighbours(x: float, format: str) -> Picture:
    """First panel: ``x`` among the numbers of ``format``. Second: relative error around 1, in units of u."""
    chosen = get_format(format)
    unit, step, nearest = chosen.unit_roundoff, spacing(x, chosen), float(rounded(x, chosen))
    grid = all_numbers(format)
    grid = grid[np.abs(grid - nearest) <= 4 * step]
    own = abs(nearest - x) / x
    line, error = panels(height=3.2)

    line.plot(grid, np.zeros_like(grid), "|", color="0.2", markersize=26, label="grid")
    line.plot(nearest, 0, "D", color="C0", markersize=8, fillstyle="none", markeredgewidth=2, label="x rounded")
    line.plot([x, x, nearest], [0.45, 0.3, 0.1], color="C3", linewidth=1)
    line.plot(x, 0.45, "o", color="C3", markersize=8, label="x")
    legend = {"loc": "upper center", "ncols": 3, "frameon": False, "fontsize": "small", "markerscale": 0.5}
    title = f"{format}: neighbours are {step:.3g} apart here"
    finish(line, "number line", "", title, legend=legend, yticks=[], ylim=(-0.8, 1.2))
    line.locator_params(axis="x", nbins=5)

    numbers = np.geomspace(0.25, 4, 2001)[1:-1]
    error.plot(np.log2(numbers), relative_errors(numbers, chosen) / unit, color="C0", linewidth=0.8)
    error.axhline(1, **LIMIT)
    error.text(-1.95, 1.04, "unit roundoff u", fontsize="small")
    error.plot(np.log2(x), own / unit, "o", color="C3", markersize=8)
    ticks: dict[str, Any] = {"xticks": range(-2, 3), "xticklabels": ["1/4", "1/2", "1", "2", "4"]}
    finish(error, "x", "relative error / u", "relative error of rounding", ylim=(0, 1.2), **ticks)
    return [line, error], (
        f"{format}: {x:.4g} is rounded to {nearest:.6g}, relative error {own:.2e} = {own / unit:.2f} u; "
        f"u = {unit:.3g}, spacing above 1 = {chosen.spacing:.3g}"
    )


BY_BITS = {round(-math.log2(get_format(name).unit_roundoff)): get_format(name) for name in LOW}
CASES = [(1.23, 0, 4), (300.7, 8, 8), (2.6, 1, 3), (0.37, -2, 11)]
CODING = coding("floating_point", lambda x, e, t: rounded(x, BY_BITS[t]), CASES)


@cache
def worst_errors() -> pd.DataFrame:
    """The largest relative error of rounding, for each binade [2^e, 2^{e+1}) and each format."""
    exponents = np.arange(-30, 21)
    # 2^11 samples a binade: the midpoints of fp16 are among them, and those of the coarser formats.
    numbers = np.ldexp(1 + np.arange(2048) / 2048, exponents[:, None])  # (binades, samples)
    tables = [
        pd.DataFrame({"format": name, "exponent": exponents, "error": relative_errors(numbers, FORMATS[name]).max(1)})
        for name in LOW
    ]
    return pd.concat(tables, ignore_index=True)


def ranges(exponent: int, format: str) -> Picture:
    """The largest relative error of rounding over the magnitude of the rounded number, one line a format."""
    table = worst_errors()
    (axes,) = panels(8.2, height=3.8, right=1.5, here=exponent)
    for marker, (name, curve) in zip("osD^", table.groupby("format", sort=False)):
        strong = strength(name == format)
        axes.plot(curve.exponent, curve.error.clip(upper=9), marker=marker, markersize=4, label=name, **strong)
    axes.text(14, 4, "overflow", fontsize="small", ha="right")
    title = "inside its range, a format's relative error is at most u"
    finish(axes, "binary exponent of x", "largest relative error", title, "y", BESIDE, ylim=(1e-4, 9))
    chosen = get_format(format)
    error = table.error[(table.format == format) & (table.exponent == exponent)].item()
    told = f"{error:.2g} = {error / chosen.unit_roundoff:.3g} u" if np.isfinite(error) else "infinite, by overflow"
    return [axes], (
        f"{format} between 2^{exponent} and 2^{exponent + 1}: largest relative error {told}; "
        f"normal from {chosen.smallest_normal:.2g} to {chosen.largest:.3g}"
    )


# --- Softmax ----------------------------------------------------------------------------------


def one_against_many(margin, rivals: int) -> Tensor:
    """Softmax of one score ``margin`` (...) and of ``rivals`` scores 0: probabilities (..., 1 + rivals)."""
    margin = torch.as_tensor(margin, dtype=torch.float64)
    scores = torch.cat([margin[..., None], margin.new_zeros(*margin.shape, rivals)], -1)
    return scores.softmax(-1)


def row_sensitivity(p: Tensor) -> Tensor:
    """||J(p)||_2 of every row of probabilities (..., n) -> (...) (Lemma 4 (`lem:softmax-jac`))."""
    return theory.softmax_sensitivity(p.unsqueeze(-2))


def margins(margin: float, rivals: int) -> Picture:
    """First panel: the probabilities. Second: ||J(p)||_2 over the margin."""
    p = one_against_many(margin, rivals)
    sweep = torch.linspace(-6, 8, 113, dtype=torch.float64)
    here = row_sensitivity(p).item()
    bars, line = panels(height=3.4)
    bars.bar(np.arange(1 + rivals), p.numpy(), color=["C3"] + ["C0"] * rivals)
    bars.set(xlabel="key", ylabel="probability", ylim=(0, 1), title="softmax of the scores")
    bars.locator_params(axis="x", integer=True)
    line.plot(sweep.numpy(), row_sensitivity(one_against_many(sweep, rivals)).numpy(), color="C0")
    line.plot(margin, here, "o", color="C3", markersize=9)
    line.axhline(0.5, **LIMIT)
    line.text(8, 0.51, "never above 1/2", fontsize="small", ha="right")
    line.axvline(math.log(rivals), color="0.5", linestyle=":", linewidth=1.5)
    finish(line, "margin of key 0", "‖J(p)‖₂", "sensitivity of softmax", ylim=(0, 0.57))
    told = f"‖J(p)‖₂ = {here:.3f} (at most 0.5); p of key 0 = {p[0]:.3f}, of each rival = {p[1]:.3f}"
    return [bars, line], f"margin {margin:.1f}: {told}"


def triangle(score_a: float, score_b: float) -> Picture:
    """||J(p)||_2 over all probabilities of three keys a, b, c; the score of c is 0."""
    steps = 40
    weights = [(a, b, steps - a - b) for a in range(steps + 1) for b in range(steps + 1 - a)]
    p = torch.tensor(weights, dtype=torch.float64) / steps
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]], dtype=torch.float64)
    own = torch.tensor([score_a, score_b, 0.0], dtype=torch.float64).softmax(0)
    here = row_sensitivity(own).item()
    (axes,) = panels(6.4, height=4.6)
    levels = np.linspace(0, 0.5, 11)
    x, y = (p @ corners).T.numpy()
    filled = axes.tricontourf(x, y, row_sensitivity(p).numpy(), levels=levels, cmap="viridis")
    figure_of(axes).colorbar(filled, label="‖J(p)‖₂", ticks=levels[::2])
    axes.plot(*(own @ corners).numpy(), "o", color="white", markeredgecolor="black", markersize=11)
    for x, y, name in ((0, -0.08, "a"), (1, -0.08, "b"), (0.5, 0.9, "c")):
        axes.text(x, y, f"all on {name}", ha="center")
    title = "‖J(p)‖₂ of three keys: largest where two tie and the third is out"
    axes.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.1, 0.98), title=title)
    axes.axis("off")
    return [axes], f"‖J(p)‖₂ = {here:.3f} at p = ({own[0]:.2f}, {own[1]:.2f}, {own[2]:.2f})"


def noise() -> Tensor:
    """Normal numbers (ROWS, KEYS) in fp32, the same at each call."""
    return torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(0))


def score_rounding_data() -> dict[str, Any]:
    """The data of ``score_rounding`` from which the browser computes."""
    return {"noise": drawing.base64_of(noise().numpy()), "keys": KEYS, "formats": bits.described(LOW)}


def rounded_scores(offset: float, spread: float, format: str) -> pd.DataFrame:
    """Softmax of ROWS rows of KEYS random scores against softmax of the same scores rounded to ``format``.

    Columns: ``observed`` is ||softmax(fl(s)) - softmax(s)||. ``first_order`` is u ||s|| ||J||_2, a bound up to O(u^2).
    ``guaranteed`` is u ||s|| / 2, a bound for errors of any size, because ||J||_2 <= 1/2 everywhere.
    """
    chosen = get_format(format)
    scores = offset + spread * noise()  # fp32, taken as exact
    low = chosen.round(scores).double()
    p = scores.double().softmax(-1)
    size = chosen.unit_roundoff * torch.linalg.vector_norm(scores.double(), dim=-1)
    return pd.DataFrame(
        {
            "observed": torch.linalg.vector_norm(low.softmax(-1) - p, dim=-1),
            "first_order": size * row_sensitivity(p),
            "guaranteed": size / 2,
        }
    )


def score_rounding(offset: float, spread: float, format: str) -> Picture:
    """Observed error of softmax over its first-order bound, one point a row of scores."""
    table = rounded_scores(offset, spread, format)
    above = table.observed > table.first_order
    (axes,) = panels(6.4, height=4.2)
    axes.plot(table.first_order[~above], table.observed[~above], ".", color="C0", label="below the bound")
    axes.plot(table.first_order[above], table.observed[above], "x", color="C3", label="above it")
    ends = np.array([1e-6, 100])
    axes.plot(ends, ends, **LIMIT)
    labels = ("first-order bound u ‖s‖ ‖J(p)‖₂", "observed change of p", "rounding the scores")
    finish(axes, *labels, "xy", {"frameon": False, "loc": "upper left"}, xlim=ends, ylim=(1e-9, 10))
    slack, never = (table.first_order / table.observed).median(), table.observed > table.guaranteed
    return [axes], (
        f"{format}, offset {offset:g}, spread {spread:g}: bound / observed = {slack:.2g} (median); "
        f"above the first-order bound: {above.sum()} of {ROWS}; above u‖s‖/2: {never.sum()}"
    )
