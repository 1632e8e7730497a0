"""LayerNorm's normalization path and epsilon (Section 4.4 (`subsec:ln`), Appendix A.4 (`app:ln-proof`)).

The statements are about one feature vector x (d_model), with mean mu and biased variance sigma^2.
For a matrix take each row's own variance and the root of the sum of squares over rows: with the mean
variance in its place (the practical score's choice, protocol section 3) M_LN is not a bound, because a
row of small variance errs more than the mean says.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def layernorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Z_eps(x) = Diag(gamma) (x - mu) / sqrt(sigma^2 + epsilon) of rows (..., d_model) (Section 4.4 (`subsec:ln`))."""
    x, gamma = x.double(), gamma.double()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return gamma * (x - mean) / (variance + epsilon).sqrt()


class LayerNormNorms(NamedTuple):
    """What the LayerNorm bounds need of exact rows; tensors (...), ``gamma_max`` = ||Diag(gamma)||_2 a scalar."""

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


def layernorm_factor(variance, epsilon):
    """f(epsilon) = (epsilon + 2 sigma^2) / (sigma^2 + epsilon)^{3/2}, decreasing in epsilon (Proposition 1 (`prop:ln`)).

    The exact Lipschitz constant of the normalization is 1 / sqrt(sigma^2 + epsilon) (d_model > 2); f is
    between once (epsilon >> sigma^2) and twice (epsilon << sigma^2) that. In sigma^2 it is not monotone:
    it rises up to sigma^2 = epsilon / 2 and falls from there.
    """
    return (epsilon + 2 * variance) / (variance + epsilon) ** 1.5


def layernorm_factor_slope(variance, epsilon):
    """f'(epsilon) = -(epsilon + 4 sigma^2) / (2 (sigma^2 + epsilon)^{5/2}) < 0 (Proposition 1 (`prop:ln`))."""
    return -(epsilon + 4 * variance) / (2 * (variance + epsilon) ** 2.5)


def layernorm_magnitude(gamma_max, variance, epsilon, input_norm, a_ln=1.0):
    """M_LN = ||Diag(gamma)||_2 f(epsilon) a_ln ||x|| (Eq. (4) (`eq:ln-abs-mag`)).

    u M_LN bounds the forward error of the normalization path (Proposition 1 (`prop:ln`)). Does not change when
    x is scaled by c and epsilon by c^2.
    """
    return gamma_max * layernorm_factor(variance, epsilon) * a_ln * input_norm


def layernorm_coefficient(magnitude, path_norm):
    """C_LN = M_LN / ||Z||, defined where ||Z|| > 0 (Eq. (6) (`eq:ln-coeff`)).

    Not the C_LN of the practical score (Section 5.1 (`subsec:bgss_estimation`)), which is f(epsilon) alone. With even
    gamma it falls from 2 to 1 times a_ln ||x|| / ||x - mu|| as epsilon grows: raising epsilon lowers the
    error relative to LayerNorm's own output by a factor of 2 at most; the rest is a smaller output.
    """
    return magnitude / path_norm


def layernorm_error_bound(gamma_max, variance, epsilon, input_norm, unit_roundoff, *, a_ln):
    """u M_LN >= ||Z~ - Z|| of a row, to first order in u (Eq. (3) (`eq:ln-abs-bound`), Proposition 1 (`prop:ln`)).

    The terms left out are small while u ||x|| / sqrt(d_model (sigma^2 + epsilon)) is, u being that of the
    arithmetic inside the kernel (see ``layernorm_change_bound``). a_ln grows with d_model where the
    sums are accumulated in the low format.
    """
    return unit_roundoff * layernorm_magnitude(gamma_max, variance, epsilon, input_norm, a_ln)


def layernorm_relative_error_bound(magnitude, path_norm, unit_roundoff):
    """u C_LN >= ||Z~ - Z|| / ||Z|| of a row with ||Z|| > 0, to first order in u (Eq. (5) (`eq:ln-bound`)).

    A constant row has Z = 0, and its computed Z~ need not be 0: only the absolute form covers it.
    """
    return unit_roundoff * layernorm_coefficient(magnitude, path_norm)


def layernorm_change_bound(gamma_max, variance, epsilon, d_model, change_norm):
    """The change of Z when x moves by at most ``change_norm``, no order left out; not in the paper.

    ||Z(x + dx) - Z(x)|| <= ||Diag(gamma)||_2 ||dx|| / ((1 - theta) sqrt(sigma^2 + epsilon)) for theta =
    ||dx|| / sqrt(d_model (sigma^2 + epsilon)) < 1: the divisor is the norm of (x - mu, sqrt(d_model epsilon))
    / sqrt(d_model), which the change moves by at most a share theta. Raises ValueError for theta >= 1, where
    nothing is known.
    """
    divisor = (variance + epsilon) ** 0.5
    share = change_norm / (d_model**0.5 * divisor)
    if not (torch.as_tensor(share) < 1).all():
        raise ValueError(f"theta = ||dx|| / sqrt(d_model (sigma^2 + epsilon)) must be below 1, got {share}")
    return gamma_max * change_norm / (divisor * (1 - share))


def layernorm_ratio(variance, epsilon, d_model, unit_roundoff):
    """rho_LN = (sigma^2 / epsilon) d_model u (Section 4.4 (`subsec:ln`), Eq. (22) (`eq:alg-rho-ln`)).

    The paper reads rho_LN < 1 as "epsilon dominates". Where epsilon dominates sigma^2 is sigma^2 < epsilon,
    with no d_model u in it; d_model u sigma^2 is the rounding error bound of a variance summed in the
    low format. So rho_LN < 1 says that epsilon exceeds the variance's rounding error: with d_model u < 1
    (768 in fp16: 0.375) it admits a sigma^2 above epsilon, with d_model u > 1 (768 in bf16: 3) it asks
    for more than dominance.
    """
    return variance / epsilon * d_model * unit_roundoff
