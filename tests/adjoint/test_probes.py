"""Several probes in one backward pass against one pass a probe."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fragility_adjoint import internals
from fragility_adjoint.predictor import Adjoint, arithmetic, recomputed
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower


@pytest.fixture(scope="module")
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def together_and_alone(adjoint, tokens):
    """The predictions with all probes at once and one by one."""
    together = adjoint(tokens)
    assert adjoint.at_once
    adjoint.at_once = False
    return together, adjoint(tokens)


def assert_alike(one, other, rel=1e-5):
    """The same values within rounding, which counts beside the largest contribution of a window and probe."""
    a, b = (
        x.contributions.pivot(index=["window", "probe"], columns="place", values="c2").to_numpy() for x in (one, other)
    )
    assert a.shape == b.shape and a.max() > 0
    assert np.abs(a - b).max(initial=0) <= rel * a.max()
    np.testing.assert_allclose(a.sum(1), b.sum(1), rtol=rel)
    np.testing.assert_allclose(one.windows.predicted, other.windows.predicted, rtol=rel)


@pytest.mark.parametrize("target", ["hidden", "kl"])
@pytest.mark.parametrize("attention", ["sdpa", OBSERVED_EAGER])
@pytest.mark.parametrize("model", ["tiny_gpt2", "tiny_llama"])
@pytest.mark.parametrize(("recipe", "gradients"), [("bf16", "low"), ("fp16", "both"), ("w8a8-int8", "fp32")])
def test_probes_at_once_are_probes_one_by_one(
    recipe, gradients, model, attention, target, tiny_tokens, request, monkeypatch
):
    """Products with weights in fp32 here: their gradients in bf16 round otherwise where sums have another order."""
    monkeypatch.setattr(recomputed, "has_native_kernels", lambda *given: False)
    monkeypatch.setattr(arithmetic, "fast_products", recomputed.fast_products.__wrapped__)  # without its cache
    model = request.getfixturevalue(model)
    low = lower(model, recipe)
    set_attention(low.model, attention)
    adjoint = Adjoint(low, model, probes=3, target=target, gradients=gradients)
    assert_alike(*together_and_alone(adjoint, tiny_tokens), rel=1e-4)


def test_gradients_in_bf16_differ_by_their_rounding(tiny_gpt2, tiny_tokens):
    estimator = Adjoint(lower(tiny_gpt2, "bf16"), tiny_gpt2, probes=3, gradients="low")
    assert_alike(*together_and_alone(estimator, tiny_tokens), rel=1e-2)


def test_probes_differ(tiny_gpt2, tiny_tokens):
    c2 = Adjoint(lower(tiny_gpt2, "bf16"), probes=3)(tiny_tokens[:1]).contributions.groupby("probe").c2.sum()
    assert c2.nunique() == 3


class Opaque(torch.autograd.Function):
    """A kernel whose gradient asks for numbers, which no batch of gradients has."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(gradient.abs().max() >= 0)


class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(Opaque.apply(self.first(x)))


def test_a_gradient_that_cannot_be_batched_takes_a_pass_for_each_probe():
    """What the failed pass recorded does not count."""
    torch.manual_seed(0)
    model = Refusing().eval().requires_grad_(False)
    tokens = torch.randn(2, 5, 8).bfloat16()
    adjoint = Adjoint(lower(model, "bf16"), model, probes=3, target=lambda model, x: model(x), gradients="low")
    refused = adjoint(tokens)
    assert not adjoint.at_once
    assert_alike(refused, adjoint(tokens), rel=0)


class Broken(torch.autograd.Function):
    """A kernel whose gradient fails with its ``error``, for several probes alone or for any number."""

    @staticmethod
    def forward(ctx, x, error, always):
        ctx.error, ctx.always = error, always
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.always or torch._C._functorch.is_batchedtensor(gradient):
            raise ctx.error
        return gradient, None, None


class Breaking(nn.Module):
    def __init__(self, error, always=False):
        super().__init__()
        self.first, self.second, self.broken = nn.Linear(8, 8), nn.Linear(8, 8), (error, always)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return self.second(Broken.apply(self.first(x), *self.broken))


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), NotImplementedError("later"), KeyError("x")])
def test_a_mistake_in_the_code_of_a_model_is_raised(error, always):
    """Also where it would not show in a pass of one probe."""
    adjoint = Adjoint(lower(Breaking(error, always), "bf16"), probes=2, target=lambda model, x: model(x))
    with pytest.raises(type(error), match=str(error.args[0])):
        adjoint(torch.randn(1, 5, 8).bfloat16())
    assert adjoint.at_once


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
    ],
)
def test_with_too_little_memory_for_all_probes_each_takes_a_pass(error):
    tokens, target = torch.randn(2, 5, 8).bfloat16(), lambda model, x: model(x)
    adjoint = Adjoint(lower(Breaking(error), "bf16"), probes=2, target=target)
    assert np.isfinite(adjoint(tokens).windows.predicted).all() and not adjoint.at_once
    with pytest.raises(type(error)):
        Adjoint(lower(Breaking(error, always=True), "bf16"), probes=2, target=target)(tokens)


def refused(x):
    """Functions of a batched ``x`` that vmap refuses."""
    yield lambda: float(x.sum())
    yield lambda: x if x.sum() > 0 else -x
    yield lambda: torch.histc(x)
    yield lambda: torch.add(x, x, out=torch.zeros(5))
    yield lambda: x.nonzero()
    yield lambda: x.tolist()
    yield lambda: x.untyped_storage()
    yield lambda: x + torch.randn(5)
    yield lambda: torch.zeros(5).add_(x)
    yield lambda: torch.zeros(5).copy_(x)
    yield lambda: Opaque.apply(x)


def test_what_vmap_refuses_is_told_from_mistakes():
    seen = []

    def run(x):
        for function in refused(x):
            with internals.without_vmap_fallback(), pytest.raises(RuntimeError) as raised:
                function()
            seen.append(internals.refused_by_vmap(raised.value))
        return x

    torch.func.vmap(run)(torch.randn(3, 5))
    assert seen == [True] * 11
    for mistake in (lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: torch.ones(2).view(3)):
        with pytest.raises(RuntimeError) as raised:
            mistake()
        assert not internals.refused_by_vmap(raised.value) and not internals.out_of_memory(raised.value)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert internals.out_of_memory(raised.value)


def test_the_mean_of_many_probes_is_right(tiny_gpt2, tiny_tokens):
    """Different seeds agree within their standard error."""
    low = lower(tiny_gpt2, "bf16")
    first, second = (
        Adjoint(low, tiny_gpt2, probes=32, seed=seed, gradients="low")(tiny_tokens[:1]).windows for seed in (0, 1)
    )
    error = np.hypot(first.standard_error, second.standard_error)
    assert (np.abs(first.predicted - second.predicted) < 4 * error).all()
