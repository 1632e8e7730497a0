"""Plans beside kernels in fp32, whose results are not cast back: what is kept makes no error at all."""

import pytest
import torch
from tiny import random_model, random_tokens
from transformers import LlamaConfig

from fragility_adjoint import predict
from fragility_adjoint.mixed_precision import apply
from fragility_core import final_hidden, mismatch

TOKENS = random_tokens(6, 24)
EVERYTHING = {"blocks": range(2), "sites": ["embedding", "head", "norms"]}
RECIPES = ("w8a8-int8@fp32", "fp8-dynamic@fp32", "torchao-int8", "ctranslate2-int8", "openvino-int8", "ggml-q4_0")


def llama(tied, depth=2):
    return random_model(LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied,
    ))  # fmt: skip


@torch.no_grad()
def measured(model, plan, output):
    low = apply(model, plan)
    with low.running():
        rounded = output(low.model, TOKENS)
    return mismatch(rounded, output(model, TOKENS)).mean().item()


def logits(model, tokens):
    return model(tokens).logits


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kept",
    [
        {}, {"sites": ["embedding"]}, {"sites": ["head"]}, {"sites": ["mlp"]}, {"sites": ["attention"]},
        {"blocks": [0]}, {"modules": ["model.layers.1.mlp.down_proj"]},
    ],
    ids=str,
)  # fmt: skip
def test_plans_leave_what_is_measured(recipe, tied, kept):
    """Of the final hidden state, which a head does not change, tied or not."""
    model = llama(tied)
    plan = predict(model, TOKENS, recipe, probes=4).contributions.keep(**kept)
    assert plan.predicted == pytest.approx(measured(model, plan, final_hidden), rel=0.15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "ggml-q4_0@bf16"])
def test_nothing_is_left_where_all_is_kept(recipe, tied):
    model = llama(tied)
    known = predict(model, TOKENS, recipe).contributions
    plan = known.keep(**EVERYTHING)
    left = plan.predicted, measured(model, plan, final_hidden)
    if recipe.endswith("bf16"):  # what is kept is cast back to it
        assert max(left) < 0.05 * known.keep().predicted and min(left) > 0
    else:
        assert left == (0, 0)


def test_a_plan_of_a_deep_model_leaves_what_is_measured():
    model = llama(tied=False, depth=40)
    known = predict(model, TOKENS, "torchao-int8").contributions
    plan = known.keep(blocks=range(20))
    assert plan.predicted == pytest.approx(measured(model, plan, final_hidden), rel=0.2)
    assert known.keep(blocks=range(40)).predicted == 0


@pytest.mark.parametrize("recipe", ["ctranslate2-int8", "openvino-int8-w"])
def test_a_tied_matrix_counts_for_the_head_that_multiplies_by_it(recipe):
    model = llama(tied=True)
    known = predict(model, TOKENS, recipe, target="logprob", probes=4).contributions
    gains = known.gains("sites").set_index("label").gain
    assert gains["head"] > 0 and gains["embedding"] == 0
    alone, both = (measured(model, known.keep(sites=sites), logits) for sites in (["embedding"], ["embedding", "head"]))
    assert both < alone


def test_arithmetic_in_fp32_has_no_price():
    """A cache in int8 beside kernels in fp32 multiplies in fp32 already; int8 inputs do not."""
    moved = {
        recipe: predict(llama(False), TOKENS, recipe).contributions.keep(blocks=[0]).flops
        for recipe in ("kv-int8@fp32", "w4a16-g32@fp32", "w8a8-int8@fp32", "kv-int8")
    }
    assert moved["kv-int8@fp32"] == moved["w4a16-g32@fp32"] == 0 < moved["w8a8-int8@fp32"] <= moved["kv-int8"]
