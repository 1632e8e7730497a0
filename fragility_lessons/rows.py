"""Rows through LayerNorm in a low format: the error, the bound of Proposition 1 (`prop:ln`), the steps of its proof.

Rows are (..., d_model) in fp32, gamma is (d_model,). Kernels round like those of a device. Errors are differences
from fp64 (``theory.layernorm_path``).
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_core import theory
from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import get_format

FEATURES = 64

# What is rounded, and a constant a_ln that holds for it. Rounding the result costs u ||Z||, at most u M_LN. Rounding
# the input costs at most u M_LN as well, to first order. Of the single steps, rounding the mean costs
# u |mu| sqrt(d_model) / sqrt(sigma^2 + epsilon), and subtraction, variance, root and two products together at most
# (4.5 + 2 sigma^2 / (sigma^2 + epsilon)) u ||x - mu|| / sqrt(sigma^2 + epsilon). In all, that is at most 4.6 u M_LN.
A_LN = {"the result": 1.0, "input and result": 2.0, "every step": 5.0}


def fused(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """LayerNorm without bias by the library's kernel, which rounds its result only."""
    return nn.functional.layer_norm(x, gamma.shape, gamma, None, epsilon)


def stepwise(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """LayerNorm without bias from elementary kernels, each of which rounds."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * (variance + epsilon).rsqrt() * gamma


def errors(x: Tensor, gamma: Tensor, epsilon: float, format: str, rounded: str) -> pd.DataFrame:
    """Observed error and bound, absolute and relative, for every row of ``x`` (rows, d_model).

    ``rounded`` is a key of A_LN. With "input and result", the exact result is that of ``x`` before rounding.
    """
    chosen = get_format(format)
    stored, gamma = chosen.round(x), chosen.round(gamma)
    given = x if rounded == "input and result" else stored
    kernel = stepwise if rounded == "every step" else fused
    with Emulation(chosen):
        low = kernel(stored, gamma, epsilon)
    norms = theory.layernorm_norms(given, gamma, epsilon)
    observed = torch.linalg.vector_norm(low.double() - theory.layernorm_path(given, gamma, epsilon), dim=-1)
    inputs = (norms.gamma_max, norms.variance, epsilon, norms.input_norm, chosen.unit_roundoff)
    bound = theory.layernorm_error_bound(*inputs, a_ln=A_LN[rounded])
    table = pd.DataFrame({"epsilon": epsilon, "observed": observed, "bound": bound, "path": norms.path_norm})
    return table.assign(relative=table.observed / table.path, relative_bound=table.bound / table.path)


STEPS = ["observed error", "worst rounding", "largest γ for each", "‖x‖ for ‖x − μ‖", "f(ε) for 1/√(σ² + ε)"]


def ladder(x: Tensor, gamma: Tensor, epsilon: float, format: str) -> pd.DataFrame:
    """The steps from the error of the library's kernel to u M_LN; each column bounds the column before it."""
    chosen = get_format(format)
    x, gamma = chosen.round(x), chosen.round(gamma)
    norms, u = theory.layernorm_norms(x, gamma, epsilon), chosen.unit_roundoff
    scale = u * norms.gamma_max / (norms.variance + epsilon).sqrt()
    table = errors(x, gamma, epsilon, format, "the result")
    columns = [
        table.observed,
        u * norms.path_norm,
        scale * (x.shape[-1] * norms.variance).sqrt(),
        scale * norms.input_norm,
        table.bound,
    ]
    return pd.DataFrame(dict(zip(STEPS, columns)))


# --- Example rows -------------------------------------------------------------------------------


def standard_normal(*shape: int) -> Tensor:
    """Normal numbers in fp64, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def standardised(draws: int) -> Tensor:
    """Normal rows (draws, FEATURES) with variance 1 and mean 0, numbers of fp32 in fp64, as a browser gets them."""
    rows = standard_normal(draws, FEATURES)
    deviation, mean = torch.std_mean(rows, -1, correction=0, keepdim=True)
    return ((rows - mean) / deviation).float().double()


def drawn(variance: float, offset: float, draws: int) -> Tensor:
    """Normal rows (draws, FEATURES) with this ``variance`` and a mean of ``offset`` standard deviations.

    Avoid standard deviations that are powers of two: dividing by them is exact.
    """
    return (variance**0.5 * (standardised(draws) + offset)).float()


def uneven_gamma(spread: float) -> Tensor:
    """Log-normal gamma (FEATURES,). The standard deviation of its logarithm is ``spread``."""
    return (spread * standard_normal(FEATURES)).exp().float()


def quiet_and_loud(loudness: float, format: str) -> Tensor:
    """Two rows (2, 8): one near 1 that varies by a spacing of ``format``, one that alternates between ±``loudness``."""
    features = torch.arange(8)
    quiet = 1 + get_format(format).spacing * (features < 2)
    return torch.stack([quiet, loudness * (1 - 2 * (features % 2))]).float()


def mean_variance(loudness: float, epsilon: float, format: str, rounded: str) -> dict[str, float]:
    """Error of both rows of ``quiet_and_loud``, the bound row by row, and the bound with the mean variance.

    The bound with the mean variance holds if only the result is rounded: v / (v + epsilon) is concave in v, so
    by Jensen's inequality the mean of ||Z||^2 over rows is largest for rows of equal variance.
    """
    x, gamma = quiet_and_loud(loudness, format), torch.ones(8)
    table = errors(x, gamma, epsilon, format, rounded)
    norms, u = theory.layernorm_norms(x, gamma, epsilon), get_format(format).unit_roundoff
    mean = theory.layernorm_error_bound(
        1.0, norms.variance.mean(), epsilon, norms.input_norm.norm(), u, a_ln=A_LN[rounded]
    )
    by_row = {name: np.linalg.norm(table[name]) for name in ("observed", "bound")}
    return {"loudness": loudness, **by_row, "bound with the mean variance": mean.item()}
