"""Models whose parts lie on several devices, as accelerate's ``device_map`` puts them: numbers as on one device."""

import copy
import re
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from far_device import FARTHER, spread
from tiny import TINY, random_gpt2
from transformers import AutoModelForCausalLM

from fragility_adjoint.explain.changed_choices import next_tokens
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.mixed_precision import Contributions, apply
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.monitor import Monitor
from fragility_lab.diagnosis import Request, diagnose, forecast, loading, needs
from fragility_lab.inputs.checkpoints import load_model
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.offloaded import load_offloaded, on_meta
from fragility_lab.measurement.comparison import observe_each
from fragility_numerics.presence import source_of
from fragility_offload.files import device_of
from fragility_offload.offloaded import offloaded_parameter
from fragility_quantization.quantized import lower

EXECUTIONS = [
    ("bf16", "native"), ("bf16", "emulated"), ("fp16", "emulated"), ("fp8_e4m3", "emulated"), ("w8a8-int8", "emulated"),
    ("mxfp4+kv-fp8", "emulated"), ("fp8_e5m2_scaled", "emulated"), ("bf16", "weights"),
]  # fmt: skip
exactly_equal = pd.testing.assert_frame_equal
ASKED = Request("embedded", "", "bf16", "1 site", windows=1, length=16)


@pytest.fixture
def models(device, tiny_gpt2):
    """``tiny_gpt2`` with two blocks and the final norm on one far device and all else on another; and whole on one."""
    places = {f"transformer.{name}": device for name in ("wte", "wpe", "drop", "h.0")} | {"lm_head": device}
    places |= {f"transformer.{name}": FARTHER for name in ("h.1", "h.2", "ln_f")}
    return spread(copy.deepcopy(tiny_gpt2), places), copy.deepcopy(tiny_gpt2).to(device)


@pytest.fixture
def tokens(device, tiny_tokens):
    return tiny_tokens.to(device)


def test_parts_keep_their_devices(models):
    low = lower(models[0], "bf16", "native").model
    assert {str(p.device) for p in low.transformer.h[0].parameters()} == {"meta"}
    assert {str(p.device) for p in low.transformer.h[2].parameters()} == {"meta:1"}


@pytest.mark.parametrize(
    ("recipe", "execution", "target"),
    [*((*execution, "hidden") for execution in EXECUTIONS), ("bf16", "native", "kl"), ("fp16", "emulated", "loss")],
)
def test_an_estimate(recipe, execution, target, models, tokens):
    gradients = "low" if target == "hidden" else "both"
    apart, whole = (
        Adjoint(lower(m, recipe, execution), m, probes=2, target=target, gradients=gradients)(tokens) for m in models
    )
    exactly_equal(apart.windows, whole.windows, check_exact=True)
    exactly_equal(apart.contributions, whole.contributions, check_exact=True)


def test_an_estimate_over_some_positions(models, tokens):
    counted = tokens % 3 > 0
    apart, whole = (Adjoint(lower(m, "bf16", "native"))(tokens, counted).windows for m in models)
    exactly_equal(apart, whole, check_exact=True)


@pytest.mark.parametrize(("recipe", "execution"), EXECUTIONS[:4])
def test_a_monitored_pass(recipe, execution, models, tokens):
    monitors = [Monitor(lower(m, recipe, execution)) for m in models]
    for _ in range(2):
        apart, whole = (monitor(tokens, loss=True) for monitor in monitors)
        exactly_equal(apart.layers, whole.layers, check_exact=True)
        exactly_equal(apart.windows, whole.windows, check_exact=True)
        for monitor in monitors:
            monitor.follow()


@torch.no_grad()
def test_stochastic_rounding(models, tokens):
    """The bits are those of one device; an estimate knows the variance of such a rounding."""
    passes, estimates = [], []
    for model in models:
        low = lower(model, "bf16", "emulated").stochastic(3)
        for _ in range(2):
            with low.running():
                passes.append(final_hidden(low.model, tokens).cpu())
        estimates.append(Adjoint(low)(tokens).windows)
    assert torch.equal(passes[0], passes[2]) and torch.equal(passes[1], passes[3])
    assert not torch.equal(passes[0], passes[1])
    exactly_equal(*estimates, check_exact=True)


def test_realised_errors(models, tokens):
    apart, whole = (
        ErrorSamples(Adjoint(lower(m, "bf16", "emulated"), m, target="flips", gradients="fp32")) for m in models
    )
    assert torch.equal(*(next_tokens(found, tokens, 2).changes.cpu() for found in (apart, whole)))


@pytest.mark.parametrize("budget", [(1, "blocks"), (2, "sites"), (3, "modules")])
def test_plans(budget, models, tokens):
    plans, passes = [], []
    for model in models:
        plans.append(Contributions(model, Adjoint(lower(model, "bf16"), model, gradients="low")(tokens)).plan(*budget))
        protected = apply(model, plans[-1])
        with torch.no_grad(), protected.running():
            passes.append(final_hidden(protected.model, tokens).cpu())
    assert plans[0] == plans[1] and torch.equal(*passes)


@pytest.mark.parametrize("asked", [{}, {"format": "w4a16-g32", "budget": "6 bits"}])
def test_a_diagnosis(asked, models, tokens):
    request = replace(ASKED, windows=3, length=40, **asked)
    found = []
    for model in models:
        model.set_attn_implementation("sdpa")
        inputs = Inputs(model, tokens.cpu().flatten(), "tiny")
        expected = forecast(request, inputs, tokens)
        assert ("spread over 2 GPUs" in str(expected)) == (model is models[0])
        found.append(diagnose(request, inputs, tokens, expected))
    apart, whole = found
    assert apart.plan == whole.plan
    exactly_equal(apart.measured, whole.measured, check_exact=True)
    exactly_equal(apart.protected, whole.protected, check_exact=True)
    exactly_equal(apart.drift, whole.drift, check_exact=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where ``tiny_gpt2`` is saved."""
    folder = tmp_path_factory.mktemp("tiny")
    random_gpt2(TINY).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def streamed(files, request):
    """The model in ``files`` streamed, with its parts on two far devices. It is opened before "meta" is one of them.

    Its head is not tied to its embedding, as in ``models``.
    """
    model = load_offloaded(files, "cpu")
    device = request.getfixturevalue("device")
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        place = FARTHER if re.search(r"h\.[12]|ln_f", path) else device
        read = partial(lambda read, place: read().to(place), source_of(parameter).read, place)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, offloaded_parameter(parameter.shape, torch.float32, place, read))
    return model


@pytest.mark.parametrize(("recipe", "execution"), EXECUTIONS)
def test_a_streamed_model(recipe, execution, streamed, models, tokens):
    target, gradients = ("kl", "both") if execution == "native" else ("hidden", "low")
    apart, whole = (
        Adjoint(lower(m, recipe, execution), m, probes=2, target=target, gradients=gradients)(tokens)
        for m in (streamed, models[1])
    )
    exactly_equal(apart.windows, whole.windows, check_exact=True)
    exactly_equal(apart.contributions, whole.contributions, check_exact=True)


def test_measured_passes_of_a_streamed_model(streamed, models, tokens):
    lowered = [lower(m, "bf16") for m in (streamed, models[1])]
    found = [observe_each(low.model, tokens[:2], low) for low in lowered]
    assert all(torch.equal(a.logits.cpu(), b.logits.cpu()) for a, b in zip(*found, strict=True))


def test_devices_of_a_streamed_model(files):
    places = {"transformer.h": "cuda:1", "": "cpu", "transformer.h.1": "cuda:2"}
    paths = ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight", "transformer.h.10.ln_1.weight", "lm_head")
    assert [str(device_of(places, path)) for path in paths] == ["cuda:1", "cuda:2", "cuda:1", "cpu"]
    model = load_offloaded(files, {"transformer.h": "cpu", "": "cpu"})
    assert torch.equal(*(final_hidden(m, torch.arange(8)[None]) for m in (model, load_offloaded(files, "cpu"))))
    with pytest.raises(OSError, match="every parameter must have a device, but no module around transformer.wpe"):
        load_offloaded(files, {"transformer.wte": "cpu", "lm_head": "cpu", "transformer.h": "cpu"})


def test_moved_weights_are_refused(tiny_gpt2):
    with pytest.raises(ValueError, match="weights must stay on their devices, but accelerate has put some on the CPU"):
        lower(cpu_offload(tiny_gpt2), "bf16")


def test_a_streamed_model_that_was_spread_afterwards_is_refused():
    offloaded = load_offloaded("embedded", "cpu")
    dispatch_model(offloaded, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match="a streamed model must be opened on its devices, but accelerate has spread"):
        lower(offloaded, "bf16")


@pytest.mark.parametrize(
    ("gpus", "share", "form", "kind"),
    [(2, 0.7, "auto", "auto"), (2, 0.7, "whole", "auto"), (2, 0.7, "streamed", "streamed"),
     (2, 0.5, "auto", "streamed"), (1, 0.7, "auto", "streamed"),
     (2, 1.1, "auto", None), (2, 0.5, "whole", None), (0, 0.7, "auto", "streamed")],
)  # fmt: skip
def test_the_form_follows_from_the_memory_of_the_gpus(gpus, share, form, kind, monkeypatch):
    request = replace(ASKED, form=form)
    free = int(share * needs.whole(request, on_meta("embedded")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(needs, "free_memory", lambda device: free)
    asked = []

    def load(name, data, lengths, windows, device, auto_class, offloaded):
        asked.append("streamed" if offloaded else device)
        return Inputs(load_model(name, "cpu", auto_class), torch.arange(100), "")

    monkeypatch.setattr(loading, "load_inputs", load)
    loading.load(request)
    assert asked == [kind]


def test_a_model_is_loaded_by_a_device_map():
    model = load_model("embedded", {"": "cpu"}, AutoModelForCausalLM)
    exact = load_model("embedded", "cpu", AutoModelForCausalLM)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), exact.parameters(), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(files, tiny_tokens):
    """What the other tests pretend, with accelerate's own placement."""
    places = {f"transformer.{name}": 0 for name in ("wte", "wpe", "drop", "h.0")} | {"lm_head": 0}
    places |= {f"transformer.{name}": 1 for name in ("h.1", "h.2", "ln_f")}
    models = dispatch_model(random_gpt2(TINY), places), random_gpt2(TINY).to(0)
    tokens = tiny_tokens.to(0)
    apart, whole = (Adjoint(lower(m, "bf16"), m, probes=2, gradients="low")(tokens).windows for m in models)
    exactly_equal(apart, whole, rtol=1e-3)
    apart, whole = (Monitor(lower(m, "bf16"), power_iteration=True)(tokens).layers for m in models)
    exactly_equal(apart, whole, rtol=1e-3)
    streamed = load_offloaded(files, places)
    apart, whole = (
        Adjoint(lower(m, "bf16"), m, probes=2, gradients="low")(tokens).windows for m in (streamed, models[0])
    )
    exactly_equal(apart, whole, check_exact=True)
