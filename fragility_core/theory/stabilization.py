"""Effects of a larger epsilon: Proposition 2 (`prop:bgss`) and the update of Algorithm 1 (`alg:bgss`).

They stand in Section 4.6 (`subsec:bgss_theory`) and Section 5.1 (`subsec:bgss_estimation`). "Frozen" means that
everything but epsilon is held at its monitored value: x, its variance, the rest of M, the transport and ||X_L||.
In a running model a larger epsilon changes all of them.
"""

import numpy as np

from fragility_core.theory import layernorm
from fragility_core.theory.unified import layer_risk
from fragility_numerics.real import Real

__all__ = [  # noqa: RUF022 (in the paper's order)
    "frozen_magnitude", "frozen_magnitude_slope", "frozen_risk", "frozen_risk_reduction", "layernorm_surrogate",
    "epsilon_candidate", "epsilon_update", "post_update_ratio_bound",
]  # fmt: skip


def frozen_magnitude(gamma_max: Real, variance: Real, epsilon: Real, input_norm: Real, a_ln: float = 1.0) -> Real:
    """M_LN^frz(epsilon) = ||Diag(gamma)||_2 f(epsilon) a ||x||, nonincreasing in epsilon (Eq. (16) (`eq:bgss-cln`)).

    Strictly decreasing where ||Diag(gamma)||_2 ||x|| > 0 (Proposition 2 (`prop:bgss`)).
    """
    return layernorm.layernorm_magnitude(gamma_max, variance, epsilon, input_norm, a_ln)


def frozen_magnitude_slope(gamma_max: Real, variance: Real, epsilon: Real, input_norm: Real, a_ln: float = 1.0) -> Real:
    """d M_LN^frz / d epsilon = ||Diag(gamma)||_2 a ||x|| f'(epsilon) <= 0 (Eq. (17) (`eq:bgss-derivative`))."""
    return gamma_max * a_ln * input_norm * layernorm.layernorm_factor_slope(variance, epsilon)


def frozen_risk(other_magnitude: Real, frozen_magnitude: Real, transport: Real, final_norm: Real) -> Real:
    """G^frz(epsilon) = (M_eff + A + M_LN^frz(epsilon)) / ||X_L|| prod_{k > l} (1 + rho_k) (Eq. (18) (`eq:bgss-g-eps`)).

    ``other_magnitude`` is M_eff + A. Nonincreasing in epsilon (Proposition 2 (`prop:bgss`)).
    """
    return layer_risk(other_magnitude + frozen_magnitude, transport, final_norm)


def frozen_risk_reduction(magnitude_before: Real, magnitude_after: Real, transport: Real, final_norm: Real) -> Real:
    """G^frz(eps) - G^frz(eps'): the drop of M_LN^frz / ||X_L||, transported (Eq. (19) (`eq:bgss-reduction`))."""
    return layer_risk(magnitude_before - magnitude_after, transport, final_norm)


def layernorm_surrogate(path_norm: Real, variance: Real, epsilon: Real) -> Real:
    """||Z|| f(epsilon), the LayerNorm magnitude of the practical score (Section 5.1 (`subsec:bgss_estimation`)).

    Nonincreasing in epsilon for a frozen ||Z||, and so is the score made from it. The paper calls it M_LN up to
    kernel-dependent multipliers. But the quotient of the two, ||Z|| / (a ||Diag(gamma)||_2 ||x||), depends on x
    and epsilon, and their units differ: when x is scaled by c and epsilon by c^2, LayerNorm and M_LN stay the
    same and the surrogate is divided by c.
    """
    return path_norm * layernorm.layernorm_factor(variance, epsilon)


def epsilon_candidate(
    variance: Real, d_model: Real, unit_roundoff: Real, *, target: float, epsilon_min: float, epsilon_max: float
) -> Real:
    """clip(sigma^2 d_model u / rho_*, epsilon_min, epsilon_max) (Eq. (23) (`eq:alg-eps-cand`)), floats or NumPy arrays.

    The smallest epsilon in the bounds with rho_LN <= rho_* = ``target``, where there is one. Raises
    ValueError unless 0 < rho_* < 1 and 0 < epsilon_min <= epsilon_max.
    """
    if not 0 < target < 1:
        raise ValueError(f"the target ratio rho_* must lie in (0, 1), got {target}")
    if not 0 < epsilon_min <= epsilon_max:
        raise ValueError(f"bounds must satisfy 0 < epsilon_min <= epsilon_max, got [{epsilon_min}, {epsilon_max}]")
    return np.clip(layernorm.layernorm_ratio(variance, 1.0, d_model, unit_roundoff) / target, epsilon_min, epsilon_max)


def epsilon_update(epsilon: Real, candidate: Real) -> Real:
    """max(epsilon, candidate), which never lowers epsilon (Eq. (24) (`eq:alg-eps-update`)), floats or NumPy arrays.

    An epsilon that starts above epsilon_max stays there, so the update is bounded only if no epsilon does.
    """
    return np.maximum(epsilon, candidate)


def post_update_ratio_bound(
    variance: Real, d_model: Real, unit_roundoff: Real, *, target: float, epsilon_max: float
) -> Real:
    """max(rho_*, sigma^2 d_model u / epsilon_max) >= rho_LN after the update (Section 5.1 (`subsec:bgss_estimation`)).

    This is rho_* wherever epsilon_max does not bind, as the paper guarantees. It holds for the variance that the
    candidate was computed from. Algorithm 2 (`alg:eps-bump`) computes the candidate from the median variance: the
    ratio of the mean variance may then stay above rho_*.
    """
    return np.maximum(target, layernorm.layernorm_ratio(variance, epsilon_max, d_model, unit_roundoff))
