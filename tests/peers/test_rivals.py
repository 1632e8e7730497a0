"""Every library makes plans within its budget, and its quantizers are those that ours stand for."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn

from fragility_peers import tasks
from fragility_peers.ladders import LADDERS, get_ladder
from fragility_quantization.static_scales import calibrated

CHECKPOINT = "embedded"
TOKENS = torch.randint(1000, (2, 24), generator=torch.Generator().manual_seed(0))
LIBRARIES = {name: ladder for name, ladder in LADDERS.items() if ladder.library != "own"}


@pytest.fixture(scope="module")
def model():
    return tasks.linear_model(CHECKPOINT)


@pytest.mark.parametrize(("name", "method"), [(n, m) for n, ladder in LIBRARIES.items() for m in ladder.methods])
def test_plans(name, method, model):
    ladder = get_ladder(name)
    least, most = min(ladder.bits), max(ladder.bits)
    budgets = [least + share * (most - least) for share in (0.2, 0.6)]
    task = {"kind": "choose", "model": CHECKPOINT, "ladder": name, "method": method, "budgets": budgets}
    answer = tasks.carry_out(task | {"calibration": TOKENS.tolist()})
    paths = tasks.layer_paths(model)
    assert sorted(path for unit in answer["units"] for path in unit) == sorted(paths)
    assert len(answer["plans"]) == len(budgets) and len(answer["scores"]) == len(answer["units"])
    sizes = [model.get_submodule(path).weight.numel() for path in paths]
    for budget, plan in zip(budgets, answer["plans"]):
        rungs = tasks.by_layer(paths, answer["units"], plan)
        bits = np.dot(sizes, [ladder.bits[rung] for rung in rungs]) / sum(sizes)
        # Olive moves layers until the share is reached, and so goes beyond it by at most one.
        assert bits <= budget + (ladder.library == "olive") * (most - least) * max(sizes) / sum(sizes)
    assert np.isfinite(answer["scores"]).all() and answer["seconds"] > 0 and answer["memory"] > 0


# Whose scales are not ours: steps of 15/16 (ladders.py), squared 0.88.
RATIOS = {"W4A16": (0.84, 0.92)}


@pytest.mark.parametrize(
    ("name", "rung"), [(n, r) for n, ladder in LIBRARIES.items() for r in ladder.rungs if r.recipe]
)
def test_quantizers_are_those_that_ours_stand_for(name, rung, model):
    """The squared error of every layer's output under the library's quantizers over that under ours."""
    driver = importlib.import_module(f"fragility_peers.{get_ladder(name).library}")
    theirs, recipe = driver.quantized(model, TOKENS, rung.name), calibrated(model, rung.recipe, TOKENS)
    ratios = []
    with torch.no_grad():
        for path, x in inputs_of(model).items():
            layer, operands = model.get_submodule(path), recipe.operands(path)
            rounded = x if operands.inputs is None else operands.inputs.round(x)
            ours = nn.functional.linear(rounded, operands.weights.round(layer.weight), layer.bias)
            errors = [(y - layer(x)).square().sum() for y in (theirs.get_submodule(path)(x), ours)]
            ratios.append(float(errors[0] / errors[1]))
    least, most = RATIOS.get(rung.name, (0.95, 1.05))
    assert least < np.exp(np.mean(np.log(ratios))) < most


def inputs_of(model):
    """What every linear layer of blocks reads in a pass over TOKENS, by path."""
    seen, paths = {}, tasks.layer_paths(model)
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda m, args, path=path: seen.update({path: args[0]}))
        for path in paths
    ]
    with torch.no_grad():
        model(TOKENS)
    for hook in hooks:
        hook.remove()
    return seen


def test_what_cannot_run_here_says_why(model):
    found = {
        library: tasks.carry_out(
            {"kind": "refuse", "model": CHECKPOINT, "ladder": name, "calibration": TOKENS.tolist()}
        )
        for library, name in (("modelopt", "modelopt fp8"), ("olive", "olive int4 int8"))
    }
    assert "Only 4-bit and 8-bit quantization supported" in found["olive"]["3 bits"]
    if not torch.cuda.is_available():
        assert found["modelopt"].keys() == {"MXFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"}
