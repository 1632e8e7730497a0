"""Inverted dropout Drop(z) = (M / p) z with a fixed 0/1 mask M and keep probability p (Remark 1 (`rem:dropout`))."""

import torch
from torch import Tensor

from fragility_core.theory.attention import kappa_softmax, softmax_jacobian
from fragility_numerics.real import Real

__all__ = ["dropout_gain_bound", "dropout_jacobian", "dropout_kappa_softmax", "dropout_kappa_bound"]  # noqa: RUF022


def dropout_gain_bound(rho: Real, keep: float) -> Real:
    """rho / p >= ||J_{Drop o f}||_2 for rho = ||J_f||_2 and p = ``keep`` (Remark 1 (`rem:dropout`)).

    So a transport factor grows by at most 1 / p: 1 + rho / p <= (1 + rho) / p. The remark says the same of all
    "per-layer factors in our bounds". That fails for the condition factor (1 + rho) / (1 - rho): it can grow by
    more than 1 / p, and without limit as rho approaches p.
    """
    return rho / keep


def dropout_jacobian(p: Tensor, mask: Tensor, keep: float) -> Tensor:
    """Diag(M / p) J(P), the differential of softmax followed by dropout, rows (..., n) -> (..., n, n).

    Lemma 6, which stands without a label after Remark 1 (`rem:dropout`), writes it J(P').
    """
    return (mask.double() / keep).unsqueeze(-1) * softmax_jacobian(p)


def dropout_kappa_softmax(score_norm: Real, p: Tensor, mask: Tensor, keep: float) -> Tensor:
    """kappa'_softmax = (||S|| / ||P'||) max_i ||Diag(M_i / p) J(P_i)||_2 with P' = (M / p) P, for ``p`` (..., n, m).

    Remark 1 (`rem:dropout`) and Lemma 6 after it claim kappa' <= kappa_softmax. The claim fails: 1 / p cancels,
    but the mask can shrink ||P'|| by more than the differential. A row (1 - t, t) whose first entry is dropped
    has kappa' -> sqrt(2) ||S|| and kappa_softmax -> 0 as t -> 0. ``dropout_kappa_bound`` holds instead.
    """
    sensitivity = torch.linalg.matrix_norm(dropout_jacobian(p, mask, keep), 2).amax(-1)
    return kappa_softmax(score_norm, torch.linalg.matrix_norm(mask * p.double()) / keep, sensitivity)


def dropout_kappa_bound(kappa: Real, probability_norm: Real, kept_norm: Real) -> Real:
    """kappa_softmax ||P|| / ||M P|| >= kappa'_softmax where M P is not all zero (Remark 1 (`rem:dropout`), corrected).

    ``kept_norm`` is ||M P||, the norm of the probabilities that the mask keeps. Equality where it keeps all.
    """
    return kappa * probability_norm / kept_norm
