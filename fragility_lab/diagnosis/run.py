"""The work: predict every window, make a plan, and measure with and without it if memory allows a reference."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from fragility_core import adjoint
from fragility_core.adjoint.coherence import Coherence, coherence
from fragility_core.arithmetic.calibration import calibrated, needs_calibration
from fragility_core.arithmetic.internals import attention_of
from fragility_core.arithmetic.lowering import LowPrecision, as_given, lower, sharing_copy
from fragility_core.arithmetic.recipes import get_recipe
from fragility_core.models.hollow import is_hollow
from fragility_core.protection import Contributions, Plan, apply
from fragility_core.protection.bits import Choice, Choices, fused_layers
from fragility_core.protection.keep import protect
from fragility_lab.diagnosis import flips
from fragility_lab.diagnosis.flips import Flips
from fragility_lab.diagnosis.growth import Growth, growth
from fragility_lab.diagnosis.measure import Ranges, compare, each, numbered, observe_each
from fragility_lab.diagnosis.needs import Forecast, secants_fit
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.routing import changed_choices
from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.environment import progress


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis. Its tables have one row per window unless stated otherwise.

    ``prediction`` is for the model without a plan. ``contributions`` says what each unit contributes to it; it is None,
    like ``plan``, if every window overflows. ``ranges`` has one row per module with values out of range. With a
    reference, ``measured`` and ``protected`` are the windows of ``measure.compare`` without and with the plan;
    ``drift`` and ``protected_drift`` are its blocks. ``changed_experts`` is the share of choices of experts that
    rounding changes, for models that choose experts. ``planned`` is the prediction with the plan, by window.
    ``coherence`` says which errors act together without a plan, unless every window overflows. For models in the whole
    form ``flips`` predicts changed choices; with a reference ``growth`` says whether the error grows in proportion.
    ``choices`` are the schemes among which a budget for schemes chose, ``choice`` what it chose. ``attention`` is the
    implementation that ran.
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
    planned: pd.Series | None = None
    choices: Choices | None = None
    choice: Choice | None = None
    attention: str = ""
    flips: Flips | None = None
    coherence: Coherence | None = None
    growth: Growth | None = None


def diagnose(request: Request, loaded: Inputs, tokens: Tensor, expected: Forecast) -> Diagnosis:
    """The diagnosis that ``request`` asks for, over ``tokens`` (B, T). Shows progress.

    Raises ValueError for a budget larger than the model.
    """
    start = time.perf_counter()
    model = loaded.model
    recipe, execution = get_recipe(request.format), request.execution
    if request.mixes:  # without a plan all layers have the smallest scheme
        recipe, execution = request.schemes[0], "auto"
    if loaded.rounded is None:
        low = lower(model, calibrated(model, recipe, tokens), execution)
    else:
        low = as_given(loaded.rounded)
    groups = tokens.split(expected.together)
    measured_groups = groups if is_hollow(model) else tokens.split(1)  # no pass is shared, and outputs need memory
    prediction = predict(low, model, groups, request.probes, request.measured_in)
    contributions, plan, planned, choices, choice = None, None, None, None, None
    if prediction.windows.overflow.eq("").any():
        contributions = Contributions(model, prediction)
        if request.mixes:
            keep = [site for site in request.kept if site in contributions.structure.sites]  # the page names others
            choices = chosen_from(request, model, groups, prediction, keep)
            choice = mixed_choice(request, choices)
            plan, planned = choices.plan(choice), pd.Series(choices.predict(choice), index=choices.windows)
        else:
            plan = contributions.plan(*request.parsed_budget)
            planned = contributions.predict(plan).set_index("window").predicted
    ranges = Ranges(low)
    referenced = request.reference == "yes" or (request.reference == "auto" and expected.fits)
    measured = drift = protected = protected_drift = changed = None
    with ranges.counting():
        if referenced:
            measured, drift = measure(low, model, measured_groups, "without the plan")
        else:
            for windows in progress(measured_groups, desc="low-precision passes"):
                observe_each(low.model, windows, low)
    if referenced and plan is not None:
        if loaded.rounded is None:
            kept = apply(model, plan, execution, tokens if needs_calibration(plan.recipe) else None)
        else:
            kept = protect(as_given(sharing_copy(loaded.rounded)), model, plan)
        protected, protected_drift = measure(kept, model, measured_groups, "with the plan")
    if referenced and prediction.contributions.site.eq("router").any():
        windows = progress(measured_groups, desc="comparing choices of experts")
        compared = (each(partial(changed_choices, low, model), group, model, low) for group in windows)
        found = torch.cat([changes.flatten() for group in compared for changes in group])
        changed = float(found.float().mean()) if len(found) else None  # routers may take all experts
    whole = not is_hollow(model)
    choosing = flips.find(low, model, tokens, prediction, request.probes, referenced) if whole else None
    secants = whole and referenced and secants_fit(request, model)
    together = errors_together(low, model, groups, request, secants) if contributions is not None else None
    grown = growth(low, model, tokens, measured, request.measured_in) if whole and referenced else None
    return Diagnosis(
        request, low.execution, prediction, ranges.table(model), time.perf_counter() - start, contributions, plan,
        measured, drift, protected, protected_drift, changed, planned, choices, choice,
        attention_of(model) or "its own", choosing, together, grown,
    )  # fmt: skip


def errors_together(
    low: LowPrecision, model, groups: Sequence[Tensor], request: Request, secants: bool
) -> Coherence:  # fmt: skip
    """Which errors of the low-precision passes over the windows of ``groups`` act together.

    With ``secants`` the contributions add up to the measured error; else it takes as long as an estimate.
    """
    gradients = "secant" if secants else "low"
    options = {"target": request.measured_in, "gradients": gradients, "batch": len(groups[0])}
    estimator = adjoint.Adjoint(low, model, request.probes, **options)
    return coherence(estimator, progress(groups, desc="errors that act together"))


def chosen_from(
    request: Request, model, groups: Sequence[Tensor], first: adjoint.Prediction, keep: Iterable[str]
) -> Choices:  # fmt: skip
    """What the schemes of ``request`` cost and do over the windows of ``groups``, and what keeping sites in fp32 does.

    ``first`` is known, the prediction for the first scheme.
    """
    how, found = (groups, request.probes, request.measured_in), {first.recipe.name: first}
    tokens = torch.cat([*groups])
    for recipe in request.schemes[1:]:
        if recipe.rounds:
            found[recipe.name] = predict(lower(model, calibrated(model, recipe, tokens)), model, *how)
    return Choices(model, found, fused_layers(model, tokens[:1]), keep)


def mixed_choice(request: Request, choices: Choices) -> Choice:
    """The choice of schemes, and of parts to keep, for the budget of ``request``."""
    amount, unit = request.parsed_budget
    return {"bits": choices.within_bits, "bytes": choices.within_bytes, "kl": choices.within_error}[unit](amount)


def predict(
    low: LowPrecision, model, groups: Sequence[Tensor], probes: int, target: str = "hidden"
) -> adjoint.Prediction:  # fmt: skip
    """The prediction for all windows of ``groups``, tokens (B, T), one group after the other.

    For a target other than the hidden state gradients are taken at both ends.
    """
    gradients = "low" if target == "hidden" else "both"
    options = {"target": target, "gradients": gradients, "batch": len(groups[0])}
    estimator = adjoint.Adjoint(low, model, probes, **options)
    found = [estimator(windows) for windows in progress(groups, desc="predicting")]
    tables = {name: numbered(getattr(p, name) for p in found) for name in ("contributions", "windows")}
    return replace(found[0], **tables)


def measure(
    low: LowPrecision, model, groups: Sequence[Tensor], name: str
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """``measure.compare`` for every window of ``groups``, tokens (B, T), with ``model`` in fp32."""
    tables = [
        compare(*window)
        for windows in progress(groups, desc=f"measuring {name}")
        for window in zip(observe_each(low.model, windows, low), observe_each(model, windows), windows.split(1))
    ]
    windows, drift = map(numbered, zip(*tables))
    return windows, drift
