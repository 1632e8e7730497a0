"""Notebook 3: the amplification of errors by LayerNorm, its dependence on epsilon, and the ratio rho_LN."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_lessons import bits, drawing, pictures, shipped
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.pictures import FORMATS as FORMATS
from fragility_lessons.pictures import LIMIT, SMALL_BESIDE, TWO_COLUMNS, Picture, finish, panels
from fragility_lessons.rows import (
    A_LN,
    FEATURES,
    STEPS,
    drawn,
    errors,
    ladder,
    mean_variance,
    standard_normal,
    standardised,
    uneven_gamma,
)
from fragility_numerics.formats import get_format

EXERCISES = exercises("layernorm_epsilon")
WIDTHS = ("64", "128", "768", "4096")
DRAWS = 4
EPSILONS = 10 ** np.linspace(-8, 4, 13)
SHOWN = (3e-9, 3e4)  # ε in pictures of rounding
VARIANCE, ROWS = 3.0, 200  # of the rows in ``looseness``


# --- A failure --------------------------------------------------------------------------------

ROW = torch.tensor([100.2, 100.4, 99.9, 100.1])


def failure(format: str = "bf16", epsilons: tuple[float, float] = (1e-5, 1.0)) -> pd.DataFrame:
    """ROW and its LayerNorm, before and after the row is stored in a ``format``, for each of ``epsilons``."""
    rows, gamma = {"x": ROW.double(), "stored": get_format(format).round(ROW).double()}, torch.ones(len(ROW)).double()
    columns = {(f"the row, exact and in {format}", name): x for name, x in rows.items()}
    for epsilon in epsilons:
        for name, x in zip(("Z", "Z, stored"), rows.values()):
            columns[f"ε = {epsilon:g}", name] = theory.layernorm_path(x, gamma, epsilon)
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()}).round(2).rename_axis("feature")


# --- The factor -------------------------------------------------------------------------------


def factor(variance_exponent: float, epsilon_exponent: float) -> Picture:
    """First panel: f(epsilon) and its two limits. Second: output, error bound and their quotient over epsilon."""
    variance, epsilon = 10**variance_exponent, 10**epsilon_exponent
    epsilons = np.geomspace(1e-8, 1e4, 49)
    here = theory.layernorm_factor(variance, epsilon)
    curve, shares = panels(height=3.8, here=epsilon)
    curve.plot(epsilons, np.full_like(epsilons, 2 / variance**0.5), color="0.5", linestyle=":", label="2/σ")
    curve.plot(epsilons, epsilons**-0.5, color="0.5", linestyle="--", label="1/√ε")
    curve.plot(epsilons, theory.layernorm_factor(variance, epsilons), color="C3", label="f(ε)")
    curve.plot(epsilon, here, "o", color="C3", markersize=8)
    finish(curve, "ε", "f(ε)", "f(ε), the amplification of LayerNorm", "xy", "best", ylim=(1e-2, 1e4))

    scale = (1 + epsilons / variance) ** -0.5
    bound = theory.layernorm_factor(variance, epsilons) / theory.layernorm_factor(variance, 0.0)
    shares.plot(epsilons, bound, color="C3", label="M_LN (absolute error)")
    shares.plot(epsilons, scale, color="C0", linestyle="--", label="‖Z‖ (output)")
    shares.plot(epsilons, bound / scale, color="C2", linestyle="-.", label="C_LN (their quotient)")
    shares.axvline(variance, **LIMIT)
    title = "as a share of the value at ε = 0"
    finish(shares, "ε (dashed: ε = σ²)", "share", title, "x", "lower left", ylim=(0, 1.05))
    share = epsilon / variance
    return [curve, shares], (
        f"σ² = {variance:.2g}, ε = {epsilon:.2g} = {share:.2g} σ²: f(ε) = {here:.3g}; against ε = 0 the output shrinks "
        f"to {(1 + share) ** -0.5:.3g}, the error bound to {here * variance**0.5 / 2:.3g}, their quotient to "
        f"{(2 + share) / (1 + share) / 2:.3g}"
    )


def bound(x: Tensor, gamma: Tensor, epsilon: float, u: float) -> Tensor:
    """u M_LN of the row ``x`` (d_model,) with a_ln = 1 (Proposition 1 (`prop:ln`))."""
    norms = theory.layernorm_norms(x, gamma, epsilon)
    return theory.layernorm_error_bound(norms.gamma_max, norms.variance, epsilon, norms.input_norm, u, a_ln=1.0)


CASES = [(torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([0.5, -2.0, 1.0, 1.5]), 0.1, 2**-8)]
CODING = coding("layernorm_epsilon", bound, CASES)


# --- Measured errors --------------------------------------------------------------------------


@cache
def sweep(variance: float, offset: float, format: str, rounded: str) -> pd.DataFrame:
    """``rows.errors`` of DRAWS rows at each of EPSILONS."""
    x, gamma = drawn(variance, offset, DRAWS), torch.ones(FEATURES)
    return pd.concat([errors(x, gamma, epsilon, format, rounded) for epsilon in EPSILONS])


def rounding(variance_exponent: float, offset: float, epsilon_exponent: float, format: str, rounded: str) -> Picture:
    """Error of LayerNorm and its bound over epsilon, absolute and relative to the output."""
    variance, epsilon = 10**variance_exponent, 10**epsilon_exponent
    table = sweep(variance, offset, format, rounded)
    here = errors(drawn(variance, offset, DRAWS), torch.ones(FEATURES), epsilon, format, rounded).mean()
    mean = table.groupby("epsilon").mean()
    row = panels(height=3.8, here=epsilon)
    pairs = {"absolute": ("observed", "bound"), "relative": ("relative", "relative_bound")}
    for axes, (kind, (observed, bound)) in zip(row, pairs.items()):
        axes.plot(table.epsilon, table[observed], ".", color="C0", markersize=4, label="observed")
        axes.plot(mean.index, mean[bound], color="C3", label="bound")
        axes.axvline(variance, **LIMIT)
        legend = TWO_COLUMNS if kind == "absolute" else None
        labels = ("ε (dashed: ε = σ²)", f"{kind} error", f"{format}: {kind} error")
        finish(axes, *labels, "xy", legend, xlim=SHOWN, ylim=(1e-6, 1e2))
    return row, (
        f"{format}, σ² = {variance:.2g}, mean {offset:g} σ, ε = {epsilon:.2g}, rounded: {rounded}; "
        f"error {here.observed:.2g}, bound {here.bound:.2g}, {here.bound / here.observed:.2g} times as large; "
        f"relative to the output {here.relative:.2g}, bound {here.relative_bound:.2g}"
    )


def rounding_data(draws: int = DRAWS) -> dict[str, Any]:
    """The data of ``rounding`` from which the browser computes."""
    known = {"rows": drawing.base64_of(standardised(draws).numpy()), "features": FEATURES}
    known |= {"epsilons": EPSILONS.tolist(), "limits": SHOWN, "constants": A_LN}
    return known | {"formats": bits.described(FORMATS)}


def looseness_data() -> dict[str, Any]:
    """The data of ``looseness`` from which the browser computes."""
    own = {"variance": VARIANCE, "normal": standard_normal(FEATURES).tolist(), "names": STEPS[1:]}
    return rounding_data(ROWS) | own


def looseness(share_exponent: float, offset: float, spread: float, format: str) -> Picture:
    """``pictures.looseness`` of u M_LN as a bound of 200 random rows."""
    table = ladder(drawn(VARIANCE, offset, ROWS), uneven_gamma(spread), 10**share_exponent * VARIANCE, format)
    axes, told = pictures.looseness(table, format, "rows", height=3.8)
    return axes, f"{format}, ε = {10**share_exponent:.2g} σ², mean {offset:g} σ: {told}"


# --- The ratio --------------------------------------------------------------------------------


def gate(epsilon: float, d_model: int, format: str) -> pd.DataFrame:
    """The LayerNorm sites of the embedded checkpoint and their rho_LN, as if they were ``d_model`` wide."""
    sites = shipped.sites()
    ratio = theory.layernorm_ratio(sites.variance, epsilon, d_model, get_format(format).unit_roundoff)
    return sites.assign(ratio=ratio)


def regimes(epsilon_exponent: float, width: str, format: str) -> Picture:
    """The lines epsilon = sigma^2 and rho_LN = 1 in the plane of variance and epsilon, and a model's LayerNorms."""
    epsilon, slope = 10**epsilon_exponent, int(width) * get_format(format).unit_roundoff
    sites = gate(epsilon, int(width), format)
    variance, top = np.array([1e-8, 1e3]), 1e3
    (axes,) = panels(8.2, height=4.2, right=2.4)
    axes.fill_between(variance, slope * variance, top, color="C0", alpha=0.2, linewidth=0, label="ρ_LN < 1: gate open")
    axes.plot(variance, slope * variance, color="C0", label="ε = d u σ²")
    axes.plot(variance, variance, color="0.2", linestyle="--", label="ε = σ²")
    for site, marker in ((1, "o"), (2, "x")):
        chosen = sites[sites.site == site]
        axes.plot(chosen.variance, np.full(len(chosen), epsilon), marker, color="C3", label=f"LayerNorm {site}")
    title, limits = f"{format}: where the gate is, and where a model is", {"xlim": variance, "ylim": (1e-8, top)}
    finish(axes, "variance σ²", "ε", title, "xy", SMALL_BESIDE, **limits)
    return [axes], (
        f"{format}, width {width}: ρ_LN < 1 needs ε > {slope:.3g} σ²; at ε = {epsilon:.2g} the {len(sites)} LayerNorms "
        f"have ρ_LN from {sites.ratio.min():.2g} to {sites.ratio.max():.2g}; the gate is open at "
        f"{(sites.ratio < 1).sum()}, and at all of them above ε = {slope * sites.variance.max():.2g}"
    )


# --- Matrices ---------------------------------------------------------------------------------


@cache
def loudness_sweep(epsilon: float, format: str, rounded: str) -> pd.DataFrame:
    """``rows.mean_variance`` over the scale of the loud row."""
    return pd.DataFrame([mean_variance(2.0**exponent, epsilon, format, rounded) for exponent in range(-12, 5, 2)])


def two_rows(loudness_exponent: float, epsilon_exponent: float, format: str, rounded: str) -> Picture:
    """A quiet and a loud row together: error and both readings of the bound over the scale of the loud row."""
    epsilon = 10**epsilon_exponent
    table = loudness_sweep(epsilon, format, rounded)
    here = mean_variance(2.0**loudness_exponent, epsilon, format, rounded)
    mean = here["bound with the mean variance"]
    (axes,) = panels(8.2, height=3.8, right=2.6, here=here["loudness"])
    axes.plot(table.loudness, table.bound, "-", color="C3", label="bound, row by row")
    axes.plot(table.loudness, table["bound with the mean variance"], "--", color="C1", label="with the mean variance")
    axes.plot(table.loudness, table.observed, ".-", color="C0", label="observed")
    labels = ("scale of the loud row", "error of both rows", f"{format}: a quiet row beside a loud one")
    finish(axes, *labels, "xy", SMALL_BESIDE, ylim=(1e-3, 1e2))
    over = here["observed"] / mean
    verdict = "holds" if over <= 1 else f"fails, the error is {over:.2g} times as large"
    return [axes], (
        f"{format}, rounded: {rounded}, loud row ±{here['loudness']:.3g}, ε = {epsilon:.2g}: error "
        f"{here['observed']:.2g}, bound row by row {here['bound']:.2g}, with the mean variance {mean:.2g} ({verdict})"
    )
