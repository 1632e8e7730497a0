"""Numerical fragility in Transformers: what low precision does to a forward pass, layer by layer.

The names that most people need can be imported from here:

    from fragility_core import lower, Monitor, score            # the paper's score of a low-precision pass
    from fragility_core import Adjoint, Contributions, apply    # a calibrated prediction, and plans made from it

| names | what they are | shown in |
|---|---|---|
| ``FORMATS``, ``get_format`` | number formats by name | README |
| ``lower`` | a model in low precision | README |
| ``Monitor``, ``score``, ``Estimator`` | statistics of one pass, and the score made of them | README |
| ``POLICIES``, ``get_policy``, ``advance`` | controllers of LayerNorm's epsilon | ``fragility_core.bgss`` |
| ``Adjoint``, ``Contributions``, ``Plan``, ``apply`` | predicted mismatch, and what to keep in fp32 | README |
| ``final_hidden``, ``mismatch`` | the final hidden state, and its relative error | README |

The formulas of the paper are in ``fragility_core.theory``. "Protocol section N" in a docstring is a section of
docs/protocol.md. Importing this package imports nothing heavy: a name is looked up when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "FORMATS": "arithmetic.formats",
    "get_format": "arithmetic.formats",
    "lower": "arithmetic.lowering",
    "Monitor": "surrogates.monitor",
    "Estimator": "surrogates",
    "score": "surrogates",
    "POLICIES": "bgss",
    "get_policy": "bgss",
    "advance": "bgss",
    "Adjoint": "adjoint",
    "Contributions": "protection",
    "Plan": "protection",
    "apply": "protection",
    "final_hidden": "models.tree",
    "mismatch": "theory",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
