"""Residual blocks x -> x + f(x) with rho = ||J_f||_2.

Section 4.3 (`subsec:residual`); the proofs are in Appendix A.3 (`app:residual-proof`).
"""

import numpy as np
import torch
from torch import Tensor

from fragility_numerics.real import Real

__all__ = [  # noqa: RUF022 (in the paper's order)
    "residual_singular_value_bounds", "residual_condition_bound", "depth_condition_bound", "downstream_transport",
]  # fmt: skip


def residual_singular_value_bounds(rho: Real) -> tuple[Real, Real]:
    """The pair (1 - rho, 1 + rho) that encloses the singular values of I + J_f (Appendix A.3 (`app:residual-proof`)).

    ``rho`` is ||J_f||_2. The lower bound says something for rho < 1 only.
    """
    return 1 - rho, 1 + rho


def residual_condition_bound(rho: Real) -> Real:
    """(1 + rho) / (1 - rho) >= kappa(I + J_f) for rho = ||J_f||_2 < 1 (Theorem 2 (`thm:residual`)).

    J_f = diag(rho, -rho) attains it. Raises ValueError for a rho outside [0, 1).
    """
    values = rho.detach().cpu() if isinstance(rho, Tensor) else np.asarray(rho)
    if not ((values >= 0) & (values < 1)).all():
        raise ValueError(
            f"the condition number is bounded for 0 <= rho < 1 in every block, got rho = {rho}; "
            "downstream_transport bounds the forward error for any rho"
        )
    return (1 + rho) / (1 - rho)


def depth_condition_bound(rho: Tensor) -> Tensor:
    """prod_l (1 + rho_l) / (1 - rho_l) >= kappa(prod_l (I + J_l)), (..., L) -> (...) (Corollary 1 (`cor:depth`)).

    Diagonal blocks attain it. Raises ValueError unless every rho_l lies in [0, 1).
    """
    return residual_condition_bound(rho).prod(-1)


def downstream_transport(rho: Tensor) -> Tensor:
    """prod_{k > l} (1 + rho_k) for every layer l, ``rho`` (..., L) -> (..., L) (Corollary 1 (`cor:depth`)).

    Bounds ||prod_{k > l} (I + J_k)||_2, and so the growth of an absolute error behind layer l, for any rho.
    The paper puts it in the place of the condition number, which it does not bound (J = diag(rho, -rho)). Nor
    does it show attenuation: it is at least 1 even where the blocks contract (J = -I / 2).
    """
    growth = 1 + rho.flip(-1)
    suffix = torch.cumprod(torch.cat([torch.ones_like(growth[..., :1]), growth[..., :-1]], -1), -1)
    return suffix.flip(-1)
