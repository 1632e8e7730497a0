"""Diagnosis of one's own model in a number format: drift, its causes, its effect on tokens, and what to keep in fp32.

``request`` says what is asked, ``loading`` loads it, ``needs`` says what it will take, ``measure`` compares passes,
``run`` does the work in steps, ``found`` is what they have found, and ``page`` writes it, part by part.
"""

from fragility_lab.diagnosis.found import Diagnosis
from fragility_lab.diagnosis.loading import load
from fragility_lab.diagnosis.needs import forecast
from fragility_lab.diagnosis.page import write
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.run import diagnose

__all__ = ["Diagnosis", "Request", "diagnose", "forecast", "load", "write"]
