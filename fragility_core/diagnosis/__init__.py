"""One's own model in a number format: how far it drifts, where, what that does to its tokens, and what to keep in fp32.

``request`` says what is asked and what it will take, ``measure`` compares passes, ``run`` does the work,
``page`` writes it down.
"""

from fragility_core.diagnosis.page import write
from fragility_core.diagnosis.request import Request, forecast, load
from fragility_core.diagnosis.run import Diagnosis, diagnose

__all__ = ["Diagnosis", "Request", "diagnose", "forecast", "load", "write"]
