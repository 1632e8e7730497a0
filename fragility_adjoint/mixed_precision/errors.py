"""Errors that a recipe makes in a model, in one call: predicted, by layer and site, and plans for a budget."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.mixed_precision.bits import Choices, choices_beside, predictions
from fragility_adjoint.mixed_precision.budget import mixes_schemes, parse_budget
from fragility_adjoint.mixed_precision.contributions import Contributions
from fragility_adjoint.mixed_precision.plans import apply
from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_core.models.padding import as_windows
from fragility_exports.libraries import Export
from fragility_exports.llama_cpp import LIBRARIES
from fragility_exports.plan import Plan, to_json
from fragility_quantization.quantized import Quantized, lower
from fragility_quantization.recipes import Recipe, get_recipe, schemes_beside
from fragility_quantization.static_scales import calibrated, needs_calibration, require_named

GROUPED = ("layer", "site", "module", "kind", "name")  # columns of ``sites.Sites.table``
UNITS = {"kl": "KL (nats a token)", "logprob": "change of log-probability (nats)", "hidden": "relative error"}


@dataclass(frozen=True)
class ModelPlan:
    """A ``plan`` for one ``model``, with the ``windows`` (B, T) over which static scales are measured."""

    model: PreTrainedModel = field(repr=False)
    plan: Plan
    windows: Tensor = field(repr=False)

    @property
    def label(self) -> str:
        """The parts that are kept, or the bits of a weight, in words."""
        return self.plan.label

    @property
    def predicted(self) -> float | None:
        """The expected error with the plan, in the unit of the target."""
        return self.plan.predicted

    def apply(self, execution: str = "auto") -> Quantized:
        """The model by the plan (``plans.apply``)."""
        return apply(self.model, self.plan, execution, self.windows)

    def export(self, library: str, path: str | Path | None = None) -> Export:
        """The plan for another ``library``, one of LIBRARIES, or as this package's own "json"; written to ``path``.

        A file at ``path`` is replaced, even a model's config.json. ``missing`` of the result names what the library
        cannot express. Raises ValueError for another library, and for a scheme that it lacks.
        """
        makers: dict[str, Any] = {**LIBRARIES, "json": lambda plan, _: Export(json.loads(to_json(plan)))}
        if library not in makers:
            raise ValueError(f"a library must be one of {', '.join(makers)}, got {library!r}")
        made = makers[library](self.plan, self.model)
        if path is not None:
            Path(path).write_text(made.text() + "\n", encoding="utf-8")
        return made


class Errors:
    """Errors that ``predict`` has found: the ``prediction``, and all that follows from it without another pass."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, prediction: Prediction, **how):
        """``how`` are the arguments of ``bits.predictions`` with which ``prediction`` was made."""
        self.model, self.tokens, self.prediction, self.how = model, tokens, prediction, how

    def __repr__(self) -> str:
        return f"<errors of {self.prediction.recipe.name}, {self.prediction.target.name} {self.predicted:.3g}>"

    @property
    def windows(self) -> pd.DataFrame:
        """One row per window: ``predicted`` in the unit of the target, its ``standard_error``, and ``overflow``."""
        return self.prediction.windows

    @property
    def predicted(self) -> float:
        """The mean over windows that do not overflow."""
        return float(self.windows.predicted.mean())

    @cached_property
    def contributions(self) -> Contributions:
        """Contributions of each unit that can be kept in fp32. Raises ValueError where every window overflows."""
        return Contributions(self.model, self.prediction)

    def by(self, *columns: str) -> pd.DataFrame:
        """Contributions of each group of roundings, largest first; ``columns`` are some of GROUPED.

        ``square`` is the expected squared error that the group makes, mean over windows, in the square of the target's
        unit (KL is a square itself); ``share`` is its share of all. Outside of blocks "layer" is missing. Raises
        ValueError for other columns.
        """
        if not columns or not all(column in GROUPED for column in columns):
            raise ValueError(f"errors are grouped by some of {', '.join(GROUPED)}, got {columns or 'none'}")
        places = self.contributions.structure.places.assign(square=self.contributions.relative)
        table = places.groupby([*columns], dropna=False)["square"].sum().sort_values(ascending=False).reset_index()
        return table.assign(share=table.square / (table.square.sum() or 1.0))

    def plot(self, column: str = "layer", **options):
        """Bars of the shares of ``by(column)``, in the order of layers or else of their size, as matplotlib's axes.

        ``options`` are those of pandas' ``plot.bar``, such as ``ax``. matplotlib must be installed.
        """
        table = self.by(column)
        if column == "layer":
            table = table.sort_values("layer", na_position="last")
        # A frame is drawn on axes of its own, a series on the current ones.
        shares = table.set_index(table[column].astype("string").fillna("outside"))[["share"]]
        unit = UNITS.get(self.prediction.target.name, self.prediction.target.name)
        labels = {"title": self.prediction.recipe.name, "xlabel": column, "ylabel": f"share of the squared {unit}"}
        return shares.plot.bar(**{"legend": False} | labels | options)

    def plan(self, budget: str = "2 blocks") -> ModelPlan:
        """The plan with the least predicted error for a ``budget`` in words (``budget.parse_budget``).

        "5 bits" and "KL 0.01" choose one scheme for each layer, and predict the others first. Raises ValueError for
        other words, for a KL where the target is another, for budgets out of range, and where every window overflows.
        """
        require_named(self.model, self.prediction.recipe)
        amount, unit = parse_budget(budget)
        if unit == "kl" and (target := self.prediction.target.name) != "kl":
            raise ValueError(f'a budget of KL needs errors in KL, got those in {target}: predict(..., target="kl")')
        if not mixes_schemes(budget, self.prediction.recipe):
            return ModelPlan(self.model, self.contributions.plan(amount, unit), self.tokens)
        choose = {"bits": "within_bits", "bytes": "within_bytes", "kl": "within_error"}[unit]
        choice = getattr(self._choices, choose)(amount)
        return ModelPlan(self.model, self._choices.plan(choice), self.tokens)

    @cached_property
    def _choices(self) -> Choices:
        own, target, asked = self.prediction.recipe, self.prediction.target, schemes_beside(self.prediction.recipe.name)
        others = predictions(self.model, [r for r in asked if r.name != own.name], self.tokens, target, **self.how)
        found = {own.name: self.prediction, **others} if asked[0].name == own.name else others
        return choices_beside(own, self.model, found, self.tokens)


def predict(
    model: PreTrainedModel, tokens: Any, recipe: str | Recipe = "bf16", target: str = "hidden", probes: int = 2,
    seed: int = 0,
) -> Errors:  # fmt: skip
    """Predict the error of the fp32 ``model`` by ``recipe`` over ``tokens``, in the unit of ``target``, and its causes.

    ``tokens`` are windows (B, T) in any form of ``padding.as_windows``. Each runs by itself: a scale of a whole input,
    as of "torch-int8", is that of one window, not of a batch. ``target`` is one of ``targets.TARGETS``. Gradients are
    those that ``Adjoint`` takes for "auto", from ``probes`` vectors of random signs drawn by ``seed``. Raises
    ValueError for padding beside static scales, and the errors of ``as_windows``, ``lower`` and ``Adjoint``.
    """
    (windows, mask), chosen = as_windows(tokens, model), get_recipe(recipe)
    if needs_calibration(chosen) and mask is not None:
        raise ValueError(f"static scales of {chosen.name} need windows without padding, got a mask: leave padding away")
    low = lower(model, calibrated(model, chosen, windows))
    prediction = Adjoint(low, model, probes, seed, target)(windows, attention_mask=mask)
    return Errors(model, windows, prediction, probes=probes, seed=seed, attention_mask=mask)
