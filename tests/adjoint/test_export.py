"""Plans as JSON, and what other libraries cannot express; tests/peers applies the exports by these libraries.

docs/exports.md has a table of every recipe and library, which is made here.
"""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from tiny import TINY, random_gpt2
from transformers import LlamaConfig, LlamaForCausalLM

from fragility_exports import libraries as export
from fragility_exports.libraries import EXPORTS, layers_of, untouched
from fragility_exports.llama_cpp import is_gguf, libraries_for, llama_quantize
from fragility_exports.plan import Plan, from_json, to_json
from fragility_numerics.formats import get_format
from fragility_quantization.operands import Operands
from fragility_quantization.recipes import RECIPES
from fragility_quantization.schemes import Scheme

KEPT = Plan("fp8-dynamic+kv-fp8", modules=("model.layers.0.mlp",), residual=True, scores=True)
MIXED = Plan("bf16", layers=(("model.layers.1.self_attn.o_proj", "fp8-tensor"),), label="mixed", predicted=0.25)
PAGE = Path(__file__).parents[2] / "docs" / "exports.md"
SCHEMES = [name for name in EXPORTS if name != "transformers"]  # it names layers, and no schemes
RULE = re.compile(r"has the rule '([a-z ]+)', not '([a-z]+)', for the scales of")


def llama(width: int = 128, layers: int = 2) -> LlamaForCausalLM:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("plan", [KEPT, MIXED, Plan("w4a16-g128")])
def test_a_plan_survives_json(plan):
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"modules": [], "layers": [], "colour": 1}', "null"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match="a plan must be JSON that to_json wrote, got"):
        from_json(text)


@pytest.mark.parametrize("library", EXPORTS)
def test_what_cannot_be_expressed_is_said_by_name(library):
    export = EXPORTS[library](KEPT, llama())
    said = " ".join(export.missing)
    assert "the fp32 residual stream" in said and "attention scores in fp32" in said
    assert "fp32 beside bf16 for model.layers.0.mlp: unquantized" in said
    assert ("the KV cache" in said) == (library != "modelopt")
    clean = EXPORTS[library](MIXED, llama())
    assert bool(clean.missing) == (library == "transformers") and clean.dtype == "bfloat16"


def test_layers_that_engines_fuse_have_one_scheme_or_are_named():
    unlike = (("model.layers.1.self_attn.k_proj", "fp8-tensor"), ("model.layers.0.mlp.down_proj", "w4a16-range-g128"))
    said = "vLLM and SGLang cannot load layers that they fuse in unlike schemes: "
    found = EXPORTS["compressed-tensors"](Plan("fp8-dynamic", layers=unlike), llama()).missing
    assert found == (f"{said}model.layers.1.self_attn.(q_proj|k_proj|v_proj)",)
    kept = Plan("fp8-dynamic", modules=("model.layers.0.mlp.up_proj",), weights_only=True)
    assert f"{said}model.layers.0.mlp.(gate_proj|up_proj)" in EXPORTS["compressed-tensors"](kept, llama()).missing
    every = tuple((f"model.layers.1.self_attn.{name}_proj", "fp8-tensor") for name in "qkv")
    assert not EXPORTS["compressed-tensors"](Plan("fp8-dynamic", layers=every), llama()).missing


@pytest.mark.parametrize("plan", [Plan("openvino-int8-w", modules=("lm_head",)), Plan("w4a16-g128", weights_only=True)])
def test_nothing_is_missing_beside_fp32_kernels(plan):
    plan = replace(plan, modules=("lm_head",))
    for library in ("compressed-tensors", "torchao"):
        made = EXPORTS[library](plan, llama())
        assert made.dtype == "float32" and "fp32 beside" not in " ".join(made.missing), library


@pytest.mark.parametrize("library", [*EXPORTS, "llama-quantize"])
def test_modules_to_keep_must_be_in_the_model(library):
    plan = Plan("ggml-q4_0" if library == "llama-quantize" else "w4a16-g128", modules=("model.layers.9", "foo"))
    write = llama_quantize if library == "llama-quantize" else EXPORTS[library]
    with pytest.raises(ValueError, match="modules to keep must be in the model, got foo, model.layers.9"):
        write(plan, llama())


def test_text_is_what_each_library_reads():
    """JSON, but for ModelOpt, which refuses texts as the keys of blocks: they stay numbers."""
    for library in EXPORTS.keys() - {"modelopt"}:
        export = EXPORTS[library](KEPT, llama())
        assert json.loads(export.text()) == export.config
    text = EXPORTS["modelopt"](Plan("w4a16-g32"), llama()).text()
    assert "-1: 32" in text and json.loads(text.replace("-1:", '"-1":'))["algorithm"] == "max"


def test_a_mix_that_keeps_parts_is_exported_as_far_as_it_can_be_said():
    """The residual stream and the norms are named as missing; layers in fp32 are left unquantized."""
    model = llama(layers=3)
    kept = ("model.layers.0.self_attn", "model.norm", "model.layers.1.input_layernorm", "lm_head")
    plan = replace(MIXED, modules=(*kept, "model.layers.2.input_layernorm", "model.embed_tokens"), residual=True)
    for library in EXPORTS:
        export = EXPORTS[library](plan, model)
        assert "the fp32 residual stream" in " ".join(export.missing)
        assert "model.layers.2.input_layernorm and 1 more" in " ".join(export.missing)
    config = EXPORTS["compressed-tensors"](plan, model).config
    assert config["config_groups"]["group_0"]["targets"] == [MIXED.layers[0][0]]
    assert {"model.layers.0.self_attn.q_proj", "lm_head"} <= {*untouched(plan, model)}


def test_layers_that_stay_as_they_are():
    model = llama()
    layers = layers_of(KEPT, model)
    stays = [path for path, operands in layers.items() if not operands]
    assert stays == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")] and len(layers) == 14
    assert untouched(KEPT, model) == [*stays, "lm_head"]
    assert [path for path, operands in layers_of(MIXED, model).items() if operands] == [MIXED.layers[0][0]]


@pytest.mark.parametrize("library", SCHEMES)
def test_a_head_with_a_scheme_is_quantized_and_an_embedding_is_named(library):
    plan = Plan("bf16", layers=(("lm_head", "fp8-w"), ("model.embed_tokens", "fp8-w")))
    export = EXPORTS[library](plan, llama())
    assert "lm_head" in export.text() and "lm_head" not in untouched(plan, llama())
    (said,) = export.missing
    assert said.endswith("cannot express a scheme for Embedding: model.embed_tokens")
    assert "model.embed_tokens" not in export.text()


@pytest.mark.parametrize("library", SCHEMES)
def test_layers_that_are_no_linear_modules_are_named_and_left_out(library):
    export = EXPORTS[library](Plan("fp8-tensor"), random_gpt2(TINY))
    (said,) = export.missing
    assert "cannot express a scheme for Conv1D: transformer.h.0.attn.c_attn, " in said and "and 7 more" in said
    assert "c_attn" not in export.text().split('"ignore"')[0]


@pytest.mark.parametrize("library", SCHEMES)
def test_layers_whose_width_groups_do_not_divide_are_named_and_left_out(library):
    model, plan = llama(width=96), Plan("w4a16-g64")
    export = EXPORTS[library](plan, model)
    assert any("cannot express groups that do not divide the width: model.layers.0" in said for said in export.missing)
    assert "down_proj" in export.text() and "up_proj" not in export.text()


# --- What stands in a configuration, written by hand; tests/peers applies them ---------------------------------------

EIGHT, E4M3, E2M1 = {"num_bits": 8}, {"num_bits": (4, 3)}, {"num_bits": (2, 1)}
PER_TOKEN = {"axis": None, "block_sizes": {-1: None}, "type": "dynamic"}
MODELOPT = {  # the quantizers of weights and of inputs
    "w4a16-g128": ({"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}, None),
    "w8a8-int8": (EIGHT | {"axis": 0}, EIGHT | PER_TOKEN),
    "fp8-tensor": (E4M3 | {"axis": None}, E4M3 | {"axis": None, "type": "dynamic"}),
    "fp8-static": (E4M3 | {"axis": None}, E4M3 | {"axis": None}),
    "mxfp4": (E2M1 | {"block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},) * 2,
    "nvfp4-w4a4": (E2M1 | {"block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},) * 2,
}
INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True}
FIXED, MEASURED, NARROW = {"dynamic": False}, {"dynamic": True}, FLOAT | {"num_bits": 4}
ONE_MX = NARROW | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
ONE_NV = NARROW | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
COMPRESSED = {  # the arguments of weights and of inputs
    "w4a16-zero-g128": (
        {"type": "int", "symmetric": False, "num_bits": 4, "strategy": "group", "group_size": 128} | FIXED, None,
    ),
    "w8a8-int8": (INT | EIGHT | FIXED | {"strategy": "channel"}, INT | EIGHT | MEASURED | {"strategy": "token"}),
    "fp8-static": (FLOAT | EIGHT | FIXED | {"strategy": "tensor"},) * 2,
    "fp8-block": (
        FLOAT | EIGHT | FIXED | {"strategy": "block", "block_structure": [128, 128]},
        FLOAT | EIGHT | MEASURED | {"strategy": "group", "group_size": 128},
    ),
    "mxfp4": (ONE_MX | FIXED, ONE_MX | MEASURED),
    "nvfp4-w4a4": (ONE_NV | FIXED, ONE_NV | {"dynamic": "local"}),
}  # fmt: skip


def typed(kind, version=1, **data):
    return {"_type": kind, "_version": version, "_data": data}


def dtype(name):
    return {"_type": "torch.dtype", "_data": name}


BY_ROW, BY_TENSOR = typed("PerRow", dim=-1), typed("PerTensor")
SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}
ASYMMETRIC = {"_type": "MappingType", "_data": "ASYMMETRIC"}
FLOOR = {"_type": "ScaleCalculationMode", "_data": "FLOOR"}
FP8, FP4 = dtype("float8_e4m3fn"), dtype("float4_e2m1fn_x2")
TORCHAO = {
    "w4a16-zero-g128": typed(
        "IntxWeightOnlyConfig", 2, weight_dtype=dtype("int4"), granularity=typed("PerGroup", group_size=128),
        mapping_type=ASYMMETRIC,
    ),
    "w8a16-channel": typed(
        "IntxWeightOnlyConfig", 2, weight_dtype=dtype("int8"), granularity=typed("PerAxis", axis=0),
        mapping_type=SYMMETRIC,
    ),
    "w8a8-int8": typed("Int8DynamicActivationInt8WeightConfig", 2, act_mapping_type=SYMMETRIC, granularity=BY_ROW),
    "fp8-tensor": typed(
        "Float8DynamicActivationFloat8WeightConfig", 2, weight_dtype=FP8, granularity=[BY_TENSOR, BY_TENSOR]
    ),
    "fp8-block": typed(
        "Float8DynamicActivationFloat8WeightConfig", 2, weight_dtype=FP8,
        granularity=[typed("PerBlock", block_size=[1, 128]), typed("PerBlock", block_size=[128, 128])],
    ),
    "fp8-w": typed("Float8WeightOnlyConfig", 2, weight_dtype=FP8, granularity=BY_ROW),
    "fp8-tensor-w": typed("Float8WeightOnlyConfig", 2, weight_dtype=FP8, granularity=BY_TENSOR),
    "mxfp4": typed(
        "MXDynamicActivationMXWeightConfig", block_size=32, activation_dtype=FP4, weight_dtype=FP4, scaling_mode=FLOOR
    ),
    "nvfp4-w4a4": typed("NVFP4DynamicActivationNVFP4WeightConfig"),
    "nvfp4-w": typed("NVFP4WeightOnlyConfig"),
}  # fmt: skip


def config_of_the_head(library, recipe):
    """What ``library`` is given for a model whose head alone has a scheme."""
    return EXPORTS[library](Plan("bf16", layers=(("lm_head", recipe),)), llama(layers=1)).config


@pytest.mark.parametrize("recipe", MODELOPT)
def test_the_configuration_of_modelopt(recipe):
    schemes = zip(("lm_head.weight_quantizer", "lm_head.input_quantizer"), MODELOPT[recipe])
    rules = [{"quantizer_name": name, "cfg": cfg} for name, cfg in schemes if cfg]
    want = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *rules], "algorithm": "max"}
    assert config_of_the_head("modelopt", recipe) == want


def test_the_cache_of_modelopt():
    rules = EXPORTS["modelopt"](Plan("kv-fp8", modules=("model.layers.1",)), llama()).config["quant_cfg"][1:]
    cache = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": E4M3 | {"use_constant_amax": True}}
    assert rules == [cache, {"quantizer_name": "model.layers.1.*[kv]_bmm_quantizer", "enable": False}]


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_the_configuration_of_compressed_tensors(recipe):
    weights, inputs = COMPRESSED[recipe]
    group = {"targets": ["lm_head"], "weights": weights} | ({"input_activations": inputs} if inputs else {})
    found = config_of_the_head("compressed-tensors", recipe)
    assert found["quant_method"] == "compressed-tensors" and found["config_groups"] == {"group_0": group}
    assert len(found["ignore"]) == 7 and "lm_head" not in found["ignore"]


@pytest.mark.parametrize("recipe", TORCHAO)
def test_the_configuration_of_torchao(recipe):
    want = typed("FqnToConfig", fqn_to_config={"lm_head": TORCHAO[recipe]})
    assert config_of_the_head("torchao", recipe) == want


def test_layers_with_the_same_scheme_are_one_group_of_compressed_tensors():
    """Layers of two schemes, in turns, are two groups; a recipe that kernels alone round has none."""
    turns = tuple((f"model.layers.{block}.mlp.{name}_proj", recipe) for block in range(2) for name, recipe in (
        ("gate", "fp8-w"), ("up", "fp8-tensor"), ("down", "fp8-w")
    ))  # fmt: skip
    groups = EXPORTS["compressed-tensors"](Plan("bf16", layers=turns), llama()).config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [
        [path for path, recipe in turns if recipe == name] for name in ("fp8-w", "fp8-tensor")
    ]
    assert EXPORTS["compressed-tensors"](Plan("bf16"), llama()).config["config_groups"] == {}


@pytest.mark.parametrize(("many", "said"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_a_message_names_a_few_modules(many, said):
    assert export.named("abc", many) == said


# --- The table of recipes --------------------------------------------------------------------------------------------


def outcome(name: str, library: str) -> str:
    """What the export of a recipe is, in the words of the table."""
    try:
        export = EXPORTS[library](Plan(name), llama(layers=1))
    except ValueError:
        return "refused"
    said = {}
    for text in export.missing:
        if found := RULE.search(text):
            said[f"rule “{found[1]}”"] = None
        elif "in the dtype of weights, not bf16" in text:
            said["scales in the dtype of the weights"] = None
        elif "with scales in bf16" in text:
            said["scales in bf16"] = None
        elif "the KV cache" in text:
            said["without the cache"] = None
        elif "another argument says the scheme" in text:
            said["layers alone"] = None
        else:
            assert " beside kernels that compute in " in text
            said["without the kernels"] = None
    return ", ".join(said) or "yes"


def table() -> str:
    """The table of docs/exports.md: one row for recipes that come out alike."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in RECIPES:
        rows.setdefault(tuple(outcome(name, library) for library in EXPORTS), []).append(f"`{name}`")
    lines = [f"| recipe | {' | '.join(EXPORTS)} |", "|---" * (1 + len(EXPORTS)) + "|"]
    return "\n".join(lines + [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()])


def test_the_page_has_the_table_of_every_recipe():
    assert table() in PAGE.read_text(encoding="utf-8"), f"docs/exports.md must have this table:\n{table()}"


@pytest.mark.parametrize("library", EXPORTS)
def test_recipes_that_round_differently_never_come_out_alike_without_a_word(library):
    """Over all pairs of recipes that are neither refused nor have a part named as missing."""
    model, silent = llama(layers=1), {}
    for name in RECIPES:
        try:
            export = EXPORTS[library](Plan(name), model)
        except ValueError:
            continue
        if not export.missing:
            silent[name] = (export.text(), export.dtype)
    assert len(silent) >= (4 if library == "transformers" else 10)
    for one, other in combinations(silent, 2):
        alike = replace(RECIPES[one], name="") == replace(RECIPES[other], name="")
        assert alike == (silent[one] == silent[other]), f"{one} and {other}"


def test_plans_of_gguf_become_rules_for_llama_quantize():
    model = llama(256)
    mixed = Plan("gguf-q4_k_m", modules=("model.layers.0.mlp",))
    made = llama_quantize(mixed, model)
    assert made.text().splitlines()[:4] == [
        r"^token_embd\.weight$=q4_k", r"^output\.weight$=q6_k", r"^blk\.0\.attn_q\.weight$=q4_k",
        r"^blk\.0\.attn_k\.weight$=q4_k",
    ]  # fmt: skip
    assert made.config["blk.0.ffn_up.weight"] == "f32" and made.config["blk.1.ffn_down.weight"] == "q6_k"
    assert not made.missing and is_gguf(mixed) and libraries_for(mixed) == [*EXPORTS, "llama-quantize"]
    some = Plan("fp32", layers=(("model.layers.1.mlp.up_proj", "ggml-q2_k"),))
    assert {*llama_quantize(some, llama(128)).config.values()} == {"f32", "q4_0"} and is_gguf(some)
    tied = llama(256)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert llama_quantize(Plan("fp32", layers=(("lm_head", "ggml-q5_k"),)), tied).config["token_embd.weight"] == "q5_k"


def test_what_llama_quantize_lacks_is_named_or_refused():
    assert libraries_for(Plan("w4a16-g128")) == [*EXPORTS]
    assert llama_quantize(Plan("ggml-q4_k@bf16"), llama()).missing == (
        "llama-quantize cannot express kernels in bf16, it computes in fp32",
    )
    assert not llama_quantize(Plan("ggml-q4_k+kv-fp16"), llama()).missing
    (said,) = llama_quantize(Plan("ggml-q4_k+kv-fp8"), llama()).missing
    assert said == "llama-quantize cannot express another KV cache than the fp16 that llama.cpp starts with"
    with pytest.raises(ValueError, match=r"llama-quantize has no int4_group128 for the weights of model\.layers\.0"):
        llama_quantize(Plan("w4a16-g128@fp32"), llama())
    for library in SCHEMES:
        with pytest.raises(ValueError, match=r"has no q4_k for the weights of .*: choose another scheme for its layer"):
            EXPORTS[library](Plan("ggml-q4_k"), llama())


def test_rules_that_a_library_lacks_are_named():
    export = EXPORTS["compressed-tensors"](Plan("w4a16-g128"), llama())
    assert export.missing == (
        "compressed-tensors has the rule 'range', not 'largest', for the scales of int4_group128",
    )
    with pytest.raises(
        ValueError, match=r"ModelOpt has no int4_group128_bf16_zero for the weights of model\.layers\.0"
    ):
        EXPORTS["modelopt"](Plan("w4a16-zero-g128"), llama())
    with pytest.raises(ValueError, match="torchao has no fp8_e4m3_tensor weights beside static fp8_e4m3_tensor inputs"):
        EXPORTS["torchao"](Plan("fp8-static"), llama())


@pytest.mark.parametrize("library", SCHEMES)
def test_weights_alone_in_a_format_are_named(library):
    export = EXPORTS[library](Plan("bf16", weights_only=True), llama())
    assert export.dtype == "float32" and "bf16 beside kernels that compute in fp32" in export.missing[0]


@pytest.mark.parametrize(("library", "role"), [("ModelOpt", "weights"), ("ModelOpt", "inputs"), ("torchao", "inputs")])
def test_zeros_that_a_library_lacks_are_refused(library, role):
    """A recipe of a user's own may have integers with a zero and scales in fp32."""
    groups = {"granularity": "row"} if role == "inputs" else {"granularity": "group", "size": 128}
    stored = Scheme(get_format("int8"), symmetric=False, **groups)
    with pytest.raises(ValueError, match=f"{library} has no .* for the {role} of layer: choose another scheme"):
        export.differences(library, stored, role, "layer")
    assert not any(
        "zero" in said for said in export.differences(library, replace(stored, symmetric=True), role, "layer")
    )


@pytest.mark.parametrize("library", ["compressed-tensors", "torchao"])
def test_inputs_without_weights_are_refused(library, monkeypatch):
    inputs = RECIPES["w8a8-int8"].linear.inputs
    monkeypatch.setattr(export, "layers_of", lambda plan, model: {"lm_head": Operands(inputs=inputs)})
    with pytest.raises(ValueError, match=f"{library} has no inputs without weights for lm_head: choose another scheme"):
        EXPORTS[library](Plan("w8a8-int8"), llama())


def test_modelopt_takes_inputs_without_weights(monkeypatch):
    inputs = RECIPES["w8a8-int8"].linear.inputs
    monkeypatch.setattr(export, "layers_of", lambda plan, model: {"lm_head": Operands(inputs=inputs)})
    made = EXPORTS["modelopt"](Plan("w8a8-int8"), llama())
    assert made.config["quant_cfg"][1:] == [{"quantizer_name": "lm_head.input_quantizer", "cfg": EIGHT | PER_TOKEN}]
    assert not made.missing
