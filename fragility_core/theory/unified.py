"""Mismatch of the output, unified bound and score, from local magnitudes.

Section 3 (`sec:problem_formulation`), Section 4.5 (`subsec:unified`) and Section 4.6 (`subsec:bgss_theory`).
"""

import torch
from torch import Tensor

from fragility_core.theory.residual import downstream_transport
from fragility_numerics.real import Real

__all__ = [  # noqa: RUF022 (in the paper's order)
    "mismatch", "total_risk", "remainder_magnitude", "local_magnitude", "mismatch_bound", "layer_risk",
    "predicted_mismatch", "layernorm_dominance",
]  # fmt: skip


def mismatch(low: Tensor, reference: Tensor) -> Tensor:
    """m = ||X~ - X|| / ||X|| over the last two dimensions, (..., T, d_model) -> (...) (Eq. (1) (`eq:pf_mismatch`)).

    Computed in fp32, or in the dtype of ``reference`` where that is wider.
    """
    dtype = torch.promote_types(reference.dtype, torch.float32)
    low, reference = low.to(dtype), reference.to(dtype)
    return torch.linalg.matrix_norm(low - reference) / torch.linalg.matrix_norm(reference)


def total_risk(risk: Tensor) -> Tensor:
    """R = sum_l G_l over the last dimension of ``risk``, (..., L) -> (...) (Section 3 (`sec:problem_formulation`))."""
    return risk.sum(-1)


def remainder_magnitude(*bounds: Real) -> Real:
    """M_eff = sum_r b_r, where u b_r bounds the error of one remaining kernel (Eq. (8) (`eq:eff-module`)).

    u M_eff then bounds the sum of the errors (Lemma 5 (`lem:eff-closure`)).
    """
    return sum(bounds)


def local_magnitude(remainder: Real, attention: Real, layernorm: Real) -> Real:
    """M = M_eff + A + M_LN (Eq. (9) (`eq:local-coeff`); at step t, Eq. (12) (`eq:bgss-local`))."""
    return remainder + attention + layernorm


def mismatch_bound(magnitude: Tensor, rho: Tensor, final_norm: Tensor, unit_roundoff: float) -> Tensor:
    """u sum_l (M_l / ||X_L||) prod_{k > l} (1 + rho_k) >= m (Theorem 3 (`thm:unified`), Eq. (10) (`eq:unified`)).

    ``magnitude`` and ``rho`` are (..., L), ``final_norm`` = ||X_L|| > 0 is (...); rho_l = ||J_{f_l}(X_{l-1})||_2.
    Holds to first order in u, for a stack that ends with its last residual block (no final LayerNorm) and
    starts from an exact input with exact weights.

    The proof adds u M_l to the residual stream. But the errors of attention and LayerNorm reach the stream only
    through the rest of their branch (W_O, the MLP), so their magnitudes must be multiplied by the gain of that
    rest (the paper's "benign norm ratios"). Without this factor the bound fails.
    """
    return predicted_mismatch(layer_risk(magnitude, downstream_transport(rho), final_norm[..., None]), unit_roundoff)


def layer_risk(magnitude: Real, transport: Real, final_norm: Real) -> Real:
    """G = (M / ||X_L||) prod_{k > l} (1 + rho_k) (Eq. (13) (`eq:bgss-layer`)); ``transport`` is the product."""
    return magnitude / final_norm * transport


def predicted_mismatch(risk: Tensor, unit_roundoff: float) -> Tensor:
    """u sum_l G_l, the first-order predictor of m, for ``risk`` (..., L) -> (...) (Eq. (14) (`eq:bgss-predictor`))."""
    return unit_roundoff * total_risk(risk)


def layernorm_dominance(layernorm: Tensor, magnitude: Tensor) -> Tensor:
    """phi = M_LN / M, and 0 where M = 0 (Eq. (15) (`eq:bgss-phi`); measured, Eq. (21) (`eq:alg-phi`))."""
    return torch.where(magnitude == 0, 0.0, layernorm / magnitude)
