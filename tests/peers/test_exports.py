"""Every export of every recipe is applied by its library, and its numbers are ours: bit for bit, or as it says itself.

Weights and inputs are compared on a model in fp32, or in bf16 where the library takes no other. What an export names as
another rule for scales must be that rule.
"""

import copy
import json
import re
from dataclasses import replace

import modelopt.torch.quantization as mtq
import pytest
import torch
import yaml
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    initialize_module_for_quantization,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torchao.core.config import config_from_dict
from torchao.prototype.mx_formats import inference_workflow
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import quant_api, quantize_
from torchao.quantization.quantize_.common import _choose_quant_func_and_quantize_tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from fragility_adjoint.mixed_precision import Plan
from fragility_core.models.paths import final_hidden
from fragility_exports.libraries import (
    EXPORTS,
    arguments,
    compressed_tensors,
    layers_of,
    modelopt,
    modules_to_not_convert,
    torchao,
)
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import RECIPES
from fragility_quantization.schemes import RULES, Scheme

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, tie_word_embeddings=False,
)  # fmt: skip
LAYER = "model.layers.1."
COMPARED = (LAYER + "mlp.down_proj", "model.layers.0.self_attn.q_proj")
KEPT = Plan("fp8-dynamic", modules=("model.layers.0.mlp",))
MIXED = Plan("bf16", layers=((LAYER + "mlp.down_proj", "w4a16-g128"), (LAYER + "self_attn.o_proj", "w8a8-int8")))
TOKENS = torch.arange(60)[None]
QUANTIZING = [name for name, recipe in RECIPES.items() if recipe.linear]
OTHER_RULE = re.compile(r"has the rule '([a-z ]+)', not '([a-z]+)', for the scales of (\S+)$")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval().requires_grad_(False)


def quantized(plan, model):
    return {path for path, operands in layers_of(plan, model).items() if operands}


def given(width: int) -> torch.Tensor:
    """Inputs (2, 30, width) with a token that is larger than the others."""
    x = torch.randn(2, 30, width, generator=torch.Generator().manual_seed(1))
    x[0, 3] *= 20
    return x


# --- What each library makes of a weight, and of the inputs of its layer ---------------------------------------------


def by_modelopt(export, model):
    theirs = mtq.quantize(copy.deepcopy(model), yaml.safe_load(export.text()), lambda m: m(TOKENS))

    def of(path):
        layer = theirs.get_submodule(path)
        x = given(layer.in_features)
        if getattr(layer.input_quantizer, "_amax", None) is not None:  # a static scale: of these inputs, not of TOKENS
            layer.input_quantizer.amax = x.abs().amax()
        return layer.weight_quantizer(layer.weight), layer.input_quantizer(x)

    return of, torch.float32


def by_compressed_tensors(export, model):
    """Scales of weights, and static ones, are those of llm-compressor's default: of the smallest and the largest."""
    theirs = copy.deepcopy(model)
    apply_quantization_config(theirs, QuantizationConfig.model_validate(json.loads(export.text())))

    def observed(x, args):
        whole, groups = generate_gparam(x.amin(), x.amax()) if args.strategy == "tensor_group" else None, x
        if args.strategy == "tensor":
            groups = x.reshape(1, -1)
        elif args.strategy == "block":
            rows, columns = args.block_structure
            groups = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
        elif args.group_size:
            groups = x.unflatten(-1, (-1, args.group_size))
        scales = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
        scale, zero = (v[:, None] if args.strategy == "channel" else v for v in scales)
        return fake_quantize(x, scale, zero, args, global_scale=whole)

    def of(path):
        layer = theirs.get_submodule(path)
        x, scheme = given(layer.in_features), layer.quantization_scheme
        weight, args = observed(layer.weight, scheme.weights), scheme.input_activations
        if args is None or args.dynamic is False:
            return weight, None if args is None else observed(x, args)
        if args.dynamic == "local":
            layer.input_global_scale.data = generate_gparam(x.amin(), x.amax())
        return weight, forward_quantize(layer, x, "input", args)

    return of, torch.float32


def by_torchao(export, model, monkeypatch):
    """On a CPU, too: a configuration asks for its device when it is applied, which does not change what it gives."""
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setattr(quant_api, "is_sm_at_least_89", lambda: True)
    monkeypatch.setattr(inference_workflow, "is_sm_at_least_100", lambda: True)
    text = export.text()
    bf16 = "MXDynamic" in text or ("Float8Dynamic" in text and "PerRow" in text)
    theirs = copy.deepcopy(model).to(torch.bfloat16 if bf16 else torch.float32)
    quantize_(theirs, config_from_dict(json.loads(text)), filter_fn=None)

    def of(path):
        layer = theirs.get_submodule(path)
        x, how = given(layer.in_features).to(layer.weight.dtype), getattr(layer.weight, "act_quant_kwargs", None)
        if how is None:
            return layer.weight.dequantize(), None
        match type(how).__name__:
            case "QuantizeTensorToMXKwargs":
                stored = MXTensor.to_mx(x, how.elem_dtype, how.block_size, scaling_mode=how.scaling_mode)
            case "QuantizeTensorToNVFP4Kwargs":
                whole = per_tensor_amax_to_scale(x.abs().amax()) if how.use_dynamic_per_tensor_scale else None
                stored = NVFP4Tensor.to_nvfp4(x, how.block_size, per_tensor_scale=whole)
            case _:
                stored = _choose_quant_func_and_quantize_tensor(x, how)
        return layer.weight.dequantize(), stored.dequantize()

    return of, torch.bfloat16 if bf16 else torch.float32


def told(scheme: Scheme, export) -> Scheme | None:
    """What the library gives for ``scheme`` as its export says: None for a rule that is none of ours."""
    if scheme.scale == "bf16" and any("in the dtype of weights, not bf16" in text for text in export.missing):
        return replace(scheme, scale="fp32")
    if f"torchao takes {scheme.name} from bf16 alone, with scales in bf16" in export.missing:
        return replace(scheme, scale="bf16")
    for text in export.missing:
        found = OTHER_RULE.search(text)
        if found and found[3] == scheme.name and found[2] == scheme.rule:
            return replace(scheme, rule=found[1]) if found[1] in RULES else None
    return scheme


def compare(theirs, x, scheme, export, exact):
    """Assert that ``theirs`` are the numbers that the export promises: not ours where it names a difference.

    Unless ``exact``, another order of operations may change the last bits of a number, and which way a tie goes.
    """
    ours, promised = scheme.round(x), told(scheme, export) if isinstance(scheme, Scheme) else scheme
    if promised is not scheme:
        assert (theirs != ours).float().mean() > 1e-3
    if promised is None:
        return
    ours = promised.round(x).to(x.dtype)
    if exact:
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    else:
        tie = ((theirs - x).abs() - (ours - x).abs()).abs() <= 1e-5 * x.abs()
        assert (tie | torch.isclose(theirs, ours, rtol=1e-6, atol=0)).all()
        assert (~torch.isclose(theirs, ours, rtol=1e-6, atol=0)).float().mean() < 0.02


CUDA_ONLY = [name for name in QUANTIZING if name.startswith(("mx", "nvfp4"))]  # in ModelOpt
# The same operations in the same order: all but ModelOpt, NVFP4 of compressed-tensors, and integers of torchao.
EXACT = {
    "modelopt": (),
    "compressed-tensors": [name for name in QUANTIZING if not name.startswith("nvfp4")],
    "torchao": [name for name in QUANTIZING if not re.match(r"w\d|nvfp4-w4a4", name)],
}

POWERS = {"fp8_e4m3_linear", "fp8_e5m2_linear"}
MXFP6 = {"mxfp6", "mxfp6-ceil", "mxfp6-e3m2"}
REFUSED = {
    "modelopt": {"w4a16-zero-g128", "fp8-block", "fp8-e5m2"} | POWERS,
    "compressed-tensors": {"fp8-e5m2", "mxfp8-e5m2", "mxfp6-e3m2", "mxint8"} | POWERS,
    "torchao": {"w4a8-int8", "fp8-static", "fp8-e5m2", "mxint8", "mxfp4-w"} | MXFP6 | POWERS,
}


@pytest.mark.parametrize("library", EXACT)
@pytest.mark.parametrize("name", QUANTIZING)
def test_every_recipe_comes_out_as_itself_or_is_named_or_refused(name, library, model, monkeypatch):
    plan = Plan(name)
    if name in REFUSED[library]:
        with pytest.raises(ValueError, match=rf"(?i){library} has no .*: choose another scheme for its layer"):
            EXPORTS[library](plan, model)
        return
    export = EXPORTS[library](plan, model)
    if library == "modelopt" and name in CUDA_ONLY and not torch.cuda.is_available():
        pytest.skip("ModelOpt rounds to MX and NVFP4 on CUDA alone")
    if library == "modelopt":
        of, dtype = by_modelopt(export, model)
    elif library == "compressed-tensors":
        of, dtype = by_compressed_tensors(export, model)
    else:
        of, dtype = by_torchao(export, model, monkeypatch)
    for path in COMPARED:
        operands, weight = plan.recipe.operands(path), model.get_submodule(path).weight.to(dtype)
        rounded, read = of(path)
        compare(rounded.to(dtype), weight, operands.weights, export, name in EXACT[library])
        if operands.inputs is not None:
            x, inputs = given(weight.shape[1]).to(dtype), operands.inputs
            if inputs.static:
                inputs = replace(inputs, largest_input=float(x.abs().amax()))
            compare(read.to(dtype), x, inputs, export, name in EXACT[library])


@pytest.mark.parametrize("name", ["kv-fp8", "kv-int8"])
def test_modelopt_stores_the_cache_as_we_do(name, model):
    plan = Plan(name, modules=("model.layers.0.self_attn",))
    export = modelopt(plan, model)
    theirs = mtq.quantize(copy.deepcopy(model), yaml.safe_load(export.text()), lambda m: m(TOKENS))
    x = given(64)[None]
    for quantizer in ("k_bmm_quantizer", "v_bmm_quantizer"):
        stored, kept = (getattr(theirs.model.layers[i].self_attn, quantizer) for i in (1, 0))
        compare(stored(x), x, plan.recipe.cache, export, exact=False)
        assert stored.is_enabled and not kept.is_enabled


# --- Which layers each library quantizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [KEPT, MIXED, Plan("w4a16-g128"), Plan("nvfp4-w"), Plan("fp8-tensor")])
def test_modelopt_quantizes_the_layers_of_the_plan(plan, model):
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
    """The final hidden state in its simulation is ours, up to the order of operations."""
    plan = Plan(f"{recipe}@fp32")
    theirs = mtq.quantize(copy.deepcopy(model), modelopt(plan, model).config, lambda m: m(TOKENS))
    low = lower(model, plan.recipe)
    with torch.no_grad(), low.running():
        ours = final_hidden(low.model, TOKENS)
    exact = final_hidden(model, TOKENS)
    error = (ours - theirs.model(TOKENS, use_cache=False).last_hidden_state).norm() / (ours - exact).norm()
    assert error < 0.02


@pytest.mark.parametrize("plan", [KEPT, MIXED, Plan("bf16", layers=(("lm_head", "fp8-w"),))])
def test_compressed_tensors_quantizes_the_layers_of_the_plan(plan, model):
    export = compressed_tensors(plan, model)
    theirs = copy.deepcopy(model)
    apply_quantization_config(theirs, QuantizationConfig.model_validate(json.loads(export.text())))
    on = {path: m for path, m in theirs.named_modules() if getattr(m, "quantization_scheme", None) is not None}
    assert on.keys() == quantized(plan, model)
    for path, module in on.items():
        operands, scheme = layers_of(plan, model)[path], module.quantization_scheme
        assert scheme.weights.num_bits == operands.weights.format.bits
        assert (scheme.input_activations is None) == (operands.inputs is None)


@pytest.mark.parametrize("plan", [
    Plan("w4a16-g128", modules=("model.layers.0.mlp",)), Plan("w8a8-int8"), Plan("fp8-w", modules=("model.layers.1",)),
    Plan("bf16", layers=((LAYER + "mlp.down_proj", "w4a16-g128"), (LAYER + "self_attn.o_proj", "w8a16-channel"))),
])  # fmt: skip
def test_torchao_quantizes_the_layers_of_the_plan(plan, model):
    model = model.bfloat16()
    config = config_from_dict(json.loads(torchao(plan, model).text()))
    before = {path: type(module.weight.data) for path, module in model.named_modules() if hasattr(module, "weight")}
    quantize_(model, config, filter_fn=None)
    weights = {path: module.weight for path, module in model.named_modules() if path in before}
    changed = {path for path, weight in weights.items() if type(weight.data) is not before[path]}
    assert changed == quantized(plan, model)


@pytest.mark.parametrize("name", ["w3a16-g64", "w4a16-g32", "w8a16-g128", "w4a16-zero-g128", "mxfp4-w", "nvfp4-w"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_groups_are_stored_in_as_many_bits_as_are_counted(name, dtype):
    scheme, layer = RECIPES[name].linear.weights, torch.nn.Linear(256, 64, bias=False).to(dtype)
    args = QuantizationArgs(**arguments(scheme, dynamic=False))
    initialize_module_for_quantization(layer, QuantizationScheme(targets=["Linear"], weights=args))
    stored = args.scale_dtype or layer.weight_scale.dtype
    assert 8 * stored.itemsize == scheme.scale_bits
    assert layer.weight_scale.shape == (64, 256 // scheme.size)


def test_transformers_leaves_the_named_modules_alone(model):
    skipped = modules_to_not_convert(KEPT, model).config["modules_to_not_convert"]
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    kept = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {*config.llm_int8_skip_modules} == {"lm_head", *kept}
