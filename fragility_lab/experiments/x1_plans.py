"""X1, second half: plans for a budget of blocks or kinds of site, each predicted before it is measured.

Every plan runs on the same windows of E2. The risks of the score come from E2's rows, the effects of patching are
measured on these windows as in E3, and the greedy choice measures every candidate.
"""

import copy
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.patching import Patching, patch_effects
from fragility_core.theory import mismatch
from fragility_lab.experiments.e2 import IDENTITY, DerivedSpec, DerivedWorker
from fragility_lab.experiments.kept_blocks import Blocks, KeptBlocks
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.running.runs import RunStore
from fragility_lab.running.task import Advance
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower


@dataclass(frozen=True)
class PlanSpec(DerivedSpec):
    """All plans on the first windows of one run of E2; raises ValueError for counts out of range."""

    experiment, unit = "X1 plans", "plan"

    tokens: int = 8192  # the windows hold so many together
    probes: int = 4
    draws: int = 20  # random choices of blocks
    blocks: tuple[int, ...] = (2, 4)  # budgets
    sites: tuple[int, ...] = (1, 2)  # budgets

    def __post_init__(self):
        if self.tokens < self.source.length:
            raise ValueError(f"tokens must make a window of {self.source.length} at least, got {self.tokens}")
        require_at_least(1, probes=self.probes, draws=self.draws)

    @property
    def windows(self) -> int:
        """The number of windows that every plan runs on."""
        return min(self.tokens // self.source.length, self.source.windows)

    @property
    def size(self) -> int:
        return len(self.blocks) * (self.draws + 6)

    @property
    def group(self) -> Hashable:
        return self.digest  # nothing is shared


class Plans(DerivedWorker[PlanSpec]):
    """Computes the plans of X1."""

    def __init__(self, inputs: Inputs, store: RunStore, source: Path):
        super().__init__(inputs, store, source)
        self.model = copy.deepcopy(inputs.model)
        set_attention(self.model, OBSERVED_EAGER)  # the attention of E2's low-precision pass

    def run(self, spec: PlanSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows, one per plan: who chose it, for which budget, its mismatch and its price.

        ``predicted`` and ``measured`` are means over windows. ``budget`` counts blocks or kinds of site, as ``unit``
        says. Windows that overflow count for no plan; if all do, there are no rows. Raises FileNotFoundError if E2's
        run is missing.
        """
        rows = self.source.require(spec.source)
        finite = rows[~rows.overflow]
        if finite.empty:
            return pd.DataFrame()
        trial = Trial(self, spec, finite[finite.window.isin(finite.window.unique()[: spec.windows])])
        table = []
        for unit, budget, chosen_by, plan in trial.plans():
            table.append(
                {"unit": unit, "budget": budget, "chosen_by": chosen_by, "label": plan.label,
                 "predicted": plan.predicted, "measured": trial.measure(plan), "parameter_bytes": plan.parameter_bytes,
                 "activation_bytes": plan.activation_bytes, "flops": plan.flops}
            )  # fmt: skip
            advance(1)
        return pd.DataFrame(table).assign(**spec.source.identity)


class Trial:
    """The windows of one run, the risks and effects of their blocks, and the mismatch under every plan tried."""

    @torch.no_grad()
    def __init__(self, worker: Plans, spec: PlanSpec, rows: pd.DataFrame):
        """``rows`` are those of E2 for the windows."""
        self.model, self.spec = worker.model, spec
        self.tokens = torch.cat([worker.window(spec.source, start) for start in rows[rows.layer == 0].start])
        self.reference = self._hidden(worker.inputs.model)
        low = lower(self.model, spec.source.precision, spec.source.execution)
        self.contributions = Contributions(self.model, Adjoint(low, probes=spec.probes)(self.tokens))
        self.risks = rows.groupby("layer").risk.mean().to_numpy()
        patching = Patching(worker.inputs.model, low)
        windows = zip(self.tokens, self.reference)
        effects = [patch_effects(patching(window[None]), reference[None]) for window, reference in windows]
        self.effects = pd.concat(effects).groupby("layer").exact_reduction.mean().to_numpy()
        self.depth = len(self.risks)
        self._measured: dict[tuple, float] = {}
        none, every = self.contributions.keep(), self.contributions.keep(blocks=range(self.depth))
        self.kept_blocks = KeptBlocks(self.model, none, every, spec.source.execution)

    def _hidden(self, model) -> Tensor:
        """Final hidden states (W, T, d_model) of the windows, as many at once as in E2."""
        return torch.cat([final_hidden(model, windows) for windows in self.tokens.split(self.spec.source.batch)])

    @torch.no_grad()
    def measure(self, plan: Plan) -> float:
        """Mean mismatch over the windows under ``plan``; a choice that was measured before is not run again."""
        if kept_by(plan) not in self._measured:
            low = apply(self.model, plan, self.spec.source.execution)
            with low.running():
                hidden = self._hidden(low.model)
            self._measured[kept_by(plan)] = float(mismatch(hidden, self.reference).double().mean())
        return self._measured[kept_by(plan)]

    def measure_blocks(self, choices: Sequence[Blocks]) -> list[float]:
        """The mean mismatches under the plans that keep these ``choices`` of blocks, all in one batch."""
        kept = {choice: kept_by(self.contributions.keep(blocks=choice)) for choice in choices}
        new = [choice for choice in kept if kept[choice] not in self._measured]
        if new:
            windows = zip(self.tokens, self.reference)
            each = [mismatch(self.kept_blocks(window[None], new), reference) for window, reference in windows]
            means = torch.stack(each).double().mean(0).tolist()
            self._measured |= {kept[choice]: mean for choice, mean in zip(new, means)}
        return [self._measured[kept[choice]] for choice in choices]

    def plans(self) -> Iterator[tuple[str, int, str, Plan]]:
        """All plans, each with its unit, its budget and who chose it: (unit, budget, chosen by, plan)."""
        chosen = [(budget, *choice) for budget in self.spec.blocks for choice in self._choices(budget)]
        self.measure_blocks([(), *(numbers for *_, numbers in chosen)])
        yield "blocks", 0, "none", self.contributions.keep()
        for budget, chosen_by, numbers in chosen:
            yield "blocks", budget, chosen_by, self.contributions.keep(blocks=numbers)
        available = self.contributions.structure.sites
        for budget in self.spec.sites:
            yield "sites", budget, "adjoint", self.contributions.plan(budget, "sites")
            for sites in combinations(available, budget):
                yield "sites", budget, "each", self.contributions.keep(sites=sites)
        both = [site for site in ("head", "norms") if site in available]
        yield "sites", len(both), "head and norms", self.contributions.keep(sites=both)

    def _choices(self, budget: int) -> Iterator[tuple[str, Blocks]]:
        every = tuple(range(self.depth))
        yield "adjoint", top(self.contributions.gains("blocks").gain, budget)
        yield "first", every[:budget]
        yield "last", every[max(self.depth - budget, 0) :]
        yield "score", top(self.risks, budget)
        yield "patching", top(self.effects, budget)
        yield "greedy", greedy(self.measure_blocks, self.depth, budget)
        for numbers in drawn(self.depth, budget, self.spec.draws):
            yield "random", numbers


def kept_by(plan: Plan) -> tuple:
    """The parts that ``plan`` keeps in fp32, as a key."""
    return plan.modules, plan.residual, plan.scores


# --- Other ways to choose blocks: numbers in ascending order ----------------------------------


def drawn(depth: int, count: int, draws: int) -> list[Blocks]:
    """``draws`` random choices of ``count`` of ``depth`` blocks."""
    generator = random.Random(0)
    return [tuple(sorted(generator.sample(range(depth), count))) for _ in range(draws)]


def top(scores: ArrayLike, count: int) -> Blocks:
    """The ``count`` blocks with the largest ``scores`` (L,), such as the paper's risk or the effects of patching.

    Of equal scores the earlier block's counts as larger. Raises ValueError for scores that are NaN.
    """
    scores = np.asarray(scores, dtype=float)
    if np.isnan(scores).any():
        raise ValueError(f"scores of blocks must be numbers, got {scores.tolist()}: leave out windows that overflow")
    return tuple(sorted(np.argsort(-scores, kind="stable")[:count].tolist()))


def greedy(measure: Callable[[Sequence[Blocks]], Sequence[float]], depth: int, count: int) -> Blocks:
    """``count`` of ``depth`` blocks, added one by one: each time the block that makes ``measure`` smallest.

    ``measure`` gets all candidates of a step at once, and returns a number for each.
    """
    chosen: Blocks = ()
    for _ in range(min(count, depth)):
        candidates = [tuple(sorted((*chosen, b))) for b in range(depth) if b not in chosen]
        chosen = candidates[int(np.argmin(measure(candidates)))]
    return chosen


# --- Views of the rows ------------------------------------------------------------------------


def plan_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean mismatch by who chose the plan, relative to no protection, and the largest error of a prediction.

    One row per unit, budget and chooser, means over runs; ``random`` is the mean of its draws. Raises ValueError if
    there are no rows because every window overflowed.
    """
    if rows.empty:
        raise ValueError("plans need windows with a finite mismatch, got none: every window of E2's runs overflowed")
    by_run = rows.measured.where(rows.chosen_by == "none").groupby([rows[name] for name in IDENTITY])
    none = by_run.transform("max")  # of a single value
    rows = rows.assign(of_none=rows.measured / none, error=(rows.predicted / rows.measured - 1).abs())
    by = rows.groupby(["unit", "budget", "chosen_by"], sort=False)
    return by.agg(
        measured_of_none=("of_none", "mean"), lowest=("of_none", "min"), highest=("of_none", "max"),
        largest_error=("error", "max"), plans=("measured", "size"),
    ).reset_index()  # fmt: skip


def against_baselines(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured mismatch of every other choice over that of the ``adjoint`` plan at equal budget, by run.

    ``random`` is the mean of its draws. Of the plans that keep "each" kind of site alone, the best one counts.
    """
    measured = rows[rows.chosen_by.ne("none") & rows.chosen_by.ne("head and norms")]
    by = measured.groupby([*IDENTITY, "unit", "budget", "chosen_by"], sort=False).measured
    value = by.mean().where(by.min().index.get_level_values("chosen_by") != "each", by.min())
    table = value.unstack("chosen_by")
    return table.div(table.adjoint, axis=0).drop(columns="adjoint")
