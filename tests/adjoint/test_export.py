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

from fragility_adjoint.mixed_precision import Plan, export
from fragility_adjoint.mixed_precision.export import EXPORTS, from_json, layers_of, to_json, untouched
from fragility_numerics.formats import get_format
from fragility_quantization.operands import Operands
from fragility_quantization.recipes import RECIPES
from fragility_quantization.schemes import Scheme

KEPT = Plan("fp8-dynamic+kv-fp8", modules=("model.layers.0.mlp",), residual=True, scores=True)
MIXED = Plan("bf16", layers=(("model.layers.1.self_attn.q_proj", "fp8-tensor"),), label="mixed", predicted=0.25)
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
