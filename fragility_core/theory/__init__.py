"""The paper's statements as pure functions, in the paper's order; each docstring names its label.

Magnitudes combine elementwise, so arguments may be floats, NumPy arrays, torch tensors or pandas
columns; functions of vectors and matrices take torch tensors and compute in fp64. The paper's
epsilon_mach is the unit roundoff u (``formats.Format.unit_roundoff``); epsilon is LayerNorm's.
``*_bound`` is what the paper's inequality says, to first order in u unless it says otherwise.

The error model behind every bound: inputs are given exactly; fl(a o b) = (a o b)(1 + delta), |delta| <= u,
with neither overflow nor underflow; a kernel's constant (c_gemm, c'_gemm = ``c_gemm_out``, c_smx =
``c_softmax``, a_ln) is a property of the machine, measured by ``fragility_lab.experiments.calibration``.

Statements that do not hold as printed, or need a reading, say so where they stand: ``gemm_error_bound``,
``softmax_error_bound``, ``attention_error_bound``, ``downstream_transport``, ``layernorm_ratio``, the
LayerNorm of a matrix (module ``layernorm``), ``mismatch_bound``, ``layernorm_surrogate``,
``post_update_ratio_bound``, ``dropout_gain_bound`` and ``dropout_kappa_softmax``.
"""

from fragility_core.theory.attention import (
    AttentionNorms,
    attention_coefficient,
    attention_error_bound,
    attention_error_bound_with_remainder,
    attention_magnitude,
    attention_norms,
    attention_relative_error_bound,
    chi_score,
    exact_attention,
    gemm_error_bound,
    kappa_score,
    kappa_softmax,
    kappa_value,
    score_error_bound,
    softmax_error_bound,
    softmax_growth,
    softmax_jacobian,
    softmax_sensitivity,
)
from fragility_core.theory.dropout import (
    dropout_gain_bound,
    dropout_jacobian,
    dropout_kappa_bound,
    dropout_kappa_softmax,
)
from fragility_core.theory.layernorm import (
    LayerNormNorms,
    layernorm_change_bound,
    layernorm_coefficient,
    layernorm_error_bound,
    layernorm_factor,
    layernorm_factor_slope,
    layernorm_magnitude,
    layernorm_norms,
    layernorm_path,
    layernorm_ratio,
    layernorm_relative_error_bound,
)
from fragility_core.theory.residual import (
    depth_condition_bound,
    downstream_transport,
    residual_condition_bound,
    residual_singular_value_bounds,
)
from fragility_core.theory.rmsnorm import (
    RMSNormNorms,
    rmsnorm_coefficient,
    rmsnorm_error_bound,
    rmsnorm_magnitude,
    rmsnorm_norms,
    rmsnorm_path,
    rmsnorm_ratio,
    rmsnorm_relative_error_bound,
)
from fragility_core.theory.stabilization import (
    epsilon_candidate,
    epsilon_update,
    frozen_magnitude,
    frozen_magnitude_slope,
    frozen_risk,
    frozen_risk_reduction,
    layernorm_surrogate,
    post_update_ratio_bound,
)
from fragility_core.theory.unified import (
    layer_risk,
    layernorm_dominance,
    local_magnitude,
    mismatch,
    mismatch_bound,
    predicted_mismatch,
    remainder_magnitude,
)

__all__ = [  # noqa: RUF022 (in the paper's order)
    # Section 3 (`sec:problem_formulation`)
    "mismatch",
    # Section 4.2 (`subsec:attn`)
    "exact_attention", "softmax_jacobian", "softmax_sensitivity", "kappa_softmax", "chi_score", "kappa_score",
    "kappa_value", "AttentionNorms", "attention_norms", "score_error_bound", "gemm_error_bound",
    "softmax_error_bound", "attention_coefficient", "attention_magnitude", "attention_error_bound",
    "attention_relative_error_bound", "softmax_growth", "attention_error_bound_with_remainder",
    # Section 4.3 (`subsec:residual`)
    "residual_singular_value_bounds", "residual_condition_bound", "depth_condition_bound", "downstream_transport",
    # Section 4.4 (`subsec:ln`)
    "layernorm_path", "LayerNormNorms", "layernorm_norms", "layernorm_factor", "layernorm_factor_slope",
    "layernorm_magnitude", "layernorm_coefficient", "layernorm_error_bound", "layernorm_relative_error_bound",
    "layernorm_change_bound", "layernorm_ratio",
    # the same for RMSNorm, which the paper does not treat
    "rmsnorm_path", "RMSNormNorms", "rmsnorm_norms", "rmsnorm_magnitude", "rmsnorm_coefficient",
    "rmsnorm_error_bound", "rmsnorm_relative_error_bound", "rmsnorm_ratio",
    # Section 4.5 (`subsec:unified`), bgss_theory
    "remainder_magnitude", "local_magnitude", "mismatch_bound", "layer_risk", "predicted_mismatch",
    "layernorm_dominance", "frozen_magnitude", "frozen_magnitude_slope", "frozen_risk", "frozen_risk_reduction",
    # Section 5 (`sec:algorithm`)
    "layernorm_surrogate", "epsilon_candidate", "epsilon_update", "post_update_ratio_bound",
    # Remark 1 (`rem:dropout`)
    "dropout_gain_bound", "dropout_jacobian", "dropout_kappa_softmax", "dropout_kappa_bound",
]  # fmt: skip
