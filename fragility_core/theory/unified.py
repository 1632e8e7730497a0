"""From local magnitudes to the output: the unified bound and the score (Section 4.5 (`subsec:unified`), bgss_theory)."""

import torch
from torch import Tensor

from fragility_core.theory.residual import downstream_transport


def mismatch(low: Tensor, reference: Tensor) -> Tensor:
    """m = ||X~ - X|| / ||X|| over the last two dimensions (..., T, d_model), in fp32 or wider (Eq. (1) (`eq:pf_mismatch`))."""
    dtype = torch.promote_types(reference.dtype, torch.float32)
    low, reference = low.to(dtype), reference.to(dtype)
    return torch.linalg.matrix_norm(low - reference) / torch.linalg.matrix_norm(reference)


def remainder_magnitude(*bounds):
    """M_eff = sum_r b_r: u M_eff bounds a sum of errors that u b_r bound one by one (Lemma 5 (`lem:eff-closure`)).

    Each of ``bounds`` is the b_r of one kernel, as in Eq. (8) (`eq:eff-module`).
    """
    return sum(bounds)


def local_magnitude(remainder, attention, layernorm):
    """M = M_eff + A + M_LN (Eq. (9) (`eq:local-coeff`); at step t Eq. (12) (`eq:bgss-local`))."""
    return remainder + attention + layernorm


def mismatch_bound(magnitude: Tensor, rho: Tensor, final_norm: Tensor, unit_roundoff: float) -> Tensor:
    """u sum_l (M_l / ||X_L||) prod_{k > l} (1 + rho_k) >= m (Eq. (10) (`eq:unified`), Theorem 3 (`thm:unified`)).

    ``magnitude`` and ``rho`` are (..., L), ``final_norm`` = ||X_L|| > 0 is (...); rho_l = ||J_{f_l}(X_{l-1})||_2.
    To first order in u, for a stack that ends with its last residual block (no final LayerNorm) and
    starts from an exact input with exact weights.

    The proof adds u M_l to the residual stream, where the errors of attention and LayerNorm arrive only
    through the rest of their branch (W_O, the MLP). Their magnitudes must be multiplied by that
    branch's gain ("benign norm ratios", says the paper); taken as printed, the bound fails.
    """
    return predicted_mismatch(layer_risk(magnitude, downstream_transport(rho), final_norm[..., None]), unit_roundoff)


def layer_risk(magnitude, transport, final_norm):
    """G = (M / ||X_L||) prod_{k > l} (1 + rho_k) (Eq. (13) (`eq:bgss-layer`)); u sum(G) predicts the mismatch."""
    return magnitude / final_norm * transport


def predicted_mismatch(risk, unit_roundoff):
    """u sum_l G_l of the last dimension of ``risk`` (..., L), the first-order predictor of m (Eq. (14) (`eq:bgss-predictor`))."""
    return unit_roundoff * risk.sum(-1)


def layernorm_dominance(layernorm: Tensor, magnitude: Tensor) -> Tensor:
    """phi = M_LN / M, and 0 where M = 0 (Eq. (15) (`eq:bgss-phi`))."""
    return torch.where(magnitude == 0, 0.0, layernorm / magnitude)
