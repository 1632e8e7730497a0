"""Faults of mixtures of experts are named: how experts are chosen and weighed, and how their weights are stored."""

from functools import cache, partial

import pytest
import torch
from test_catalogue import WINDOWS
from test_structure_suspects import SIZES
from tiny import random_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from fragility_core.models.paths import block_paths
from fragility_engines.proving.ground import Ground
from fragility_engines.proving.variations import Variation, by_window, native
from fragility_engines.suspects.experts import experts
from fragility_engines.suspects.suspect import logprobs

GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOW_RANK = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES = {
    "qwen3": partial(Qwen3MoeConfig, num_experts=8, **GROUPED, **ROUTED),
    "gpt_oss": partial(GptOssConfig, num_local_experts=8, num_experts_per_tok=2, **GROUPED),
    "deepseek": partial(
        DeepseekV3Config, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=0, **SIZES, **ROUTED,
        **LOW_RANK,
    ),
    "mixtral": partial(MixtralConfig, num_local_experts=8, **GROUPED),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor")


@cache
def ground_of(family, depth):
    """The prediction and the suspects of a deep model whose branches add as little as few do."""
    model = random_model(FAMILIES[family](num_hidden_layers=depth))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter.mul_((2 / depth) ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return Ground(model, WINDOWS, 0)


def judged(family, depth, run):
    _, verdict = ground_of(family, depth).judged(Variation("an engine", run))
    return verdict


def configured(family, depth, **others):
    """An engine in bf16 with another configuration."""

    def run(model, windows):
        other = AutoModelForCausalLM.from_config(
            FAMILIES[family](num_hidden_layers=depth, **others), attn_implementation="eager"
        ).eval()
        other.load_state_dict(model.state_dict())
        return by_window(partial(logprobs, other.bfloat16()), windows)

    return run


def for_each_mixture(change):
    def changed(model):
        for block in model.model.layers:
            change(block.mlp)

    return changed


def shifted(mlp):
    for parameter in mlp.experts.parameters():
        parameter.data = torch.cat([parameter[1:], parameter[:1]])


def swapped(mlp):
    gate, up = mlp.experts.gate_up_proj.chunk(2, 1)
    mlp.experts.gate_up_proj.data = torch.cat([up, gate], 1)


def as_halves(mlp):
    """The engine takes the first half of the columns as the gate, where the model takes every other one."""
    for name, parameter in mlp.experts.named_parameters():
        if name.startswith("gate_up"):
            parameter.data = torch.stack(parameter.chunk(2, -1), -1).flatten(-2)


def without_bias(mlp):
    mlp.router.bias.data.zero_()


def without_choice(mlp):
    mlp.gate.e_score_correction_bias.zero_()


def without_shared(mlp):
    mlp.shared_experts.down_proj.weight.data.zero_()


CONFIGURATIONS = {
    "3 experts for a token in place of 2": ("qwen3", {"num_experts_per_tok": 3}),
    "1 expert for a token in place of 2": ("mixtral", {"num_experts_per_tok": 1}),
    "weights of the chosen experts scaled to add up to 1": ("qwen3", {"norm_topk_prob": True}),
    "weights of the chosen experts not scaled to add up to 1": ("deepseek", {"norm_topk_prob": False}),
    "no scaling factor of the chosen experts": ("deepseek", {"routed_scaling_factor": 1.0}),
    "experts chosen without groups": ("deepseek", {"n_group": 1}),
}
LOADED = {
    "each expert with the weights of the one after it": ("gpt_oss", shifted),
    "the halves in each other's place in gate_up_proj of experts": ("mixtral", swapped),
    "gate_up_proj of experts read in halves, not in turns": ("gpt_oss", as_halves),
    "no bias of the router": ("gpt_oss", without_bias),
    "no shared expert": ("deepseek", without_shared),
}


@pytest.mark.parametrize("cause", CONFIGURATIONS)
def test_a_fault_of_the_routers_settings_is_named(cause):
    family, others = CONFIGURATIONS[cause]
    verdict = judged(family, 2, configured(family, 2, **others))
    assert verdict.kind == "more" and verdict.cause.suspect.name == cause, verdict.line


@pytest.mark.parametrize("cause", LOADED)
def test_a_fault_of_loading_experts_is_named(cause):
    family, change = LOADED[cause]
    verdict = judged(family, 2, native(for_each_mixture(change)))
    assert verdict.kind == "more" and verdict.cause.suspect.name == cause, verdict.line


def test_a_bias_of_the_choice_alone_is_named():
    verdict = judged("deepseek", 2, native(for_each_mixture(without_choice)))
    assert verdict.kind == "more" and verdict.cause.suspect.name == "no bias of the router", verdict.line


@pytest.mark.parametrize("cause", ["weights of the chosen experts scaled to add up to 1"])
def test_a_fault_of_routers_in_forty_blocks_is_named(cause):
    family, others = CONFIGURATIONS[cause]
    verdict = judged(family, 40, configured(family, 40, **others))
    assert verdict.kind == "more" and verdict.cause.suspect.name == cause and not verdict.partial, verdict.line


def test_one_blocks_experts_are_named():
    def change(model):
        shifted(model.model.layers[1].mlp)

    verdict = judged("qwen3", 2, native(change))
    assert verdict.kind == "more", verdict.line
    assert verdict.cause.suspect.name == "each expert with the weights of the one after it in model.layers.1"


def test_models_without_experts_have_no_such_suspects():
    model = random_model(LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **SIZES))
    assert not [*experts(model, block_paths(model))]
