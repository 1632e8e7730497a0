"""Mixed schemes: the knapsack against all choices, groups of fused layers, plans predicted and applied."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from fragility_core.adjoint.targets import get_target
from fragility_core.arithmetic.operands import linear_weights, owner, rounded_weight
from fragility_core.arithmetic.recipes import get_recipe
from fragility_core.protection import Plan, apply
from fragility_core.protection.bits import Choices, fused_layers, predictions

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=101),
    "llama": LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=128, num_key_value_heads=2, num_local_experts=4),
}
RECIPES = ["w4a16-g32@fp32", "w8a16-g32@fp32"]
TOKENS = torch.arange(48).view(2, 24)


def random_model(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)


def choices_of(errors, bits, squared=True):
    """Choices with these tables (groups, schemes), of one window."""
    made = Choices.__new__(Choices)
    made.errors, made.bits, made.rest = errors[None], bits, np.array([0.125])
    made.groups, made.weights = [(str(i),) for i in range(len(errors))], 1
    made.target = get_target("kl" if squared else "hidden")
    return made


tables = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(*(arrays(float, shape, elements=st.floats(0.01, 1.0)) for _ in range(2)))
)


@given(tables, st.floats(0, 1), st.booleans())
@settings(deadline=None, max_examples=60)
def test_no_choice_is_better(given_tables, share, squared):
    errors, bits = given_tables
    known = choices_of(errors, bits, squared)
    every = list(product(range(errors.shape[1]), repeat=len(errors)))
    rows = range(len(errors))
    sums = np.array([(errors[rows, c].sum(), bits[rows, c].sum()) for c in map(list, every)])
    budget = sums[:, 1].min() + share * np.ptp(sums[:, 1]) + 1e-9
    found = known.within_bits(budget)
    assert bits[rows, found].sum() <= budget * (1 + 1e-6)
    assert errors[rows, found].sum() <= sums[sums[:, 1] <= budget, 0].min() * (1 + 1e-5)
    bound = sums[:, 0].min() + share * np.ptp(sums[:, 0]) + 0.125 + 1e-9
    found = known.within_error(bound if squared else bound**0.5)
    assert errors[rows, found].sum() + 0.125 <= bound * (1 + 1e-6)
    assert bits[rows, found].sum() <= sums[sums[:, 0] + 0.125 <= bound, 1].min() * (1 + 1e-5)


def test_budgets_out_of_reach_are_refused():
    known = choices_of(np.array([[0.5, 0.1]]), np.array([[2.0, 4.0]]))
    with pytest.raises(ValueError, match="must be at least 2 bits, those of the smallest scheme, got 1.5"):
        known.within_bits(1.5)
    with pytest.raises(ValueError, match="the bound on kl must be at least 0.225, .* got 0.2"):
        known.within_error(0.2)


def test_layers_with_one_input_are_fused():
    assert [len(group) for group in fused_layers(random_model("gpt2"), TOKENS)] == [1] * 8
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    groups = fused_layers(random_model("llama"), TOKENS)
    assert [len(group) for group in groups] == [3, 1, 2, 1] * 2
    assert groups[0] == tuple(f"model.layers.0.{layer}" for layer in layers)
    experts = fused_layers(random_model("mixtral"), TOKENS)
    assert [len(group) for group in experts] == [3, 1, 1] * 2


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mixed_plan_is_predicted_as_its_own_recipe_is(name):
    """The plan's contributions are those of a prediction for the plan itself, at the exact point."""
    model = random_model(name)
    groups = fused_layers(model, TOKENS)
    known = Choices(model, predictions(model, RECIPES, TOKENS, gradients="fp32"), groups)
    choice = known.within_bits(8.0)
    plan = known.plan(choice)
    assert known.mean_bits(choice) <= 8.0 and len({*choice}) > 1
    low = apply(model, plan)
    weights = linear_weights(low.model)
    for path, weight in linear_weights(model).items():
        operands = plan.recipe.operands(owner(path)).weights
        want = weight if operands is None else rounded_weight(model, path, weight, operands)
        assert torch.equal(weights[path], want), path
    (own,) = predictions(model, [plan.recipe], TOKENS, gradients="fp32").values()
    np.testing.assert_allclose(known.predict(choice), own.windows.predicted, rtol=1e-4)


def test_all_budgets_from_one_set_of_predictions():
    model = random_model("gpt2")
    known = Choices(model, predictions(model, RECIPES, TOKENS), fused_layers(model, TOKENS))
    curve = known.curve(12)
    assert curve.bits.is_monotonic_increasing and curve.predicted.is_monotonic_decreasing
    assert curve.bits.iloc[0] == 5 and curve.bits.iloc[-1] == 32 and curve.predicted.iloc[-1] == 0
    everything = known.plan(known.within_bits(32))
    assert everything.layers == () and everything.predicted == 0
    assert apply(model, everything).recipe == get_recipe("fp32")


def test_strange_layers_and_recipes_are_refused():
    model = random_model("gpt2")
    with pytest.raises(ValueError, match="must be linear layers of blocks, got transformer.wte"):
        apply(model, Plan("bf16", layers=(("transformer.wte", "w4a16-g32"),)))
    found = predictions(model, ["bf16", "w4a16-g32@fp32"], TOKENS)
    with pytest.raises(ValueError, match="kernels in one format, got bf16, fp32"):
        Choices(model, found, fused_layers(model, TOKENS))
