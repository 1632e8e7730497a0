"""One of several schemes for every linear layer, under a budget of bits or of error: the best choice of all.

Contributions to the squared error add up over layers. So the choice is a multiple-choice knapsack, which is solved
exactly. One prediction for each scheme is enough for all budgets.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from fragility_core.adjoint import Adjoint, Prediction
from fragility_core.adjoint.targets import Target
from fragility_core.arithmetic.lowering import lower
from fragility_core.arithmetic.operands import linear_weights, owner
from fragility_core.arithmetic.recipes import Recipe, get_recipe
from fragility_core.protection.keep import Plan

SOLVED = {"mip_rel_gap": 0.0, "time_limit": 60.0}


def predictions(
    model: nn.Module, recipes: Sequence[str | Recipe], tokens: Tensor, target: str | Target = "kl",
    gradients: str = "both", probes: int = 2, seed: int = 0,
) -> dict[str, Prediction]:  # fmt: skip
    """The prediction for the fp32 ``model`` over ``tokens`` (B, T) in each of ``recipes``, by name.

    The other arguments are those of ``Adjoint``. Recipes that round nothing are left out.
    """
    rounding = [recipe for recipe in map(get_recipe, recipes) if recipe.rounds]
    return {r.name: Adjoint(lower(model, r), model, probes, seed, target, gradients)(tokens) for r in rounding}


@torch.no_grad()
def fused_layers(model: nn.Module, tokens: Tensor) -> list[tuple[str, ...]]:
    """Paths of the linear layers of blocks, in groups of those that a module calls with the same input.

    Engines compute the layers of a group as one, with one scheme: query, key and value; gate and up. The experts of a
    layer are one module, or several with one parent. ``tokens`` (B, T) must reach every layer.
    """
    paths = list(dict.fromkeys(owner(path) for path in linear_weights(model)))
    seen: dict[str, tuple] = {}
    with ExitStack() as stack:
        for path in paths:
            hook = model.get_submodule(path).register_forward_pre_hook(
                lambda module, args, path=path: seen.update({path: (owner(path), *identity(args[0]))})
            )
            stack.callback(hook.remove)
        model(tokens)
    groups: dict[tuple, list[str]] = {}
    for path in paths:
        groups.setdefault(seen.get(path, (path,)), []).append(path)
    return [tuple(group) for group in groups.values()]


def identity(x: Tensor) -> tuple:
    """What two tensors with the same entries in the same memory share."""
    return x.data_ptr(), tuple(x.shape), tuple(x.stride())


class Choices:
    """What each scheme costs and does in each group of linear layers.

    ``errors`` (windows, groups, schemes) are contributions over the square of the target's norm, ``rest`` (windows,)
    those of all other kernels and weights. ``bits`` (groups, schemes) counts what the weights of a group take.
    """

    def __init__(self, model: nn.Module, found: Mapping[str, Prediction], groups: Sequence[tuple[str, ...]]):
        """``found`` has a prediction for the fp32 ``model`` in each recipe, by name, all over the same windows.

        The recipes have kernels in one format. One without operands stands for layers in that format; fp32 needs none.
        ``groups`` is ``fused_layers``. Raises ValueError for recipes beside different kernels, and for windows that
        overflow.
        """
        recipes = {name: prediction.recipe for name, prediction in found.items()}
        if len(kernels := {recipe.kernels.name for recipe in recipes.values()}) != 1:
            raise ValueError(
                f"recipes to choose from must have kernels in one format, got {', '.join(sorted(kernels))}"
            )
        self.groups, (self.kernels,) = list(groups), kernels
        first = next(iter(found.values()))
        self.target, self.windows = first.target, first.windows.window.to_numpy()
        parts = [self._parts(prediction) for prediction in found.values()]
        if self.kernels == "fp32":
            recipes["fp32"] = get_recipe("fp32")
            parts.append((np.zeros_like(parts[0][0]), parts[0][1]))
        self.names = list(recipes)
        self.errors = np.stack([errors for errors, _ in parts], -1)
        self.rest = np.mean([rest for _, rest in parts], 0)
        if not np.isfinite(self.errors).all():
            raise ValueError("a choice of schemes needs finite predictions, but some window overflows: leave it out")
        sizes = self._sizes(model)
        self.weights = sum(sizes.values())  # entries of all weights
        self.bits = np.array([[sum(sizes[p] for p in group) * width(r) for r in recipes.values()] for group in groups])

    @staticmethod
    def _sizes(model: nn.Module) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path, weight in linear_weights(model).items():
            sizes[owner(path)] = sizes.get(owner(path), 0) + weight.numel()
        return sizes

    def _parts(self, prediction: Prediction) -> tuple[np.ndarray, np.ndarray]:
        """Errors (windows, groups) of the groups' weights and inputs, and (windows,) of all else."""
        number = {path: i for i, group in enumerate(self.groups) for path in group}
        rows, windows = prediction.contributions, prediction.windows.set_index("window").norm
        probes = rows.probe.max() + 1
        share = rows.c2 / rows.window.map(windows) ** 2 / probes
        operand = (rows.kind == "weight") | (rows.name == "operand")
        group = rows.module.where(operand).map(number).fillna(-1).astype(int)
        group = group.where(~((rows.kind == "weight") & (rows.name == "bias")), -1)
        table = share.groupby([rows.window, group]).sum().unstack(fill_value=0.0)
        table = table.reindex(index=self.windows, columns=range(-1, len(self.groups)), fill_value=0.0)
        return table.to_numpy()[:, 1:], table[-1].to_numpy()

    @cached_property
    def mean(self) -> np.ndarray:
        """Errors (groups, schemes), mean over windows."""
        return self.errors.mean(0)

    def predict(self, choice: Sequence[int]) -> np.ndarray:
        """The prediction (windows,) in the target's unit if group i has the scheme with number ``choice[i]``."""
        square = self.rest + self.errors[:, range(len(self.groups)), list(choice)].sum(1)
        return square if self.target.squared else square**0.5

    def mean_bits(self, choice: Sequence[int]) -> float:
        """Bits that a weight of the linear layers takes on average."""
        return float(self.bits[range(len(self.groups)), list(choice)].sum() / self.weights)

    def within_bits(self, bits: float) -> list[int]:
        """The choice with the least squared error whose weights take at most ``bits`` on average.

        Raises ValueError for a budget below the smallest scheme's.
        """
        least = self.bits.min(1).sum() / self.weights
        if bits < least:
            raise ValueError(
                f"the budget must be at least {least:.3g} bits, those of the smallest scheme, got {bits:g}"
            )
        return knapsack(self.mean, self.bits / self.weights, bits)

    def within_error(self, bound: float) -> list[int]:
        """The smallest choice whose prediction, mean over windows in the target's unit, is at most ``bound``.

        The bound holds for the mean of squares, whose root is at least the mean. Raises ValueError for a bound below
        what the other kernels give.
        """
        square = bound if self.target.squared else bound**2
        least = self.rest.mean() + self.mean.min(1).sum()
        if square < least:
            least = least if self.target.squared else least**0.5
            raise ValueError(
                f"the bound on {self.target.name} must be at least {least:.3g}, which the best schemes and all other "
                f"kernels give, got {bound:g}"
            )
        return knapsack(self.bits / self.weights, self.mean, square - self.rest.mean())

    def plan(self, choice: Sequence[int]) -> Plan:
        """The plan of a choice, with its predicted error, mean over windows."""
        layers = [
            (path, self.names[number])
            for group, number in zip(self.groups, choice)
            for path in group
            if get_recipe(self.names[number]).linear
        ]
        label = f"{self.mean_bits(choice):.2f} bits a weight"
        predicted = float(self.predict(choice).mean())
        return Plan(self.kernels, label=label, predicted=predicted, layers=tuple(layers))

    def curve(self, count: int = 25) -> pd.DataFrame:
        """The best predicted error for ``count`` budgets from the smallest scheme's bits to the largest's."""
        least, most = (self.bits.min(1).sum() / self.weights, self.bits.max(1).sum() / self.weights)
        rows = []
        for budget in np.linspace(least, most, count):
            choice = self.within_bits(float(budget) * (1 + 1e-9))
            rows.append({"bits": self.mean_bits(choice), "predicted": float(self.predict(choice).mean())})
        return pd.DataFrame(rows).drop_duplicates(ignore_index=True)


def knapsack(cost: np.ndarray, amount: np.ndarray, budget: float) -> list[int]:
    """One scheme for every group: the least sum of ``cost`` (groups, schemes) with ``amount`` within ``budget``.

    A search that takes longer than SOLVED allows ends with the best choice so far. Raises RuntimeError where no choice
    is within the budget.
    """
    groups, schemes = cost.shape
    one_each = np.kron(np.eye(groups), np.ones(schemes))
    scale = max(budget, 1e-300)
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(amount.reshape(1, -1) / scale, ub=1 + 1e-12)]
    costs = cost.ravel() / max(np.abs(cost).max(), 1e-300)
    found = milp(costs, integrality=1, bounds=Bounds(0, 1), constraints=constraints, options=SOLVED)
    if found.x is None:
        raise RuntimeError(f"no choice of schemes was found: {found.message}")
    return found.x.reshape(groups, schemes).argmax(1).tolist()


def width(recipe: Recipe) -> float:
    """Bits of an entry of the linear weights, with its share of the scales."""
    return (recipe.linear.weights or recipe.kernels).bits
