"""The remedy of an overflow: plans are run from cheap to dear, until one brings all windows back into the range."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fragility_adjoint import predictor
from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.predictor.overflow import Overflow, first_overflow
from fragility_core.models.paths import block_of, hidden_and_logits, is_norm, within
from fragility_numerics.formats import get_format
from fragility_numerics.lowering import LowPrecision, sharing_copy
from fragility_numerics.nested import tensors
from fragility_quantization.quantized import Quantized, lower
from fragility_quantization.recipes import Recipe
from fragility_quantization.static_scales import needs_calibration

MOST_MODULES = 8
WIDE = "bf16"
WHOLE = f"{WIDE} for everything"  # the last plan
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Attempt:
    """A ``plan`` that was run, and ``left``, the place that still left the range; None if every window came back."""

    plan: Plan
    left: Overflow | None


@dataclass(frozen=True)
class Remedy:
    """The remedy for windows that overflow.

    ``places`` has the place where each window overflows, by its number. ``tried`` has the plans in the order in which
    they were run, from cheap to dear. The last one mends all windows, or none does. If windows divide by an epsilon
    that rounds to zero, and a larger one mends them, ``epsilon`` has the path of the norm and the larger epsilon; else
    it is None.
    """

    places: dict[int, Overflow]
    tried: list[Attempt]
    epsilon: tuple[str, float] | None

    @property
    def plan(self) -> Plan | None:
        """The first plan that brings every window back; None if none does."""
        return next((attempt.plan for attempt in self.tried if attempt.left is None), None)


def find(
    model: nn.Module, low: Quantized, prediction: predictor.Prediction, tokens: Tensor, numbers: Iterable[int],
    execution: str,
) -> Remedy:  # fmt: skip
    """The remedy for the windows with these ``numbers`` of ``tokens`` (B, T), for ``model`` as ``low``.

    ``prediction`` has the places of the units.
    """
    found = {number: left_range(low, tokens[number : number + 1]) for number in numbers}
    places = {number: place for number, place in found.items() if place is not None}
    if not places:
        return Remedy({}, [], None)
    windows = tokens[list(places)].split(1)
    contributions, tried = whatever_contributes(model, prediction), []
    candidates = CandidatePlans(contributions, windows, execution, tokens if needs_calibration(low.recipe) else None)
    for attempt in candidates.attempts(next(iter(places.values()))):
        tried.append(attempt)
        if attempt.left is None:
            break
    return Remedy(places, tried, raised_epsilon(model, low, execution, places, windows))


def whatever_contributes(model: nn.Module, prediction: predictor.Prediction) -> Contributions:
    """The units of ``model`` and prices of plans, with contributions of 0: no ``prediction`` needs to be finite."""
    windows = prediction.windows.assign(predicted=0.0, norm=1.0)
    return Contributions(
        model, replace(prediction, windows=windows, contributions=prediction.contributions.assign(c2=0.0))
    )


@torch.no_grad()
def left_range(low: LowPrecision, tokens: Tensor) -> Overflow | None:
    """The place where the pass over one window of ``tokens`` (1, T) leaves the range; None if all stays in range."""
    outputs: list[Tensor] = []
    place = first_overflow(low, lambda model: outputs.extend(hidden_and_logits(model, tokens)))
    if place is None and not all(x.isfinite().all() for x in tensors(outputs)):
        return Overflow("", "nan", "the output")
    return place


def mending(remedy: Remedy | None, contributions: Contributions) -> Plan | None:
    """The plan of the ``remedy`` with its prediction, if it keeps parts in fp32; else None."""
    plan = None if remedy is None else remedy.plan
    return contributions.priced(plan) if plan is not None and plan.format == contributions.recipe.name else None


def with_remedy(
    contributions: Contributions, remedy: Remedy | None, budget: tuple[float, str], tokens: Tensor, execution: str
) -> Plan:  # fmt: skip
    """The plan for the ``budget``, an amount and a unit, that brings back the windows of ``tokens`` that overflow.

    The plan is the remedy alone if the budget pays for no more, or if keeping more lets one of these windows overflow.
    """
    alone = mending(remedy, contributions)
    if alone is None:
        return contributions.plan(*budget)
    if contributions.size(alone, budget[1]) > budget[0]:
        return alone
    assert remedy is not None  # ``alone`` is its plan
    plan = contributions.plan(*budget, beside=alone)
    calibrating = tokens if needs_calibration(contributions.recipe) else None
    candidates = CandidatePlans(contributions, tokens[list(remedy.places)].split(1), execution, calibrating)
    return alone if candidates.left(candidates.applied(plan)) else plan


def execution_of(plan: Plan, recipe: Recipe, execution: str) -> str:
    """The ``execution`` of a model with ``plan``; "auto" if the plan has another format than ``recipe``."""
    return execution if plan.format == recipe.name or execution == "weights" else "auto"


class CandidatePlans:
    """Plans for the model of ``contributions``, from cheap to dear. Each is run over the ``windows`` that overflow."""

    def __init__(
        self, contributions: Contributions, windows: Sequence[Tensor], execution: str, calibrating: Tensor | None
    ):  # fmt: skip
        self.contributions, self.model, self.windows = contributions, contributions.model, windows
        self.execution, self.calibrating = execution, calibrating

    def attempts(self, place: Overflow) -> Iterator[Attempt]:
        """The attempts, one after the other; ``place`` is where the first window overflows without a plan."""
        sites = [name for name in ("scores", "residual") if name in self.contributions.structure.sites]
        begun: list[tuple[dict, Overflow]] = []

        def with_sites(*names: str) -> Iterator[Attempt]:
            kept = dict.fromkeys(names, True)
            for attempt in self.run(kept):
                yield attempt
                if attempt.left is not None:
                    begun.append((kept, attempt.left))

        for name in sites:
            yield from with_sites(name)
        yield from self.modules({}, place)
        if len(sites) == 2:
            yield from with_sites(*sites)
        for kept, left in begun:
            yield from self.modules(kept, left)
        yield from self.run({}, format=WIDE)

    def modules(self, kept: dict, left: Overflow | None) -> Iterator[Attempt]:
        """Attempts that keep, beside ``kept``, the module in which the overflow begins, then one more, up to eight."""
        modules: tuple[str, ...] = ()
        while left is not None and len(modules) < MOST_MODULES:
            path = self.next_module(left.module, modules)
            if path is None:
                return
            modules = (*(m for m in modules if not within(m, path)), path)
            left = None
            for attempt in self.run(kept, modules):
                yield attempt
                left = attempt.left

    def next_module(self, path: str, kept: Iterable[str]) -> str | None:
        """The module at ``path``, or its block if the module is kept already or has no parameters.

        None if the block is kept already, too, or if the module holds blocks: that is the model, and no cheap plan.
        """
        block = block_of(path)
        for candidate in (path, block[0] if block else ""):
            inside = any(within(candidate, other) for other in kept)
            holds = any(within(b, candidate) and b != candidate for b in self.contributions.structure.blocks)
            if candidate and not inside and not holds and list(self.model.get_submodule(candidate).parameters()):
                return candidate
        return None

    def run(self, kept: dict, modules: tuple[str, ...] = (), format: str = "") -> Iterator[Attempt]:
        """An attempt with one plan, or none if the model cannot keep these parts. Windows run until one overflows."""
        words = {"scores": "attention scores", "residual": "residual stream"}
        label = ", ".join([*(words[name] for name in kept), *modules]) or WHOLE
        plan = Plan(format or self.contributions.recipe.name, modules, label=label, **kept)
        if not format:
            plan = replace(self.contributions.priced(plan), predicted=None)
        try:
            low = self.applied(plan, execution_of(plan, self.contributions.recipe, self.execution))
        except ValueError:  # the plan is not in force in this model
            return
        yield Attempt(plan, self.left(low))

    def applied(self, plan: Plan, execution: str = "") -> LowPrecision:
        """The model with ``plan``. Raises ValueError for a plan that is not in force."""
        return apply(self.model, plan, execution or self.execution, self.calibrating)

    def left(self, low: LowPrecision) -> Overflow | None:
        """The place where the first window that overflows leaves the range; None if all stay in range."""
        places = (left_range(low, window) for window in self.windows)
        return next((place for place in places if place is not None), None)


def raised_epsilon(
    model: nn.Module, low: Quantized, execution: str, places: dict[int, Overflow], windows: Sequence[Tensor]
) -> tuple[str, float] | None:  # fmt: skip
    """The norm that divides by an epsilon rounded to zero, and the smallest normal number if that mends it, or None."""
    divided = [place.module for place in places.values() if place.kind == "infinite"]
    if not divided:
        return None
    path, least = divided[0], get_format(low.format.name).smallest_normal
    norms = [p for p, module in model.named_modules() if is_norm(module)]
    if path not in norms:
        return None
    raised = sharing_copy(model)
    for name in EPSILONS:
        for module in map(raised.get_submodule, norms):
            if 0 < (getattr(module, name, None) or 0) < least:
                setattr(module, name, least)
    again = lower(raised, low.recipe, execution)
    return (path, least) if all(left_range(again, window) is None for window in windows) else None
