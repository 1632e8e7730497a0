"""Decoder families beside GPT-2, as small random models of the real classes.

Every statistic is compared with an fp64 computation. The tests capture its tensors themselves: by the names that each
family gives its modules, and by an attention function that records queries, keys and values.
"""

import copy
import shutil
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import fresh_model, random_tokens
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fragility_core.models.blocks import blocks
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import SIGNALS, score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.patching import Patching
from fragility_core.surrogates.reductions import sampled_rows, softmax_sensitivity_estimate
from fragility_core.surrogates.scoring import out_gain
from fragility_core.surrogates.shadow import set_epsilons
from fragility_core.surrogates.transport import residual_transport
from fragility_core.surrogates.weights import WeightStatistics
from fragility_core.theory import mismatch
from fragility_lab.experiments import e2, e5
from fragility_lab.experiments.shadow import ShadowTraining
from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.inputs.loading import Inputs, load
from fragility_lab.measurement.travel import stream_norms
from fragility_lab.paths import CHECKPOINTS
from fragility_lab.running.engine import complete
from fragility_numerics import attention
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

HEADS, WIDTH, TOKENS = 4, 32, 20
BASE = {
    "vocab_size": 101, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
PLAIN = BASE | {"intermediate_size": 48}
GROUPED = PLAIN | {"num_key_value_heads": 2}
OPT = BASE | {"ffn_dim": 48, "word_embed_proj_dim": WIDTH}


@dataclass(frozen=True)
class Family:
    """A configuration, and the names of the modules in its blocks that the score is about."""

    config: PretrainedConfig
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    centred: bool = False
    offset: float = 0.0
    parallel: bool = False
    head_norms: tuple[str, ...] = ()
    out_norms: tuple[str, ...] = ()
    layers: str = "layers"


NEOX = {
    "attention": "attention", "qkv": ("query_key_value",), "out": "dense", "mlp_in": ("mlp.dense_h_to_4h",),
    "mlp_out": "mlp.dense_4h_to_h", "activation": "mlp.act", "centred": True,
}  # fmt: skip
PHI = {
    "norms": ("input_layernorm", "input_layernorm"), "out": "dense", "mlp_in": ("mlp.fc1",), "mlp_out": "mlp.fc2",
    "activation": "mlp.activation_fn", "centred": True, "parallel": True,
}  # fmt: skip
SANDWICH = {
    "norms": ("input_layernorm", "pre_feedforward_layernorm"), "offset": 1.0,
    "out_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip
FAMILIES = {
    "opt": Family(
        OPTConfig(**OPT), norms=("self_attn_layer_norm", "final_layer_norm"), out="out_proj", mlp_in=("fc1",),
        mlp_out="fc2", activation="activation_fn", centred=True, layers="decoder.layers",
    ),
    "gpt_neox": Family(GPTNeoXConfig(**PLAIN), **NEOX, parallel=True),
    "gpt_neox in sequence": Family(GPTNeoXConfig(**PLAIN, use_parallel_residual=False), **NEOX),
    "phi": Family(PhiConfig(**GROUPED), **PHI),
    "phi with head norms": Family(
        PhiConfig(**PLAIN, qk_layernorm=True), **PHI, head_norms=("q_layernorm", "k_layernorm")
    ),
    "llama": Family(LlamaConfig(**GROUPED)),
    "llama with biases": Family(LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)),
    "mistral": Family(MistralConfig(**GROUPED, sliding_window=7)),
    "qwen2": Family(Qwen2Config(**GROUPED)),
    "qwen3": Family(Qwen3Config(**GROUPED, head_dim=16), head_norms=("q_norm", "k_norm")),
    "gemma": Family(GemmaConfig(**GROUPED, head_dim=16), offset=1.0),
    "gemma2": Family(
        Gemma2Config(**GROUPED, head_dim=16, attn_logit_softcapping=None), **SANDWICH
    ),
    "gemma3": Family(
        Gemma3TextConfig(
            **GROUPED, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
        ),
        **SANDWICH, head_norms=("q_norm", "k_norm"),
    ),
    "olmo2": Family(
        Olmo2Config(**GROUPED), norms=(), head_norms=("q_norm", "k_norm"),
        out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "cohere": Family(
        CohereConfig(**GROUPED), norms=("input_layernorm", "input_layernorm"), centred=True, parallel=True
    ),
    "phi3": Family(
        Phi3Config(**GROUPED), qkv=("qkv_proj",), mlp_in=("mlp.gate_up_proj",), activation="mlp.activation_fn"
    ),
}  # fmt: skip
each_family = pytest.mark.parametrize("name", FAMILIES)


def family_model(config: PretrainedConfig, weight_scale: float = 0.16) -> PreTrainedModel:
    """A model without a head whose statistics are far from degenerate (see ``tiny.random_gpt2``)."""
    model = fresh_model(config, auto_class=AutoModel)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            weight = name.endswith("norm.weight")
            plus_one = weight and not config.model_type.startswith("gemma")
            parameter.copy_(plus_one + (0.4 if weight else 0.1) * torch.randn_like(parameter))
        else:
            parameter.copy_((0.2 if "embed" in name else weight_scale) * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(3, TOKENS, smallest=1)


# --- The oracle ----------------------------------------------------------------------------------

seen_heads: dict[nn.Module, tuple] = {}


def recording(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The library's attention, which keeps its arguments."""
    seen_heads[module] = (query, key, value, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register("recording", recording)
AttentionMaskInterface.register("recording", sdpa_mask)


def captured(model: PreTrainedModel, window: torch.Tensor, layers: nn.ModuleList) -> dict[nn.Module, tuple]:
    """Input and output (T, features) of every module of every block in a pass over a window (T,)."""
    calls = {}

    def keep(module, args, kwargs, output):
        read = args[0] if args else kwargs["hidden_states"]
        returned = output[0] if isinstance(output, tuple) else output
        calls[module] = read.reshape(len(window), -1), returned.reshape(len(window), -1)

    hooks = [m.register_forward_hook(keep, with_kwargs=True) for block in layers for m in block.modules()]
    model(window[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def attention_statistics(family: Family, attention: nn.Module, context: torch.Tensor) -> dict:
    """The statistics of protocol section 3, head by head; every query head meets the key head of its group."""
    query, key, value, scaling = (x[0] if torch.is_tensor(x) else x for x in seen_heads[attention])
    length, group = query.shape[1], len(query) // len(key)
    reach = getattr(attention, "sliding_window", getattr(family.config, "sliding_window", None))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (reach or length))
    scores, probabilities, keys, values, contexts = [], [], [], [], []
    for head, q in enumerate(query):
        k, v = key[head // group], value[head // group]
        s = scaling * q @ k.T
        p = s.masked_fill(~visible, -torch.inf).softmax(-1)
        scores.append(s.masked_fill(~visible, 0)), probabilities.append(p)
        keys.append(k), values.append(v), contexts.append(p @ v)
    torch.testing.assert_close(torch.cat(contexts, 1), context, rtol=1e-6, atol=1e-6)
    p = torch.stack(probabilities)
    return {
        "query_norm": query.norm() * scaling / attention.scaling,
        "key_norm": torch.stack(keys).norm(),
        "value_norm": torch.stack(values).norm(),
        "value_spectral_norm": max(torch.linalg.matrix_norm(v, 2) for v in values),
        "score_norm": torch.stack(scores).norm(),
        "probability_norm": p.norm(),
        "softmax_sensitivity": softmax_sensitivity_estimate(p[:, sampled_rows(length)]).max(),
        "context_norm": context.norm(),
    }


def norm_statistics(family: Family, norm: nn.Module, site: int | str, x: torch.Tensor) -> dict:
    epsilon = getattr(norm, "eps", None) or norm.variance_epsilon
    centred = x - x.mean(-1, keepdim=True) if family.centred else x
    variance, gamma = centred.square().mean(-1), norm.weight + family.offset
    return {
        f"input_{site}_norm": x.norm(),
        f"path_{site}_norm": (gamma * centred / (variance[:, None] + epsilon).sqrt()).norm(),
        f"variance_{site}": variance.mean(),
        f"variance_{site}_min": variance.min(),
        f"gamma_{site}_max": gamma.abs().max(),
        f"epsilon_{site}": epsilon,
    }


def weights(family: Family, block: nn.Module) -> dict[str, torch.Tensor]:
    """The block's weight matrices; those of query, key and value are taken apart by hand."""
    attention = block.get_submodule(family.attention)
    qkv = [attention.get_submodule(name).weight for name in family.qkv]
    if family.qkv == ("query_key_value",):  # head by head
        qkv = qkv[0].view(HEADS, 3, -1, WIDTH).unbind(1)
        qkv = [weight.reshape(-1, WIDTH) for weight in qkv]
    elif family.qkv == ("qkv_proj",):  # two heads of keys and of values behind four of queries
        qkv = qkv[0].split([WIDTH, WIDTH // 2, WIDTH // 2])
    return dict(zip(("query", "key", "value"), qkv)) | {
        "attention_out": attention.get_submodule(family.out).weight,
        "mlp_in": torch.cat([block.get_submodule(name).weight for name in family.mlp_in]),
        "mlp_out": block.get_submodule(family.mlp_out).weight,
    }


def family_statistics(family: Family, block: nn.Module, calls: dict) -> dict:
    """The columns that only some families have."""
    attention, row = block.get_submodule(family.attention), {}
    if family.parallel:
        row |= {"parallel": True, "shared_norm": len(set(family.norms)) == 1}
    for heads, name in zip(("query", "key"), family.head_norms):
        norm = attention.get_submodule(name)
        x = calls[norm][0].view(-1, norm.weight.numel())
        site = norm_statistics(family, norm, 0, x)
        row[f"{heads}_gain"] = site["gamma_0_max"] / (site["variance_0_min"] + site["epsilon_0"]) ** 0.5
    if "gate" in family.mlp_in[0]:
        last = calls[block.get_submodule(family.mlp_in[-1])][1]
        up = last if len(family.mlp_in) == 2 else last[:, 48:]
        activated = calls[block.get_submodule(family.activation)][1]
        torch.testing.assert_close(activated * up, calls[block.get_submodule(family.mlp_out)][0])
        row |= {"activated_max": activated.abs().max(), "up_max": up.abs().max()}
    return row


def family_oracle(family: Family, model: PreTrainedModel, window: torch.Tensor) -> list[dict[str, float]]:
    """The statistics of one window (T,), block by block; ``model`` in fp64."""
    model.set_attn_implementation("recording")
    layers = model.get_submodule(family.layers)
    calls, rows = captured(model, window, layers), []
    for block in layers:
        attention = block.get_submodule(family.attention)
        context, projected = calls[attention.get_submodule(family.out)]
        activated, result = calls[block.get_submodule(family.mlp_out)]
        row = attention_statistics(family, attention, context)
        row |= {"norm_2_norm": calls[block.get_submodule(family.mlp_in[0])][0].norm()}
        for site, name in [*enumerate(family.norms, 1), *zip(("1_out", "2_out"), family.out_norms)]:
            norm = block.get_submodule(name)
            row |= norm_statistics(family, norm, site, calls[norm][0])
        if family.out_norms:  # what a branch adds is normalized
            projected, result = (calls[block.get_submodule(name)][1] for name in family.out_norms)
        if not family.norms:
            h = calls[block][0]
            row |= {"input_1_norm": h.norm(), "input_2_norm": (h + projected).norm()}
        row |= {"attention_norm": projected.norm(), "activation_norm": activated.norm(), "mlp_norm": result.norm()}
        for name, weight in weights(family, block).items():
            row[f"{name}_weight_norm"] = torch.linalg.matrix_norm(weight, 2)
        row |= family_statistics(family, block, calls)
        rows.append({name: float(value) for name, value in row.items()})
    return rows


# --- Statistics and score ------------------------------------------------------------------------


@each_family
def test_statistics_agree_with_their_definitions(name, tokens):
    family = FAMILIES[name]
    model = family_model(family.config)
    layers = Monitor(lower(model, "fp32"))(tokens).layers
    wanted = [row for window in tokens for row in family_oracle(family, copy.deepcopy(model).double(), window)]
    assert len(layers) == len(wanted) == 6
    constants = {"window", "layer", "head_width", "d_model", "score_scaling", "activation_lipschitz"}
    assert set(layers) == constants | set(wanted[0])
    width = model.get_submodule(family.layers)[0].get_submodule(family.attention).scaling ** -2
    assert layers.head_width.tolist() == [pytest.approx(width)] * 6 and layers.d_model.unique() == [WIDTH]
    for (_, row), definition in zip(layers.iterrows(), wanted):
        for column, value in definition.items():
            # ||V||_2 is an estimate from below, by up to 0.4 % (test_reductions.py).
            allowed = 4e-3 if column == "value_spectral_norm" else 5e-5
            assert row[column] == pytest.approx(value, rel=allowed, abs=1e-6), column


@each_family
@pytest.mark.parametrize(("format", "execution"), [("bf16", "native"), ("fp16", "emulated"), ("fp8_e4m3", "emulated")])
def test_score_is_finite_and_positive(name, format, execution, tokens):
    low = lower(family_model(FAMILIES[name].config), format, execution)
    seen = Monitor(low)(tokens)
    _, windows = score(seen.layers, seen.windows, low.format.unit_roundoff)
    signals = windows[[*SIGNALS]].drop(columns=[] if FAMILIES[name].norms else "layernorm_only").to_numpy()
    assert (signals > 0).all() and np.isfinite(signals).all()


@each_family
def test_gains_add_in_parallel_and_a_shared_norm_errs_once(name, tokens):
    family = FAMILIES[name]
    seen = Monitor(lower(family_model(family.config), "bf16"))(tokens)
    layers, _ = score(seen.layers, seen.windows, 2.0**-8)
    alpha, beta = layers.attention_norm / layers.input_1_norm, layers.mlp_norm / layers.input_2_norm
    wanted = alpha + beta if family.parallel else alpha + beta + alpha * beta
    assert layers.transport.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    if len(set(family.norms)) == 1:
        assert (layers.layernorm_term == layers.layernorm_1_term).all() and (layers.layernorm_1_term > 0).all()
    elif not family.norms:
        assert (layers.layernorm_term == 0).all()
    else:
        assert (layers.layernorm_2_term > 0).all()


@torch.no_grad()
@each_family
@pytest.mark.parametrize("weight_scale", [0.02, 0.16])
def test_transport_estimators_enclose_the_exact_norm(name, weight_scale, tokens):
    """power_iteration <= ||J_f||_2 <= operator_norm of the second block, whose Jacobian autograd forms in fp64."""
    model, window = family_model(FAMILIES[name].config, weight_scale), tokens[:1, :3]
    layers = Monitor(lower(model, "fp32"), power_iteration=True)(window).layers
    below, above = (residual_transport(layers, estimator)[1] for estimator in ("power_iteration", "operator_norm"))
    block, calls = model.double().get_submodule(FAMILIES[name].layers)[1], []
    handle = block.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
    model.set_attn_implementation("recording")
    model(window, use_cache=False)
    handle.remove()
    _, (x, *args), kwargs = calls[0]
    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(lambda x: block(x, *args, **kwargs) - x, x)
    exact = torch.linalg.matrix_norm(jacobian.view(x.numel(), x.numel()), 2).item()
    assert 0.2 * exact <= below <= exact * (1 + 1e-4) and exact <= above


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.out_norms])
def test_gain_of_a_norm_behind_a_branch_bounds_its_jacobian(name, tokens):
    """By autograd in fp64, in windows of one token, where no mean over positions is taken."""
    family = FAMILIES[name]
    model, window = family_model(family.config), tokens[:1, :1]
    layers = Monitor(lower(model, "fp32"))(window).layers
    block = model.double().get_submodule(family.layers)[1]
    calls = captured(model, window[0], model.get_submodule(family.layers))
    for branch, name in enumerate(family.out_norms, 1):
        norm = block.get_submodule(name)
        with torch.enable_grad():
            jacobian = torch.autograd.functional.jacobian(norm, calls[norm][0][0])
        exact = torch.linalg.matrix_norm(jacobian, 2).item()
        assert exact <= out_gain(layers, branch)[1] <= 4 * exact  # f is at most twice 1 / r, and gamma is uneven


@each_family
def test_norms_by_token_are_those_of_what_is_added(name, tokens):
    """The stream before a block and what its sublayers add make the stream behind it, in every family."""
    family = FAMILIES[name]
    model, window = family_model(family.config), tokens[:1]
    found = stream_norms(lower(model, "fp32"), window)
    calls = captured(model, window[0], model.get_submodule(family.layers))
    for number, block in enumerate(model.get_submodule(family.layers)):
        ends = family.out_norms or (f"{family.attention}.{family.out}", family.mlp_out)
        a, m = (calls[block.get_submodule(end)][1] for end in ends)
        before, after = calls[block]
        torch.testing.assert_close(before + a + m, after, rtol=1e-4, atol=1e-4)
        for norms, value in ((found.attention, a), (found.mlp, m), (found.entering, before)):
            torch.testing.assert_close(norms[number, 0], value.norm(dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.last[0], after.norm(dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.hidden[0], final_hidden(model, window)[0].norm(dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_score_and_travel_of_forty_blocks(name, tokens):
    family = FAMILIES[name]
    config = type(family.config)(**family.config.to_dict() | {"num_hidden_layers": 40, "layer_types": None})
    low = lower(family_model(config), "bf16")
    seen = Monitor(low)(tokens[:2])
    layers, windows = score(seen.layers, seen.windows, low.format.unit_roundoff)
    assert len(layers) == 80 and np.isfinite(windows[[*SIGNALS]].to_numpy()).all() and (windows.combined > 0).all()
    norms = stream_norms(low, tokens[:2])
    assert len(norms.mlp) == 40 and (norms.travel(low.format.unit_roundoff) > 0).all()


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "gemma3", "olmo2"])
def test_weight_norms_are_followed(name):
    model = family_model(FAMILIES[name].config)
    statistics = WeightStatistics(blocks(model))
    statistics.follow()
    for parameter in model.parameters():
        parameter.mul_(1.01)
    exact = WeightStatistics(blocks(model)).measure()
    assert statistics.follow() == {column: pytest.approx(values, rel=1e-5) for column, values in exact.items()}


@pytest.mark.parametrize("execution", ["native", "emulated"])
def test_layers_of_different_reach(monkeypatch, execution):
    """Sliding layers have masks and show all keys; full ones show the visible keys. Their segments differ."""
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 2**18)
    reach = {"max_position_embeddings": 256, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config = Qwen2Config(**GROUPED | reach)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    model, window = family_model(config), random_tokens(2, 256, smallest=1)
    seen, exact = (
        Monitor(lower(model, *how))(window).layers[["score_norm", "probability_norm"]]
        for how in (("bf16", execution), ("fp32",))
    )
    pd.testing.assert_frame_equal(seen, exact, rtol=0.1)


def test_a_model_in_autocast():
    """Rotary embeddings then give fp32 queries, and products of those are bf16."""
    model, window = family_model(LlamaConfig(**GROUPED)), torch.arange(1, 13)[None]
    attention.set_attention(model, attention.OBSERVED_EAGER)
    expected = model(window).last_hidden_state
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
            hidden = model(window).last_hidden_state
        assert 0 < mismatch(hidden.float(), expected).max() < 0.1


@pytest.mark.parametrize(
    "config", [CohereConfig(**GROUPED, logit_scale=0.25), GraniteConfig(**GROUPED, logits_scaling=4.0)]
)
def test_loss_is_of_the_logits_that_the_model_gives(config, tokens):
    """These families scale their logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    losses = Monitor(lower(model, "fp32"))(tokens, loss=True).windows.loss
    want = [model(window[None], labels=window[None]).loss.item() for window in tokens]
    np.testing.assert_allclose(losses, want, rtol=1e-5)


def test_the_stream_may_be_wider_than_the_final_state(tokens):
    torch.manual_seed(0)
    model = AutoModel.from_config(OPTConfig(**OPT | {"word_embed_proj_dim": 16})).eval()
    streams = []
    layer = model.decoder.layers[0].self_attn_layer_norm
    handle = layer.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    model(tokens)
    handle.remove()
    seen = Monitor(lower(model, "fp32"))(tokens).layers
    want = torch.linalg.vector_norm(streams[0].flatten(1), dim=-1)
    np.testing.assert_allclose(seen[seen.layer == 0].input_1_norm, want.detach(), rtol=1e-5)


def test_gpt2_that_keeps_scores_in_fp32_is_monitored_so(tokens):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=101, reorder_and_upcast_attn=True)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    for parameter in model.h.parameters():
        parameter.data.mul_(8)
    low = lower(model, "bf16")
    with torch.no_grad(), low.running():
        own = low.model(tokens).last_hidden_state.float()
    monitored = Monitor(low)(tokens).hidden.float()
    attention.set_attention(low.model, attention.OBSERVED_EAGER)
    with torch.no_grad(), low.running():
        rounded = low.model(tokens).last_hidden_state.float()
    assert (monitored - own).norm() < 0.2 * (rounded - own).norm()


def test_epsilon_is_that_of_the_norms(tokens):
    """Epsilon is raised through ``Block``; in Llama it has another name than in LayerNorm. The norms' output falls."""
    monitor = Monitor(lower(family_model(LlamaConfig(**GROUPED)), "fp32"))
    before = monitor(tokens).layers
    set_epsilons(monitor.blocks, (1e-1, 1e-1))
    after = monitor(tokens).layers
    assert (before.epsilon_1 == 1e-6).all() and (after.epsilon_1 == 0.1).all() and (after.epsilon_2 == 0.1).all()
    assert (after.path_1_norm < before.path_1_norm).all()
    assert after.variance_1[0] == pytest.approx(before.variance_1[0], rel=1e-5)


# --- What is built on the blocks -----------------------------------------------------------------


def patched_by_hook(model: PreTrainedModel, low: LowPrecision, tokens: torch.Tensor, layer: int | None) -> torch.Tensor:
    """One low-precision pass in which block ``layer`` alone is computed by ``model``."""
    ours, exact = (blocks(m) for m in (low.model, model))

    def replace(block, args, kwargs, output):
        with low.paused():
            x = args[0].float()
            if "position_embeddings" in kwargs:
                kinds = getattr(model.config, "layer_types", [None])
                kind = {"layer_type": kinds[layer]} if len(set(kinds)) > 1 else {}
                kwargs |= {"position_embeddings": model.rotary_emb(x, torch.arange(x.shape[1])[None], **kind)}
            return low.format.round(exact[layer].module(x, *args[1:], **kwargs))

    hook = None if layer is None else ours[layer].module.register_forward_hook(replace, with_kwargs=True)
    with torch.no_grad(), attention.observing_attention(low.model), low.running():
        hidden = low.model(tokens, use_cache=False).last_hidden_state
    if hook is not None:
        hook.remove()
    return hidden


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma", "gemma3", "olmo2", "gpt_neox", "phi", "opt"])
@pytest.mark.parametrize(("format", "execution"), [("bf16", "native"), ("fp16", "emulated")])
def test_stacked_patched_passes_equal_single_ones(name, format, execution, tokens):
    """Three windows at once. Mistral's have a mask: 20 tokens are more than its sliding window of 7."""
    model = family_model(FAMILIES[name].config)
    low = lower(model, format, execution)
    stacked = Patching(model, low)(tokens)
    single = torch.stack([patched_by_hook(model, low, tokens, layer) for layer in (None, 0, 1)])
    reference = model(tokens).last_hidden_state
    assert stacked.shape == single.shape == (3, 3, TOKENS, WIDTH)
    assert (stacked != single).double().mean() < 0.1  # kernels may sum differently for more rows
    torch.testing.assert_close(mismatch(stacked, reference), mismatch(single, reference), rtol=5e-3, atol=0)


def test_patching_the_only_faulty_block_leaves_no_mismatch(tokens):
    """In fp32; the rotary embeddings of the low-precision pass are fp32, too."""
    model = family_model(LlamaConfig(**GROUPED))
    low = lower(model, "fp32")
    low.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    base, first, second = mismatch(Patching(model, low)(tokens), model(tokens).last_hidden_state)
    assert (base > 1e-4).all() and (first > 1e-4).all() and (second < 1e-3 * base).all()


def test_shadow_training_of_a_llama(tokens):
    torch.manual_seed(0)
    training = ShadowTraining(LlamaForCausalLM(LlamaConfig(**GROUPED)).eval(), "bf16")
    losses = [training.train_step(tokens, 1e-2)[0] for _ in range(5)]
    layers, windows = training.shadow.observe(tokens)
    assert losses[-1] < losses[0]
    assert (windows.mismatch > 0).all() and (windows.mismatch < 0.1).all() and (layers.risk > 0).all()


def test_e2_of_a_llama(tmp_path):
    """From a folder with a model and a tokenizer to the runs' tables, as in ``make reproduce MODEL=...``."""
    shutil.copytree(
        CHECKPOINTS / "embedded", tmp_path / "llama", ignore=shutil.ignore_patterns("model*", "*config.json")
    )
    tokenizer = load_tokenizer("embedded")
    tokenizer.save_pretrained(tmp_path / "llama")
    LlamaModel(LlamaConfig(**GROUPED | {"vocab_size": len(tokenizer)})).save_pretrained(tmp_path / "llama")
    grid = e2.Grid(str(tmp_path / "llama"), "embedded", ("bf16",), (32,), (0,), windows=4, batch_tokens=64)
    inputs = e2.load_inputs(grid)
    (policy,) = e5.policies(["bgss"], e5.TrainingSetting("llama", "embedded"), inputs)
    assert policy.base_epsilon == 1e-6
    rows = complete(e2.MonitoredPasses, e2.specifications(grid, inputs), inputs, tmp_path / "runs")
    assert len(rows) == 8 and (rows[["mismatch", "combined", "risk"]] > 0).all(axis=None)
    with pytest.raises(ValueError, match=r"must fit the context of '.*llama', 64 tokens, got lengths \[65\]"):
        load(str(tmp_path / "llama"), "embedded", [65], windows=2)


def test_e5_wants_norms_before_the_sublayers():
    inputs = Inputs(family_model(Olmo2Config(**GROUPED)), torch.zeros(1), "")
    with pytest.raises(
        TypeError, match="E5 raises the epsilon of the norms before attention and MLP, got a model with norms behind"
    ):
        e5.policies(["bgss"], e5.TrainingSetting("olmo2", "embedded"), inputs)


# --- What is refused -----------------------------------------------------------------------------

OUTSIDE = {
    "post-norm": (OPTConfig(**OPT, do_layer_norm_before=False), "between the block's input and the attention's"),
    "scaled residual": (GraniteConfig(**GROUPED, residual_multiplier=0.5), "a second norm that reads h"),
    "mixtral": (MixtralConfig(**GROUPED), "a LayerNorm or RMSNorm before the linear layers of an MLP"),
    "llama 4": (  # which adds what its experts give to the result of an MLP, in place
        Llama4TextConfig(**GROUPED, intermediate_size_mlp=96, num_local_experts=2),
        "one MLP, and no router",
    ),
    "own attention": (
        GPTNeoConfig(vocab_size=101, hidden_size=WIDTH, num_layers=1, attention_types=[[["global"], 1]], num_heads=4),
        "attention interface, got GPTNeoModel, which computes its scores itself: predict its mismatch",
    ),
    "norms of heads of their own": (
        CohereConfig(**GROUPED, use_qk_norm=True),
        "an attention of projections alone, or with one norm of queries",
    ),
    "encoder": (T5Config(vocab_size=101, d_model=WIDTH, num_layers=1), "got a model with is_encoder_decoder=True"),
    "cross-attention": (
        GPT2Config(vocab_size=101, n_embd=WIDTH, n_layer=1, n_head=4, add_cross_attention=True),
        "got a model with add_cross_attention=True",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_blocks_are_refused_with_what_they_lack(name):
    config, message = OUTSIDE[name]
    config.bos_token_id = config.eos_token_id = 0
    with pytest.raises(TypeError, match=message):
        blocks(AutoModel.from_config(config).eval())


def test_a_refusal_names_the_modules_that_ran():
    with pytest.raises(TypeError, match=r"MixtralDecoderLayer: .* that ran: self_attn \(MixtralAttention\), .*q_proj"):
        blocks(AutoModel.from_config(MixtralConfig(**GROUPED)).eval())


def test_a_list_without_attention_is_refused():
    model = family_model(LlamaConfig(**GROUPED))
    for layer in model.layers:
        del layer.self_attn.is_causal
    with pytest.raises(TypeError, match=r"does not cover LlamaModel: it needs blocks with one attention module"):
        blocks(model)


def test_finding_blocks_leaves_nothing_behind():
    """No hooks are left; training modes and the state of random numbers are as before. Dropout does not disturb it."""
    model = AutoModel.from_config(OPTConfig(**OPT, dropout=0.5)).train()
    model.decoder.layers[0].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert len(blocks(model)) == 2
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
