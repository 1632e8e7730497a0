"""Mixed schemes: groups of fused layers, parts in fp32 beside them, plans predicted and applied."""

import numpy as np
import pytest
import torch
from tiny import fresh_model
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from fragility_adjoint.mixed_precision import Plan, apply
from fragility_adjoint.mixed_precision.bits import Choices, choices_beside, chosen_groups, fused_layers, predictions
from fragility_adjoint.mixed_precision.structure import stored_parameters
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import within
from fragility_quantization.operands import linear_weights, owner, rounded_weight, with_known_layers
from fragility_quantization.recipes import get_recipe

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=101),
    "llama": LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=128, num_key_value_heads=2, num_local_experts=4),
}
RECIPES = ["w4a16-g32@fp32", "w8a16-g32@fp32"]
TOKENS = torch.arange(48).view(2, 24)


def model_and_choices(name, recipes=RECIPES, keep=()):
    """The model, with attention whose scores are rounded, and what its choices do."""
    model = fresh_model(CONFIGS[name], 0.1)
    model.set_attn_implementation("eager")
    found = predictions(model, recipes, TOKENS)
    return model, Choices(model, found, fused_layers(model, TOKENS), keep)


def test_budgets_out_of_reach_are_refused():
    _, known = model_and_choices("gpt2")
    with pytest.raises(ValueError, match="must be at least 4.5 bits, those of the smallest scheme, got 4.4"):
        known.within_bits(4.4)
    with pytest.raises(
        ValueError, match=r"must be at least 0.1\d* MB, which the model takes with .* in fp32, got 0.01 MB"
    ):
        known.within_bytes(10_000)
    _, rounded = model_and_choices("gpt2", ["w4a16-g32", "bf16"])
    with pytest.raises(ValueError, match="the bound on kl must be at least .*, got 1e-12"):
        rounded.within_error(1e-12)


def test_layers_with_one_input_are_fused():
    assert [len(group) for group in fused_layers(fresh_model(CONFIGS["gpt2"], 0.1), TOKENS)] == [1] * 8
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    groups = fused_layers(fresh_model(CONFIGS["llama"], 0.1), TOKENS)
    assert [len(group) for group in groups] == [3, 1, 2, 1] * 2
    assert groups[0] == tuple(f"model.layers.0.{layer}" for layer in layers)
    experts = fused_layers(fresh_model(CONFIGS["mixtral"], 0.1), TOKENS)
    assert [len(group) for group in experts] == [3, 1, 1] * 2


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mixed_plan_is_predicted_as_its_own_recipe_is(name):
    """The plan's contributions are those of a prediction for the plan itself, at the exact point."""
    model = fresh_model(CONFIGS[name], 0.1)
    groups = fused_layers(model, TOKENS)
    known = Choices(model, predictions(model, RECIPES, TOKENS, gradients="fp32"), groups)
    choice = known.within_bits(8.0)
    plan = known.plan(choice)
    assert known.mean_bits(choice) <= 8.0 and len({*choice.schemes}) > 1
    low = apply(model, plan)
    weights = linear_weights(low.model)
    for path, weight in linear_weights(model).items():
        operands = plan.recipe.operands(owner(path)).weights
        want = weight if operands is None else rounded_weight(model, path, weight, operands)
        assert torch.equal(weights[path], want), path
    (own,) = predictions(model, [plan.recipe], TOKENS, gradients="fp32").values()
    np.testing.assert_allclose(known.predict(choice), own.windows.predicted, rtol=1e-4)


GGUF = ["ggml-q4_0", "ggml-q5_1", "ggml-q8_0"]


@pytest.mark.parametrize("tied", [False, True])
def test_plans_of_gguf_give_each_tensor_a_type_embedding_and_head_included(tied):
    model = fresh_model(LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=tied), 0.1)
    groups = chosen_groups(model, TOKENS, get_recipe(GGUF[0]))
    ends = [("model.embed_tokens", "lm_head")] if tied else [("model.embed_tokens",), ("lm_head",)]
    assert [len(group) for group in groups[:14]] == [1] * 14 and groups[14:] == ends
    known = Choices(model, predictions(model, GGUF, TOKENS, gradients="fp32"), groups)
    matrices = {id(p): p.numel() for p in model.parameters() if p.ndim == 2}
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert known.weights == sum(matrices.values()) and known.fixed_bits == 32 * vectors
    choice = known.within_bits(6.0)
    plan = known.plan(choice)
    assert known.mean_bits(choice) <= 6.0 and len({*choice.schemes}) > 1
    assert {path for path, _ in plan.layers} == {path for group in groups for path in group}
    stored = sum(p.entries * p.bits for p in stored_parameters(model, with_known_layers(model, plan.recipe)))
    assert known.stored_bytes(choice) == round(stored / 8)
    (own,) = predictions(model, [plan.recipe], TOKENS, gradients="fp32").values()
    np.testing.assert_allclose(known.predict(choice), own.windows.predicted, rtol=1e-4)
    apply(model, plan)


def test_types_that_fall_back_count_the_bits_that_they_then_take():
    model = fresh_model(CONFIGS["llama"], 0.1)  # rows of 64 and 128
    groups = chosen_groups(model, TOKENS, get_recipe("ggml-q4_k"))
    known = Choices(model, predictions(model, ["ggml-q4_k"], TOKENS, gradients="fp32"), groups)
    assert known.names == ["ggml-q4_k", "fp32"] and known.least_bits == 5.5


def test_all_budgets_from_one_set_of_predictions():
    model = fresh_model(CONFIGS["gpt2"], 0.1)
    known = Choices(model, predictions(model, RECIPES, TOKENS), fused_layers(model, TOKENS))
    curve = known.curve(12)
    assert curve.bits.is_monotonic_increasing and curve.predicted.is_monotonic_decreasing
    assert curve.bits.iloc[0] == 4.5 and curve.bits.iloc[-1] == 32 and curve.predicted.iloc[-1] == 0
    everything = known.plan(known.within_bits(32))
    assert everything.layers == () and everything.predicted == 0
    assert apply(model, everything).recipe == get_recipe("fp32")


def stored_bytes(model, plan):
    """Of the parameters of the protected ``model``; norms beside an fp32 stream hold bf16 numbers."""
    weights = {id(p): plan.recipe.operands(owner(path)).weights for path, p in linear_weights(model).items()}
    bits = 0
    for p in model.parameters():
        scheme = weights.get(id(p))
        exact = p.dtype == torch.float32 and not torch.equal(p, p.bfloat16().float())
        bits += p.numel() * (32 if exact else scheme.bits if scheme else 16)
    return round(bits / 8)


KEEP = ["residual", "scores", "norms", "head", "attention", "mlp"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_parts_in_fp32_are_in_the_same_choice(name):
    """What the knapsack counts is what the plan's own definitions give, and what the applied model stores."""
    model, known = model_and_choices(name, ["w4a16-g32", "w8a16-g32", "bf16"], KEEP)
    _, without = model_and_choices(name, ["w4a16-g32", "w8a16-g32", "bf16"])
    before = np.inf
    for bits in (known.least_bits, 6.0, 12.0, 40.0):
        choice = known.within_bits(bits)
        plan, taken = known.plan(choice), known._taken(choice)
        assert known.mean_bits(choice) <= bits * (1 + 1e-6) and plan.residual  # free
        assert known._knapsack.error(taken) == pytest.approx(known.predict(choice).mean())
        assert known._knapsack.error(taken) <= before
        before = known._knapsack.error(taken)
        if bits == 12:
            assert plan.predicted < 0.9 * without.predict(without.within_bits(bits)).mean()
        low = apply(model, plan, tokens=TOKENS)
        assert known.stored_bytes(choice) == stored_bytes(low.model, plan), plan.label
        assert known.within_bytes(known.stored_bytes(choice) + 1).schemes
    everything = known.plan(known.within_bits(40.0))
    layers = [path for group in known.groups for path in group]
    assert everything.layers == () and all(any(within(p, m) for m in everything.modules) for p in layers)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_in_fp32_are_predicted_as_for_the_protected_model(name):
    model, known = model_and_choices(name, ["w4a16-g32", "w8a16-g32", "bf16"], KEEP)
    plan = known.plan(known.within_bits(9.0))
    assert plan.residual and plan.layers
    low = apply(model, plan, tokens=TOKENS)
    again = Adjoint(low, model, probes=2, target="kl", gradients="both")(TOKENS)
    assert plan.predicted == pytest.approx(again.windows.predicted.mean(), rel=0.06)


def test_what_only_costs_time_is_free_and_is_kept_only_if_asked_for():
    _, asked = model_and_choices("llama", ["w4a16-g32", "bf16"], ["scores"])
    _, plain = model_and_choices("llama", ["w4a16-g32", "bf16"])
    best = asked.within_bits(asked.least_bits)
    assert asked.plan(best).scores and asked.mean_bits(best) == plain.least_bits
    assert not plain.plan(plain.within_bits(100)).scores and not plain.plan(plain.within_bits(100)).modules
    assert asked.plan(best).flops > 0 and asked.plan(best).label.endswith("bits a weight, scores in fp32")


def test_the_smallest_choice_within_an_error_uses_what_is_free():
    _, asked = model_and_choices("gpt2", ["w8a16-g32", "bf16"], ["residual", "head"])
    _, plain = model_and_choices("gpt2", ["w8a16-g32", "bf16"])
    bound = plain.predict(plain.within_bits(10.0)).mean()
    small, large = asked.within_error(bound), plain.within_error(bound)
    assert asked.predict(small).mean() <= bound * (1 + 1e-6)
    assert asked.mean_bits(small) < plain.mean_bits(large)


@pytest.mark.parametrize("name", ["w4a16-g32@fp32", "ggml-q5_0"])
def test_parts_with_linear_layers_are_kept_beside_fp32_kernels(name):
    model = fresh_model(CONFIGS["llama"], 0.1)
    found = predictions(model, [name], TOKENS)
    known = choices_beside(get_recipe(name), model, found, TOKENS, ["attention", "mlp"])
    assert known.kernels == "fp32" and len(known.parts) == 4
    errors = [known.predict(known.within_bits(bits)).mean() for bits in np.linspace(known.least_bits, 32, 6)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6 < errors[0]


def test_layers_that_share_a_matrix_have_one_scheme_and_count_it_once():
    """As in Zamba2, whose shared blocks hold the same parameters in modules of their own."""
    model = fresh_model(LlamaConfig(**SIZES | {"num_hidden_layers": 3}, intermediate_size=128), 0.1)
    for name in ("gate_proj", "up_proj", "down_proj"):
        for block in (1, 2):
            getattr(model.model.layers[block].mlp, name).weight = getattr(model.model.layers[0].mlp, name).weight
    found = predictions(model, ["w4a16-g32", "w8a16-g32", "bf16"], TOKENS)
    known = choices_beside(get_recipe("w4a16-g32"), model, found, TOKENS)
    assert known.least_bits == pytest.approx(4.5)
    for paths in known.groups:
        assert len(paths) == (6 if "mlp.gate_proj" in paths[0] else len(paths)) and len({*paths}) == len(paths)
    choice = known.within_bits(8.5)
    weights = {id(x): x.numel() for x in linear_weights(model).values()}
    of = {path: known.names[k] for group, k in zip(known.groups, choice.schemes) for path in group}
    by_hand = {
        id(x): x.numel() * {"w4a16-g32": 4.5, "w8a16-g32": 8.5, "bf16": 16}[of[owner(path)]]
        for path, x in linear_weights(model).items()
    }
    assert known.mean_bits(choice) == pytest.approx(sum(by_hand.values()) / sum(weights.values()))
    assert len({of[f"model.layers.{block}.mlp.down_proj"] for block in range(3)}) == 1


def test_parts_that_a_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="got 'lm_tail'"):
        model_and_choices("gpt2", ["w4a16-g32", "bf16"], ["lm_tail"])
    with pytest.raises(ValueError, match="sites to keep must be among those of this model, .*, got residual"):
        model_and_choices("gpt2", RECIPES, ["residual"])  # kernels in fp32 round no sums


def test_strange_layers_and_recipes_are_refused():
    model = fresh_model(CONFIGS["gpt2"], 0.1)
    with pytest.raises(
        ValueError, match="must be linear layers of blocks, embeddings or the head, got 'transformer.ln_f'"
    ):
        apply(model, Plan("bf16", layers=(("transformer.ln_f", "w4a16-g32"),)))
    found = predictions(model, ["bf16", "w4a16-g32@fp32"], TOKENS)
    with pytest.raises(ValueError, match="kernels of one format, got bf16, fp32: take one"):
        Choices(model, found, fused_layers(model, TOKENS))
