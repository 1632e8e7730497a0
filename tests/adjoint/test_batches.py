"""Several windows in one pass against one pass a window."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from test_adjoint_families import DENSE, EXPERTS, OTHERS
from test_probes import assert_alike
from tiny import random_model, random_tokens
from torch import nn
from torch.nn import functional
from transformers import BloomConfig, FalconConfig, GPT2Config

from fragility_adjoint.predictor import Adjoint, arithmetic, estimator, recomputed
from fragility_adjoint.predictor.recomputed import WeightProduct
from fragility_adjoint.predictor.windows import over_windows
from fragility_adjoint.quantization.quantized import lower
from fragility_core.numerics.attention import OBSERVED_EAGER, set_attention

TOKENS = random_tokens(3, 40, vocabulary=257, smallest=1)
GPT2 = GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=128, vocab_size=257)
LLAMA, MISTRAL = (next(c for c in DENSE if c.model_type == name) for name in ("llama", "mistral"))
RECIPES = ["fp16", "fp8_e4m3", "fp8_e4m3_linear", "w8a8-int8", "mxfp8", "w4a16-g128"]
# Changes in place, a derivative of the model's own, a search for the token of padding, and experts.
ALONE = [DENSE[0], *EXPERTS, *(config for config in OTHERS if isinstance(config, BloomConfig | FalconConfig))]
TOGETHER = [GPT2, *(config for config in [*DENSE, *OTHERS] if config not in ALONE)]

by_type = {"ids": lambda config: config.model_type}


@pytest.fixture
def products_in_fp32(monkeypatch):
    """Gradients of products with weights are not rounded to bf16, which sums in another order would round otherwise."""
    monkeypatch.setattr(recomputed, "has_native_kernels", lambda *given: False)
    monkeypatch.setattr(arithmetic, "fast_products", recomputed.fast_products.__wrapped__)  # without its cache


def both_ways(low, model, *given, batch=2, **options):
    """The predictions for windows one by one, and for windows in batches."""
    alone, batched = (Adjoint(low, model, batch=size, **options) for size in (1, batch))
    one, other = alone(*given), batched(*given)
    assert batched.batch == batch
    return one, other


@pytest.mark.parametrize(
    ("config", "attention"),
    [*product(TOGETHER, ["eager"]), *product([GPT2, LLAMA, MISTRAL], ["sdpa", OBSERVED_EAGER])],
    ids=lambda x: x if isinstance(x, str) else x.model_type,
)
def test_windows_in_a_batch_are_windows_one_by_one(config, attention, products_in_fp32):
    """At the fp32 point, where the values do not depend on how the pass rounds; the last batch has one window."""
    model = random_model(config)
    low = lower(model, "bf16")
    set_attention(low.model, attention)
    counted = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(2)) < 0.7
    options = {"probes": 2, "target": "kl", "gradients": "fp32"}
    assert_alike(*both_ways(low, model, TOKENS, counted, (5, 6, 7), **options), rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "target"), [*product(RECIPES, ["hidden"]), *product(["fp16"], ["logprob", "loss", "flips"])]
)
def test_recipes_and_targets(recipe, target, products_in_fp32):
    """A scale is that of one window, as the sums over positions are that inputs of linear layers have."""
    model = random_model(LLAMA)
    both = both_ways(lower(model, recipe), model, TOKENS, batch=3, probes=2, target=target, gradients="fp32")
    assert_alike(*both, rel=1e-3)


@pytest.mark.parametrize("how", ["low", "both", "weights", "stochastic"])
@pytest.mark.parametrize("config", [GPT2, LLAMA], **by_type)
def test_the_pass_itself_in_low_precision(config, how):
    """A batch may round otherwise, and gradients in bf16 with it: single contributions move, their sum hardly."""
    model = random_model(config)
    low = lower(model, "bf16", "weights" if how == "weights" else "auto")
    low = low.stochastic(0) if how == "stochastic" else low
    gradients = "both" if how == "both" else "low"
    one, other = both_ways(low, model, TOKENS, batch=3, probes=2, gradients=gradients)
    np.testing.assert_allclose(one.windows.predicted, other.windows.predicted, rtol=0.03)
    assert other.contributions.drop(columns=["c2", "signed"]).equals(one.contributions.drop(columns=["c2", "signed"]))


def test_the_model_runs_once_for_a_batch(tiny_gpt2, tiny_tokens):
    low, calls = lower(tiny_gpt2, "bf16"), []
    for batch, runs in ((1, 3), (2, 2), (3, 1), (64, 1)):
        adjoint = Adjoint(low, tiny_gpt2, batch=batch)
        adjoint.model.transformer.register_forward_pre_hook(lambda *call: calls.append(call))
        adjoint(tiny_tokens)
        assert len(calls) == runs
        calls.clear()


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize("config", ALONE, **by_type)
def test_where_a_batch_cannot_be_computed_windows_run_one_by_one(config, recipe):
    """Nothing of a failed pass is left."""
    model = random_model(config)
    low = lower(model, recipe)
    batched = Adjoint(low, model, probes=2, batch=3)
    one, other = Adjoint(low, model, probes=2)(TOKENS), batched(TOKENS)
    assert batched.batch == 1
    assert one.contributions.equals(other.contributions) and one.windows.equals(other.windows)


@pytest.mark.parametrize("at_once", [True, False])
def test_probes_of_a_batch(at_once, products_in_fp32):
    """In one backward pass, or one by one."""
    model = random_model(LLAMA)
    adjoint = Adjoint(lower(model, "bf16"), model, probes=3, gradients="fp32", batch=3)
    adjoint.at_once = at_once
    assert_alike(Adjoint(lower(model, "bf16"), model, probes=3, gradients="fp32")(TOKENS), adjoint(TOKENS), rel=1e-3)
    assert adjoint.batch == 3


def test_a_batch_that_fails_on_the_way_back(tiny_gpt2, tiny_tokens, monkeypatch):
    """Its windows run one by one, with all probes of a window at once as before."""
    low, backward = lower(tiny_gpt2, "bf16"), estimator.backward

    def failing(outputs, *given, **options):
        if len(outputs[0]) > 1:
            raise RuntimeError("out of memory")
        return backward(outputs, *given, **options)

    monkeypatch.setattr(estimator, "backward", failing)
    batched = Adjoint(low, tiny_gpt2, probes=2, batch=3)
    one, other = Adjoint(low, tiny_gpt2, probes=2)(tiny_tokens), batched(tiny_tokens)
    assert (batched.batch, batched.at_once, batched.recorder.probe) == (1, True, 0)
    assert one.contributions.equals(other.contributions) and one.windows.equals(other.windows)


def test_a_mistake_of_the_caller_does_not_end_batches(tiny_gpt2, tiny_tokens):
    batched = Adjoint(lower(tiny_gpt2, "bf16"), tiny_gpt2, batch=3)
    with pytest.raises(IndexError):
        batched(tiny_tokens + 1000)
    assert batched.batch == 3
    assert np.isfinite(batched(tiny_tokens).windows.predicted).all() and batched.batch == 3


def test_an_overflow_is_that_of_its_window(tiny_gpt2, tiny_tokens):
    """A token with a huge embedding overflows in its window alone, inside of a norm and outside."""
    model = copy.deepcopy(tiny_gpt2)
    tokens = tiny_tokens.clone()
    tokens[tokens == 7], tokens[1, 3] = 8, 7
    model.transformer.wte.weight.data[7] = 7e4
    one, other = both_ways(lower(model, "fp16"), model, tokens, batch=3)
    assert list(one.windows.overflow) == list(other.windows.overflow) and one.windows.overflow[1]
    assert other.windows.predicted.isna().tolist() == [False, True, False]


def test_products_with_weights():
    """Of a batch as of each window, with the gradients of the weights of each."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8, 6), torch.randn(6)
    given = [t.clone().requires_grad_() for t in (x, weight.expand(3, 8, 6), bias.expand(3, 6))]
    product = torch.func.vmap(over_windows(WeightProduct.apply))(*given)
    sign = torch.randn(product.shape)
    found = torch.autograd.grad(product, given, sign)
    for window in range(3):
        own = [t.clone().requires_grad_() for t in (x[window], weight, bias)]
        alone = WeightProduct.apply(*own)
        torch.testing.assert_close(product[window], alone)
        for a, b in zip(found, torch.autograd.grad(alone, own, sign[window])):
            torch.testing.assert_close(a[window], b, rtol=0.02, atol=0.02)


class ChosenWeights(nn.Module):
    """The weights of a product are those that the first token of a window chooses."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.how = nn.Embedding(257, 8), how
        self.weights, self.biases = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 8))
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        x, chosen = self.embedding(tokens), tokens[:, 0] % 4
        if self.how == "weights":
            return functional.linear(x, self.weights[chosen][0], self.biases[0])
        if self.how == "biases":
            return functional.linear(x, self.weights[0], self.biases[chosen][0])
        return torch.addmm(self.biases[chosen][0], x[0], self.weights[chosen][0])[None]


@pytest.mark.parametrize("how", ["weights", "biases", "addmm"])
def test_weights_that_windows_do_not_have_in_common(how):
    model = ChosenWeights(how)
    options = {"probes": 2, "gradients": "fp32", "target": lambda model, x: model(x), "batch": 3}
    one, other = both_ways(lower(model, "bf16"), model, TOKENS, **options)
    assert len(set((TOKENS[:, 0] % 4).tolist())) > 1
    assert_alike(one, other, rel=0.02)  # gradients in bf16


class Masked(nn.Module):
    """Fused attention of four heads, without the keys of tokens that are divisible by 3."""

    def __init__(self, shape: str):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.shape = nn.Embedding(257, 32), shape
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        x = torch.tanh(self.embedding(tokens))
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)  # (1, 4, T, 8)
        seen = tokens % 3 != 0  # (1, T)
        if self.shape == "five dimensions":
            return functional.scaled_dot_product_attention(*[heads[:, None]] * 3, seen)[:, 0].transpose(1, 2)
        mask = {"keys": seen, "rows": seen.expand(len(tokens[0]), -1)[None], "all": seen[:, None, None]}[self.shape]
        return functional.scaled_dot_product_attention(*[heads] * 3, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("shape", ["keys", "rows", "all", "five dimensions"])
def test_masks_of_windows(shape):
    """As many windows as heads, so that a mask of windows could be taken for one of heads."""
    model, tokens = Masked(shape), random_tokens(4, 12, seed=3, vocabulary=257)
    one, other = both_ways(lower(model, "bf16"), model, tokens, batch=4, target=lambda model, x: model(x))
    assert_alike(one, other, rel=1e-3)
    assert one.windows.norm.nunique() == 4


class CommonInput(nn.Module):
    """A product whose input all windows have in common."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.weight = nn.Embedding(257, 8), nn.Parameter(torch.randn(8, 8))
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        ones = torch.ones(1, tokens.shape[1], 8, dtype=self.weight.dtype)
        return self.embedding(tokens) * functional.linear(ones, self.weight)


def test_an_input_that_windows_have_in_common():
    model = CommonInput()
    options = {"probes": 2, "gradients": "fp32", "target": lambda model, x: model(x), "batch": 3}
    assert_alike(*both_ways(lower(model, "bf16"), model, TOKENS, **options), rel=0.02)


class SharedTable(nn.Module):
    """What all windows have in common is rounded, too: a table of positions, made anew in each pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(257, 8), nn.ModuleList([nn.Linear(8, 8)])
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[-1]).to(self.embedding.weight.dtype)
        table = torch.sin(positions[:, None] * torch.arange(8).to(positions.dtype))
        return self.layers[0](torch.tanh(self.embedding(tokens)) * table)


def test_what_windows_have_in_common_counts_in_each(products_in_fp32):
    model = SharedTable()
    one, other = both_ways(
        lower(model, "bf16"), model, TOKENS, batch=3, probes=2, gradients="fp32", target=lambda model, x: model(x)
    )
    assert_alike(one, other, rel=1e-3)
    assert one.contributions.groupby("name").c2.sum()["sin"] > 0


def test_a_batch_of_no_window_is_refused(tiny_gpt2):
    with pytest.raises(ValueError, match="probes and batch must be at least 1, got 1 and 0"):
        Adjoint(lower(tiny_gpt2, "bf16"), tiny_gpt2, batch=0)
