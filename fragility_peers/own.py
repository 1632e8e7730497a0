"""This project's choice of schemes, and its quantizers in the place of a library's."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from fragility_adjoint.mixed_precision.bits import Choices, predictions
from fragility_adjoint.mixed_precision.knapsack import Knapsack
from fragility_numerics.lowering import rounded_copy
from fragility_peers.ladders import LADDERS, Ladder, get_ladder
from fragility_peers.tasks import Chosen
from fragility_quantization.quantized import how_stored
from fragility_quantization.static_scales import calibrated


def choose(model: nn.Module, calibration: Tensor, task: dict[str, Any]) -> Chosen:
    """One prediction for each rung, then an exact knapsack for each budget, over the units of ``task``."""
    ladder, units = get_ladder(task["ladder"]), [tuple(unit) for unit in task["units"]]
    recipes = [calibrated(model, rung.recipe, calibration) for rung in ladder.rungs if rung.recipe]
    known = Choices(model, predictions(model, recipes, calibration, probes=task["probes"], seed=task["seed"]), units)
    errors = np.stack(
        [known.mean[:, known.names.index(rung.name if rung.recipe else "fp32")] for rung in ladder.rungs], 1
    )
    sizes = [sum(model.get_parameter(f"{path}.weight").numel() for path in unit) for unit in units]
    return Chosen(task["units"], errors.tolist(), best_plans(errors, sizes, ladder, task["budgets"]))


def best_plans(errors: np.ndarray, sizes: list[int], ladder: Ladder, budgets: list[float]) -> list[list[int]]:
    """The plan with the least sum of ``errors`` (units, rungs) for each budget in bits a weight."""
    errors, bits = np.asarray(errors), np.outer(sizes, ladder.bits) / sum(sizes)
    one_each: Any = np.arange(errors.size).reshape(errors.shape).tolist()
    weights, covers = np.zeros(1), np.zeros((errors.size, 1), dtype=bool)  # nothing else
    problem = Knapsack(errors.ravel(), bits.ravel(), weights, covers, alternatives=one_each)
    plans = [problem.least_error(budget * (1 + 1e-9)) for budget in budgets]
    return [taken.reshape(errors.shape).argmax(1).tolist() for taken in plans]


def quantized(model: nn.Module, calibration: Tensor, rung: str) -> nn.Module:
    """The model with rounded weights of all blocks' linear layers; raises ValueError for a rung that rounds inputs."""
    recipe = next(
        r.recipe for ladder in LADDERS.values() if ladder.library == "own" for r in ladder.rungs if r.name == rung
    )
    if recipe is None or recipe.linear.inputs is not None:
        raise ValueError(f"without a library weights alone are quantized, got {rung}")
    return rounded_copy(model, how_stored(model, recipe), recipe.kernels)
