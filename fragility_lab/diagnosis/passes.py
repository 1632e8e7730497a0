"""The passes of a diagnosis: the model in low precision, predictions for windows, and their measurement."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from torch import Tensor

from fragility_adjoint import predictor
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.steady import steady
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.comparison import compare, numbered, observe_each
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision
from fragility_offload.offloaded import is_offloaded
from fragility_quantization.quantized import Quantized, as_prequantized, lower
from fragility_quantization.recipes import get_recipe
from fragility_quantization.static_scales import calibrated


def low_model(request: Request, loaded: Inputs, tokens: Tensor) -> Quantized:
    """The model in low precision without a plan, by the format. Static scales are measured over ``tokens`` (B, T)."""
    if loaded.rounded is not None:
        return as_prequantized(loaded.rounded)
    recipe = get_recipe(request.format)
    if request.mixes:  # beside kernels in fp32 where weights alone are chosen; a mix of GGUF is none of the schemes
        own, kernels = request.schemes[0], request.schemes[-1].kernels
        recipe = own if own.gguf == recipe.gguf else replace(recipe, kernels=kernels)
    execution = "auto" if request.mixes else request.execution
    return lower(loaded.model, calibrated(loaded.model, recipe, tokens), execution)


def estimator(low: LowPrecision, model, probes: int, target: str) -> predictor.Adjoint:
    """The estimator of the error of ``low`` in ``target``, with gradients at both ends unless that is "hidden"."""
    gradients = "low" if target == "hidden" else "both"
    return predictor.Adjoint(low, model, probes, target=target, gradients=gradients)


def predict(known: predictor.Adjoint, groups: Sequence[Tensor]) -> predictor.Prediction:
    """The prediction by ``known`` for all windows of ``groups``, tokens (B, T), one group after the other.

    If windows scatter, there are more probes than ``known`` has (``steady``), except in a streamed model.
    """

    def estimate(seed: int) -> predictor.Prediction:
        """The prediction from the probes of a ``seed``."""
        how = "predicting" if not seed else "predicting again, as windows scatter"
        found = [known(windows, seeds=[seed] * len(windows)) for windows in progress(groups, desc=how)]
        tables = {name: numbered(getattr(p, name) for p in found) for name in ("contributions", "windows")}
        return replace(found[0], **tables)

    return estimate(0) if is_offloaded(known.low.model) else steady(estimate)


def measure(
    low: LowPrecision, model, groups: Sequence[Tensor], name: str
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """``comparison.compare`` of ``low`` with the fp32 ``model`` for every window of ``groups``, tokens (B, T)."""
    tables = [
        compare(*window)
        for windows in progress(groups, desc=f"measuring {name}")
        for window in zip(observe_each(low.model, windows, low), observe_each(model, windows), windows.split(1))
    ]
    windows, drift = map(numbered, zip(*tables))
    return windows, drift
