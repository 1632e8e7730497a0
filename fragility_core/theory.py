"""The paper's formulas, in the paper's order, as pure functions.

Magnitudes combine elementwise, so arguments may be floats, NumPy arrays, torch tensors or pandas
columns; functions of vectors and matrices take torch tensors and compute in fp64. The paper's
epsilon_mach is the unit roundoff u (``formats.Format.unit_roundoff``); epsilon is LayerNorm's.
"""

import torch
from torch import Tensor

# --- Self-attention (subsec. attn) ------------------------------------------------------------


def softmax_jacobian(p: Tensor) -> Tensor:
    """J(p) = Diag(p) - p p^T of probability rows ``p`` (..., n) -> (..., n, n)."""
    p = p.double()
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def softmax_sensitivity(p: Tensor) -> Tensor:
    """d_smx: the largest ||J(p)||_2 over the rows of ``p`` (..., n, m), at most 1/2.

    This is the operator norm of the row-wise softmax's differential (subsec. attn).
    """
    return torch.linalg.matrix_norm(softmax_jacobian(p), 2).amax(-1)


def kappa_softmax(score_norm, probability_norm, sensitivity):
    """kappa_softmax = (||S|| / ||P||) d_smx (subsec. attn)."""
    return score_norm / probability_norm * sensitivity


def chi_score(query_norm, key_norm, probability_norm, head_width, sensitivity):
    """chi_score = ||Q|| ||K|| d_smx / (||P|| sqrt(d)) (subsec. attn)."""
    return query_norm * key_norm / (probability_norm * head_width**0.5) * sensitivity


def kappa_value(probability_norm, value_spectral_norm, context_norm):
    """kappa_val = ||P|| ||V||_2 / ||A||, defined where ||A|| > 0 (subsec. attn)."""
    return probability_norm * value_spectral_norm / context_norm


def attention_magnitude(kappa, chi, probability_norm, value_spectral_norm, c_softmax=0.0, c_gemm=1.0, c_gemm_out=0.0):
    """A = [c_smx + kappa_softmax + c_gemm chi_score + c'_gemm] ||P|| ||V||_2 (eq. attn-contrib).

    u A bounds the forward error of PV (Theorem attn). The default constants are those of the
    practical score (subsec. bgss_estimation): (kappa_softmax + chi_score) ||P|| ||V||_2.
    """
    return (c_softmax + kappa + c_gemm * chi + c_gemm_out) * probability_norm * value_spectral_norm


# --- Residual relaxation (subsec. residual) ---------------------------------------------------


def residual_condition_bound(rho):
    """(1 + rho) / (1 - rho) >= kappa(I + J_f) for rho = ||J_f||_2 < 1 (Theorem residual)."""
    return (1 + rho) / (1 - rho)


def downstream_transport(rho: Tensor) -> Tensor:
    """prod_{k > l} (1 + rho_k) for every layer l of ``rho`` (..., L) (Corollary depth)."""
    growth = 1 + rho.flip(-1)
    suffix = torch.cumprod(torch.cat([torch.ones_like(growth[..., :1]), growth[..., :-1]], -1), -1)
    return suffix.flip(-1)


# --- LayerNorm (subsec. ln) -------------------------------------------------------------------


def layernorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Z_eps(x) = Diag(gamma) (x - mu) / sqrt(sigma^2 + epsilon) of rows (..., d_model) (subsec. ln)."""
    x, gamma = x.double(), gamma.double()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return gamma * (x - mean) / (variance + epsilon).sqrt()


def layernorm_factor(variance, epsilon):
    """f(epsilon) = (epsilon + 2 sigma^2) / (sigma^2 + epsilon)^{3/2}, decreasing in epsilon (Proposition ln)."""
    return (epsilon + 2 * variance) / (variance + epsilon) ** 1.5


def layernorm_magnitude(gamma_max, variance, epsilon, input_norm, a_ln=1.0):
    """M_LN = ||Diag(gamma)||_2 f(epsilon) a_ln ||x|| (eq. ln-abs-mag).

    u M_LN bounds the forward error of the normalization path (Proposition ln).
    """
    return gamma_max * layernorm_factor(variance, epsilon) * a_ln * input_norm


def layernorm_ratio(variance, epsilon, d_model, unit_roundoff):
    """rho_LN = (sigma^2 / epsilon) d_model u; below 1, epsilon dominates (subsec. ln, eq. alg-rho-ln)."""
    return variance / epsilon * d_model * unit_roundoff


# --- Unified forward stability and the score (subsec. unified, bgss_theory) -------------------


def local_magnitude(remainder, attention, layernorm):
    """M = M_eff + A + M_LN (eq. local-coeff)."""
    return remainder + attention + layernorm


def layer_risk(magnitude, transport, final_norm):
    """G = (M / ||X_L||) prod_{k > l} (1 + rho_k) (eq. bgss-layer); u sum(G) predicts the mismatch."""
    return magnitude / final_norm * transport


def layernorm_dominance(layernorm: Tensor, magnitude: Tensor) -> Tensor:
    """phi = M_LN / M, and 0 where M = 0 (eq. bgss-phi)."""
    return torch.where(magnitude == 0, 0.0, layernorm / magnitude)


def mismatch(low: Tensor, reference: Tensor) -> Tensor:
    """m = ||X~ - X|| / ||X|| over the last two dimensions (..., T, d_model), in fp32 or wider (eq. pf_mismatch)."""
    dtype = torch.promote_types(reference.dtype, torch.float32)
    low, reference = low.to(dtype), reference.to(dtype)
    return torch.linalg.matrix_norm(low - reference) / torch.linalg.matrix_norm(reference)
