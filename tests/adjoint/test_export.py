"""Plans as JSON, and what other libraries cannot express; tests/peers loads the exports in these libraries."""

import json
from dataclasses import replace

import pytest
from tiny import TINY, random_gpt2

from fragility_adjoint.mixed_precision import Plan
from fragility_adjoint.mixed_precision.export import EXPORTS, from_json, layers_of, modelopt, to_json, untouched

KEPT = Plan("fp8-dynamic+kv-fp8", modules=("transformer.h.0.mlp",), residual=True, scores=True)
MIXED = Plan("bf16", layers=(("transformer.h.1.attn.c_attn", "w4a16-g32"),), label="mixed", predicted=0.25)


@pytest.mark.parametrize("plan", [KEPT, MIXED, Plan("w4a16-g128")])
def test_a_plan_survives_json(plan):
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"modules": [], "layers": [], "colour": 1}', "null"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match="a plan must be JSON that to_json wrote, got"):
        from_json(text)


@pytest.mark.parametrize("library", EXPORTS)
def test_what_cannot_be_expressed_is_said_by_name(library):
    export = EXPORTS[library](KEPT, random_gpt2(TINY))
    said = " ".join(export.missing)
    assert "the fp32 residual stream" in said and "attention scores in fp32" in said
    assert "fp32 beside bf16 for transformer.h.0.mlp: unquantized" in said
    assert ("the KV cache" in said) == (library != "modelopt")
    assert json.loads(export.json())
    assert not EXPORTS[library](MIXED, random_gpt2(TINY)).missing


def test_a_mix_that_keeps_parts_is_exported_as_far_as_it_can_be_said():
    """The residual stream and the norms are named as missing; layers in fp32 are left unquantized."""
    model = random_gpt2(TINY)
    kept = (
        "transformer.h.0.attn",
        "transformer.ln_f",
        "transformer.h.1.ln_1",
        "lm_head",
        *("transformer.h.2.ln_1", "transformer.wte"),
    )
    plan = replace(MIXED, modules=kept, residual=True)
    for library in ("modelopt", "compressed-tensors", "torchao", "transformers"):
        export = EXPORTS[library](plan, model)
        assert "the fp32 residual stream" in " ".join(export.missing)
        assert "transformer.h.2.ln_1 and 1 more" in " ".join(export.missing)
    assert EXPORTS["compressed-tensors"](plan, model).config["config_groups"]["group_0"]["targets"] == [
        MIXED.layers[0][0]
    ]
    assert {"transformer.h.0.attn.c_attn", "lm_head"} <= {*untouched(plan, model)}


def test_layers_that_stay_as_they_are():
    model = random_gpt2(TINY)
    layers = layers_of(KEPT, model)
    stays = [path for path, operands in layers.items() if not operands]
    assert stays == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"] and len(layers) == 4 * TINY.n_layer
    assert untouched(KEPT, model) == [*stays, "lm_head"]
    assert [path for path, operands in layers_of(MIXED, model).items() if operands] == ["transformer.h.1.attn.c_attn"]


def test_rules_that_a_library_lacks_are_named():
    export = modelopt(Plan("w4a16-zero-g128"), random_gpt2(TINY))
    assert export.missing == ("ModelOpt has symmetric integers alone, not int4_group128_bf16_zero",)
