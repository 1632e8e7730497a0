"""The predictor on every family of decoders as Hugging Face ships them: small configurations, random weights."""

import gc
from dataclasses import replace

import pytest
import torch
from families import DENSE, EXPERTS, GROUPED, OTHERS, TOKENS
from tiny import low_hidden, random_model
from torch import nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
)

from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.theory import mismatch
from fragility_lab.measurement.routing import ExpertChoices, changed_choices, expert_choices
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.nested import tensors
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

SITES = {"embedding", "norm", "projection", "scores", "softmax", "context", "mlp", "residual", "head"}

each_family = pytest.mark.parametrize("config", DENSE, ids=lambda config: config.model_type)
each_mixture = pytest.mark.parametrize("config", EXPERTS, ids=lambda config: config.model_type)


def mean_ratio(model, low):
    """The predicted over the measured mismatch, mean over the windows."""
    measured = mismatch(low_hidden(low, TOKENS), final_hidden(model, TOKENS)).numpy()
    return (Adjoint(low, model, probes=2, gradients="low")(TOKENS).windows.predicted / measured).mean()


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3_linear"])
@each_family
def test_prediction_is_the_measured_mismatch(config, format):
    """With the library's eager attention, weights included. Mean ratios from 0.95 to 1.04 were measured."""
    model = random_model(config)
    low = lower(model, format)
    assert 0.92 < mean_ratio(model, low) < 1.08


@pytest.mark.parametrize("config", [DENSE[0], *EXPERTS], ids=lambda config: config.model_type)
def test_no_tensor_waits_for_the_garbage_collector(config):
    """A tensor in a cycle of references stays in memory until garbage is collected, for a whole pass or longer."""
    model = random_model(config)
    adjoint = Adjoint(lower(model, "bf16"), model, gradients="low")
    adjoint(TOKENS)  # tensors that the library makes once do not count
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        adjoint(TOKENS)
        gc.collect()
        waiting = [x.shape for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not waiting


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_families_that_the_code_was_not_written_for(config):
    model = random_model(config)
    low = lower(model, "bf16")
    assert 0.92 < mean_ratio(model, low) < 1.08


@pytest.mark.parametrize("recipe", ["w8a8-int8", "fp8-dynamic@fp32"])
@pytest.mark.parametrize("config", [*DENSE, *OTHERS], ids=lambda config: config.model_type)
def test_the_pass_of_the_predictor_is_the_real_one(config, recipe):
    """Some families read the embedding itself in their first block, whose inputs are rounded, too."""
    model = random_model(config)
    low = lower(model, recipe, "auto" if "@" in recipe else "emulated")
    found = Adjoint(low, model, gradients="secant")(TOKENS[:1]).windows.measured.item()
    real = mismatch(low_hidden(low, TOKENS[:1]), final_hidden(model, TOKENS[:1])).item()
    assert found == pytest.approx(real, rel=2e-3)


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "mxfp4"])
@each_mixture
def test_experts_round_their_inputs_in_whatever_form_they_are_multiplied(config, recipe):
    """Grouped products, which are the library's default, and one expert after the other: by the first block's MLP."""
    model, found = random_model(config), {}
    for form in ("grouped_mm", "eager", "plain"):
        model.set_experts_implementation(form if form != "plain" else "eager")
        low = lower(model, without_inputs(recipe) if form == "plain" else recipe, "emulated")
        mlp = low.model.get_submodule("model.layers.0.mlp")
        hook = mlp.register_forward_hook(lambda m, i, out, form=form: found.update({form: next(tensors(out)).float()}))
        low_hidden(low, TOKENS)
        hook.remove()
    assert mismatch(found["grouped_mm"], found["eager"]).max() < 0.01
    assert mismatch(found["plain"], found["eager"]).min() > 0.02
    model.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match="batched_mm makes copies: call model.set_experts_implementation"):
        lower(model, recipe, "emulated")
    lower(model, "w4a16-g32", "emulated")  # rounds weights alone


def without_inputs(name):
    """The recipe that rounds the same weights, and no inputs of their products."""
    recipe = get_recipe(name)
    return replace(recipe, name="weights", linear=replace(recipe.linear, inputs=None))


@pytest.mark.parametrize("implementation", ["sdpa", OBSERVED_EAGER])
@pytest.mark.parametrize(
    "config", [LlamaConfig(**GROUPED), MistralConfig(sliding_window=24, **GROUPED)], ids=["llama", "mistral"]
)
def test_other_attention(config, implementation):
    """Grouped queries and a sliding window, with other implementations of attention."""
    model = random_model(config)
    low = lower(model, "bf16")
    set_attention(low.model, implementation)
    assert 0.92 < mean_ratio(model, low) < 1.08


class Encoder(nn.Module):
    """A Transformer made of torch's own modules, not of transformers'."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(257, 64)
        self.layers = nn.TransformerEncoder(layer, 3, nn.LayerNorm(64), enable_nested_tensor=False).layers
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        return nn.Sequential(*self.layers)(self.embedding(tokens))


def test_any_module():
    model = Encoder()
    low = lower(model, "bf16")
    assert 0.92 < mean_ratio(model, low) < 1.08
    places = Adjoint(low)(TOKENS[:1]).contributions
    assert set(places.site) == {"embedding", "norm", "projection", "context", "mlp", "residual"}
    assert set(places.query("site == 'projection'").module.str.extract(r"layers\.\d\.(\w+)")[0]) == {"self_attn"}


# --- Sites -------------------------------------------------------------------------------------------


def site_by_name(path: str) -> str:
    """The site of a parameter, from the name that the library gives its module."""
    leaf = path.split(".")[-1]
    if "norm" in leaf or leaf.startswith("ln_"):
        return "norm"
    if leaf in ("lm_head", "embed_out"):
        return "head"
    if "embed" in leaf or leaf in ("wte", "wpe"):
        return "embedding"
    return "projection" if "attn" in path or "attention" in path else "mlp"


def places_of(model, low):
    """The contributions of a pass that ends with the logits: one row per place."""
    return Adjoint(low, target=lambda model, tokens: model(tokens).logits)(TOKENS[:1, :12]).contributions


@each_family
def test_sites(config):
    """The site of every weight agrees with its name, and the kernels of every block have all sites."""
    model = random_model(config)
    places = places_of(model, lower(model, "bf16"))
    weights, kernels = places.query("kind == 'weight'"), places.query("kind == 'kernel'")
    assert list(weights.site) == [site_by_name(path) for path in weights.module]
    assert set(kernels.site) - {"attention"} == SITES
    for _, block in kernels[kernels.layer.notna()].groupby("layer"):
        assert set(block.site) - {"attention"} == SITES - {"embedding", "head"}
        assert {"softmax", "to"} >= set(block[block.site == "softmax"].name)
        assert set(block[block.block_output].site) == {"residual"}
        assert (block.site == "residual").sum() == 2
    assert set(places.layer.dropna()) == {0, 1, 2}


# --- Mixtures of experts -----------------------------------------------------------------------------


@each_mixture
def test_mixtures_of_experts(config):
    """The prediction holds for tokens that no change of experts reaches, and is too low in windows with a change."""
    model = random_model(config)
    low = lower(model, "bf16")
    changed = changed_choices(low, model, TOKENS).any(0)  # of any router
    undisturbed = ~changed.cumsum(1).bool()  # before the first change in the window, as the model is causal
    low_state, exact = low_hidden(low, TOKENS), final_hidden(model, TOKENS)
    counted = undisturbed[..., None]
    measured = mismatch(low_state * counted, exact * counted).numpy()
    adjoint = Adjoint(low, model, probes=2, gradients="low")
    ratio = adjoint(TOKENS, undisturbed).windows.predicted / measured
    assert 0.92 < ratio.mean() < 1.08
    windows = changed.any(1).numpy()
    everywhere = adjoint(TOKENS).windows.predicted / mismatch(low_state, exact).numpy()
    assert windows.any() and everywhere[windows].mean() < 0.85
    places = adjoint(TOKENS[:1]).contributions.query("site == 'router'")
    assert set(places.kind) == {"kernel", "weight"} and set(places.layer) == {0, 1, 2}


def test_a_router_that_takes_the_largest_score_twice_is_one_and_a_softmax_is_none():
    """Phi-3.5-MoE calls no topk, and attention of GPT-OSS subtracts the largest score."""
    for kind in (PhimoeConfig, GptOssConfig):
        model = random_model(kind(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_local_experts=4, pad_token_id=0,
        ))  # fmt: skip
        places = Adjoint(lower(model, "bf16"))(TOKENS[:1, :12] % 97).contributions.query("site == 'router'")
        assert set(places.module) == {f"model.layers.{layer}.mlp.router" for layer in (0, 1)}


@torch.no_grad()
def chosen_experts(model, tokens):
    """The experts (routers, tokens, 2) that the library's router logits choose."""
    logits = torch.stack(model(tokens, output_router_logits=True).router_logits).float()
    return logits.topk(2).indices.sort(-1).values


@each_mixture
def test_changed_choices_are_those_of_the_router_logits(config):
    model = random_model(config)
    low = lower(model, "bf16")
    with low.running():
        rounded = chosen_experts(low.model, TOKENS)
    changed = (chosen_experts(model, TOKENS) != rounded).any(-1).view(3, *TOKENS.shape)
    assert changed.any() and torch.equal(changed_choices(low, model, TOKENS), changed)


@pytest.mark.parametrize(
    "shape", [(5, 2, 4), (5, 2), (5, 1, 8), (1, 5, 24), (5, 4)],
    ids=["within groups of experts", "all experts", "within the only group", "keys", "groups"],
)  # fmt: skip
def test_other_choices_than_of_some_experts_for_each_token_do_not_count(shape):
    with ExpertChoices(TOKENS[:1, :5], MixtralConfig(num_local_experts=8)) as seen:
        torch.topk(torch.rand(shape), 2)
        torch.topk(torch.rand(5, 8), 2)
        torch.topk(torch.rand(1, 5, 8), 2)
    assert [chosen.shape for chosen in seen.experts] == [(5, 2), (5, 2)]
    assert all((chosen.diff() > 0).all() for chosen in seen.experts)  # ascending


def test_routers_that_may_choose_nothing_are_counted():
    """Beside the experts there are some that do nothing, or a choice to skip."""
    with ExpertChoices(TOKENS[:1, :5], MixtralConfig(num_local_experts=8, zero_expert_num=4)) as seen:
        for width in (8, 9, 12, 10):
            torch.topk(torch.rand(5, width), 2)
    assert len(seen.experts) == 3


@pytest.mark.parametrize(("kind", "groups"), [(DeepseekV3Config, 4), (DeepseekV3Config, 1), (Glm4MoeConfig, 1)])
def test_routers_with_groups_choose_once_for_each_token(kind, groups):
    model = random_model(kind(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2, n_group=groups,
        topk_group=min(groups, 2), first_k_dense_replace=0, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=64, pad_token_id=0,
    ))  # fmt: skip
    tokens = TOKENS % 97
    assert [chosen.shape for chosen in expert_choices(model, tokens)] == [(tokens.numel(), 2)] * 3


def test_a_dense_model_chooses_no_experts():
    model = random_model(DENSE[3])
    assert changed_choices(lower(model, "bf16"), model, TOKENS).shape == (0, *TOKENS.shape)
