"""E1: controlled sweeps of the three mechanisms, in double precision (protocol section 4)."""

from dataclasses import dataclass, fields
from itertools import product

import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fragility_core import theory
from fragility_lab.inputs.loading import require_at_least, require_values

SCORE_PERTURBATION = 0.0025


@dataclass(frozen=True)
class Sweeps:
    """The configurations of the three sweeps; by default those of the paper's release."""

    margins: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    value_scales: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    epsilons: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # ascending
    gains: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    depth: int = 6

    def __post_init__(self):
        axes = {field.name: getattr(self, field.name) for field in fields(self)[:-1]}
        require_values(**axes)
        require_at_least(1, depth=self.depth)
        for name, values in axes.items():
            if min(values) < 0:
                raise ValueError(f"{name} must not be negative, got {min(values)}")
        if list(self.epsilons) != sorted(self.epsilons):
            raise ValueError(f"epsilons must ascend, got {', '.join(map(str, self.epsilons))}")


def _double(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def attention_case(margin: float, value_scale: float) -> dict[str, float]:
    """Perturb the scores of a 2 x 2 attention map; proxy = kappa_softmax ||P|| ||V||_2 (Theorem 1 (`thm:attn`))."""
    scores = _double([[0, -margin], [-margin, 0]])
    values = value_scale * _double([[1, -1], [-1, 1]])
    probabilities = scores.softmax(-1)
    perturbed = (scores + SCORE_PERTURBATION * scores).softmax(-1)
    sensitivity = theory.softmax_sensitivity(probabilities)
    probability_norm = torch.linalg.matrix_norm(probabilities)
    kappa = theory.kappa_softmax(torch.linalg.matrix_norm(scores), probability_norm, sensitivity)
    proxy = theory.attention_magnitude(kappa, 0.0, probability_norm, torch.linalg.matrix_norm(values, 2))
    return {
        "margin": margin,
        "value_scale": value_scale,
        "score_norm": torch.linalg.matrix_norm(scores).item(),
        "softmax_sensitivity": sensitivity.item(),
        "kappa_softmax": kappa.item(),
        "measured": torch.linalg.matrix_norm((perturbed - probabilities) @ values).item(),
        "proxy": proxy.item(),
    }


def layernorm_case(epsilon: float) -> dict[str, float]:
    """Perturb a nearly constant row; theory = M_LN with a_ln = 1 (Proposition 1 (`prop:ln`))."""
    x, gamma = _double([1, 1.001, 0.999, 1.002]), _double([1, 0.9, 1.1, 1])
    dx = 1e-4 * _double([1, -1, 1, -1])
    change = theory.layernorm_path(x + dx, gamma, epsilon) - theory.layernorm_path(x, gamma, epsilon)
    magnitude = theory.layernorm_magnitude(gamma.abs().max(), x.var(correction=0), epsilon, torch.linalg.vector_norm(x))
    return {"epsilon": epsilon, "measured": torch.linalg.vector_norm(change).item(), "theory": magnitude.item()}


def residual_case(gain: float, depth: int) -> dict[str, float]:
    """Compose a block of gain ``gain`` ``depth`` times; bound (1 + rho)^depth (Corollary 1 (`cor:depth`))."""
    block = torch.diag(_double([1 + gain, 1 - gain / 4]))
    x = _double([1, 1])
    moved = torch.linalg.matrix_power(block, depth) @ x
    measured = torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(x)
    # The transport of a layer counts the later layers only, so one layer more than ``depth`` is given.
    bound = theory.downstream_transport(torch.full((depth + 1,), gain, dtype=torch.float64))[0]
    return {"rho": gain, "measured": measured.item(), "bound": bound.item(), "gap": (bound - measured).item()}


def sweeps(chosen: Sweeps = Sweeps()) -> dict[str, pd.DataFrame]:
    """The three tables, one row per configuration: in the release 20 of attention, 10 of LayerNorm, 8 of residuals."""
    attention = [attention_case(*case) for case in product(chosen.margins, chosen.value_scales)]
    return {
        "attention": pd.DataFrame(attention),
        "layernorm": pd.DataFrame([layernorm_case(epsilon) for epsilon in chosen.epsilons]),
        "residual": pd.DataFrame([residual_case(gain, chosen.depth) for gain in chosen.gains]),
    }


def summary(tables: dict[str, pd.DataFrame]) -> dict[str, float | bool]:
    """The claims of E1: correlations, and booleans for monotonicity and for the bound."""
    attention, layernorm, residual = tables["attention"], tables["layernorm"], tables["residual"]
    return {
        "attention_pearson": stats.pearsonr(attention.measured, attention.proxy).statistic,
        "attention_spearman": stats.spearmanr(attention.measured, attention.proxy).statistic,
        "layernorm_pearson": stats.pearsonr(layernorm.measured, layernorm.theory).statistic,
        "layernorm_spearman": stats.spearmanr(layernorm.measured, layernorm.theory).statistic,
        "layernorm_measured_nonincreasing": bool(layernorm.measured.is_monotonic_decreasing),
        "layernorm_theory_nonincreasing": bool(layernorm.theory.is_monotonic_decreasing),
        "residual_bound_respected": bool((residual.gap >= -1e-12).all()),
        "residual_max_gap": residual.gap.max(),
    }
