"""The predictor on every family of decoders as Hugging Face ships them: small configurations, random weights."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fragility_core.adjoint import Adjoint, final_hidden
from fragility_core.adjoint.routing import compare_routes, router_margins
from fragility_core.attention import IMPLEMENTATION
from fragility_core.emulation import lower
from fragility_core.theory import mismatch

TOKENS = torch.randint(1, 257, (4, 64), generator=torch.Generator().manual_seed(1))
SPECIAL = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128}
MLP = SPECIAL | SHAPE | {"intermediate_size": 160}
GROUPED = MLP | {"num_key_value_heads": 2}
DENSE = [
    GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=128, **SPECIAL),
    GPTNeoXConfig(**MLP),
    OPTConfig(ffn_dim=160, word_embed_proj_dim=64, **SPECIAL, **SHAPE),
    LlamaConfig(**GROUPED),
    MistralConfig(sliding_window=24, **GROUPED),
    Qwen2Config(**GROUPED),
    Qwen3Config(head_dim=16, **GROUPED),
    GemmaConfig(head_dim=16, **GROUPED),
    Gemma2Config(head_dim=16, sliding_window=24, **GROUPED),
    Gemma3TextConfig(head_dim=16, sliding_window=24, **GROUPED),
    PhiConfig(**MLP),
    Phi3Config(**GROUPED),
]
EXPERTS = [
    MixtralConfig(num_local_experts=4, **GROUPED),
    Qwen2MoeConfig(moe_intermediate_size=48, shared_expert_intermediate_size=96, num_experts=4, num_experts_per_tok=2, **GROUPED),
    Qwen3MoeConfig(moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=16, **GROUPED),
]  # fmt: skip
SITES = {"embedding", "norm", "projection", "scores", "softmax", "context", "mlp", "residual", "head"}

each_family = pytest.mark.parametrize("config", DENSE, ids=lambda config: config.model_type)
each_mixture = pytest.mark.parametrize("config", EXPERTS, ids=lambda config: config.model_type)


@torch.no_grad()
def random_model(config: PreTrainedConfig):
    """Matrices that keep the size of what they multiply, norms and biases away from 0 and 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        else:
            embedding = "emb" in name or "wte" in name or "wpe" in name
            parameter.normal_(0, 1.0 if embedding else parameter.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def states(model, low, tokens):
    """Final hidden states in low precision and in fp32."""
    with low.running():
        return final_hidden(low.model, tokens).float(), final_hidden(model, tokens)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@each_family
def test_prediction_is_the_measured_mismatch(config, format):
    """Weights included, library's eager attention: mean ratio within 8 % (measured: see README)."""
    model = random_model(config)
    low = lower(model, format)
    ratio = Adjoint(low, model, probes=2)(TOKENS).windows.predicted / mismatch(*states(model, low, TOKENS)).numpy()
    assert 0.92 < ratio.mean() < 1.08


@pytest.mark.parametrize("implementation", ["sdpa", IMPLEMENTATION])
@pytest.mark.parametrize("config", [LlamaConfig(**GROUPED), MistralConfig(sliding_window=24, **GROUPED)], ids=repr)
def test_other_attention(config, implementation):
    """Grouped queries and a sliding window, whatever computes them."""
    model = random_model(config)
    low = lower(model, "bf16")
    low.model.set_attn_implementation(implementation)
    ratio = Adjoint(low, model, probes=2)(TOKENS).windows.predicted / mismatch(*states(model, low, TOKENS)).numpy()
    assert 0.92 < ratio.mean() < 1.08


# --- Sites -------------------------------------------------------------------------------------------


def site_by_name(path: str) -> str:
    """What the module that owns a parameter is for, from the names that the library gives."""
    leaf = path.split(".")[-1]
    if "norm" in leaf or leaf.startswith("ln_"):
        return "norm"
    if leaf in ("lm_head", "embed_out"):
        return "head"
    if "embed" in leaf or leaf in ("wte", "wpe"):
        return "embedding"
    return "projection" if "attn" in path or "attention" in path else "mlp"


def places_of(model, low):
    """One row per place of a pass that ends with the logits."""
    return Adjoint(low, output=lambda model, tokens: model(tokens).logits)(TOKENS[:1, :12]).kernels


@each_family
def test_sites(config):
    """Every weight's site is the one its name says; kernels make all sites, in every block."""
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
def test_tokens_before_any_change_of_experts(config):
    """The estimate holds where no change of experts can reach, and is far too low over all tokens."""
    model = random_model(config)
    low = lower(model, "bf16")
    routing = compare_routes(low, model, TOKENS)
    adjoint = Adjoint(low, model, probes=2)
    low_state, exact = states(model, low, TOKENS)
    counted = routing.undisturbed[..., None]
    measured = mismatch(low_state * counted, exact * counted).numpy()
    ratio = adjoint(TOKENS, routing.undisturbed).windows.predicted / measured
    assert 0.9 < np.nanmean(ratio) < 1.1
