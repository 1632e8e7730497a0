"""Every export is loaded by the library that it is for, and quantizes the layers of the plan, no others."""

import copy
import json

import modelopt.torch.quantization as mtq
import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    initialize_module_for_quantization,
)
from torchao.core.config import config_from_dict
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from fragility_adjoint.mixed_precision import Plan
from fragility_adjoint.mixed_precision.export import (
    arguments,
    compressed_tensors,
    layers_of,
    modelopt,
    modules_to_not_convert,
    torchao,
)
from fragility_adjoint.quantization.quantized import lower
from fragility_adjoint.quantization.recipes import RECIPES
from fragility_core.models.paths import final_hidden

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, tie_word_embeddings=False,
)  # fmt: skip
LAYER = "model.layers.1."
KEPT = Plan("fp8-dynamic", modules=("model.layers.0.mlp",))
MIXED = Plan("bf16", layers=((LAYER + "mlp.down_proj", "w4a16-g128"), (LAYER + "self_attn.o_proj", "w8a8-int8")))
TOKENS = torch.arange(60)[None]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval().requires_grad_(False)


def quantized(plan, model):
    return {path for path, operands in layers_of(plan, model).items() if operands}


@pytest.mark.parametrize("plan", [KEPT, MIXED, Plan("w4a16-g128"), Plan("nvfp4-w"), Plan("fp8-tensor")])
def test_modelopt(plan, model):
    export = modelopt(plan, model)
    theirs = mtq.quantize(copy.deepcopy(model), export.config, lambda m: m(TOKENS))
    on = {
        path for path, module in theirs.named_modules()
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled
    }  # fmt: skip
    assert on == quantized(plan, model) and bool(export.missing) == bool(plan.modules)
    for path in on:
        inputs = theirs.get_submodule(path).input_quantizer.is_enabled
        assert inputs == (layers_of(plan, model)[path].inputs is not None)


@pytest.mark.parametrize("recipe", ["w8a16-channel", "w4a16-g128", "fp8-w", "w8a16-g128", "fp8-dynamic"])
def test_modelopt_quantizes_as_predicted(recipe, model):
    """The final hidden state in its simulation is ours, up to the order of operations. MX and NVFP4 need CUDA there."""
    plan = Plan(f"{recipe}@fp32")
    theirs = mtq.quantize(copy.deepcopy(model), modelopt(plan, model).config, lambda m: m(TOKENS))
    low = lower(model, plan.recipe)
    with torch.no_grad(), low.running():
        ours = final_hidden(low.model, TOKENS)
    exact = final_hidden(model, TOKENS)
    error = (ours - theirs.model(TOKENS, use_cache=False).last_hidden_state).norm() / (ours - exact).norm()
    assert error < 0.02


@pytest.mark.parametrize("plan", [KEPT, MIXED, *(Plan(name) for name in (
    "w4a16-g128", "w8a8-int8", "fp8-tensor", "nvfp4-w4a4", "nvfp4-w", "mxfp4", "mxfp8", "w4a16-zero-g128", "fp8-block"
))])  # fmt: skip
def test_compressed_tensors(plan, model):
    export = compressed_tensors(plan, model)
    config = QuantizationConfig.model_validate(json.loads(export.json()))
    theirs = copy.deepcopy(model)
    apply_quantization_config(theirs, config)
    on = {path: m for path, m in theirs.named_modules() if getattr(m, "quantization_scheme", None) is not None}
    assert on.keys() == quantized(plan, model)
    for path, module in on.items():
        operands, scheme = layers_of(plan, model)[path], module.quantization_scheme
        assert scheme.weights.num_bits == operands.weights.format.bits
        assert (scheme.input_activations is None) == (operands.inputs is None)


@pytest.mark.parametrize("name", ["fp8-dynamic", "w8a8-int8", "w4a16-g128", "mxfp8", "mxfp4", "nvfp4-w4a4", "fp8-w"])
def test_torchao_reads_every_configuration(name, model):
    config = config_from_dict(json.loads(torchao(Plan(name), model).json()))
    assert set(config.fqn_to_config) == quantized(Plan(name), model)


@pytest.mark.parametrize("plan", [
    Plan("w4a16-g128", modules=("model.layers.0.mlp",)), Plan("w8a8-int8"), Plan("fp8-w", modules=("model.layers.1",)),
    Plan("bf16", layers=((LAYER + "mlp.down_proj", "w4a16-g128"), (LAYER + "self_attn.o_proj", "w8a16-channel"))),
])  # fmt: skip
def test_torchao_quantizes_the_layers_of_the_plan(plan, model):
    model = model.bfloat16()
    config = config_from_dict(json.loads(torchao(plan, model).json()))
    before = {path: type(module.weight.data) for path, module in model.named_modules() if hasattr(module, "weight")}
    quantize_(model, config, filter_fn=None)
    weights = {path: module.weight for path, module in model.named_modules() if path in before}
    changed = {path for path, weight in weights.items() if type(weight.data) is not before[path]}
    assert changed == quantized(plan, model)


@pytest.mark.parametrize("name", ["w3a16-g64", "w4a16-g32", "w8a16-g128", "w4a16-zero-g128", "mxfp4-w", "nvfp4-w"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_groups_are_stored_in_as_many_bits_as_are_counted(name, dtype):
    scheme, layer = RECIPES[name].linear.weights, torch.nn.Linear(256, 64, bias=False).to(dtype)
    given = QuantizationArgs(**arguments(scheme, dynamic=False))
    initialize_module_for_quantization(layer, QuantizationScheme(targets=["Linear"], weights=given))
    stored = given.scale_dtype or layer.weight_scale.dtype
    assert 8 * stored.itemsize == scheme.scale_bits
    assert layer.weight_scale.shape == (64, 256 // scheme.size)


def test_transformers_leaves_the_named_modules_alone(model):
    skipped = modules_to_not_convert(KEPT, model).config["modules_to_not_convert"]
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    kept = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {*config.llm_int8_skip_modules} == {"lm_head", *kept}


WITHOUT = {name for name in RECIPES if name.startswith(("fp8-e5m2", "fp8-block", "mxfp6", "mxint8", "fp8_e"))}
WITHOUT |= {"w4a8-int8", "mxfp4-w"}


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.linear.weights and n != "fp8-static"])
def test_every_recipe_is_expressed_or_refused_by_name(name, model):
    plan = Plan(name)
    assert modelopt(plan, model).config and compressed_tensors(plan, model).config
    if name in WITHOUT:
        with pytest.raises(ValueError, match="torchao has no configuration for"):
            torchao(plan, model)
    else:
        config_from_dict(torchao(plan, model).config)
