"""LayerNorm's normalization path and epsilon (Section 4.4 (`subsec:ln`), Appendix A.4 (`app:ln-proof`)).

The statements are about one feature vector x (d_model) with mean mu and biased variance sigma^2. For a matrix,
take the variance of each row, and the root of the sum of squares of the rows' bounds.

The practical score uses the mean variance of all rows instead (protocol section 3). For a kernel that rounds
only its result, M_LN is still a bound then: row i errs by at most u max|gamma| sqrt(d_model v_i / (v_i +
epsilon)), and v / (v + epsilon) is concave, so by Jensen's inequality the mean variance does not lower the sum
of squares. Where inputs or the centring are rounded too, M_LN with the mean variance is not a bound: a row of
small variance then errs by more than the mean variance says.

RMSNorm, which the paper does not treat, has the mean square s^2 = ||x||^2 / d_model in the place of the variance. Its
path Z(x) = Diag(gamma) x / r with r = sqrt(s^2 + epsilon) has the Jacobian Diag(gamma) (I / r - x x^T / (d_model r^3)),
and ||x x^T||_2 / d_model = s^2. The triangle inequality by which the paper bounds LayerNorm's Jacobian gives the same
factor f of s^2. So the score takes ``layernorm_magnitude`` of the mean square for such a norm. Nothing cancels in an
RMSNorm: every entry errs by at most a_ln u of itself, and u M_LN bounds the error with no order left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fragility_numerics.real import Real

__all__ = [  # noqa: RUF022 (in the paper's order)
    "layernorm_path", "LayerNormNorms", "layernorm_norms", "layernorm_factor", "layernorm_factor_slope",
    "layernorm_magnitude", "layernorm_coefficient", "layernorm_error_bound", "layernorm_relative_error_bound",
    "layernorm_ratio",
]  # fmt: skip


def layernorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Z_eps(x) = Diag(gamma) (x - mu) / sqrt(sigma^2 + epsilon) of rows (..., d_model) (Section 4.4 (`subsec:ln`))."""
    x, gamma = x.double(), gamma.double()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return gamma * (x - mean) / (variance + epsilon).sqrt()


class LayerNormNorms(NamedTuple):
    """Norms of exact rows that the LayerNorm bounds need; tensors (...), ``gamma_max`` = ||Diag(gamma)||_2 a scalar."""

    gamma_max: Tensor
    variance: Tensor
    input_norm: Tensor
    path_norm: Tensor


def layernorm_norms(x: Tensor, gamma: Tensor, epsilon: float) -> LayerNormNorms:
    """The norms of every row of ``x`` (..., d_model), in fp64 (Section 4.4 (`subsec:ln`))."""
    norm = torch.linalg.vector_norm
    return LayerNormNorms(
        gamma_max=gamma.double().abs().max(),
        variance=x.double().var(-1, correction=0),
        input_norm=norm(x.double(), dim=-1),
        path_norm=norm(layernorm_path(x, gamma, epsilon), dim=-1),
    )


def layernorm_factor(variance: Real, epsilon: Real) -> Real:
    """f(epsilon) = (epsilon + 2 sigma^2) / (sigma^2 + epsilon)^{3/2}, strictly decreasing (Proposition 1 (`prop:ln`)).

    The local Lipschitz constant of the normalization at x, the norm of its Jacobian, is 1 / sqrt(sigma^2 +
    epsilon) for d_model > 2. f lies between once (epsilon >> sigma^2) and twice (epsilon << sigma^2) that
    constant. In sigma^2, f is not monotone: it rises up to sigma^2 = epsilon / 2 and falls from there.
    """
    return (epsilon + 2 * variance) / (variance + epsilon) ** 1.5


def layernorm_factor_slope(variance: Real, epsilon: Real) -> Real:
    """f'(epsilon) = -(epsilon + 4 sigma^2) / (2 (sigma^2 + epsilon)^{5/2}) < 0 (Appendix A.4 (`app:ln-proof`))."""
    return -(epsilon + 4 * variance) / (2 * (variance + epsilon) ** 2.5)


def layernorm_magnitude(gamma_max: Real, variance: Real, epsilon: Real, input_norm: Real, a_ln: float = 1.0) -> Real:
    """M_LN = ||Diag(gamma)||_2 f(epsilon) a_ln ||x|| (Eq. (4) (`eq:ln-abs-mag`)).

    u M_LN bounds the forward error of the normalization path (Proposition 1 (`prop:ln`)). M_LN stays the same
    when x is scaled by c and epsilon by c^2.
    """
    return gamma_max * layernorm_factor(variance, epsilon) * a_ln * input_norm


def layernorm_coefficient(magnitude: Real, path_norm: Real) -> Real:
    """C_LN = M_LN / ||Z||, defined where ||Z|| > 0 (Eq. (6) (`eq:ln-coeff`)).

    The practical score (Section 5.1 (`subsec:bgss_estimation`)) gives the name C_LN to f(epsilon) alone. With
    even gamma, C_LN falls from 2 to 1 times a_ln ||x|| / ||x - mu|| as epsilon grows. So a larger epsilon lowers
    the error relative to LayerNorm's own output by a factor of 2 at most; beyond that, the output shrinks.
    """
    return magnitude / path_norm


def layernorm_error_bound(
    gamma_max: Real, variance: Real, epsilon: Real, input_norm: Real, unit_roundoff: Real, *, a_ln: float
) -> Real:
    """u M_LN >= ||Z~ - Z|| of a row, to first order in u (Eq. (3) (`eq:ln-abs-bound`), Proposition 1 (`prop:ln`)).

    The neglected terms are small while u ||x|| / sqrt(d_model (sigma^2 + epsilon)) is small, for the u of the
    arithmetic inside the kernel. a_ln grows with d_model where the kernel accumulates sums in the low format.
    For a matrix see the head of this module.
    """
    return unit_roundoff * layernorm_magnitude(gamma_max, variance, epsilon, input_norm, a_ln)


def layernorm_relative_error_bound(magnitude: Real, path_norm: Real, unit_roundoff: Real) -> Real:
    """u C_LN >= ||Z~ - Z|| / ||Z|| of a row with ||Z|| > 0, to first order in u (Eq. (5) (`eq:ln-bound`)).

    A constant row has Z = 0, and its computed Z~ need not be 0. Only the absolute bound covers such a row.
    """
    return unit_roundoff * layernorm_coefficient(magnitude, path_norm)


def layernorm_ratio(variance: Real, epsilon: Real, d_model: Real, unit_roundoff: Real) -> Real:
    """rho_LN = (sigma^2 / epsilon) d_model u (Section 4.4 (`subsec:ln`), Eq. (22) (`eq:alg-rho-ln`)).

    The paper reads rho_LN < 1 as "epsilon dominates". But epsilon dominates sigma^2 where sigma^2 < epsilon,
    whatever d_model u is. The product d_model u sigma^2 bounds the rounding error of a variance summed in the
    low format, so rho_LN < 1 says that epsilon exceeds this error. With d_model u < 1 (768 in fp16: 0.375) that
    allows sigma^2 > epsilon; with d_model u > 1 (768 in bf16: 3) it demands more than dominance.
    """
    return variance / epsilon * d_model * unit_roundoff
