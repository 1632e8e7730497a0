"""The paper's score of a low-precision model, and the one pass that measures what it needs.

``architectures`` finds the blocks, ``monitor`` watches a pass, ``score`` puts the statistics together.
"""

from fragility_core.surrogates.scoring import DERIVED, LAYERNORM_TERMS, SIGNALS, Estimator, score

__all__ = ["DERIVED", "LAYERNORM_TERMS", "SIGNALS", "Estimator", "score"]
