"""Diagnosis of a user's model in a number format: drift, its causes, its effect on tokens, and what to keep in fp32.

``options`` and ``request`` check what is asked for, ``loading`` loads the model and its windows, ``needs`` forecasts
time and memory, ``run`` does the work in steps, ``found`` holds the findings, and ``page`` writes them.
"""

import importlib

_MODULES = {
    "Diagnosis": "found", "Request": "request", "diagnose": "run", "forecast": "needs", "load": "loading",
    "write": "page",
}  # fmt: skip
__all__ = ["Diagnosis", "Request", "diagnose", "forecast", "load", "write"]


def __getattr__(name: str):
    """Import a name when it is asked for, so that a refusal of ``make diagnose`` need not wait for PyTorch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
