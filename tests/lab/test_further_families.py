"""Further families: each way in which one differs from those that the code was written for, and with EVERY=yes all."""

import inspect

import numpy as np
import pytest
import torch
from test_diagnosis_families import EVERYTHING, FORMATS, HEADS, ROUTED, diagnosed, read
from tiny import low_hidden, random_model, random_tokens
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    MBartConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RemBertConfig,
    RwkvConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fragility_adjoint.explain.error_samples import ErrorSamples, ScaledErrors
from fragility_adjoint.mixed_precision import Contributions
from fragility_adjoint.mixed_precision.bits import fused_layers
from fragility_adjoint.mixed_precision.structure import scores_can_be_kept
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.windows import windows_of
from fragility_core.models.configuration import heads_width
from fragility_core.models.paths import block_paths, final_hidden, hidden_and_logits
from fragility_core.theory import mismatch
from fragility_engines.comparison.slopes import Directions
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.recipes import CACHE, recipes
from fragility_engines.suspects.scales import scaled, scales
from fragility_engines.suspects.structure import around, in_one_block
from fragility_engines.suspects.suspect import logprobs, score
from fragility_lab.diagnosis.loading import require_causal
from fragility_lab.measurement.comparison import by_token_last, compare, observe
from fragility_lab.measurement.decoding import greedy, kept_length
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

TWO = {"num_hidden_layers": 2}
TOKENS = random_tokens(4, 16, vocabulary=101, smallest=1)
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN3_NEXT = Qwen3NextConfig(**ROUTED, **TWO, **LINEAR, shared_expert_intermediate_size=16)  # no layer has keys
LLAMA4 = Llama4TextConfig(**HEADS, **TWO, num_local_experts=4, intermediate_size_mlp=32, attention_chunk_size=8)


def ratio(model, low):
    """The predicted over the measured mismatch of all windows."""
    with torch.no_grad():
        measured = mismatch(low_hidden(low, TOKENS), final_hidden(model, TOKENS)).numpy()
    return Adjoint(low, model, probes=4)(TOKENS).windows.predicted.mean() / measured.mean()


@torch.no_grad()
def test_a_model_that_cannot_go_on_from_its_cache_reads_the_whole_text():
    model, text = random_model(QWEN3_NEXT), TOKENS[:2]
    for _ in range(4):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    with pytest.raises(ValueError, match="get_seq_length"):
        model(TOKENS[:2], use_cache=True)
    assert torch.equal(greedy(model, TOKENS[:2], 4), text[:, 16:])
    assert kept_length(lower(model, "fp32"), TOKENS[:2], text[:, 16:]).tolist() == [4, 4]


def test_an_error_of_the_whole_text_is_raised():
    model = random_model(QWEN3_NEXT)
    with pytest.raises(IndexError):
        greedy(model, TOKENS + 101, 1)


def test_a_constant_in_16_bits_is_no_rounded_weight():
    model = random_model(RecurrentGemmaConfig(**HEADS, **TWO, lru_width=16, attention_window_size=8))
    assert model.model.normalizer.dtype == torch.bfloat16
    assert 0.8 < ratio(model, lower(model, "bf16")) < 1.25
    with pytest.raises(ValueError, match="reference must be in fp32"):
        Adjoint(lower(model, "bf16"), random_model(model.config).bfloat16())


@torch.no_grad()
def test_the_base_of_a_model_whose_prefix_names_no_part_of_it():
    model = random_model(LLAMA4)
    assert model.base_model is model
    final, logits = hidden_and_logits(model, TOKENS)
    assert torch.equal(final_hidden(model, TOKENS), final) and final.shape == (4, 16, 16)
    assert torch.equal(model.lm_head(final), logits)
    coarse = lower(model, "kv-int8@fp32")
    assert float(mismatch(low_hidden(coarse, TOKENS), final).mean()) > 0  # the cache of the base rounds
    with pytest.raises(RuntimeError, match="bare call"):
        lower(model, "w8a8-int8").model.model(TOKENS)


def test_several_streams_are_compared_as_one():
    model = random_model(Gemma3nTextConfig(
        **HEADS, num_hidden_layers=3, num_kv_shared_layers=0, vocab_size_per_layer_input=101,
        hidden_size_per_layer_input=4, sliding_window=4, laurel_rank=4,
    ))  # fmt: skip
    low = lower(model, "bf16")
    _, drift = compare(observe(low.model, TOKENS, low), observe(model, TOKENS), TOKENS)
    assert drift.groupby("window").size().nunique() == 1 and [*drift.window.unique()] == [0, 1, 2, 3]
    assert drift.error.between(0, 0.1).all()


@pytest.mark.parametrize(("batch", "length"), [(1, 8), (3, 8), (8, 8), (4, 1)])
def test_tokens_by_window(batch, length):
    x = torch.randn(batch, length, 6, 5)  # 6 streams
    want = x.flatten(2)
    assert torch.equal(by_token_last(x, batch, length), want)
    assert torch.equal(by_token_last(want, batch, length), want)
    if (batch, length) != (4, 1):
        streams_first = x.permute(2, 0, 1, 3)
        assert torch.equal(by_token_last(streams_first, batch, length), want)
    assert torch.equal(by_token_last(want.reshape(batch * length, 30), batch, length), want)
    if batch != length:
        assert torch.equal(by_token_last(want.transpose(0, 1), batch, length), want)
    patches = torch.randn(batch, 5, 30)
    assert by_token_last(patches, batch, 7) is patches


def test_a_model_whose_own_code_fails_is_refused_by_name():
    """DBRX's code clamps without bounds, unless its configuration gives one."""
    config = DbrxConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=101, **OWN["dbrx"])
    require_causal(random_model(config), "dbrx")
    config.attn_config.clip_qkv = None
    with pytest.raises(
        ValueError, match="runs over tokens alone, got 'dbrx', whose own code fails in fp32: RuntimeError"
    ):
        require_causal(random_model(config), "dbrx")


def test_heads_of_other_widths_by_layer():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16, "sliding_window": 4}
    config = Gemma4TextConfig(**HEADS, **TWO, **kinds, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    assert [heads_width(config, number) for number in range(2)] == [2 * 8, 2 * 16]
    assert heads_width(Llama4TextConfig(**HEADS), 0) == 16 and heads_width(None, 0) == 0
    model = random_model(config)
    low = lower(model, "bf16")
    assert Contributions(model, Adjoint(low, model)(TOKENS[:1])).plan(1, "blocks").flops > 0


def test_attention_returns_what_every_family_can_view():
    """AFMoE views the result of its attention in another shape, without a copy."""
    config = AfmoeConfig(**ROUTED, **TWO, num_dense_layers=1, sliding_window=4)
    assert scores_can_be_kept(random_model(config))


def test_an_attention_that_does_not_run_is_no_part_to_keep():
    sizes = {
        "d_model": 16,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "encoder_layers": 1,
    }
    model = random_model(MBartConfig(vocab_size=101, max_position_embeddings=32, is_decoder=True, **sizes))
    low = lower(model, "bf16")
    known = Contributions(model, Adjoint(low, model)(TOKENS[:1]))
    assert known.structure.sites["attention"] == tuple(f"model.decoder.layers.{n}.self_attn" for n in range(2))
    assert fused_layers(model, TOKENS[:1])  # a cache of its own has no place for the second block


# --- Small errors ------------------------------------------------------------------------------------


class KeptErrors(ScaledErrors):
    """A share of the errors of the first pass, which has none, in the passes after it."""

    def __init__(self):
        super().__init__(0.0)
        self.errors, self.left = [], None

    def __call__(self, x, stored, alike=False, of_stored=None):
        if self.left is None:
            read = x if of_stored is None else of_stored
            self.errors.append((stored.round(read).float() - read).nan_to_num(0.0, 0.0, 0.0))
            return x
        return x + self.share * next(self.left)

    def start(self, share):
        self.share, self.left = share, iter(self.errors)


def missed(model, tokens=TOKENS) -> float:
    """How far signed contributions are from the error's products with the probes, relative to the error of the pass.

    A 64th of every error stays within the first order, and changes no choice of experts.
    """
    share, low = 1 / 64, lower(model, "bf16", "emulated")
    adjoint = Adjoint(low, model, 2, gradients="fp32")
    samples, tokens = ErrorSamples(adjoint), tokens[:2]
    signed = adjoint(tokens).contributions.groupby(["window", "probe"]).signed.sum()
    found = []
    for window in windows_of(tokens, 0):

        def run(model, window=window):
            return final_hidden(model, window.tokens).float()

        with torch.no_grad(), low.running():
            rounded = run(low.model)
        if type(model).__name__ not in NOT_ALIKE:
            assert torch.equal(samples.scaled(run, 1.0), rounded)  # the same roundings as those that are executed
        kept = KeptErrors()
        exact = samples._run(run, kept)
        kept.start(share)
        error = (exact - samples._run(run, kept)) / share
        products = window.signs(error, 2).flatten(1) @ error.flatten()
        left = products - torch.tensor(signed[window.number].to_numpy(), dtype=torch.float32)
        found.append(float(left.square().mean().sqrt() / error.norm()))
    return max(found)


# Samples are not bit for bit the pass. Constants, which samples leave exact, are suspected; not proved.
NOT_ALIKE = {"CTRLLMHeadModel", "ProphetNetForCausalLM", "RecurrentGemmaForCausalLM"}
# Their own code computes a part without gradients: tables of positions, or in an autograd function.
WITHOUT_GRADIENTS = {"bloom", "ctrl", "marian", "pegasus", "roformer", "recurrent_gemma"}
BERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "is_decoder": True}
SMALL_ERRORS = {
    "sums in place": RemBertConfig(vocab_size=101, input_embedding_size=16, output_embedding_size=16, **BERT, **TWO),
    "written step by step": RwkvConfig(vocab_size=101, hidden_size=16, attention_hidden_size=16, **TWO),
    "experts": QWEN3_NEXT,
}


@pytest.mark.parametrize("kind", SMALL_ERRORS)
def test_small_errors_add_up(kind):
    assert missed(random_model(SMALL_ERRORS[kind])) < 0.03


def test_the_row_of_the_padding_is_rounded_as_others_are():
    assert missed(random_model(SMALL_ERRORS["sums in place"]), TOKENS.masked_fill(TOKENS % 3 == 0, 0)) < 0.03


def test_a_mixture_has_the_error_of_draws_that_change_experts():
    text = " ".join(read(diagnosed(random_model(QWEN3_NEXT), "bf16")).split())
    assert "which do change experts, give" in text and "% was measured. The few tokens" in text


# --- All of them -----------------------------------------------------------------------------------

NAMES = {  # what the families call their sizes, and small values
    101: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions n_ctx max_seq_len",
    32: "intermediate_size ffn_dim n_inner dff decoder_ffn_dim d_inner ffn_hidden_size",
    16: "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size mamba_d_ssm lru_width "
    "attention_hidden_size",
    8: "head_dim global_head_dim swa_head_dim kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim index_head_dim "
    "attention_window_size attention_chunk_size linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim mamba_d_state mamba_chunk_size chunk_size ssm_state_size block_size dim_model_base",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim index_topk sliding_window "
    "attention_window local_attention mamba_dt_rank state_size rotary_dim hidden_size_per_layer_input laurel_rank "
    "adapter_rank mamba_n_heads mamba_num_heads n_mamba_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_attention_heads "
    "n_heads n_head num_heads decoder_attention_heads attention_heads num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk top_k_experts num_selected_experts index_n_heads linear_num_key_heads "
    "linear_num_value_heads",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group n_groups "
    "first_k_dense_replace moe_layer_start_index num_dense_layers mamba_n_groups mamba_ngroups num_mem_blocks",
    0: "bos_token_id eos_token_id pad_token_id num_kv_shared_layers",
}
SMALL = {name: value for value, names in NAMES.items() for name in names.split()}
SMALL |= {"is_decoder": True, "use_mamba_kernels": False, "block_auto_adjust_ff_dim": False}
# What a family needs besides.
OWN = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 8},
    "codegen": {"n_head": 4},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "intermediate_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "xlstm": {"num_heads": 2},
    "zamba2": {"hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"]},
}
LATENT = {"head_dim": 4}  # DeepSeek's attention: that of the part of a head that is rotated
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGEST = 10**6  # parameters
IN = {"deepseek_v4": "bf16"}  # transformers leaves some of its layers in fp32 beside fp16, where their input is in fp16
CANNOT = {
    "hrm_text": "its own code runs blocks without gradients",
    "reformer": "its own code refuses gradients but in training",
    "xlstm": "its own code fails in 16 bits",
}

LARGE = {  # parts for images or sound, or sizes of other names
    "blt", "cpmant", "dots3_note", "emu3", "fuyu", "gemma3", "gemma4", "gemma4_unified", "git", "got_ocr2",
    "kimi_linear", "llama4", "mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe",
    "roc_bert",
}  # fmt: skip
UNBUILT = {  # transformers refuses these sizes, or builds no model of this type from its configuration alone
    "cohere_compass_text", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "lfm2_moe", "musicgen",
    "musicgen_melody", "qwen4_exp", "zamba", "zaya",
}  # fmt: skip
REFUSED = {"mimo_v2_flash", "xlm", "xlnet", "xmod", "zamba2"}  # not causal, or their own code fails at these sizes


def small(name: str):
    """A configuration of the type ``name``, its sizes those of SMALL, where it has them, and of OWN."""
    kind = CONFIG_MAPPING[name]
    called, default = getattr(kind, "attribute_map", {}), kind()
    known = {*inspect.signature(kind).parameters, *vars(default), *called}
    sizes = {option: value for option, value in SMALL.items() if option in known}
    if "kv_lora_rank" in known:
        sizes |= LATENT
    doubled = {option for option, other in called.items() if {option, other} <= {*sizes}}
    return kind(**{option: value for option, value in (sizes | OWN.get(name, {})).items() if option not in doubled})


UNLIKE = [  # gated norms, latent queries, weights and activations of their own kinds, softcaps that must be numbers
    "apertus", "bailing_hybrid", "deepseek_v4", "falcon_mamba", "gemma3n_text", "inkling2_text", "olmo_hybrid",
    "qwen3_5_text", "qwen3_next",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({*TYPES} - LARGE - UNBUILT - REFUSED - CANNOT.keys()) if EVERYTHING else UNLIKE)
@torch.no_grad()
def test_every_suspect_of_a_comparison_runs(name):
    """Each changes a pass, or is not a suspect of this type, and leaves the model as it was."""
    model, log = random_model(small(name)), [Scored(TOKENS[0].numpy(), np.full(TOKENS.shape[1], -1.0))]
    before = logprobs(model, TOKENS[0])
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)))
    first = block_paths(model)[0]
    known = [*directed.tried, *directed.structure, *directed.runs, *in_one_block(model, first), *around(model, first)]
    caches = [each for each in recipes(model, get_recipe("bf16")) if each.mend == CACHE]
    for suspect in [*known, *caches, *(number.usual[0] for number in directed.numbers)]:
        score(model, TOKENS[0], suspect)
    for scale in scales(model):
        with scaled(scale.layers, 0.01, model):
            pass
    assert len(known) > 30
    torch.testing.assert_close(logprobs(model, TOKENS[0]), before, rtol=0, atol=0)


@pytest.mark.parametrize("number", [*range(len(TYPES))] if EVERYTHING else [], ids=lambda number: TYPES[number])
def test_every_causal_type_has_its_page(number):
    """Of every type of transformers but those named above: a type that is new there fails until it runs or is named."""
    name = TYPES[number]
    if name in LARGE | UNBUILT | CANNOT.keys():
        pytest.skip(CANNOT.get(name, "cannot be made small"))
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(small(name)).num_parameters() <= LARGEST
    model = random_model(small(name))
    if name in REFUSED:
        with pytest.raises(ValueError, match="a diagnosis needs a model that"):
            require_causal(model, name)
        return
    require_causal(model, name)
    if name != "big_bird":  # IndexError with its block-sparse attention; the cause is not known
        assert missed(model) < (0.5 if name in WITHOUT_GRADIENTS else 0.1)
    read(diagnosed(model, IN.get(name, FORMATS[number % 3]), windows=1))
