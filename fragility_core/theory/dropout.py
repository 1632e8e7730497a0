"""Inverted dropout Drop(z) = (M / p) z with a fixed 0/1 mask M and keep probability p (Remark 1 (`rem:dropout`))."""

import torch
from torch import Tensor

from fragility_core.theory.attention import kappa_softmax, softmax_jacobian


def dropout_gain_bound(rho, keep):
    """rho / p >= ||J_{Drop o f}||_2 for rho = ||J_f||_2 (Remark 1 (`rem:dropout`)).

    So a transport factor grows by at most 1 / p: 1 + rho / p <= (1 + rho) / p. "Per-layer factors in our
    bounds" holds no further: the condition factor (1 + rho) / (1 - rho) can grow by more, and without
    limit as rho nears p.
    """
    return rho / keep


def dropout_jacobian(p: Tensor, mask: Tensor, keep: float) -> Tensor:
    """Diag(M / p) J(P), the differential of softmax and attention dropout, rows (..., n) -> (..., n, n).

    Written J(P') where the paper says that dropout does not worsen kappa_softmax (the lemma after Remark 1 (`rem:dropout`)).
    """
    return (mask.double() / keep).unsqueeze(-1) * softmax_jacobian(p)


def dropout_kappa_softmax(score_norm, p: Tensor, mask: Tensor, keep: float) -> Tensor:
    """kappa'_softmax = (||S|| / ||P'||) max_i ||Diag(M_i / p) J(P_i)||_2, P' = (M / p) P, of ``p`` (..., n, m).

    Remark 1 (`rem:dropout`) and its Lemma claim kappa' <= kappa_softmax. That does not hold: 1 / p cancels, but
    masking shrinks ||P'|| more than the differential. A row (1 - t, t) whose first entry is dropped has
    kappa' -> sqrt(2) ||S|| and kappa -> 0 as t -> 0. See ``dropout_kappa_bound`` for what holds.
    """
    sensitivity = torch.linalg.matrix_norm(dropout_jacobian(p, mask, keep), 2).amax(-1)
    return kappa_softmax(score_norm, torch.linalg.matrix_norm(mask * p.double()) / keep, sensitivity)


def dropout_kappa_bound(kappa, probability_norm, kept_norm):
    """kappa_softmax ||P|| / ||M P|| >= kappa'_softmax, for M P not all zero: Remark 1 (`rem:dropout`) put right.

    ``kept_norm`` is ||M P||, the norm of the probabilities that the mask keeps. Equality where it keeps all.
    """
    return kappa * probability_norm / kept_norm
