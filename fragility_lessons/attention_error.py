"""Notebook 2: rounding errors of one attention head, the bound of Theorem 1 (`thm:attn`), and the steps of its proof.

A head is a triple of queries, keys and values (..., T, d). Leading dimensions are independent draws. Like the kernels
of a device, those here accumulate in fp32 and round each result once. Errors are differences from fp64 on the same
inputs.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_core.theory import AttentionNorms
from fragility_lessons import bits, drawing, pictures
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.floating_point import stored_scores
from fragility_lessons.pictures import BESIDE, FORMATS, LIMIT, TWO_COLUMNS, Picture, finish, panels, strength
from fragility_lessons.rows import standard_normal
from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import get_format

EXERCISES = exercises("attention_error")
MARGINS = torch.arange(1, 41, dtype=torch.float64) / 4
MEASURES = {"absolute": ("observed", "bound"), "relative": ("relative", "relative_bound")}
LIMITS = {"absolute": (1e-5, 1e3), "relative": (1e-4, 10.0)}  # the same for all scales of values, so that points move
STEPS = ["observed error", "norms multiplied", "largest ‖J‖ of the rows", "largest rounding (bound)"]
KEYS, WIDTH, DRAWS = 8, 24, 4  # of the heads below; dividing by sqrt(24) rounds, as it is no power of two

# A kernel that rounds its result once has a relative error of at most u in every entry. So the three kernels err by
# at most u ||QK^T|| <= u ||Q|| ||K||, u ||P|| and u ||PV|| <= u ||P|| ||V||_2. fp32 accumulation adds far less.
CONSTANTS = {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}

Head = tuple[Tensor, Tensor, Tensor]


# --- A failure ---------------------------------------------------------------------------------


def failure() -> pd.DataFrame:
    """The head of notebook 1 (``floating_point.failure``) by format, with values 1 and -1."""
    rows = {}
    for name in ("fp32", *FORMATS):
        scores = stored_scores(299.0, name)
        first, second = scores.softmax(0).tolist()
        told = {"stored scores": "{:g}, {:g}".format(*scores.tolist())}
        rows[name] = told | {"probabilities": f"{first:.2f}, {second:.2f}", "output": f"{first - second:.2f}"}
    return pd.DataFrame(rows).T


# --- Errors and the bound -----------------------------------------------------------------------


def stored(head: Head, format: str) -> Head:
    """``head`` rounded to ``format``, in the format's ``compute_dtype``."""
    query, key, value = (get_format(format).round(part.float()) for part in head)
    return query, key, value


def low_attention(head: Head, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """S, P and A of ``head``, stored and computed in ``format`` and returned as fp64."""
    query, key, value = stored(head, format)
    with Emulation(get_format(format)):
        scores = query @ key.mT / math.sqrt(query.shape[-1])  # (..., T, T)
        probabilities = scores.softmax(-1)
        context = probabilities @ value  # (..., T, d)
    return scores.double(), probabilities.double(), context.double()


def error_bound(norms: AttentionNorms, format: str) -> Tensor:
    """The bound of Theorem 1 (`thm:attn`) for kernels that round once, for each draw (...)."""
    amplified = (norms.probability_norm, norms.value_spectral_norm, get_format(format).unit_roundoff)
    return theory.attention_error_bound(norms.kappa_softmax, norms.chi_score, *amplified, **CONSTANTS)


def errors(head: Head, format: str) -> pd.DataFrame:
    """Observed error and bound, absolute and relative, and the condition numbers, one row for each draw of ``head``."""
    norms = theory.attention_norms(*head)
    *_, exact = theory.exact_attention(*head)
    *_, low = low_attention(head, format)
    columns = {
        "observed": torch.linalg.matrix_norm(low - exact),
        "bound": error_bound(norms, format),
        "context": norms.context_norm,
        "κ_softmax": norms.kappa_softmax,
        "χ_score": norms.chi_score,
    }
    table = pd.DataFrame({name: column.flatten().numpy() for name, column in columns.items()})
    return table.assign(relative=table.observed / table.context, relative_bound=table.bound / table.context)


def ladder(head: Head, format: str) -> pd.DataFrame:
    """The steps of the proof of Theorem 1 (`thm:attn`), one row for each draw.

    Each column bounds the column before it, up to O(u^2). First the norms of P~ - P and V are multiplied, and the
    error of the product PV is added. Then d_smx ||S~ - S|| plus the error of the softmax kernel replaces ||P~ - P||.
    Last, the largest possible error replaces each measured one.
    """
    norm = torch.linalg.matrix_norm
    norms, exact, low = theory.attention_norms(*head), theory.exact_attention(*head), low_attention(head, format)
    scores, probabilities, context = (norm(there - here) for there, here in zip(low, exact))
    kernel = norm(low[1] - low[0].softmax(-1))
    product = norm(low[2] - low[1] @ head[2].double())
    columns = [
        context,
        probabilities * norms.value_spectral_norm + product,
        (norms.sensitivity * scores + kernel) * norms.value_spectral_norm + product,
        error_bound(norms, format),
    ]
    return pd.DataFrame(torch.stack(columns, -1).numpy(), columns=STEPS)


# --- Example heads ------------------------------------------------------------------------------


@cache
def orthogonal() -> tuple[Tensor, Tensor]:
    """Rows of random orthogonal matrices and values, both (DRAWS, KEYS, WIDTH), as numbers of fp32 in fp64.

    Values are normal with mean zero over the keys, so that they cancel if attention is uniform.
    """
    rows = torch.linalg.qr(standard_normal(DRAWS, WIDTH, KEYS)).Q.mT
    values = standard_normal(DRAWS, KEYS, WIDTH)
    return rows.float().double(), (values - values.mean(-2, keepdim=True)).float().double()


def peaked(margin: Tensor, value_scale: float = 1.0) -> Head:
    """Heads (M, DRAWS, KEYS, WIDTH) in which every query prefers one key by ``margin`` (M,): S = margin I.

    Queries and keys are the same scaled rows of orthogonal matrices.
    """
    rows, values = orthogonal()
    directions = rows * (margin.double() * math.sqrt(WIDTH)).sqrt()[:, None, None, None]
    return directions, directions, (value_scale * values).expand_as(directions)


def normal(spread: float, draws: int) -> Head:
    """Normal queries, keys and values (draws, KEYS, WIDTH) whose scores have the standard deviation ``spread``."""
    queries, keys, values = standard_normal(3, draws, KEYS, WIDTH)
    return queries * math.sqrt(spread), keys * math.sqrt(spread), values


# --- The coding exercise ------------------------------------------------------------------------


def bracket(query: Tensor, key: Tensor, d_smx: float) -> float:
    """The bracket of Theorem 1 (`thm:attn`) for kernels that round once, with ``d_smx`` given."""
    scores, probabilities, _ = theory.exact_attention(query, key, key)
    norms, width = (query.norm(), key.norm(), probabilities.norm()), query.shape[-1]
    kappa = theory.kappa_softmax(scores.norm(), probabilities.norm(), d_smx)
    return theory.attention_coefficient(kappa, theory.chi_score(*norms, width, d_smx), **CONSTANTS)


CASES = [(torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[0.3, 1.0], [2.0, -0.5]]), 0.25)]
CODING = coding("attention_error", bracket, CASES)


# --- Pictures ----------------------------------------------------------------------------------


@cache
def sweep(value_exponent: float, format: str) -> pd.DataFrame:
    """``errors`` of heads with each of MARGINS, and the column ``margin``."""
    table = errors(stored(peaked(MARGINS, 2.0**value_exponent), format), format)
    return table.assign(margin=MARGINS.repeat_interleave(DRAWS).numpy())


def sharpness(margin: float, value_exponent: float, format: str, measure: str) -> Picture:
    """First panel: error and bound over the margin. Second: the terms in the bracket of the bound."""
    table = sweep(value_exponent, format)
    observed, bound = MEASURES[measure]
    mean = table.groupby("margin").mean()
    here = mean.iloc[np.abs(mean.index - margin).argmin()]
    curve, terms = panels(height=3.8, here=margin)

    curve.plot(table.margin, table[observed], ".", color="C0", markersize=4, label="observed")
    curve.plot(mean.index, mean[bound], color="C3", label="bound")
    labels, limits = ("margin", f"{measure} error", f"{format}: error of the head"), (0, MARGINS[-1].item())
    finish(curve, *labels, "y", TWO_COLUMNS, xlim=limits, ylim=LIMITS[measure])

    heights = [np.ones(len(mean)), np.ones(len(mean)), mean["κ_softmax"], mean["χ_score"]]
    names = ["c′_gemm (PV)", "c_smx (softmax)", "κ_softmax", "χ_score"]
    terms.stackplot(mean.index, heights, labels=names, colors=["0.75", "0.55", "C0", "C1"])
    terms.axvline(math.log(KEYS - 1), **LIMIT)
    finish(terms, "margin", "", "terms in the bound's bracket", "", "upper right", xlim=limits, ylim=(0, 7))
    return [curve, terms], (
        f"{format}, margin {margin:g}, values × 2^{value_exponent:g}: {measure} error {here[observed]:.2g}, "
        f"bound {here[bound]:.2g}, {here[bound] / here[observed]:.2g} times as large; "
        f"κ_softmax = {here['κ_softmax']:.2g}, χ_score = {here['χ_score']:.2g}"
    )


def sharpness_data() -> dict[str, Any]:
    """The data of ``sharpness`` from which the browser computes."""
    rows, values = (drawing.base64_of(part.numpy()) for part in orthogonal())
    known = {"rows": rows, "values": values, "keys": KEYS, "width": WIDTH, "margins": MARGINS.tolist()}
    axes = {measure: drawing.panel(sharpness(2.0, 0.0, "bf16", measure)[0][0])[0]["y"] for measure in MEASURES}
    return known | {"limits": LIMITS, "axes": axes, "formats": bits.described(FORMATS)}


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
    axes.text(-4, 1.5, "bound", fontsize="small")
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
