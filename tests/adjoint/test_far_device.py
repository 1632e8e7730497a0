"""Every computation on a second device (see ``far_device``): no kernel mixes devices, and passes do not wait."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from far_device import waits
from tiny import random_tokens

from fragility_adjoint.predictor import Adjoint
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.patching import Patching
from fragility_lab.diagnosis import Request, diagnose, forecast
from fragility_lab.diagnosis.page import page
from fragility_lab.experiments import e2, e3, e5, x1, x1_plans
from fragility_lab.inputs.checkpoints import load_model
from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.engine import complete
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower

GRID = e2.Grid("tiny", "random", ("bf16", "fp16"), (32,), (0,), 4)
EXECUTIONS = [
    ("bf16", "native"), ("bf16", "emulated"), ("fp16", "emulated"), ("fp8_e4m3", "emulated"),
    ("fp8_e5m2_scaled", "emulated"), ("bf16", "weights"),
]  # fmt: skip
# Before the first block, the library reads whether a window holds several texts; plain passes do so, too.
OF_THE_LIBRARY = "aten::_local_scalar_dense"


@pytest.fixture
def moved(device, tiny_gpt2, tiny_tokens):
    """A model and its windows on the far device."""
    return copy.deepcopy(tiny_gpt2).to(device), tiny_tokens.to(device)


@pytest.fixture
def both_inputs(moved, tiny_gpt2):
    """What experiments load, on the far device and on the CPU."""
    stream = random_tokens(400, seed=2)
    return [Inputs(model, stream, "tiny") for model in (moved[0], tiny_gpt2)]


def test_operands_of_two_devices_are_refused(device):
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3, device=device) + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3).add_(torch.ones((), device=device))
    assert not waits


def test_waits_are_counted(device):
    x = torch.arange(4.0, device=device)
    assert x[x > 1].cpu().tolist() == [2.0, 3.0]
    assert x.sum().item() == 6 and bool(x[0] == 0)
    assert waits == {"an index or mask": 1, "to the host": 1, OF_THE_LIBRARY: 2}


@pytest.mark.parametrize(("format", "execution"), EXECUTIONS)
def test_a_monitored_pass(format, execution, moved, tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(moved[0], format, execution))
    monitor(moved[1])  # makes indices that are kept
    waits.clear()
    observed = monitor(moved[1])
    # Epsilons go to the device from pinned memory. All statistics come back at once.
    assert waits == {"to the device": 1, "to the host": 1, OF_THE_LIBRARY: 1}
    expected = Monitor(lower(tiny_gpt2, format, execution))(tiny_tokens)
    pd.testing.assert_frame_equal(observed.layers, expected.layers, rtol=0.02)


@pytest.mark.parametrize("attention", ["sdpa", OBSERVED_EAGER])
@pytest.mark.parametrize(("format", "execution"), EXECUTIONS)
def test_an_estimate(format, execution, attention, moved, tiny_gpt2, tiny_tokens):
    predicted = []
    for model, tokens in (moved, (tiny_gpt2, tiny_tokens)):
        low = lower(model, format, execution)
        set_attention(low.model, attention)
        estimate = Adjoint(low, model, probes=2, gradients="low")
        waits.clear()
        predicted.append(estimate(tokens).windows.predicted)
        if model is moved[0]:
            assert waits.pop(OF_THE_LIBRARY) == len(tokens)
            assert set(waits) == {"to the host"} and waits.total() <= 3  # readings, norms, ranges
    np.testing.assert_allclose(*predicted, rtol=0.01)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_patched_passes(format, moved, tiny_gpt2, tiny_tokens):
    patching = Patching(moved[0], lower(moved[0], format, "emulated"))
    waits.clear()
    patched = patching(moved[1])
    assert waits == {OF_THE_LIBRARY: 1}
    expected = Patching(tiny_gpt2, lower(tiny_gpt2, format, "emulated"))(tiny_tokens)
    torch.testing.assert_close(patched.cpu(), expected, rtol=0, atol=0.02)


def test_experiments(both_inputs, tmp_path):
    there, here = both_inputs
    sources = e2.specifications(GRID, there)
    rows = complete(e2.MonitoredPasses, sources, there, tmp_path / "e2")
    on_cpu = complete(e2.MonitoredPasses, e2.specifications(GRID, here), here, tmp_path / "cpu")
    np.testing.assert_allclose(rows.mismatch, on_cpu.mismatch, rtol=0.3)  # other rounding errors where that is native
    source = tmp_path / "e2"
    specs = e3.PatchSpec.of(sources, windows=2, noisy_windows=1, realisations=2)
    assert complete(e3.Patches, specs, there, tmp_path / "e3", source=source).exact_reduction.notna().all()
    specs = x1.EstimateSpec.of(sources, probes=2, redraws=1)
    assert np.isfinite(complete(x1.Estimates, specs, there, tmp_path / "x1", source=source).predicted).all()
    specs = x1_plans.PlanSpec.of(sources, tokens=64, probes=1, draws=1, blocks=(1,), sites=(1,))
    plans = complete(x1_plans.Plans, specs, there, tmp_path / "plans", source=source)
    assert ((plans.measured > 0) & (plans.measured < 2 * plans.predicted)).all()


def test_training_with_a_shadow(both_inputs, tmp_path):
    setting = e5.TrainingSetting("tiny", "random", length=32, windows=4, steps=4)
    losses = []
    for place in both_inputs:
        specs = e5.specifications(setting, e5.policies(["none", "bgss"], setting, place), [0], place)
        folder = tmp_path / place.device.type
        losses.append(complete(e5.Mitigation, specs, place, folder, checkpoint_interval=2).loss)
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.parametrize("asked", [{}, {"attention": "eager"}, {"weights_only": True}, {"format": "fp8_e4m3_scaled"}])
def test_a_diagnosis(asked, both_inputs, moved):
    sizes = {"model": "tiny", "data": "random", "format": "bf16", "budget": "1 site", "windows": 2, "length": 12}
    request, windows = Request(**sizes | asked), moved[1][:2, :12]
    both_inputs[0].model.set_attn_implementation("sdpa" if request.attention == "auto" else request.attention)
    found = diagnose(request, both_inputs[0], windows, forecast(request, both_inputs[0], windows))
    assert np.isfinite(found.measured.mismatch).all() and found.plan is not None
    assert "<html" in page(found)


def test_models_are_loaded_onto_the_default_device(device):
    assert load_model("embedded").device == device
