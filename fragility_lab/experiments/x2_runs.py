"""X2 in runs: one analysis for one recipe or one ladder of recipes each, so that X2 goes on where it stopped."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import pandas as pd
from torch import Tensor

from fragility_lab.experiments.x2 import (
    QUANTITIES,
    Evaluator,
    coherence_rows,
    draw_rows,
    growth_rows,
    layer_rows,
    plan_rows,
    realisation_rows,
    recipe_rows,
)  # fmt: skip
from fragility_lab.experiments.x2_flips import changed_rows, length_rows
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Advance, Worker


@dataclass(frozen=True)
class AnalysisSpec(Specification):
    """One analysis of X2 for ``recipes``; raises ValueError for an unknown analysis and counts out of range."""

    experiment, unit = "X2", "window"

    analysis: str  # one of ANALYSES
    recipes: tuple[str, ...]  # one, or a ladder
    model: str
    data: str
    inputs: str  # digest of the weights, the token stream and what begins a window
    device: str
    windows: int
    length: int  # tokens per window
    seed: int = 0
    probes: int = 2
    count: int = 1  # budgets of plans, probes of coherence, draws, realisations, or tokens that are decoded
    quantities: tuple[str, ...] = QUANTITIES  # targets of recipes, each with a prediction of its own

    def __post_init__(self):
        if self.analysis not in ANALYSES:
            raise ValueError(f"analysis must be one of {', '.join(ANALYSES)}, got {self.analysis!r}")
        if not self.quantities or not set(self.quantities) <= set(QUANTITIES):
            raise ValueError(f"quantities must be some of {', '.join(QUANTITIES)}, got {', '.join(self.quantities)!r}")
        require_at_least(1, windows=self.windows, length=self.length, probes=self.probes, count=self.count)
        require_at_least(0, seed=self.seed)

    @property
    def label(self) -> str:
        return "-".join([self.analysis, *self.recipes])

    @property
    def size(self) -> int:
        return self.windows


class Recipes(Worker):
    """Computes analyses of X2. Analyses of the same windows share the fp32 passes."""

    def __init__(self, inputs: Inputs, store: RunStore):
        super().__init__(inputs, store)
        self.evaluator = cache(lambda *chosen, probes: Evaluator(inputs.model, self.tokens(*chosen), probes))

    def tokens(self, length: int, windows: int, seed: int) -> Tensor:
        """Windows (B, T), on the device of the model."""
        return self.inputs.windows(length, windows, seed)[1].to(self.inputs.device)

    def run(self, spec: AnalysisSpec, advance: Advance) -> pd.DataFrame:
        """The rows of the analysis, from its function in ANALYSES."""
        evaluator = self.evaluator(spec.length, spec.windows, spec.seed, probes=spec.probes)
        return ANALYSES[spec.analysis](evaluator, spec)


ANALYSES: dict[str, Callable[[Evaluator, AnalysisSpec], pd.DataFrame]] = {
    "recipes": lambda evaluator, spec: recipe_rows(evaluator, spec.recipes[0], spec.quantities),
    "growth": lambda evaluator, spec: growth_rows(evaluator, spec.recipes[0]),
    "coherence": lambda evaluator, spec: coherence_rows(evaluator, spec.recipes[0], spec.count),
    "draws": lambda evaluator, spec: draw_rows(evaluator, spec.recipes[0], spec.count),
    "realisations": lambda evaluator, spec: realisation_rows(evaluator, spec.recipes[0], spec.count),
    "changed": lambda evaluator, spec: changed_rows(evaluator, spec.recipes[0]),
    "lengths": lambda evaluator, spec: length_rows(evaluator, spec.recipes[0], spec.count),
    "layers": lambda evaluator, spec: layer_rows(evaluator, spec.recipes[0]),
    "plans": lambda evaluator, spec: plan_rows(evaluator, spec.recipes, spec.count),
}


@dataclass(frozen=True)
class Analyses:
    """The fields that all runs of X2 have in common, as in ``AnalysisSpec``."""

    model: str
    data: str
    inputs: Inputs
    seed: int = 0
    probes: int = 2
    quantities: tuple[str, ...] = QUANTITIES

    def of(
        self, analysis: str, recipes: Iterable[str | Iterable[str]], windows: int, length: int, count: int = 1
    ) -> list[AnalysisSpec]:  # fmt: skip
        """One run of ``analysis`` for each of ``recipes``, or of ladders of them."""
        names = ((each,) if isinstance(each, str) else tuple(each) for each in recipes)
        given = self.model, self.data, self.inputs.digest, self.inputs.device.type
        chosen = tuple(self.quantities) if analysis == "recipes" else QUANTITIES
        sizes = windows, length, self.seed, self.probes, count
        return [AnalysisSpec(analysis, each, *given, *sizes, chosen) for each in names]
