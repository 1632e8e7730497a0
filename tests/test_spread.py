"""Models whose blocks lie on several devices, as accelerate's ``device_map`` puts them: numbers as on one device."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from far_device import FARTHER, far_device, spread

from fragility_core.adjoint import Adjoint
from fragility_core.arithmetic.lowering import lower
from fragility_core.surrogates.monitor import Monitor

EXECUTIONS = [
    ("bf16", "native"), ("bf16", "emulated"), ("fp16", "emulated"), ("fp8_e4m3", "emulated"), ("w8a8-int8", "emulated"), ("mxfp4+kv-fp8", "emulated"),
    ("fp8_e5m2_scaled", "emulated"), ("bf16", "weights"),
]  # fmt: skip


@pytest.fixture
def device(monkeypatch):
    with far_device(monkeypatch) as device:
        yield device


@pytest.fixture
def models(device, tiny_gpt2):
    """``tiny_gpt2`` with two blocks, final norm and head on one far device and all else on another; whole on one."""
    places = {f"transformer.{name}": device for name in ("wte", "wpe", "drop", "h.0")} | {"lm_head": device}
    places |= {f"transformer.{name}": FARTHER for name in ("h.1", "h.2", "ln_f")}
    return spread(copy.deepcopy(tiny_gpt2), places), copy.deepcopy(tiny_gpt2).to(device)


@pytest.fixture
def tokens(device, tiny_tokens):
    return tiny_tokens.to(device)


@pytest.mark.parametrize("target", ["hidden", "kl", "loss"])
@pytest.mark.parametrize(("recipe", "execution"), EXECUTIONS)
def test_an_estimate(recipe, execution, target, models, tokens):
    found = []
    for model in models:
        low = lower(model, recipe, execution)
        gradients = "low" if target == "hidden" else "both"
        found.append(Adjoint(low, model, probes=2, target=target, gradients=gradients)(tokens))
    here, there = found
    print(here.windows, there.windows)
    assert len(here.contributions) == len(there.contributions)
    np.testing.assert_allclose(here.windows.predicted, there.windows.predicted, rtol=0.01)
    print((here.contributions.c2/there.contributions.c2).describe())


@pytest.mark.parametrize(("recipe", "execution"), EXECUTIONS[:4])
def test_a_monitored_pass(recipe, execution, models, tokens):
    here, there = (
        Monitor(lower(m, recipe, execution))(tokens, loss=True) for m in models
    )
    pd.testing.assert_frame_equal(here.layers, there.layers, rtol=1e-3)
    pd.testing.assert_frame_equal(here.windows, there.windows, rtol=1e-3)
    print(((here.layers-there.layers)/there.layers).abs().max().max())
