"""Every library makes plans within its budget, and its quantizers are those that ours stand for."""

import numpy as np
import pytest
import torch

from fragility_core.arithmetic.calibration import calibrated
from fragility_core.arithmetic.lowering import lower
from fragility_lab.rivals import tasks
from fragility_lab.rivals.ladders import LADDERS, get_ladder

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
    sizes = [model.get_submodule(path).weight.numel() for path in paths]
    for budget, plan in zip(budgets, answer["plans"]):
        rungs = tasks.by_layer(paths, answer["units"], plan)
        bits = np.dot(sizes, [ladder.bits[rung] for rung in rungs]) / sum(sizes)
        # Olive moves layers until the share is reached, and so goes beyond it by at most one.
        assert bits <= budget + (ladder.library == "olive") * (most - least) * max(sizes) / sum(sizes)
    assert np.isfinite(answer["scores"]).all() and answer["seconds"] > 0 and answer["memory"] > 0


RATIOS = {"W4A16": (0.75, 1.05), "MXFP4": (0.8, 1.25)}  # other rounding of the scale, as ladders.py says


@pytest.mark.parametrize(
    ("name", "rung"), [(n, r) for n, ladder in LIBRARIES.items() for r in ladder.rungs if r.recipe]
)
def test_quantizers_are_those_that_ours_stand_for(name, rung, model):
    """The squared error of the logits under the library's quantizers over that under ours."""
    driver = __import__(f"fragility_lab.rivals.{get_ladder(name).library}", fromlist=["quantized"])
    low = lower(model, calibrated(model, rung.recipe, TOKENS))
    with torch.no_grad():
        exact = model(TOKENS).logits
        theirs = model_with(driver.quantized(model, TOKENS, rung.name), model)(TOKENS).logits
        with low.running():
            ours = low.model(TOKENS).logits
    ratio = float((theirs - exact).square().sum() / (ours - exact).square().sum())
    least, most = RATIOS.get(rung.name, (0.9, 1.1))
    assert least < ratio < most


def model_with(quantized, model):
    """``model`` with the linear layers of blocks of ``quantized``, as plans are measured."""
    copied = tasks.linear_model(CHECKPOINT)
    for path in tasks.layer_paths(model):
        copied.set_submodule(path, quantized.get_submodule(path))
    return copied


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
