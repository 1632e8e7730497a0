"""Plans for other libraries, as plain data: NVIDIA ModelOpt, compressed-tensors, torchao, transformers.

Each function returns an ``Export``: the configuration, and by name what of the plan is not in it. A scheme that a
library lacks is refused with a ValueError. No library is imported. tests/peers applies each configuration by the real
one, and compares the tensors bit for bit; docs/exports.md has the outcome for every recipe.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fragility_core.models.paths import head_paths, within
from fragility_exports.plan import Plan
from fragility_numerics.formats import Format, of_dtype
from fragility_quantization.ggml import GgmlType
from fragility_quantization.operands import owner, stored_weights, with_known_layers
from fragility_quantization.recipes import Operands
from fragility_quantization.schemes import Scheme

MANY = 5  # modules that a message names
FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of which vLLM and SGLang make one


@dataclass(frozen=True)
class Export:
    """A configuration of another library for a model loaded in ``dtype``, and what of the plan is not in it."""

    config: dict[str, Any]
    missing: tuple[str, ...] = ()
    dtype: str = ""

    def text(self) -> str:
        """The configuration as JSON; numbers as keys, which only ModelOpt has, stay numbers: it is YAML then."""
        return re.sub(r'"(-\d+)":', r"\1:", json.dumps(self.config, indent=2))


INTEGERS = "int8 int4 int3 int2"
SIZES = {"e8m0": (32,), "e4m3": (16,)}  # of groups under such scales; under others they have any size
FLOATS = ("fp8_e4m3", "fp32", "tensor row block", "tensor row group", "largest")
NVFP4, GROUPS = ("fp4_e2m1", "e4m3", "group", "group", "largest"), ("e8m0", "group", "group")
# What libraries have, as tests/peers finds it: formats, the kind of scales, granularities of weights and of inputs, and
# rules for scales. The rule of ModelOpt's MX, which needs CUDA, is read in its tensor_quant_mx.cu.
KINDS = {
    "ModelOpt": (
        (INTEGERS, "fp32", "row group", "row", "largest"), ("fp8_e4m3", "fp32", "tensor row", "tensor row", "largest"),
        ("fp8_e4m3 fp8_e5m2 fp6_e2m3 fp6_e3m2 fp4_e2m1 int8", *GROUPS, "ceil"), NVFP4,
    ),
    "compressed-tensors": (
        (INTEGERS, "fp32 bf16", "row group", "row", "range"), FLOATS,
        ("fp8_e4m3 fp6_e2m3 fp4_e2m1", *GROUPS, "nearest"), NVFP4,
    ),
    "torchao": (
        (INTEGERS, "fp32 bf16", "row group", "row", "range"), FLOATS,
        ("fp8_e4m3 fp8_e5m2 fp4_e2m1", *GROUPS, "floor ceil"), NVFP4,
    ),
}  # fmt: skip


def layers_of(plan: Plan, model: nn.Module) -> dict[str, Operands]:
    """The operands by path of every layer of ``model`` that may have any; none for those that the plan keeps.

    Raises ValueError for a module to keep that ``model`` does not have.
    """
    if unknown := sorted({*plan.modules} - {path for path, _ in model.named_modules()}):
        raise ValueError(f"modules to keep must be in the model, got {named(unknown)}")
    recipe = with_known_layers(model, plan.recipe)
    found = {path: recipe.operands(path) for path in map(owner, stored_weights(model, recipe))}
    return found | {path: Operands() for path in found if any(within(path, module) for module in plan.modules)}


def named(paths: Sequence[str], many: int = MANY) -> str:
    """The first ``many`` of ``paths`` as text, and the number of the others."""
    return ", ".join(paths[:many]) + (f" and {len(paths) - many} more" if len(paths) > many else "")


def fused(layers: Mapping[str, Operands]) -> list[str]:
    """A message that names ``layers`` that engines fuse although their operands differ: engines cannot load them."""
    together: dict[str, set[Operands]] = {}
    for path, operands in layers.items():
        parent, _, name = path.rpartition(".")
        for names in (names for names in FUSED if name in names):
            together.setdefault(f"{parent}.({'|'.join(names)})", set()).add(operands)
    paths = [path for path, unlike in together.items() if len(unlike) > 1]
    return [f"vLLM and SGLang cannot load layers that they fuse in unlike schemes: {named(paths)}"] if paths else []


def dtype_of(plan: Plan) -> torch.dtype:
    """The dtype in which kernels compute."""
    return torch.float32 if plan.weights_only else plan.recipe.kernels.compute_dtype


def missing_parts(plan: Plan, library: str) -> list[str]:
    """Messages that name the parts of ``plan`` that no configuration of ``library`` can express."""
    kernels, computing = plan.recipe.kernels.name, of_dtype(dtype_of(plan)).name
    parts: dict[str, object] = {"the fp32 residual stream": plan.residual, "attention scores in fp32": plan.scores}
    parts["the KV cache"] = plan.recipe.cache is not None and not stores_cache(plan, library)
    parts[f"{kernels} beside kernels that compute in {computing}"] = kernels != computing
    parts[f"fp32 beside {kernels} for {named(plan.modules)}: unquantized, they run in one dtype with the rest"] = (
        plan.modules and computing != "fp32"
    )
    return [f"{library} cannot express {part}" for part, asked in parts.items() if asked]


def stores_cache(plan: Plan, library: str) -> bool:
    """True if the configuration of ``library`` says how the cache is stored: ModelOpt's, in up to 8 bits."""
    cache = plan.recipe.cache
    return library == "ModelOpt" and cache is not None and cache.bits <= 8 and not isinstance(cache, GgmlType)


def differences(library: str, stored: Any, role: str, path: str) -> list[str]:
    """Name the differences of ``library`` from the scheme ``stored``; raises ValueError for a scheme that it lacks."""
    for formats, scales, weights, inputs, rules in KINDS[library] if isinstance(stored, Scheme) else ():
        asked = {stored.format.name: formats, stored.scale: scales}
        asked[stored.granularity] = weights if role == "weights" else inputs
        sized = stored.size in SIZES.get(stored.scale, (stored.size,))
        # ModelOpt scales by the largest entry alone, torchao has no zeros of inputs
        zeros = library == "compressed-tensors" or (library == "torchao" and role == "weights")
        if sized and (stored.symmetric or zeros) and all(name in names.split() for name, names in asked.items()):
            other = stored.symmetric and stored.rule not in rules.split()
            found = [f"has the rule {rules!r}, not {stored.rule!r}, for the scales of {stored.name}"] * other
            found += [f"has scales of {stored.name} in the dtype of weights, not bf16"] * (stored.scale == "bf16")
            rows = (library, role, stored.format.name, stored.granularity) == ("torchao", "inputs", "fp8_e4m3", "row")
            found += [f"takes {stored.name} from bf16 alone, with scales in bf16"] * rows
            return [f"{library} {difference}" for difference in found]
    raise ValueError(f"{library} has no {stored.name} for the {role} of {path}: choose another scheme for its layer")


def quantized(plan: Plan, model: nn.Module, library: str) -> tuple[dict[str, Operands], list[str]]:
    """The layers by path that ``library`` quantizes, and what it cannot express; raises as ``differences`` does."""
    layers, missing, others = {}, missing_parts(plan, library), dict[str, list[str]]()
    for path, operands in layers_of(plan, model).items():
        module, schemes = model.get_submodule(path), {r: s for r, s in vars(operands).items() if s is not None}
        if schemes.keys() == {"inputs"} and library != "ModelOpt":
            raise ValueError(f"{library} has no inputs without weights for {path}: choose another scheme for its layer")
        for role, stored in schemes.items():
            missing += differences(library, stored, role, path)
        if schemes and not isinstance(module, nn.Linear):
            others.setdefault(f"a scheme for {type(module).__name__}", []).append(path)
        elif any(stored.size and module.in_features % stored.size for stored in schemes.values()):
            others.setdefault("groups that do not divide the width", []).append(path)
        elif schemes:
            layers[path] = operands
    return layers, missing + [f"{library} cannot express {what}: {named(paths)}" for what, paths in others.items()]


def export(config: dict[str, Any], missing: Iterable[str], plan: Plan) -> Export:
    """The export of ``config`` for ``plan``; each part of the plan that is ``missing`` is named once."""
    return Export(config, tuple(dict.fromkeys(missing)), str(dtype_of(plan)).removeprefix("torch."))


def untouched(plan: Plan, model: nn.Module) -> list[str]:
    """Paths of the layers that stay as they are: those without operands, and the head unless it has some."""
    layers = layers_of(plan, model)
    return [path for path in dict.fromkeys([*layers, *head_paths(model)]) if not layers.get(path)]


def bits_of(format: Format) -> int | tuple[int, int]:
    """The bits of an integer; exponent and fraction bits of a floating-point format."""
    return format.bits if format.lowest is not None else (format.bits - format.significand, format.significand - 1)


def modelopt(plan: Plan, model: nn.Module) -> Export:
    """``plan`` for ``modelopt.torch.quantization.quantize(model, config, forward_loop)``, as of ModelOpt 0.47.

    ``model`` has the paths of the plan.
    """
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    layers, missing = quantized(plan, model, "ModelOpt")
    for path, operands in layers.items():
        for name, stored in (("weight", operands.weights), ("input", operands.inputs)):
            if stored is not None:
                rules.append({"quantizer_name": f"{path}.{name}_quantizer", "cfg": quantizer(stored, name)})
    if plan.recipe.cache is not None and stores_cache(plan, "ModelOpt"):
        rules.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": quantizer(plan.recipe.cache, "input")})
        rules += [{"quantizer_name": f"{path}.*[kv]_bmm_quantizer", "enable": False} for path in plan.modules]
    return export({"quant_cfg": rules, "algorithm": "max"}, missing, plan)


def quantizer(stored: Any, name: str) -> dict[str, Any]:
    """The attributes of a quantizer of ModelOpt for the "weight" or the "input" of a layer."""
    if not isinstance(stored, Scheme):
        return {"num_bits": bits_of(stored), "use_constant_amax": True}  # the scale 1 of fp8_e4m3
    config: dict[str, Any] = {"num_bits": bits_of(stored.format)}
    dynamic = {"type": "dynamic"} if name == "input" and not stored.static else {}
    rows = {"axis": 0} if name == "weight" else {"axis": None, "block_sizes": {-1: None}}
    if stored.granularity != "group":
        return config | (rows if stored.granularity == "row" else {"axis": None}) | dynamic
    scales = {"e8m0": (8, 0), "e4m3": (4, 3)}.get(stored.scale)
    kind = {"type": "dynamic", "scale_bits": scales} if scales else {"type": "static"}
    return config | {"block_sizes": {-1: stored.size} | kind}


def compressed_tensors(plan: Plan, model: nn.Module) -> Export:
    """``plan`` as the quantization configuration of compressed-tensors, as of 0.20: one group for every scheme.

    llm-compressor's ``QuantizationModifier`` takes the same groups and ``ignore``.
    """
    layers, missing = quantized(plan, model, "compressed-tensors")
    groups: dict[Operands, list[str]] = {}
    for path, operands in layers.items():
        groups.setdefault(operands, []).append(path)
    config: dict[str, Any] = {}
    for number, (operands, paths) in enumerate(groups.items()):
        config[f"group_{number}"] = {"targets": paths, "weights": arguments(operands.weights, dynamic=False)}
        if operands.inputs is not None:
            config[f"group_{number}"]["input_activations"] = arguments(operands.inputs, dynamic=True)
    ignored, missing = untouched(plan, model), [*missing, *fused(layers_of(plan, model))]
    return export({"quant_method": "compressed-tensors", "config_groups": config, "ignore": ignored}, missing, plan)


def arguments(scheme: Any, dynamic: bool) -> dict[str, Any]:
    """The ``QuantizationArgs`` of compressed-tensors for how weights or (``dynamic``) inputs are stored."""
    strategy = {"row": "token" if dynamic else "channel"}.get(scheme.granularity, scheme.granularity)
    found: dict[str, Any] = {
        "num_bits": scheme.format.bits, "type": "float" if scheme.format.lowest is None else "int",
        "symmetric": scheme.symmetric, "strategy": strategy, "dynamic": dynamic and not scheme.static,
    }  # fmt: skip
    if strategy == "block":
        found["block_structure"] = [scheme.size, scheme.size]
    elif scheme.size:
        found["group_size"] = scheme.size
    if scheme.scale == "e4m3":
        found |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        found |= {"dynamic": "local"} if dynamic else {}
    elif scheme.scale == "e8m0":
        found["scale_dtype"] = "torch.uint8"
    return found


def torchao(plan: Plan, model: nn.Module) -> Export:
    """``plan`` as torchao's ``FqnToConfig``, which ``torchao.core.config.config_from_dict`` reads, as of 0.18.

    ``quantize_(model, config, filter_fn=None)`` applies it.
    """
    layers, missing = quantized(plan, model, "torchao")
    configs = {path: layer_config(operands, path) for path, operands in layers.items()}
    return export(typed("FqnToConfig", fqn_to_config=configs), missing, plan)


def typed(kind: str, version: int = 1, **data: Any) -> dict[str, Any]:
    """An object of torchao in the form of its JSON."""
    return {"_type": kind, "_version": version, "_data": data}


def layer_config(operands: Operands, path: str) -> dict[str, Any]:
    """The configuration of torchao for the layer at ``path``; raises ValueError if it cannot express the operands."""
    scheme: Any = operands.weights
    inputs: Any = operands.inputs
    size = scheme.size
    floats = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp4_e2m1": "float4_e2m1fn_x2"}
    dtype = {"_type": "torch.dtype", "_data": floats.get(scheme.format.name, scheme.format.name)}
    mapping = {"_type": "MappingType", "_data": "SYMMETRIC" if scheme.symmetric else "ASYMMETRIC"}
    rows = typed("PerRow", dim=-1) if scheme.granularity == "row" else typed("PerTensor")
    alike = replace(scheme, granularity="group") if scheme.granularity == "block" else scheme
    asked = (scheme.format.name[:3], scheme.granularity, scheme.scale, inputs is not None)
    match asked if inputs in (None, alike) else ():
        case ("int", _, _, False):
            grain = typed("PerGroup", group_size=size) if size else typed("PerAxis", axis=0)
            return typed("IntxWeightOnlyConfig", 2, weight_dtype=dtype, granularity=grain, mapping_type=mapping)
        case ("int", "row", _, True) if scheme.format.bits == 8:
            return typed("Int8DynamicActivationInt8WeightConfig", 2, act_mapping_type=mapping, granularity=rows)
        case ("fp8", _, "fp32", True):
            both = [typed("PerBlock", block_size=[count, size]) for count in (1, size)] if size else [rows, rows]
            return typed("Float8DynamicActivationFloat8WeightConfig", 2, weight_dtype=dtype, granularity=both)
        case ("fp8", ("row" | "tensor"), "fp32", False):
            return typed("Float8WeightOnlyConfig", 2, weight_dtype=dtype, granularity=rows)
        case (_, _, "e8m0", True):
            mode = {"_type": "ScaleCalculationMode", "_data": {"floor": "FLOOR", "ceil": "RCEIL"}[scheme.rule]}
            config = {"block_size": size, "activation_dtype": dtype, "weight_dtype": dtype, "scaling_mode": mode}
            return typed("MXDynamicActivationMXWeightConfig", **config)
        case (_, _, "e4m3", _):
            return typed("NVFP4DynamicActivationNVFP4WeightConfig" if inputs else "NVFP4WeightOnlyConfig")
    beside = "alone" if inputs is None else f"beside {'static ' * inputs.static}{inputs.name} inputs"
    raise ValueError(f"torchao has no {scheme.name} weights {beside} for {path}: choose another scheme for its layer")


def modules_to_not_convert(plan: Plan, model: nn.Module) -> Export:
    """The argument of transformers' quantization configurations that names what stays in the checkpoint's dtype."""
    found = {stored.name for layer in layers_of(plan, model).values() for stored in vars(layer).values() if stored}
    missing = missing_parts(plan, "transformers")
    missing += [f"modules_to_not_convert cannot express {name}: another argument says the scheme" for name in found]
    return export({"modules_to_not_convert": untouched(plan, model)}, sorted(missing), plan)


EXPORTS = {
    "modelopt": modelopt, "compressed-tensors": compressed_tensors, "torchao": torchao,
    "transformers": modules_to_not_convert,
}  # fmt: skip
