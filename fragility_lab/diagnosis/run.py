"""The work: steps that each fill in a part of the diagnosis. A step that fails leaves the others as they are."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_adjoint import predictor
from fragility_adjoint.explain.coherence import coherence
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.mixed_precision.bits import Choice, Choices, choices_beside
from fragility_adjoint.mixed_precision.plans import protect
from fragility_core.models.paths import attention_modules
from fragility_lab.diagnosis import flips, remedy
from fragility_lab.diagnosis.found import Diagnosis, Failure, made
from fragility_lab.diagnosis.needs import Forecast, secants_fit
from fragility_lab.diagnosis.passes import estimator, low_model, measure, predict
from fragility_lab.diagnosis.plans import exports
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.sentence import EXPLAINED, broken
from fragility_lab.diagnosis.tails import origins
from fragility_lab.diagnosis.tokens import COLUMNS, TOLD, errors_by_token
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.comparison import Ranges, each, observe_each
from fragility_lab.measurement.growth import growth
from fragility_lab.measurement.routing import changed_choices
from fragility_lab.reporting.tables import duration
from fragility_lab.running.environment import progress
from fragility_lab.running.threads import on_free_cores
from fragility_numerics.internals import attention_of
from fragility_numerics.lowering import sharing_copy
from fragility_offload.offloaded import is_offloaded
from fragility_quantization.quantized import Quantized, as_prequantized, lower
from fragility_quantization.static_scales import calibrated, needs_calibration

SELDOM = 5  # a report waits for so many times the seconds of the one before, except the final report
PASSES = 2  # realisations of rounding that are measured by token, including the pass that runs


class Work:
    """The models and windows that the steps of a diagnosis share, and what is ``found`` so far."""

    def __init__(self, request: Request, loaded: Inputs, tokens: Tensor, expected: Forecast, found: Diagnosis):
        self.request, self.loaded, self.model = request, loaded, loaded.model
        self.tokens, self.expected, self.found = tokens, expected, found
        self.groups = tokens.split(expected.batch)
        self.whole = not is_offloaded(self.model)
        found.tokenizer, found.opening = loaded.tokenizer, loaded.opening.spelled
        found.attention = (attention_of(self.model) if attention_modules(self.model) else None) or "its own"
        found.vocabulary = self.model.config.get_text_config().vocab_size
        found.referenced = request.reference == "yes" or (request.reference == "auto" and expected.fits)

    @cached_property
    def low(self) -> Quantized:
        """The model in low precision without a plan."""
        return low_model(self.request, self.loaded, self.tokens)

    @cached_property
    def estimator(self) -> predictor.Adjoint:
        """The estimator of the error without a plan."""
        return estimator(self.low, self.model, self.request.probes, self.request.measured_in)

    @cached_property
    def realisations(self) -> ErrorSamples:
        """Passes, with drawn errors, of the model without a plan; those of the estimator if it has the fp32 end."""
        known = self.estimator
        if not known.points[-1].exact:
            known = predictor.Adjoint(self.low, self.model, gradients="fp32", beside=known)
        return ErrorSamples(known)

    @property
    def finite_windows(self) -> dict[int, Tensor]:
        """The windows (1, T) whose prediction is finite, by number; all windows if there is no prediction."""
        windows = dict(enumerate(self.tokens.split(1)))
        if self.found.prediction is None:
            return windows
        overflow = self.found.prediction.windows.set_index("window").overflow
        return {number: window for number, window in windows.items() if overflow[number] == ""}

    @property
    def lost_windows(self) -> list[int]:
        """The numbers of the windows whose prediction is not finite, or whose KL is not although fp32 is finite."""
        lost = {*range(len(self.tokens))} - {*self.finite_windows}
        if (measured := self.found.measured) is not None:
            lost |= {*measured.window[~np.isfinite(measured.kl)]}
        return sorted(map(int, lost - self.found.lost_in_fp32))

    def kept(self, plan: Plan, execution: str = "") -> Quantized:
        """The model in low precision with a ``plan``, computing as asked for unless another ``execution`` is given."""
        if self.loaded.rounded is not None:
            return protect(as_prequantized(sharing_copy(self.loaded.rounded)), self.model, plan)
        calibrating = self.tokens if needs_calibration(plan.recipe) else None
        return apply(self.model, plan, execution or self.request.execution, calibrating)


def predict_windows(work: Work) -> None:
    """Predict every window without a plan, and what each unit contributes."""
    found = work.found
    found.execution = work.low.execution
    found.prediction = predict(work.estimator, work.groups)
    if work.finite_windows:
        found.contributions = Contributions(work.model, found.prediction)


def measure_windows(work: Work) -> None:
    """Measure every window without a plan, and count the values out of range. Without a reference, only count."""
    found, low, ranges = work.found, work.low, Ranges(work.low)
    found.execution = low.execution
    with ranges.counting():
        if found.referenced:
            found.measured, found.drift = measure(low, work.model, work.groups, "without the plan")
        else:
            for windows in progress(work.groups, desc="low-precision passes"):
                observe_each(low.model, windows, low)
    found.ranges = ranges.table(work.model)


def mend_overflows(work: Work) -> None:
    """Look for the cheapest plan that brings back the windows that overflow."""
    prediction, numbers = made(work.found.prediction), work.lost_windows
    work.found.remedy = remedy.find(work.model, work.low, prediction, work.tokens, numbers, work.request.execution)


def predict_mended(work: Work) -> None:
    """Predict and measure the windows that overflow with the plan that brings them back."""
    found, request, mending = work.found, work.request, made(work.found.remedy)
    numbers, plan = [*mending.places], made(mending.plan)
    tokens = work.tokens[numbers]
    calibrating = work.tokens if needs_calibration(plan.recipe) else None
    mended = apply(work.model, plan, remedy.execution_of(plan, work.low.recipe, request.execution), calibrating)
    target = "hidden" if request.measured_in == "hidden" else "kl"
    known = estimator(mended, work.model, request.probes, target)
    prediction = predict(known, tokens.split(len(work.groups[0])))
    found.mended = pd.DataFrame({"window": numbers, "predicted": prediction.windows.predicted.to_numpy()})
    if found.referenced:
        measured, _ = measure(mended, work.model, tokens.split(1), "with what brings windows back")
        found.mended = found.mended.join(measured.drop(columns="window"))


def choose_plan(work: Work) -> None:
    """Make the plan for the budget, and predict it."""
    found, request, contributions = work.found, work.request, made(work.found.contributions)
    if request.mixes:
        keep = [site for site in request.kept if site in contributions.structure.sites]  # the page names others
        choices = chosen_from(request, work.model, work.groups, made(found.prediction), keep)
        found.choices, found.choice = choices, mixed_choice(request, choices)
        found.planned = pd.Series(choices.predict(found.choice), index=choices.windows)
        found.plan = choices.plan(found.choice)
    else:
        budget = request.parsed_budget
        plan = remedy.with_remedy(contributions, found.remedy, budget, work.tokens, request.execution)
        found.planned = contributions.predict(plan).set_index("window").predicted
        found.plan = plan
    if not request.reference_model:  # whose weights are stored already
        found.exports = exports(found.plan, work.model)


def measure_plan(work: Work) -> None:
    """Measure every window with the plan."""
    found = work.found
    kept = work.kept(made(found.plan))
    found.protected, found.protected_drift = measure(kept, work.model, work.groups, "with the plan")


def compare_experts(work: Work) -> None:
    """Count the choices of experts that rounding changes."""
    windows = progress(work.groups, desc="comparing choices of experts")
    compared = (each(partial(changed_choices, work.low, work.model), group, work.model, work.low) for group in windows)
    changes = torch.cat([changes.flatten() for group in compared for changes in group])
    work.found.changed_experts = float(changes.float().mean()) if len(changes) else None  # routers may take all experts


def follow_tokens(work: Work) -> None:
    """Predict and measure the error by token, and find where the error of tokens in the tail begins."""
    found, probes = work.found, work.request.probes
    passes = 1 if work.low.weights_only else PASSES  # errors of weights stay as they are
    found.by_token = errors_by_token(
        work.low, work.realisations, work.finite_windows, probes, passes * found.referenced
    )  # fmt: skip
    tail = found.by_token.tail(COLUMNS[work.request.measured_in], TOLD)
    found.origins = pd.Series(dtype=object)
    for window, rows in tail.groupby("window"):
        begun = origins(work.low, work.model, work.finite_windows[window], rows.position.tolist())
        found.origins = pd.concat([found.origins, pd.Series(begun, index=rows.index)])


def choose_tokens(work: Work) -> None:
    """Predict changed choices, and decode greedily."""
    found = work.found
    found.flips = flips.find(
        work.low, work.model, work.realisations, made(found.by_token), found.chooses_experts, found.referenced
    )  # fmt: skip


def add_up_signs(work: Work) -> None:
    """Find errors that act together. With secant slopes, if memory allows, they add up to the measured error."""
    secants = work.whole and work.found.referenced and secants_fit(work.request, work.model)
    target, gradients = work.request.measured_in, "secant" if secants else "low"
    known = predictor.Adjoint(
        work.low, work.model, work.request.probes, target=target, gradients=gradients, beside=work.estimator
    )
    work.found.coherence = coherence(known, progress(work.groups, desc="errors that act together"))


def halve_errors(work: Work) -> None:
    """Measure how the error grows, with half of every rounding error."""
    found = work.found
    found.growth = growth(work.realisations, work.model, work.tokens, found.measured, work.request.measured_in)


def continue_text(work: Work) -> None:
    """Continue the beginning of a window in fp32, in low precision, and with the plan, or say why not."""
    found, windows = work.found, work.finite_windows
    if not work.whole:
        found.sentence = "This model is read from the disk for every pass, and a text takes many passes."
    elif not found.referenced:
        found.sentence = "No fp32 pass was run, so there is no text to compare with."
    elif not windows:
        found.sentence = f"Every window overflows in {work.request.described}, which leaves no numbers to choose words."
    elif work.request.length < 2:
        found.sentence = "Windows of one token leave nothing to continue."
    else:
        most = EXPLAINED if secants_fit(work.request, work.model) else 0
        low, kept = work.low, work.kept
        if low.execution == "native":  # the estimator rounds as emulation does: causes add up to the error of its pass
            low, kept = lower(work.model, low.recipe, "emulated"), partial(work.kept, execution="emulated")
        found.sentence = broken(found, work.model, windows, low, kept, most)


@dataclass(frozen=True)
class Step:
    """A step of the work: its ``name``, what it is ``doing`` in words, and the function that it runs.

    The step ``needs`` these fields of the diagnosis to be known. It is done if ``asked`` returns True.
    """

    name: str
    doing: str
    run: Callable[[Work], None]
    needs: tuple[str, ...] = ()
    asked: Callable[[Work], bool] = lambda work: True


STEPS = (
    Step("prediction", "predicting", predict_windows),
    Step("measurement", "measuring", measure_windows),
    Step(
        "remedy", "mending what overflows", mend_overflows, ("prediction",),  # what came rounded has no other form
        lambda work: bool(work.lost_windows) and work.loaded.rounded is None,
    ),
    Step(
        "mended", "predicting what is mended", predict_mended, ("remedy",),
        lambda work: made(work.found.remedy).plan is not None,
    ),
    Step("plan", "choosing a plan", choose_plan, ("contributions",)),
    Step("plan measured", "measuring the plan", measure_plan, ("plan",), lambda work: work.found.referenced),
    Step(
        "experts", "comparing choices of experts", compare_experts, ("prediction",),
        lambda work: work.found.referenced and work.found.chooses_experts,
    ),
    Step(
        "tokens", "following single tokens", follow_tokens,
        asked=lambda work: work.whole and bool(work.finite_windows),
    ),
    Step("choices", "predicting changed choices", choose_tokens, ("by_token",)),
    Step("coherence", "finding errors that act together", add_up_signs, ("contributions",)),
    Step("growth", "halving every error", halve_errors, ("measured",), lambda work: work.whole),
    Step("sentence", "continuing a text", continue_text),
)  # fmt: skip


@on_free_cores()
def diagnose(
    request: Request, loaded: Inputs, tokens: Tensor, expected: Forecast,
    report: Callable[[Diagnosis], object] | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis that ``request`` asks for, over ``tokens`` (B, T). Shows progress.

    ``report`` is called with the diagnosis so far: after the last step, and after others unless reports would take a
    large part of the time. A step that fails is in ``Diagnosis.failed``. Steps that need its result are left out, and
    all others run. There are as many threads as cores that are free at the start.
    """
    found = Diagnosis(request, dtypes=loaded.dtypes, pending=[step.name for step in STEPS])
    reported, reporting = 0.0, 0.0
    work = Work(request, loaded, tokens, expected, found)
    for number, step in enumerate(STEPS, 1):
        if all(getattr(found, name) is not None for name in step.needs) and step.asked(work):
            start = time.perf_counter()
            print(f"step {number} of {len(STEPS)}: {step.doing}{expected.of(step.name)}", flush=True)
            try:
                step.run(work)
            except Exception as error:  # the page tells of any error, and has all other parts
                found.failed[step.name] = Failure.of(step.doing, error)
            found.seconds[step.name] = time.perf_counter() - start
        found.pending.remove(step.name)
        if report is not None and (not found.pending or time.perf_counter() - reported >= SELDOM * reporting):
            start = time.perf_counter()
            report(found)
            reported = time.perf_counter()
            reporting = reported - start
    taken = sum(found.seconds.values())
    print(f"all steps took {duration(taken)}; the forecast was {duration(expected.seconds)}", flush=True)
    return found


def chosen_from(
    request: Request, model, groups: Sequence[Tensor], first: predictor.Prediction, keep: Iterable[str]
) -> Choices:  # fmt: skip
    """The choices among the schemes of ``request``, and of parts of the sites ``keep`` in fp32, over ``groups``.

    ``first`` is the prediction for the format, the first scheme or a mix of them. Windows that overflow with some
    scheme do not count.
    """
    found = {first.recipe.name: first} if request.schemes[0].name == first.recipe.name else {}
    tokens = torch.cat([*groups])
    for recipe in request.schemes:
        if recipe.rounds and recipe.name not in found:
            low = lower(model, calibrated(model, recipe, tokens))
            found[recipe.name] = predict(estimator(low, model, request.probes, request.measured_in), groups)
    return choices_beside(first.recipe, model, found, tokens, keep)


def mixed_choice(request: Request, choices: Choices) -> Choice:
    """The choice of schemes, and of parts to keep, for the budget of ``request``."""
    amount, unit = request.parsed_budget
    return {"bits": choices.within_bits, "bytes": choices.within_bytes, "kl": choices.within_error}[unit](amount)
