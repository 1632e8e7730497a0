"""RMSNorm's normalization path: what Section 4.4 (`subsec:ln`) becomes where no mean is subtracted. Not in the paper.

Z(x) = Diag(gamma) x / r with r = sqrt(s^2 + epsilon) and s^2 = ||x||^2 / d_model has the Jacobian
Diag(gamma) (I / r - x x^T / (d_model r^3)). The spectral norm of x x^T / d_model is s^2, so the step by
which the paper goes from LayerNorm's Jacobian to Proposition 1 (`prop:ln`), the triangle inequality, gives the same
factor f (``layernorm_factor``) with the mean square s^2 in the place of the variance.

Two things differ. Without a subtraction nothing cancels: every entry of a computed Z is off by at most
a_rms u of itself, so that the bounds hold with no order left out (M_RMS >= a_rms ||Z||). And epsilon has
nothing to repair: see ``rmsnorm_coefficient``.

The statements are about one feature vector x (d_model); gamma is what multiplies the normalized vector,
in Gemma 1 + weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fragility_core.theory.layernorm import layernorm_coefficient, layernorm_magnitude, layernorm_ratio


def rmsnorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Z_eps(x) = Diag(gamma) x / sqrt(s^2 + epsilon) of rows (..., d_model), s^2 = mean of x^2; not in the paper."""
    x, gamma = x.double(), gamma.double()
    return gamma * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


class RMSNormNorms(NamedTuple):
    """What the RMSNorm bounds need of exact rows; tensors (...), ``gamma_max`` = ||Diag(gamma)||_2 a scalar."""

    gamma_max: Tensor
    mean_square: Tensor
    input_norm: Tensor
    path_norm: Tensor


def rmsnorm_norms(x: Tensor, gamma: Tensor, epsilon: float) -> RMSNormNorms:
    """The norms of every row of ``x`` (..., d_model), in fp64; not in the paper."""
    norm = torch.linalg.vector_norm
    return RMSNormNorms(
        gamma_max=gamma.double().abs().max(),
        mean_square=x.double().square().mean(-1),
        input_norm=norm(x.double(), dim=-1),
        path_norm=norm(rmsnorm_path(x, gamma, epsilon), dim=-1),
    )


def rmsnorm_magnitude(gamma_max, mean_square, epsilon, input_norm, a_rms=1.0):
    """M_RMS = ||Diag(gamma)||_2 f(epsilon) a_rms ||x||, f of the mean square (cf. Eq. (4) (`eq:ln-abs-mag`)); not in the paper.

    f = (epsilon + 2 s^2) / (s^2 + epsilon)^{3/2} is between once and twice the exact Lipschitz constant
    1 / sqrt(s^2 + epsilon) (d_model > 1), as for LayerNorm; along x the Jacobian is only epsilon / r^3.
    """
    return layernorm_magnitude(gamma_max, mean_square, epsilon, input_norm, a_rms)


def rmsnorm_coefficient(magnitude, path_norm):
    """C_RMS = M_RMS / ||Z||, defined where ||Z|| > 0 (cf. Eq. (6) (`eq:ln-coeff`)); not in the paper.

    At most a_rms (1 + s^2 / (s^2 + epsilon)) max|gamma| / min|gamma|, attained with even gamma: below
    2 a_rms whatever x is, where LayerNorm's grows with ||x|| / ||x - mu|| without limit.
    """
    return layernorm_coefficient(magnitude, path_norm)


def rmsnorm_error_bound(gamma_max, mean_square, epsilon, input_norm, unit_roundoff, *, a_rms):
    """u M_RMS >= ||Z~ - Z|| of a row (cf. Eq. (3) (`eq:ln-abs-bound`)); not in the paper.

    a_rms u bounds the relative error of an entry. It is about 1 for a kernel that computes in fp32 and
    rounds once (Gemma), 2 where the normalized vector is rounded before gamma multiplies it (Llama), 4.5
    where square, mean, sum, root and products are rounded one by one.
    """
    return unit_roundoff * rmsnorm_magnitude(gamma_max, mean_square, epsilon, input_norm, a_rms)


def rmsnorm_relative_error_bound(magnitude, path_norm, unit_roundoff):
    """u C_RMS >= ||Z~ - Z|| / ||Z|| of a row with ||Z|| > 0 (cf. Eq. (5) (`eq:ln-bound`)); not in the paper."""
    return unit_roundoff * rmsnorm_coefficient(magnitude, path_norm)


def rmsnorm_ratio(mean_square, epsilon, d_model, unit_roundoff):
    """rho_RMS = (s^2 / epsilon) d_model u (cf. Eq. (22) (`eq:alg-rho-ln`)); not in the paper.

    Below 1 epsilon exceeds the rounding error of a mean square summed in the low format. That error is
    relative to s^2 itself, so that a large ratio is no danger here; it is kept so that controllers read
    one column for both norms.
    """
    return layernorm_ratio(mean_square, epsilon, d_model, unit_roundoff)
