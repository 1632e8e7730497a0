"""The work: predict every window, plan, and measure with and without the plan where a reference fits."""

import time
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from fragility_core import adjoint
from fragility_core.adjoint.routing import changed_choices
from fragility_core.arithmetic.lowering import LowPrecision, lower
from fragility_core.protection import Contributions, Plan, apply
from fragility_lab.diagnosis.measure import Ranges, compare, observe
from fragility_lab.diagnosis.request import Forecast, Request
from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.progress import progress


@dataclass(frozen=True)
class Diagnosis:
    """What was found; the tables have a row per window unless said otherwise.

    ``prediction`` is that of the unprotected pass, ``contributions`` what it says about units (None where
    every window overflows, and there is no ``plan`` then). ``ranges`` has a row per module whose values
    left the range. With a reference, ``measured`` and ``protected`` are ``measure.compare``'s windows without
    and with the plan, ``drift`` and ``protected_drift`` its blocks. ``changed_experts`` is the share of
    choices of experts that rounding changes, for models that make such choices.
    """

    request: Request
    execution: str
    prediction: adjoint.Prediction
    ranges: pd.DataFrame
    seconds: float
    contributions: Contributions | None = None
    plan: Plan | None = None
    measured: pd.DataFrame | None = None
    drift: pd.DataFrame | None = None
    protected: pd.DataFrame | None = None
    protected_drift: pd.DataFrame | None = None
    changed_experts: float | None = None


def diagnose(request: Request, loaded: Inputs, tokens: Tensor, expected: Forecast) -> Diagnosis:
    """Do what ``request`` asks over ``tokens`` (B, T), with progress.

    Raises ValueError for a budget that exceeds what the model has.
    """
    start = time.perf_counter()
    model, low = loaded.model, lower(loaded.model, request.format, request.execution)
    prediction = predict(low, model, tokens, request.probes)
    contributions, plan = None, None
    if prediction.windows.overflow.eq("").any():
        contributions = Contributions(model, prediction)
        plan = contributions.plan(*request.parsed_budget)
    ranges = Ranges(low)
    referenced = request.reference == "yes" or (request.reference == "auto" and expected.fits)
    result = partial(Diagnosis, request, low.execution, prediction, contributions=contributions, plan=plan)
    if not referenced:
        with ranges.counting():
            for window in progress(tokens.split(1), desc="low-precision passes"):
                observe(low.model, window, low)
        return result(ranges.table(model), time.perf_counter() - start)
    with ranges.counting():
        measured, drift = measure(low, model, tokens, "without the plan")
    protected, protected_drift = None, None
    if plan is not None:
        protected, protected_drift = measure(apply(model, plan, request.execution), model, tokens, "with it")
    changed = None
    if prediction.kernels.site.eq("router").any():
        windows = progress(tokens.split(1), desc="comparing choices of experts")
        changed = float(torch.stack([changed_choices(low, model, w)[0].float().mean() for w in windows]).mean())
    return result(
        ranges.table(model), time.perf_counter() - start, measured=measured, drift=drift, protected=protected,
        protected_drift=protected_drift, changed_experts=changed,
    )  # fmt: skip


def predict(low: LowPrecision, model, tokens: Tensor, probes: int) -> adjoint.Prediction:
    """The prediction of all windows ``tokens`` (B, T), one after the other."""
    estimator = adjoint.Adjoint(low, model, probes)
    found = [estimator(window) for window in progress(tokens.split(1), desc="predicting")]
    kernels, windows = (
        pd.concat([getattr(p, name).assign(window=number) for number, p in enumerate(found)], ignore_index=True)
        for name in ("kernels", "windows")
    )
    return replace(found[0], kernels=kernels, windows=windows)


def measure(low: LowPrecision, model, tokens: Tensor, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``measure.compare`` of every window with the fp32 ``model``, one after the other."""
    tables = [
        compare(observe(low.model, window, low), observe(model, window), window)
        for window in progress(tokens.split(1), desc=f"measuring {name}")
    ]
    windows, drift = (
        pd.concat([table.assign(window=number) for number, table in enumerate(column)], ignore_index=True)
        for column in zip(*tables)
    )
    return windows, drift
