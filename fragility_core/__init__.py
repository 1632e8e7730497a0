"""Numerical fragility in Transformers: what low precision does to a forward pass, layer by layer.

The names that most people need, for a Hugging Face ``model`` in fp32 and ``tokens`` (B, T) of token ids::

    from fragility_core import observe
    report = observe(model, tokens, "fp16")  # report.windows: the score and the mismatch; report.layers: risks

    from fragility_core import FORMATS, get_format, lower
    format = get_format("bf16")  # FORMATS has the basic formats by name
    low = lower(model, "bf16")  # native where the device can, emulated elsewhere

    from fragility_core import patch
    with patch(low, model, block=1):  # one block in fp32
        logits = low(tokens).logits

    from fragility_core import final_hidden, mismatch
    with low.running():
        rounded = final_hidden(low.model, tokens)
    measured = mismatch(rounded, final_hidden(model, tokens))  # (B,) relative errors of the final hidden state

    from fragility_core import Estimator, Monitor, score
    observed = Monitor(low)(tokens)  # one pass, all statistics of the paper's score
    layers, windows = score(observed.layers, observed.windows, format.unit_roundoff, Estimator(layernorm="paper"))

    from fragility_core import POLICIES, advance, get_policy
    policy = get_policy("bgss")  # POLICIES has the classes by name
    state = policy.start(layers=layers.layer.nunique())
    rows, signal = layers[layers.window == 0], windows.combined[0]
    state = advance(state, signal, policy.decide(state, rows, signal))  # state.epsilon is for the next step

    from fragility_core import Controller
    controller = Controller(model, "bgss", "fp16")  # in a training loop of your own
    controller.step(tokens[:1])  # after an optimizer step: observes, decides, and sets LayerNorm's epsilons

What goes beyond the paper, such as quantization recipes, predictions of errors and plans, is in ``fragility_adjoint``.
The formulas of the paper are in ``fragility_core.theory``. "Protocol section N" in a docstring is a section of
docs/protocol.md. Importing this package imports nothing heavy: each name is looked up when it is first used.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "fragility_numerics.formats": ("FORMATS", "get_format"),
    "fragility_numerics.lowering": ("lower",),
    "fragility_core.surrogates": ("Estimator", "score"),
    "fragility_core.surrogates.monitor": ("Monitor",),
    "fragility_core.surrogates.observe": ("observe",),
    "fragility_core.surrogates.patching": ("patch",),
    "fragility_core.bgss": ("POLICIES", "advance", "get_policy"),
    "fragility_core.bgss.controller": ("Controller",),
    "fragility_core.models.paths": ("final_hidden",),
    "fragility_core.theory": ("mismatch",),
}


def lazily(package: str, names: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[..., Any], Callable[[], Any]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a ``package`` whose ``names`` load when used.

    ``names`` lists the offered names by module; a module may be of any package.
    """
    modules = {name: module for module, offered in names.items() for name in offered}

    def look_up(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return sorted(modules), look_up, lambda: sorted({*vars(sys.modules[package]), *modules})


__all__, __getattr__, __dir__ = lazily(__name__, _NAMES)
