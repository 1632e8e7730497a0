"""The paper's score of a low-precision model, and the one pass that measures what the score needs.

``monitor`` measures the statistics of a pass, ``scoring`` computes the score from them.
"""

from fragility_core.surrogates.scoring import DERIVED, LAYERNORM_TERMS, SIGNALS, Estimator, score

__all__ = ["DERIVED", "LAYERNORM_TERMS", "SIGNALS", "Estimator", "score"]
