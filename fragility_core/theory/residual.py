"""Residual blocks x -> x + f(x) with rho = ||J_f||_2 (Section 4.3 (`subsec:residual`), Appendix A.3 (`app:residual-proof`))."""

import numpy as np
import torch
from torch import Tensor


def _require_small_gain(rho) -> None:
    if not np.all((np.asarray(rho) >= 0) & (np.asarray(rho) < 1)):
        raise ValueError(
            f"the condition number is bounded for 0 <= rho < 1 in every block, got rho = {rho}; "
            "downstream_transport bounds the forward error for any rho"
        )


def residual_singular_value_bounds(rho):
    """1 - rho <= sigma_min and sigma_max <= 1 + rho of I + J_f, rho = ||J_f||_2 (Appendix A.3 (`app:residual-proof`)).

    The lower one says something for rho < 1 only.
    """
    return 1 - rho, 1 + rho


def residual_condition_bound(rho):
    """(1 + rho) / (1 - rho) >= kappa(I + J_f) for rho = ||J_f||_2 < 1 (Theorem 2 (`thm:residual`)).

    Attained by J_f = diag(rho, -rho). Raises ValueError for a rho outside [0, 1).
    """
    _require_small_gain(rho)
    return (1 + rho) / (1 - rho)


def depth_condition_bound(rho: Tensor) -> Tensor:
    """prod_l (1 + rho_l) / (1 - rho_l) >= kappa(prod_l (I + J_l)), ``rho`` (..., L) -> (...) (Corollary 1 (`cor:depth`)).

    Every single rho_l must be below 1: raises ValueError otherwise. Attained by diagonal blocks.
    """
    return residual_condition_bound(rho).prod(-1)


def downstream_transport(rho: Tensor) -> Tensor:
    """prod_{k > l} (1 + rho_k) for every layer l of ``rho`` (..., L) (Corollary 1 (`cor:depth`)).

    Bounds ||prod_{k > l} (I + J_k)||_2, hence the growth of an absolute error behind layer l, for
    any rho. It is not a bound of the condition number, for which the paper lets it stand in (J = diag(rho,
    -rho)), and it shows no attenuation: it is at least 1 even where the blocks contract (J = -I / 2).
    """
    growth = 1 + rho.flip(-1)
    suffix = torch.cumprod(torch.cat([torch.ones_like(growth[..., :1]), growth[..., :-1]], -1), -1)
    return suffix.flip(-1)
