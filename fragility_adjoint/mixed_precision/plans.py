"""Application of a plan: a low-precision model in which chosen parts compute in fp32.

Hooks cast tensors where a kept part begins and ends. Type promotion does the rest, natively and emulated: a kernel with
an fp32 operand gives fp32. Hooks are partial functions of a module, so that a protected model can be pickled.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from fragility_adjoint.mixed_precision.structure import scores_can_be_kept
from fragility_core.models.paths import (
    block_paths,
    branch_paths,
    embedding_paths,
    head_paths,
    norm_paths,
    outermost,
    within,
    without_cache,
)
from fragility_exports.plan import Plan
from fragility_numerics.attention import FP32_SCORES, set_attention
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.nested import map_tensors, tensors
from fragility_offload.offloaded import parameter_copy, widen
from fragility_quantization.cache import cast_shared, unrounded
from fragility_quantization.operands import owner, stored_weights, with_known_layers
from fragility_quantization.quantized import Quantized, lower
from fragility_quantization.recipes import Operands
from fragility_quantization.static_scales import calibrated

NOISE = 1e-6  # relative error of a kept module that is none of rounding, at most

Low = TypeVar("Low", bound=LowPrecision)


def cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """``value`` with the tensors of dtype ``source`` in it, however nested, cast to ``target``."""
    return map_tensors(value, lambda x: x.to(target) if x.dtype == source else x)


def cast_inputs(source: torch.dtype, target: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """A hook before the forward of ``module``."""
    return cast(args, source, target), cast(kwargs, source, target)


def cast_output(source: torch.dtype, target: torch.dtype, module: nn.Module, args: tuple, output: Any) -> Any:
    """A hook after the forward of ``module``."""
    return cast(output, source, target)


def restore_fp32(module: nn.Module, exact: nn.Module, copies: dict[int, nn.Parameter]) -> None:
    """Give ``module`` copies of the parameters and buffers of its fp32 twin ``exact``.

    Modules that shared a rounded parameter with it keep the rounded one. ``copies`` holds the copies made so far, by
    the ``id`` of the twin's parameter: two kept modules that share a table still share it.
    """
    for rounded, twin in zip(module.modules(), exact.modules(), strict=True):
        for name, parameter in twin.named_parameters(recurse=False):
            if id(parameter) not in copies:
                copies[id(parameter)] = parameter_copy(parameter)
            setattr(rounded, name, copies[id(parameter)])
        for name, buffer in twin.named_buffers(recurse=False):
            setattr(rounded, name, buffer.clone())


def keep_stream(model: nn.Module, compute_dtype: torch.dtype, kept: Collection[str]) -> None:
    """Keep the residual stream of ``model`` in fp32: embeddings give fp32, and sums with an fp32 stream are fp32.

    What is inside of the modules at the paths ``kept`` is left alone.
    """
    parts = {path: m for path, m in model.named_modules() if not any(p != path and within(path, p) for p in kept)}
    for path in parts.keys() & embedding_paths(model):
        parts[path].register_forward_hook(partial(cast_output, compute_dtype, torch.float32))
    for path in parts.keys() & norm_paths(model):
        parts[path].register_forward_pre_hook(widen_weights)
        parts[path].register_forward_hook(partial(cast_output, torch.float32, compute_dtype))
    clamp = partial(clamp_mask, torch.finfo(compute_dtype).min)
    for path in parts.keys() & branch_paths(model):
        for hook in (clamp, partial(cast_inputs, torch.float32, compute_dtype)):
            parts[path].register_forward_pre_hook(hook, with_kwargs=True)


def clamp_mask(lowest: float, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Raise an additive mask to the ``lowest`` number of the format; with an fp32 stream it holds fp32's lowest."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dtype != torch.float32:
        return args, kwargs
    return args, kwargs | {"attention_mask": mask.clamp_min(lowest)}


def widen_weights(norm: nn.Module, args: tuple) -> None:
    """Let a norm with an fp32 input compute in fp32, with its rounded weights."""
    if args[0].dtype == torch.float32:
        for parameter in norm.parameters():
            widen(parameter)


@torch.no_grad()
def apply(model: nn.Module, plan: Plan, execution: str = "auto", tokens: Tensor | None = None) -> Quantized:
    """A copy of the fp32 ``model`` in the plan's format, except for the parts that the plan keeps.

    ``execution`` is that of ``lowering.lower``. By default it is "weights" for a plan that was made for weights alone.
    A pass over ``tokens`` (B, T), two zeros unless given, checks that the kept parts compute in fp32 and round nothing.
    Static scales are measured over the tokens, which then must be given. Raises ValueError for an unknown module, for
    one that does not run or is not in force, for a residual stream or scores that cannot be kept, and in training mode.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"apply takes a Plan, got {plan!r:.60}: predict(...).plan(...) has its own apply()")
    if any(module.training for module in model.modules()):
        raise ValueError("a plan is checked in a pass of the model in eval mode, got training mode: call model.eval()")
    require_modules(model, plan.modules)
    recipe = with_known_layers(model, plan.recipe if tokens is None else calibrated(model, plan.recipe, tokens))
    if not recipe.rounds and (plan.modules or plan.residual or plan.scores):
        raise ValueError(f"keeping parts in fp32 needs a format that rounds results, such as bf16, got {plan.format}")
    layers = map(owner, stored_weights(model, recipe))
    kept = {path: Operands() for path in layers if any(within(path, module) for module in plan.modules)}
    recipe = replace(recipe, layers=dict(recipe.layers) | kept, uncached=recipe.uncached | {*plan.modules})
    if plan.scores and not scores_can_be_kept(model):
        raise ValueError(
            "scores can be kept in models whose attention comes from transformers' attention interface and neither "
            f"caps scores nor adds to them, got {type(model).__name__}: keep its attention modules instead"
        )
    low = lower(model, recipe, "weights" if plan.weights_only and execution == "auto" else execution)
    return protect(low, model, plan, tokens)


@torch.no_grad()
def protect(low: Low, model: nn.Module, plan: Plan, tokens: Tensor | None = None) -> Low:
    """``low``, changed in place: the parts that ``plan`` keeps are those of ``model``, from which it was rounded.

    ``apply`` does so with a model that it lowers itself. ``tokens`` and errors are those of ``apply``.
    """
    require_modules(model, plan.modules)
    plan = replace(plan, modules=outermost(plan.modules))
    require_own(model, plan.modules)
    compute_dtype = torch.float32 if low.weights_only else low.format.compute_dtype
    # Outputs that are not cast back: the stream, if it is kept, and the logits, which nothing follows.
    fp32_outputs = {*head_paths(model), *(plan.residual * [*embedding_paths(model), *block_paths(model)])}
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device) if tokens is None else tokens
    returned = dtypes_of(plan.modules, low, tokens)  # some models keep the stream in fp32 themselves
    fp32_outputs |= {path for path, dtypes in returned.items() if {*dtypes} == {torch.float32}}
    if plan.residual:
        keep_stream(low.model, compute_dtype, plan.modules)
    copies: dict[int, nn.Parameter] = {}
    for path in plan.modules:
        module = low.model.get_submodule(path)
        restore_fp32(module, model.get_submodule(path), copies)
        module.register_forward_pre_hook(partial(cast_inputs, compute_dtype, torch.float32), with_kwargs=True)
        if path not in fp32_outputs:
            module.register_forward_hook(partial(cast_output, torch.float32, compute_dtype))
    for module in low.model.modules():
        if getattr(module, "is_kv_shared_layer", False):
            module.register_forward_pre_hook(cast_shared, with_kwargs=True)
    if plan.scores:
        set_attention(low.model, FP32_SCORES)
    check(low, plan, tokens, fp32_outputs, compute_dtype)
    return low


def require_modules(model: nn.Module, paths: Collection[str]) -> None:
    """Raises ValueError for a path at which ``model`` has no module with parameters; names the most similar paths."""
    modules = dict(model.named_modules())
    known = [path for path, module in modules.items() if path and next(module.parameters(), None) is not None]
    for path in paths:
        if isinstance(modules.get(path), (nn.ModuleList, nn.ModuleDict)):
            inside = ", ".join(f"{path}.{name}" for name, _ in modules[path].named_children())
            raise ValueError(f"a module to keep must run itself, got {path!r}, which only holds others: name {inside}")
        if path not in known:
            like = ", ".join(get_close_matches(path, known)) or ", ".join(known[:5])
            raise ValueError(f"a module to keep must be one of the model's with parameters, got {path!r}: see {like}")


def require_own(model: nn.Module, paths: Collection[str]) -> None:
    """Raises ValueError if a module at or in ``paths`` has parameters and is also used outside of ``paths``."""
    roots = {*map(model.get_submodule, paths)}
    every = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if [*m.parameters()]]
    kept = [path for path, module in every if module in roots]
    inside = {module: path for path, module in every if any(within(path, p) for p in kept)}
    for path, module in every:
        if module in inside and not any(within(path, p) for p in kept):
            raise ValueError(f"a plan keeps a shared module for all its users, got {inside[module]}: keep {path}, too")


def check(
    low: LowPrecision, plan: Plan, tokens: Tensor, fp32_outputs: Collection[str], compute_dtype: torch.dtype
) -> None:
    """Raises ValueError unless exactly the parts that ``plan`` names are in fp32 in a pass over ``tokens``.

    Kept modules receive fp32 and round nothing, inputs of products and a cache included. They return ``compute_dtype``,
    or fp32 if they are among ``fp32_outputs``. If the residual stream is kept, every block returns fp32.
    """

    def require(path: str, invariant: str, holds: bool, found: object) -> None:
        if not holds:
            raise ValueError(f"the plan is not in force: {path} must {invariant}, got {found}")

    blocks = block_paths(low.model) if plan.residual else []  # blocks of a vision tower do not run
    calls: dict[str, list[Call]] = {path: [] for path in plan.modules}
    returned = dtypes_of({*plan.modules, *blocks}, low, tokens, calls)
    for path in plan.modules:
        parameters = {p.dtype for p in low.model.get_submodule(path).parameters()}
        require(path, "run in the checking pass", path in returned, "no call of it: give tokens that reach it")
        require(path, "have fp32 parameters", parameters == {torch.float32}, parameters)
        received = {*floating(calls[path][-1][:2])}
        require(path, "receive fp32", received <= {torch.float32}, received)
        expected = torch.float32 if path in fp32_outputs else compute_dtype
        require(path, f"return {expected}", {*returned[path]} == {expected}, {*returned[path]})
        rounded = max(call.distance(low.model.get_submodule(path)) for call in calls[path])
        require(path, "round nothing inside", rounded <= NOISE, f"a relative error of {rounded:.2g}")
    for path in (path for path in blocks if path in returned):
        stream = returned[path][0] if returned[path] else None  # attention weights may follow it
        require(path, "keep the residual stream in fp32", stream == torch.float32, stream)


class Call(NamedTuple):
    """A call of a module that computes in fp32: what it got, caches as they were, and what its forward returned."""

    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def distance(self, module: nn.Module) -> float:
        """The relative error of the call against ``module`` by itself, which rounds no inputs, caches or results."""
        pairs = zip(tensors(self.output), tensors(module.forward(*self.args, **self.kwargs)), strict=True)
        known = [(x.double(), y.double()) for x, y in pairs if x.is_floating_point() and y.isfinite().all()]
        return max((float((x - y).norm() / y.norm().clamp_min(1e-300)) for x, y in known), default=0.0)


def floating(values: Any) -> list[torch.dtype]:
    """The dtypes of floating tensors."""
    return [x.dtype for x in tensors(values) if x.is_floating_point()]


def dtypes_of(
    paths: Collection[str], low: LowPrecision, tokens: Tensor, calls: Mapping[str, list[Call]] = MappingProxyType({})
) -> dict[str, list[torch.dtype]]:
    """The dtypes of floating tensors that modules at ``paths`` return in a pass over ``tokens``, by path.

    Modules that do not run are missing. ``calls`` gets every call of its modules, before other hooks change results.
    """
    returned: dict[str, list[torch.dtype]] = {}
    if not paths:
        return returned

    def record(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        returned[path] = floating(output)

    def begin(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        args = tuple(unrounded(x) if isinstance(x, Cache) else x for x in args)
        kwargs = {key: unrounded(x) if isinstance(x, Cache) else x for key, x in kwargs.items()}
        calls[path].append(Call(args, kwargs, None))

    def end(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        calls[path][-1] = calls[path][-1]._replace(output=output)

    with ExitStack() as stack:
        for path in paths:
            module = low.model.get_submodule(path)
            hooks = [module.register_forward_hook(partial(record, path))]
            if path in calls:
                hooks.append(module.register_forward_pre_hook(partial(begin, path), with_kwargs=True))
                hooks.append(module.register_forward_hook(partial(end, path), prepend=True))
            for hook in hooks:
                stack.callback(hook.remove)
        with low.running():
            low.model(tokens, **without_cache(low.model))
    return returned
