"""Plans for other libraries, as plain data: NVIDIA ModelOpt, compressed-tensors, torchao, transformers.

Each function returns an ``Export``: the configuration, and by name what the library cannot express. No library is
imported. tests/peers loads each configuration in the real one and compares the layers that it quantizes.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fragility_adjoint.mixed_precision.plans import Plan
from fragility_adjoint.quantization.operands import linear_weights, owner
from fragility_adjoint.quantization.recipes import Operands
from fragility_adjoint.quantization.schemes import Scheme
from fragility_core.models.paths import head_paths, within
from fragility_core.numerics.formats import Format, NumberFormat

MANY = 5  # modules that a message names


@dataclass(frozen=True)
class Export:
    """A configuration of another library, and what of the plan is not in it."""

    config: dict[str, Any]
    missing: tuple[str, ...] = ()

    def json(self) -> str:
        """The configuration as text."""
        return json.dumps(self.config, indent=2)


def to_json(plan: Plan) -> str:
    """``plan`` as text, which ``from_json`` reads."""
    return json.dumps(asdict(plan), indent=2)


def from_json(text: str) -> Plan:
    """The plan that ``to_json`` wrote; raises ValueError for another text."""
    try:
        fields = json.loads(text)
        modules, layers = tuple(fields.pop("modules")), tuple(map(tuple, fields.pop("layers")))
        return Plan(modules=modules, layers=layers, **fields)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as cause:
        raise ValueError(f"a plan must be JSON that to_json wrote, got {text[:60]!r}") from cause


def layers_of(plan: Plan, model: nn.Module) -> dict[str, Operands]:
    """The operands of every linear layer of the blocks of ``model`` by path; none for those that the plan keeps."""
    recipe, paths = plan.recipe, dict.fromkeys(owner(path) for path in linear_weights(model))
    kept = {path for path in paths if any(within(path, module) for module in plan.modules)}
    return {path: Operands() if path in kept else recipe.operands(path) for path in paths}


def missing_parts(plan: Plan, library: str) -> list[str]:
    """Parts of ``plan`` that no configuration of ``library`` can say."""
    parts: dict[str, object] = {"the fp32 residual stream": plan.residual, "attention scores in fp32": plan.scores}
    parts["the KV cache"] = plan.recipe.cache is not None and library != "ModelOpt"
    shown = ", ".join(plan.modules[:MANY]) + (
        f" and {len(plan.modules) - MANY} more" if len(plan.modules) > MANY else ""
    )
    parts[f"fp32 beside {plan.recipe.kernels.name} for {shown}: unquantized, they run in one dtype with the rest"] = (
        plan.modules
    )
    return [f"{library} cannot express {part}" for part, asked in parts.items() if asked]


def untouched(plan: Plan, model: nn.Module) -> list[str]:
    """Paths of the linear layers that stay as they are: those without operands, and the head."""
    return [path for path, operands in layers_of(plan, model).items() if not operands] + head_paths(model)


def bits_of(format: Format) -> int | tuple[int, int]:
    """The bits of an integer; exponent and fraction bits of a floating-point format."""
    return format.bits if format.lowest is not None else (format.bits - format.significand, format.significand - 1)


def parts(stored: Any) -> tuple[Format, Scheme]:
    """The format of ``stored``, and the scheme; a format alone is one under the scale 1."""
    return (stored.format, stored) if isinstance(stored, Scheme) else (stored, Scheme(stored))


def modelopt(plan: Plan, model: nn.Module) -> Export:
    """``plan`` for ``modelopt.torch.quantization.quantize(model, config, forward_loop)``, as of ModelOpt 0.47.

    ``model`` has the paths of the plan. ModelOpt quantizes ``nn.Linear``, not GPT-2's ``Conv1D``. It takes the
    ``config`` itself: the keys of ``block_sizes`` are numbers, which JSON turns into texts that it refuses.
    """
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    missing = missing_parts(plan, "ModelOpt")
    for path, operands in layers_of(plan, model).items():
        for name, stored in (("weight", operands.weights), ("input", operands.inputs)):
            if stored is not None:
                rules.append({"quantizer_name": f"{path}.{name}_quantizer", "cfg": quantizer(stored, name)})
                missing += lost(stored, "ModelOpt", rules=("largest", "ceil", "floor"))
    if plan.recipe.cache is not None:
        rules.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": quantizer(plan.recipe.cache, "input")})
    return Export({"quant_cfg": rules, "algorithm": "max"}, tuple(dict.fromkeys(missing)))


def quantizer(stored: NumberFormat, name: str) -> dict[str, Any]:
    """The attributes of a quantizer of ModelOpt for the "weight" or the "input" of a layer."""
    format, scheme = parts(stored)
    config: dict[str, Any] = {"num_bits": bits_of(format)}
    if scheme.granularity == "tensor":
        return config | {"axis": None}
    if scheme.granularity == "row":
        by_token = {"axis": None, "type": "dynamic", "block_sizes": {-1: None}}
        return config | ({"axis": 0} if name == "weight" else by_token)
    sizes: dict[Any, Any] = {-1: scheme.size} | ({-2: scheme.size} if scheme.granularity == "block" else {})
    scales = {"e8m0": (8, 0), "e4m3": (4, 3)}.get(scheme.scale)
    kind = "dynamic" if scales or name == "input" else "static"
    return config | {"block_sizes": sizes | {"type": kind} | ({"scale_bits": scales} if scales else {})}


def lost(stored: NumberFormat, library: str, rules: tuple[str, ...]) -> list[str]:
    """Properties of how a layer is stored that ``library``, with its ``rules`` for scales, loses."""
    _, scheme = parts(stored)
    found = [] if scheme.rule in rules else [f"{library} has no rule {scheme.rule!r} for the scales of {scheme.name}"]
    return found + ([] if scheme.symmetric else [f"{library} has symmetric integers alone, not {scheme.name}"])


def compressed_tensors(plan: Plan, model: nn.Module) -> Export:
    """``plan`` as the quantization configuration of compressed-tensors, as of 0.20: one group for every scheme.

    The same groups and ``ignore`` are those of llm-compressor's ``QuantizationModifier``.
    """
    layers, missing = layers_of(plan, model), missing_parts(plan, "compressed-tensors")
    groups: dict[Operands, list[str]] = {}
    for path, operands in layers.items():
        if operands.weights is not None:
            groups.setdefault(operands, []).append(path)
    config: dict[str, Any] = {}
    for number, (operands, paths) in enumerate(groups.items()):
        config[f"group_{number}"] = {"targets": paths, "weights": arguments(operands.weights, dynamic=False)}
        if operands.inputs is not None:
            config[f"group_{number}"]["input_activations"] = arguments(operands.inputs, dynamic=True)
        if parts(operands.weights)[1].rule == "mse":
            missing.append("compressed-tensors leaves the rule 'mse' to the observer of llm-compressor")
    return Export(
        {"quant_method": "compressed-tensors", "config_groups": config, "ignore": untouched(plan, model)},
        tuple(dict.fromkeys(missing)),
    )


def arguments(stored: NumberFormat | None, dynamic: bool) -> dict[str, Any]:
    """The ``QuantizationArgs`` of compressed-tensors for how weights or (``dynamic``) inputs are stored."""
    format, scheme = parts(stored)
    strategy = {"row": "token" if dynamic else "channel"}.get(scheme.granularity, scheme.granularity)
    found: dict[str, Any] = {
        "num_bits": format.bits, "type": "float" if format.lowest is None else "int", "symmetric": scheme.symmetric,
        "strategy": strategy, "dynamic": dynamic and not scheme.static,
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

    ``quantize_(model, config, filter_fn=None)`` applies it. Raises ValueError for schemes that torchao lacks.
    """
    layers = {path: operands for path, operands in layers_of(plan, model).items() if operands}
    configs = {path: layer_config(operands, path) for path, operands in layers.items()}
    config = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
    missing = missing_parts(plan, "torchao")
    for operands in layers.values():
        if operands.weights is not None:
            missing += lost(operands.weights, "torchao", rules=("largest", "floor", "ceil"))
    return Export(config, tuple(dict.fromkeys(missing)))


def typed(kind: str, version: int = 1, **data: Any) -> dict[str, Any]:
    """An object of torchao as its JSON has it."""
    return {"_type": kind, "_version": version, "_data": data}


def layer_config(operands: Operands, path: str) -> dict[str, Any]:
    """The configuration of torchao for the layer at ``path``."""
    format, scheme = parts(operands.weights or operands.inputs)
    size, float8 = scheme.size, {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    rows = typed("PerRow", dim=-1) if scheme.granularity == "row" else typed("PerTensor")
    number = format.name, scheme.granularity, scheme.scale, operands.inputs is not None
    mx = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp4_e2m1": "float4_e2m1fn_x2"}
    match number:
        case (("int8" | "int4" | "int3" | "int2"), ("row" | "group"), _, False):
            grain = typed("PerGroup", group_size=size) if size else typed("PerAxis", axis=0)
            integers = {"_type": "torch.dtype", "_data": format.name}
            return typed("IntxWeightOnlyConfig", 2, weight_dtype=integers, granularity=grain)
        case ("int8", "row", _, True):
            kind = {"_type": "MappingType", "_data": "SYMMETRIC"}
            return typed("Int8DynamicActivationInt8WeightConfig", 2, act_mapping_type=kind, granularity=rows)
        case ("fp8_e4m3", ("row" | "tensor"), "fp32", True):
            return typed("Float8DynamicActivationFloat8WeightConfig", 2, weight_dtype=float8, granularity=[rows, rows])
        case ("fp8_e4m3", ("row" | "tensor"), "fp32", False):
            return typed("Float8WeightOnlyConfig", 2, weight_dtype=float8, granularity=rows)
        case (name, "group", "e8m0", True) if name in mx:
            numbers = {"_type": "torch.dtype", "_data": mx[name]}
            mode = {"_type": "ScaleCalculationMode", "_data": {"floor": "FLOOR", "ceil": "RCEIL"}[scheme.rule]}
            return typed(
                "MXDynamicActivationMXWeightConfig", block_size=size, activation_dtype=numbers, weight_dtype=numbers,
                scaling_mode=mode,
            )  # fmt: skip
        case (_, _, "e4m3", inputs):
            return typed("NVFP4DynamicActivationNVFP4WeightConfig" if inputs else "NVFP4WeightOnlyConfig")
    raise ValueError(f"torchao has no configuration for {scheme.name} in {path}: choose another scheme for its layer")


def modules_to_not_convert(plan: Plan, model: nn.Module) -> Export:
    """The argument of transformers' quantization configurations that names what stays in the checkpoint's dtype."""
    schemes = {operands for operands in layers_of(plan, model).values() if operands}
    missing = missing_parts(plan, "transformers")
    if len(schemes) > 1:
        missing.append(f"modules_to_not_convert cannot express {len(schemes)} schemes beside each other")
    return Export({"modules_to_not_convert": untouched(plan, model)}, tuple(missing))


EXPORTS = {
    "modelopt": modelopt, "compressed-tensors": compressed_tensors, "torchao": torchao,
    "transformers": modules_to_not_convert,
}  # fmt: skip
