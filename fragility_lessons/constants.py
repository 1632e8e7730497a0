"""The kernel constants of the theory: a priori for kernels that round once, and measured on a machine's kernels.

``kernel_samples`` draws the samples and states the error model.
"""

from typing import Any

import pandas as pd
import torch

from fragility_core import theory
from fragility_lessons.kernel_samples import (
    arithmetic,
    device_of,
    sample_attention,
    sample_layernorm,
    sample_stacks,
)
from fragility_numerics.formats import NumberFormat, get_format
from fragility_numerics.lowering import LowPrecision

# Each constant by the name of the theory's keyword argument, with the statement that introduces it.
CONSTANTS = {"c_gemm": "Lemma 1", "c_gemm_out": "Lemma 2", "c_softmax": "Lemma 3", "a_ln": "Proposition 1"}


def gamma_n(n: int, unit_roundoff: float) -> float:
    """gamma_n = n u / (1 - n u), the relative error of n roundings (Higham 2002, Lemma 3.1)."""
    return n * unit_roundoff / (1 - n * unit_roundoff)


def a_priori_constants(format: str, *, keys: int, head_width: int, features: int) -> dict[str, float]:
    """Constants for kernels that compute in fp32 and round once (kernel constants of Appendix A.7 (`app:estimation`)).

    ``keys`` m, ``head_width`` d, ``features`` d_model. In each constant, 1 is the rounding of the result and the
    rest is fp32 arithmetic: gamma_n for a sum of n terms, sqrt(min(m, d)) for the step from |V| to ||V||_2 (see
    ``theory.gemm_error_bound``), and a dozen roundings around exponentials (an approximate one may err by 20
    units) and moments.

    The three attention constants include O(u^2) and hold for every input without overflow or underflow: below the
    smallest normal number a result may err by half a subnormal spacing more (``kernel_samples.underflow``). a_ln
    also needs fp32's u ||x|| to be small beside sqrt(d_model (sigma^2 + epsilon)). A row in fp32 can break this: for
    x = (10^6 + 1/16, 10^6 + 1/8), gamma = 1 and epsilon = 1e-12 the error is 552 times the bound.
    """
    u, fine = get_format(format).unit_roundoff, get_format("fp32").unit_roundoff
    scaled = (1 + u) ** 2 * (1 + fine) ** 2  # product and scaling rounded, the scale itself rounded to fp32
    return {
        "c_gemm": (scaled - 1 - u + gamma_n(head_width, fine) * scaled) / u,
        "c_gemm_out": 1 + (1 + u) * gamma_n(keys, fine) * min(keys, head_width) ** 0.5 / u,
        "c_softmax": 1 + (1 + u) * gamma_n(2 * keys + 32, fine) / u,
        "a_ln": 1 + (1 + u) * gamma_n(2 * features + 16, fine) / u,
    }


def attention_terms(sample: pd.DataFrame, format: NumberFormat) -> pd.DataFrame:
    """``observed`` error of the three attention kernels, and its bound as ``free`` + constant x ``unit``.

    One row for each draw of ``sample_attention`` and constant, with family and shape.
    """
    s, u = sample, format.unit_roundoff
    scores = (s.score_norm, s.query_norm, s.key_norm, s.head_width, u)
    scaling = theory.score_error_bound(*scores, c_gemm=0.0)
    product = theory.score_error_bound(*scores, c_gemm=1.0) - scaling
    softmax = theory.softmax_error_bound(s.softmax_exact_norm, u, c_softmax=1.0)
    context = theory.gemm_error_bound(s.gemm_left_norm, s.value_spectral_norm, u, c_gemm_out=1.0)
    cell = s[["family", "shape"]]
    parts = [
        cell.assign(constant="c_gemm", observed=s.score_error, free=scaling + s.score_underflow, unit=product),
        cell.assign(constant="c_gemm_out", observed=s.gemm_error, free=s.context_underflow, unit=context),
        cell.assign(constant="c_softmax", observed=s.softmax_error, free=s.softmax_underflow, unit=softmax),
    ]
    return pd.concat(parts, ignore_index=True)


def _kernel_terms(low: LowPrecision, attention: pd.DataFrame, seed: int) -> pd.DataFrame:
    """``attention_terms`` of the sample ``attention``, and the same for Proposition 1 (`prop:ln`)."""
    s = sample_layernorm(low, seed)
    unit = theory.layernorm_error_bound(
        s.gamma_max, s.variance, s.epsilon, s.input_norm, low.format.unit_roundoff, a_ln=1.0
    )
    layernorm = s[["family", "shape"]].assign(
        constant="a_ln", observed=s.layernorm_error, free=s.layernorm_underflow, unit=unit
    )
    return pd.concat([attention_terms(attention, low.format), layernorm], ignore_index=True)


def measure_constants(format: str, device: str = "cpu", execution: str = "auto", seed: int = 0) -> pd.DataFrame:
    """The smallest kernel constants that hold over a seeded sample (Appendix A.7 (`app:estimation`)).

    One row for each constant: constant, statement, format, execution ("native" or "emulated"), device, value,
    sample (number of draws), and the family and shape (n x m x d or d_model) of the draw that attains the value. A
    value of 0 means that the terms without a constant cover every error. Below fp32 the values barely depend on
    shapes; in fp32 they grow with the lengths of the sums. Raises ValueError as ``lower`` does.
    """
    low = arithmetic(format, device, execution)
    terms = _kernel_terms(low, sample_attention(low, seed), seed)
    terms["value"] = ((terms.observed - terms.free) / terms.unit).clip(lower=0)
    grouped = terms.groupby("constant").value
    attained = terms.loc[grouped.idxmax()].set_index("constant").assign(sample=grouped.size()).loc[list(CONSTANTS)]
    table = attained.assign(statement=pd.Series(CONSTANTS), format=low.format.name, execution=low.execution)
    columns = ["constant", "statement", "format", "execution", "device", "value", "sample", "family", "shape"]
    return table.assign(device=str(device_of(low))).reset_index()[columns]


def constant_values(measured: pd.DataFrame) -> dict[str, float]:
    """The values of a ``measure_constants`` table by name, as the theory's keyword arguments take them."""
    return measured.set_index("constant").value.to_dict()


def bound_slack(
    format: str, device: str = "cpu", execution: str = "auto", seed: int = 1, constants: dict[str, float] | None = None
) -> pd.DataFrame:
    """The slack of each statement: its bound over the observed error, for each draw of a seeded sample.

    Columns: statement, format, execution, family, shape, observed, bound, slack = bound / observed (inf where
    nothing was rounded). ``constants`` are by default those of ``measure_constants`` with seed 0.

    The statements of the four kernels include underflow. "Theorem 1" is the printed first-order bound of Theorem 1
    (`thm:attn`), whose slack may fall below 1 if O(u^2) or underflow counts. "Theorem 1 with remainder" leaves out
    nothing. "Theorem 3" is Theorem 3 (`thm:unified`) for the linear stacks of ``kernel_samples.observe_stack``.
    """
    low = arithmetic(format, device, execution)
    constants = constants or constant_values(measure_constants(format, device, execution))
    attention, stacks = sample_attention(low, seed), sample_stacks(low, seed)
    terms = _kernel_terms(low, attention, seed)
    kernels = terms[["family", "shape", "observed"]].assign(
        statement=terms.constant.map(CONSTANTS), bound=terms.free + terms.constant.map(constants) * terms.unit
    )
    heads = attention[["family", "shape"]].assign(observed=attention.attention_error)
    first_order, complete = _attention_bounds(attention, low.format, constants)
    unified = stacks.addition_bound + constants["c_gemm_out"] * stacks.product_bound
    rows = [
        kernels,
        heads.assign(statement="Theorem 1", bound=first_order),
        heads.assign(statement="Theorem 1 with remainder", bound=complete),
        stacks[["family", "shape"]].assign(statement="Theorem 3", observed=stacks.mismatch, bound=unified),
    ]
    table = pd.concat(rows, ignore_index=True).assign(format=low.format.name, execution=low.execution)
    table["slack"] = table.bound / table.observed
    return table[["statement", "format", "execution", "family", "shape", "observed", "bound", "slack"]]


def summarize_slack(rows: pd.DataFrame) -> pd.DataFrame:
    """Slack by statement, format and execution, for ``rows`` of ``bound_slack``.

    Columns: draws, the share of draws without any error (``exact``), and quantiles over the other draws (smallest,
    1 %, median, 95 %, largest).
    """
    by = ["statement", "format", "execution"]
    exact = (rows.observed == 0).groupby([rows[name] for name in by], sort=False).mean()
    inexact = rows[rows.observed > 0].groupby(by, sort=False).slack
    quantiles = inexact.quantile([0, 0.01, 0.5, 0.95, 1]).unstack()
    quantiles.columns = ["smallest", "1 %", "median", "95 %", "largest"]
    return pd.concat([rows.groupby(by, sort=False).size().rename("draws"), exact.rename("exact"), quantiles], axis=1)


def _attention_bounds(attention: pd.DataFrame, format: NumberFormat, constants: dict[str, float]) -> tuple:
    """The bound of Theorem 1 (`thm:attn`) for every draw, to first order and in full."""
    kernels = {name: constants[name] for name in ("c_softmax", "c_gemm", "c_gemm_out")}
    column: dict[str, Any] = {
        name: torch.from_numpy(attention[name].to_numpy(copy=True)) for name in attention.select_dtypes("number")
    }
    norms, u = theory.AttentionNorms._make(map(column.__getitem__, theory.AttentionNorms._fields)), format.unit_roundoff
    first_order = theory.attention_error_bound(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm, u, **kernels
    )
    underflow = column["score_underflow"], column["softmax_underflow"], column["context_underflow"]
    complete = theory.attention_error_bound_with_remainder(norms, column["spread"], u, **kernels, underflow=underflow)
    return first_order.numpy(), complete.numpy()
