"""Rows through LayerNorm in a low format: their errors, Proposition 1 (`prop:ln`), and what its proof gives away.

Rows are (..., d_model) in fp32, gamma (d_model,). Kernels round as a device's do and are compared
with fp64 (``theory.layernorm_path``).
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_core import theory
from fragility_core.arithmetic.emulation import Emulation
from fragility_core.arithmetic.formats import get_format

FEATURES = 64

# What is rounded, and a constant a_ln that holds for it: u ||Z|| and, to first order, an input's u ||x|| arrive as at
# most u M_LN each. Of the single steps, the mean's rounding costs u |mu| sqrt(d_model), and subtraction, variance,
# root and two products at most (4.5 + 2 sigma^2 / (sigma^2 + epsilon)) u ||x - mu||: in all, 4.6 u M_LN.
A_LN = {"the result": 1.0, "input and result": 2.0, "every step": 5.0}


def fused(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """LayerNorm's path by the library's kernel, which rounds its result only."""
    return nn.functional.layer_norm(x, gamma.shape, gamma, None, epsilon)


def stepwise(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """The same from elementary kernels, each of which rounds."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * (variance + epsilon).rsqrt() * gamma


def errors(x: Tensor, gamma: Tensor, epsilon: float, format: str, rounded: str) -> pd.DataFrame:
    """One row a row of ``x`` (rows, d_model): the observed error and the bound, absolute and relative.

    ``rounded`` is a key of A_LN. Unless the input's rounding counts too, x is what ``format`` stores of it.
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
    """From the error of the library's kernel to u M_LN, one row a row of ``x``: each column bounds the one before."""
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


# --- Rows to look at ----------------------------------------------------------------------------


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawn(variance: float, offset: float, draws: int) -> Tensor:
    """Normal rows (draws, FEATURES) of exactly this ``variance`` and of mean ``offset`` standard deviations.

    A deviation that is a power of two is a special case: the output is then on the input's grid as it is.
    """
    rows = _normal(draws, FEATURES)
    deviation, mean = torch.std_mean(rows, -1, correction=0, keepdim=True)
    return (variance**0.5 * ((rows - mean) / deviation + offset)).float()


def uneven_gamma(spread: float) -> Tensor:
    """gamma (FEATURES,), log-normal: the logarithm's standard deviation is ``spread``."""
    return (spread * _normal(FEATURES)).exp().float()


def quiet_and_loud(loudness: float, format: str) -> Tensor:
    """Two rows (2, 8): one near 1 that varies by a spacing of ``format``, the other alternating ±``loudness``."""
    features = torch.arange(8)
    quiet = 1 + get_format(format).spacing * (features < 2)
    return torch.stack([quiet, loudness * (1 - 2 * (features % 2))]).float()


def mean_variance(loudness: float, epsilon: float, format: str) -> dict[str, float]:
    """Error of both rows of ``quiet_and_loud``, each step rounded, and two readings of the bound for a matrix."""
    x, gamma = quiet_and_loud(loudness, format), torch.ones(8)
    table = errors(x, gamma, epsilon, format, "every step")
    norms, u = theory.layernorm_norms(x, gamma, epsilon), get_format(format).unit_roundoff
    mean = theory.layernorm_error_bound(
        1.0, norms.variance.mean(), epsilon, norms.input_norm.norm(), u, a_ln=A_LN["every step"]
    )
    by_row = {name: np.linalg.norm(table[name]) for name in ("observed", "bound")}
    return {"loudness": loudness, **by_row, "bound with the mean variance": mean.item()}
