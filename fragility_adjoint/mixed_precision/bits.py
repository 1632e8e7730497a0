"""One of several schemes for every linear layer, and parts kept in fp32, under one budget: the best choice of all.

Contributions to the squared error add up. So the choice is a knapsack, which is solved exactly. One prediction for each
scheme is enough for all budgets.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_adjoint.mixed_precision import structure
from fragility_adjoint.mixed_precision.contributions import Contributions
from fragility_adjoint.mixed_precision.knapsack import Knapsack
from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_adjoint.predictor.targets import Target
from fragility_core.models.paths import within, without_cache
from fragility_exports.plan import Plan
from fragility_quantization.gguf_tensors import group_bits, tensor_groups, with_shared
from fragility_quantization.operands import linear_weights, owner
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe, get_recipe


def predictions(
    model: nn.Module, recipes: Sequence[str | Recipe], tokens: Tensor, target: str | Target = "kl",
    gradients: str = "auto", probes: int = 2, seed: int = 0, attention_mask: Tensor | None = None,
) -> dict[str, Prediction]:  # fmt: skip
    """The prediction for the fp32 ``model`` over ``tokens`` (B, T) in each of ``recipes``, by name.

    Other arguments are those of ``Adjoint``. Recipes that round nothing are left out.
    """
    rounding, how = (r for r in map(get_recipe, recipes) if r.rounds), (model, probes, seed, target, gradients)
    return {r.name: Adjoint(lower(model, r), *how)(tokens, attention_mask=attention_mask) for r in rounding}


@torch.no_grad()
def fused_layers(model: nn.Module, tokens: Tensor) -> list[tuple[str, ...]]:
    """Paths of the linear layers of blocks, grouped: a group has the layers that one module calls with one input.

    Engines compute the layers of a group as one, with one scheme: query, key and value; gate and up. The experts of a
    layer are one module, or several with one parent. ``tokens`` (B, T) must reach every layer.
    """
    paths = list(dict.fromkeys(owner(path) for path in linear_weights(model)))
    seen: dict[str, tuple] = {}

    def see(path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[path] = owner(path), args[0].data_ptr(), args[0].shape, args[0].stride()  # the same entries in one memory

    with ExitStack() as stack:
        for path in paths:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(see, path))
            stack.callback(hook.remove)
        model(tokens, **without_cache(model))
    groups: dict[tuple, list[str]] = {}
    for path in paths:
        groups.setdefault(seen.get(path, (path,)), []).append(path)
    return [tuple(group) for group in groups.values()]


def chosen_groups(model: nn.Module, tokens: Tensor, recipe: Recipe) -> list[tuple[str, ...]]:
    """Paths in groups of layers to which a choice beside ``recipe`` gives one scheme.

    These are ``fused_layers``; beside a recipe of GGUF they are single tensors, and tied ends are one.
    """
    return with_shared(model, tensor_groups(model, recipe) if recipe.gguf else fused_layers(model, tokens))


class Choice(NamedTuple):
    """The number of the scheme of every group, and the numbers of the parts that are kept in fp32."""

    schemes: tuple[int, ...]
    kept: tuple[int, ...] = ()


class Choices:
    """Costs and effects of each scheme in each group of linear layers, and of keeping other parts in fp32.

    ``errors`` (windows, groups, schemes) are contributions over the square of the target's norm, and ``mean`` (groups,
    schemes) is their mean over windows. ``rest`` (windows, places) has those of all other kernels and weights, and
    ``others`` (windows,) their sum if none is kept in fp32. ``bits`` (groups, schemes) counts what the weights of a
    group take, and ``least_bits`` is what a weight takes on average if every layer has its smallest scheme.
    ``parts`` are the plans of what may be kept: one module each, the residual stream, or the scores.
    """

    def __init__(
        self, model: nn.Module, found: Mapping[str, Prediction], groups: Sequence[tuple[str, ...]],
        keep: Iterable[str] = (),
    ):  # fmt: skip
        """``found`` has a prediction for the fp32 ``model`` in each recipe, by name, all over the same windows.

        The recipes have kernels in one format. One without operands stands for layers in that format; fp32 needs none.
        ``groups`` is ``fused_layers``. ``keep`` names what may also be kept in fp32: sites (``KEEPABLE_SITES``), each
        of whose modules is chosen by itself, or paths of modules. Linear layers inside may then be in fp32, too.

        Raises ValueError for recipes beside different kernels, windows that overflow, and parts that the model lacks.
        """
        recipes = {name: prediction.recipe for name, prediction in found.items()}
        if len(kernels := {recipe.kernels.name for recipe in recipes.values()}) != 1:
            raise ValueError(f"recipes must have kernels of one format, got {', '.join(sorted(kernels))}: take one")
        if not all(len(prediction.finite) == len(prediction.windows) for prediction in found.values()):
            raise ValueError("a choice of schemes needs finite predictions, but some window overflows: leave it out")
        self.groups, (self.kernels,) = list(groups), kernels
        first = next(iter(found.values()))
        self.target, self.windows = first.target, first.windows.window.to_numpy()
        self._known = Contributions(model, first)
        self.parts = self._parts(keep)
        self._inside = [
            (i, g) for i, part in enumerate(self.parts) for g, paths in enumerate(self.groups)
            if any(within(p, m) for p in paths for m in part.modules)
        ]  # fmt: skip
        errors, elsewhere = map(list, zip(*map(self._tables, found.values())))
        if self.kernels == "fp32" or self._inside:
            recipes["fp32"] = get_recipe("fp32")
            errors.append(np.zeros_like(errors[0]))
        self.names = list(recipes)
        # The scheme of layers that are kept in fp32 beside kernels in another format; -1 if there is none.
        self._fp32 = self.names.index("fp32") if self.kernels != "fp32" and self._inside else -1
        self.errors = np.stack(errors, -1)
        self.mean = self.errors.mean(0)
        self.rest, self._elsewhere = self._aligned(elsewhere)
        self.others = self.rest.sum(1) + self._elsewhere
        chosen = {path for group in groups for path in group}
        stored = structure.stored_parameters(model, first.recipe)
        fixed = [p for p in stored if not (p.linear and chosen.intersection(p.users))]  # all that has no scheme
        self.weights = sum(p.entries for p in stored) - sum(p.entries for p in fixed)
        self.fixed_bits = sum(p.entries * p.bits for p in fixed)
        self.bits = group_bits(model, self.groups, [*recipes.values()], first.recipe)
        self.least_bits = float(self.bits.min(1).sum() / self.weights)
        self._knapsack = self._problem(fixed)
        self._best: dict[int, list[Choice]] = {}  # a page asks twice for the same number

    def _parts(self, keep: Iterable[str]) -> list[Plan]:
        """One plan for each module that may be kept, and for the residual stream and the scores."""
        known, found = self._known, dict[tuple, Plan]()
        for name in keep:
            if name in ("residual", "scores"):
                plans = [known.keep(sites=[name])]
            else:
                paths = known.structure.sites.get(name, () if name in structure.KEEPABLE_SITES else (name,))
                plans = [known.keep([path]) for path in paths]
            if not plans:
                raise ValueError(f"parts to keep must be in this model, {', '.join(known.structure.sites)}, got {name}")
            found |= {(plan.modules, plan.residual, plan.scores): plan for plan in plans}
        return list(found.values())

    def _tables(self, prediction: Prediction) -> tuple[np.ndarray, pd.DataFrame]:
        """Errors (windows, groups) of the groups' weights and inputs, and (windows, places) of all else."""
        number = {path: i for i, group in enumerate(self.groups) for path in group}
        rows, norms = prediction.contributions, prediction.windows.set_index("window").norm
        share = rows.c2 / rows.window.map(norms) ** 2 / (rows.probe.max() + 1)
        table = share.groupby([rows.window, rows.place]).sum().unstack(fill_value=0.0).reindex(index=self.windows)
        places = rows.drop_duplicates("place").set_index("place").loc[table.columns]
        operand = (places.kind == "weight") & (places.name != "bias") | (places.name == "operand")
        group = places.module.where(operand).map(number).fillna(-1).astype(int).to_numpy()
        by_group = table.T.groupby(group).sum().T.reindex(columns=range(len(self.groups)), fill_value=0.0)
        table.columns = identities(places)
        return by_group.to_numpy(), table.loc[:, group < 0]

    def _aligned(self, tables: Sequence[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
        """The mean of ``tables`` (windows, places), and (windows,) of places that the first lacks (other experts)."""
        columns = tables[0].columns
        self._places = np.flatnonzero(identities(self._known.structure.places).isin(columns))
        strange = [table.loc[:, ~table.columns.isin(columns)].sum(axis=1) for table in tables]
        aligned = [table.reindex(columns=columns, fill_value=0.0).to_numpy() for table in tables]
        return np.mean(aligned, 0), np.mean(strange, 0)

    def _problem(self, parameters: Sequence[structure.Stored]) -> Knapsack:
        """The knapsack over the decisions: a scheme for each group, then those of ``Contributions.knapsack``."""
        inside, every = {g for _, g in self._inside}, range(len(self.groups))
        self._decisions = [(g, k) for g in every for k in range(len(self.names)) if g in inside or k != self._fp32]
        number = {decision: i for i, decision in enumerate(self._decisions)}
        kept = [self._known.unpriced(self.groups[g] if k == self._fp32 else ()) for g, k in self._decisions]
        units, free = [*kept, *self.parts], [0.0] * len(self.parts)
        errors, sizes = ([*(table[d] for d in self._decisions), *free] for table in (self.mean, self.bits))
        # norms beside an fp32 stream have rounded weights
        stored = structure.storage(parameters, [unit.modules for unit in units])
        problem = self._known.knapsack(units, sizes, errors, *stored)
        within_parts = [(len(kept) + i, number[g, self.names.index("fp32")]) for i, g in self._inside]
        return replace(
            problem, weights=self.rest.mean(0), covers=problem.covers[:, self._places],
            alternatives=[[i for i, (group, _) in enumerate(self._decisions) if group == g] for g in every],
            needs=[*problem.needs, *within_parts],
        )  # fmt: skip

    def _taken(self, choice: Choice) -> np.ndarray:
        """The decisions of the knapsack, booleans."""
        first, taken = len(self._decisions), np.zeros(len(self._knapsack.errors), dtype=bool)
        taken[[*map(self._decisions.index, enumerate(choice.schemes)), *(first + i for i in choice.kept)]] = True
        return taken

    def _choice(self, taken: np.ndarray) -> Choice:
        first = len(self._decisions)
        schemes = dict(self._decisions[i] for i in np.flatnonzero(taken[:first]))
        kept = np.flatnonzero(taken[first : first + len(self.parts)])
        return Choice(tuple(int(schemes[g]) for g in range(len(self.groups))), tuple(map(int, kept)))

    def _kept(self, choice: Choice) -> Plan:
        """The plan for what the choice keeps in fp32."""
        layers = [path for paths, scheme in zip(self.groups, choice.schemes) if scheme == self._fp32 for path in paths]
        return self._known.together([self._known.unpriced(layers), *(self.parts[i] for i in choice.kept)])

    def predict(self, choice: Choice) -> np.ndarray:
        """The prediction (windows,) in the target's unit."""
        left = ~self._known.vanishing(self._kept(choice))[self._places]
        rest = self.rest[:, left].sum(1) + self._elsewhere
        square = rest + self.errors[:, range(len(self.groups)), list(choice.schemes)].sum(1)
        return square if self.target.squared else square**0.5

    def mean_bits(self, choice: Choice) -> float:
        """Bits that a weight of the linear layers takes on average, with what parts in fp32 take more than before."""
        return self._knapsack.size(self._taken(choice)) / self.weights

    def stored_bytes(self, choice: Choice) -> int:
        """Bytes of the whole model as it is stored. Scales of rows and tensors are not counted."""
        return round((self._knapsack.size(self._taken(choice)) + self.fixed_bits) / 8)

    def within_bits(self, bits: float) -> Choice:
        """The choice with the least squared error whose weights take at most ``bits`` on average.

        Raises ValueError for a budget below the smallest schemes', and TypeError for words (``budget.parse_budget``).
        """
        if isinstance(bits, str):
            raise TypeError(f"bits are a number here, got {bits!r}: Errors.plan takes words")
        if bits < self.least_bits:
            least = np.ceil(self.least_bits * 1e3) / 1e3
            raise ValueError(f"the budget must be at least {least:g} bits, those of the smallest scheme, got {bits:g}")
        return self._choice(self._knapsack.least_error(bits * self.weights))

    def within_bytes(self, size: float) -> Choice:
        """The choice of ``within_bits`` for at most ``size`` bytes of the whole model (``stored_bytes``)."""
        least = (self.least_bits * self.weights + self.fixed_bits) / 8
        if size < least:
            raise ValueError(
                f"the budget must be at least {np.ceil(least / 1e3) / 1e3:g} MB, which the model takes with the "
                f"smallest schemes and all other parameters in {self.kernels}, got {size / 1e6:g} MB"
            )
        return self._choice(self._knapsack.least_error(8 * size - self.fixed_bits))

    def within_error(self, bound: float) -> Choice:
        """The smallest choice whose prediction, mean over windows in the target's unit, is at most ``bound``.

        The bound holds for the mean of squares, whose root is no less. Raises ValueError below what other kernels give.
        """
        square = (bound if self.target.squared else bound**2) - self._elsewhere.mean()
        least = self._knapsack.error(self._knapsack.least_error())
        if square < least:
            least = (least + self._elsewhere.mean()) ** (1.0 if self.target.squared else 0.5)
            raise ValueError(
                f"the bound on {self.target.name} must be at least {least:.3g}, which the best schemes and all other "
                f"kernels give, got {bound:g}"
            )
        return self._choice(self._knapsack.least_size(square))

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice, with its predicted error, mean over windows."""
        kept = self._kept(choice)
        named = {path: self.names[k] for group, k in zip(self.groups, choice.schemes) for path in group}
        layers = tuple((path, name) for path, name in named.items() if get_recipe(name).linear)
        words = f"{self.mean_bits(choice):.2f} bits a weight"
        label = words if kept.label == "nothing" else f"{words}, {kept.label} in fp32"
        mixed = self._known.priced(replace(kept, format=self.kernels, layers=layers, label=label), known=False)
        return replace(mixed, predicted=float(self.predict(choice).mean()))

    def best(self, count: int) -> list[Choice]:
        """The choices of ``within_bits`` for ``count`` budgets, from the smallest scheme's bits to the largest's."""
        if count not in self._best:
            budgets = np.linspace(self.least_bits, self.bits.max(1).sum() / self.weights, count)
            self._best[count] = list(dict.fromkeys(self.within_bits(float(b) * (1 + 1e-9)) for b in budgets))
        return list(self._best[count])

    def curve(self, count: int = 25) -> pd.DataFrame:
        """Bits a weight and predicted error of the ``best`` choices."""
        rows = [(self.mean_bits(choice), float(self.predict(choice).mean())) for choice in self.best(count)]
        return pd.DataFrame(rows, columns=["bits", "predicted"]).drop_duplicates(ignore_index=True)


def choices_beside(
    recipe: Recipe, model: nn.Module, found: Mapping[str, Prediction], tokens: Tensor, keep: Iterable[str] = ()
) -> Choices:  # fmt: skip
    """The ``Choices`` from the predictions ``found``, without windows that overflow in some recipe.

    Groups are the ``chosen_groups`` beside ``recipe``; the first of ``tokens`` (B, T) must reach every layer.
    """
    finite = set.intersection(*(prediction.finite for prediction in found.values()))
    found = {name: prediction.of(finite) for name, prediction in found.items()}
    return Choices(model, found, chosen_groups(model, tokens[:1], recipe), keep)


def identities(places: pd.DataFrame) -> pd.MultiIndex:
    """Keys of ``places`` that hold in predictions for several recipes, in which their numbers may differ."""
    key = [places.module, places.name, places.kind]
    return pd.MultiIndex.from_arrays([*key, places.groupby(key).cumcount()])
