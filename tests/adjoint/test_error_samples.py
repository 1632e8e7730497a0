"""Passes with a share of every error: none, the whole, and what is between them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, random_gpt2, random_tokens
from torch import nn

from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.targets import logits
from fragility_lab.measurement.comparison import compare, numbered, observe
from fragility_lab.measurement.growth import Growth, growth
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

TOKENS = random_tokens(2, 24)


def run_tokens(model):
    return logits(model, TOKENS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "fp8_e4m3", "w4a16-g32", "fp8-dynamic", "nvfp4-w4a4", "kv-fp8", "kv-int8"]
)
def test_without_errors_it_is_the_fp32_pass_and_with_all_the_low_precision_one(name, attention):
    model = random_gpt2(TINY)
    model.set_attn_implementation(attention)
    low = lower(model, get_recipe(name), "emulated")
    realisations = ErrorSamples(Adjoint(low, model, target="kl", gradients="fp32"))
    with torch.no_grad(), low.running():
        rounded = run_tokens(low.model)
    assert torch.equal(realisations.scaled(run_tokens, 0.0), run_tokens(model))
    assert torch.equal(realisations.scaled(run_tokens, 1.0), rounded)
    change = realisations.scaled(run_tokens, 0.5) - run_tokens(model)
    assert 0.3 < float(change.norm() / (rounded - run_tokens(model)).norm()) < 0.7


def overflowing():
    """A GPT-2 whose activations leave the range of fp16."""
    model = random_gpt2(TINY)
    model.transformer.h[1].mlp.c_fc.weight.mul_(1e5)
    return model


def test_an_overflow_is_one_at_every_share():
    model = overflowing()
    low = lower(model, "fp16", "emulated")
    realisations = ErrorSamples(Adjoint(low, model, target="kl", gradients="fp32"))
    with torch.no_grad(), low.running():
        rounded = run_tokens(low.model)
    assert rounded.isnan().any() and torch.equal(realisations.scaled(run_tokens, 0.0), run_tokens(model))
    assert torch.allclose(realisations.scaled(run_tokens, 1.0), rounded, rtol=0, atol=0, equal_nan=True)
    assert realisations.scaled(run_tokens, 0.5).isnan().any()


class Shifted(nn.Module):
    """One linear layer, and a table that is stored in low precision with it."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(8, 8, bias=False)
        self.layer.weight = nn.Parameter(torch.randn(8, 8, generator=generator), requires_grad=False)
        self.register_buffer("table", torch.randn(8, generator=generator))

    def forward(self, x):
        return self.layer(x.to(self.table.dtype)) + self.table


class ShiftedInPlace(Shifted):
    """The same, where a sum, and products in a part of it, are written into the tensor that is there."""

    def forward(self, x):
        y = self.layer(x.to(self.table.dtype))
        y += self.table
        y[..., :4] *= self.table[4:]
        return y


@pytest.mark.parametrize("kind", [Shifted, ShiftedInPlace])
def test_buffers_have_their_share(kind):
    model, x = kind().eval(), torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    low = lower(model, "bf16", "emulated")
    realisations = ErrorSamples(Adjoint(low, model, gradients="fp32"))
    with torch.no_grad(), low.running():
        rounded = low.model(x).float()
    assert torch.equal(realisations.scaled(lambda m: m(x).float(), 1.0), rounded)
    assert torch.equal(realisations.scaled(lambda m: m(x).float(), 0.0), model(x))


class Moved(Shifted):
    """The same, whose results are then written to another tensor, position by position, and chosen."""

    def forward(self, x):
        y = super().forward(x)
        z = torch.zeros_like(y)
        for position in range(y.shape[1]):
            z[:, position] = y[:, position]
        return torch.where(z > 0, z, z.masked_fill(z > 0, 0.0))


def test_what_only_moves_has_its_errors_once():
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    made, moved = (
        ErrorSamples(Adjoint(lower(model, "bf16", "emulated"), model, gradients="fp32"))
        for model in (Shifted().eval(), Moved().eval())
    )
    for share in (0.25, 1.0):
        want, found = (each.scaled(lambda m: m(x).float(), share) for each in (made, moved))
        assert torch.equal(found, want)
    want, found = (each.draw(lambda m: m(x).float()) for each in (made, moved))
    assert torch.equal(found, want)


def test_a_model_without_a_head_has_errors_in_all_of_its_modules():
    model = random_gpt2(TINY).transformer
    low = lower(model, "bf16", "emulated")
    realisations = ErrorSamples(Adjoint(low, model, gradients="fp32"))

    def final(model):
        return model(TOKENS).last_hidden_state.float()

    with torch.no_grad(), low.running():
        want = final(low.model) - final(model)
    drawn = realisations.draw(final) - realisations.exact(final)
    assert 0.7 < float(drawn.norm() / want.norm()) < 1.4


class Linear(nn.Module):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 8, bias=False)])
        self.layers[0].weight = nn.Parameter(torch.randn(8, 16, generator=generator), requires_grad=False)

    def forward(self, x):
        return self.layers[0](x)


@settings(max_examples=20)
@given(st.floats(0, 1), st.integers(0, 99))
def test_the_output_of_a_layer_moves_in_proportion_to_the_errors_of_its_weight(share, seed):
    model, x = Linear().eval(), torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed))
    low = lower(model, "w4a16-g32@fp32")
    realisations = ErrorSamples(Adjoint(low, model, gradients="fp32"))
    whole = x.double() @ (low.model.layers[0].weight - model.layers[0].weight).double().mT
    change = realisations.scaled(lambda m: m(x), share).double() - x.double() @ model.layers[0].weight.double().mT
    assert torch.allclose(change, share * whole, atol=1e-5)


def test_a_share_of_errors_needs_those_of_the_fp32_model():
    model = random_gpt2(TINY)
    realisations = ErrorSamples(Adjoint(lower(model, "bf16"), model, gradients="low"))
    with pytest.raises(ValueError, match="need the fp32 pass, got none: .* make Adjoint with gradients=.both."):
        realisations.scaled(run_tokens, 0.5)


@pytest.mark.parametrize("target", ["hidden", "kl"])
@pytest.mark.parametrize(
    ("name", "weight_scale", "proportional"), [("fp16", 8.0, True), ("fp8_e5m2", 8.0, True), ("fp8_e5m2", 32.0, False)]
)
def test_small_errors_grow_in_proportion_and_large_ones_do_not(name, weight_scale, proportional, target):
    """With large weights a change of the scores moves attention to other tokens, and errors do not grow further."""
    model, windows = random_gpt2(TINY, weight_scale), random_tokens(8, 16)
    low = lower(model, get_recipe(name), "emulated")
    whole = numbered(compare(observe(low.model, x, low), observe(model, x), x)[0] for x in windows.split(1))
    found = growth(ErrorSamples(Adjoint(low, model, gradients="fp32")), model, windows, whole, target)
    assert found.low < found.ratio < found.high
    assert found.in_proportion is proportional
    assert found.ratio == pytest.approx(1, abs=0.1) if proportional else found.low > 1.1


@given(st.floats(0.1, 3.5), st.floats(1e-6, 1))
def test_a_power_law_has_its_exponent(power, size):
    half, whole = (size * share**power for share in (0.5, 1.0))
    assert Growth(4 * half / whole, 0.0, 9.0).exponent == pytest.approx(power, abs=1e-6)


class LinearSoftmax(nn.Module):
    """A linear layer and a softmax."""

    def __init__(self):
        super().__init__()
        self.layers = Linear().layers

    def forward(self, x):
        return torch.log_softmax(self.layers[0](x).double(), -1)


@settings(max_examples=10)
@given(st.integers(0, 99))
def test_small_errors_of_a_linear_layer_have_exponent_2_behind_a_softmax(seed):
    """The KL divergence, in fp64, with errors of int8 weights and products in fp32."""
    model, x = LinearSoftmax().eval(), torch.randn(1, 50, 16, generator=torch.Generator().manual_seed(seed))
    realisations = ErrorSamples(Adjoint(lower(model, "w8a16-g32@fp32"), model, gradients="fp32"))
    exact = model(x)
    half, whole = (
        float((exact.exp() * (exact - realisations.scaled(lambda m: m(x), share))).sum(-1).mean())
        for share in (0.5, 1.0)
    )
    assert Growth(4 * half / whole, 0.0, 9.0).exponent == pytest.approx(2, abs=0.02)
