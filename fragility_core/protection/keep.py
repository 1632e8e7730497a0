"""Apply a plan: a low-precision model in which chosen parts compute in fp32.

Only casts at boundaries are added, as hooks. The rest follows from type promotion, natively and
emulated alike: a kernel with an fp32 operand gives fp32.
"""

from collections.abc import Collection
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from fragility_core.arithmetic.attention import FP32_SCORES, set_attention
from fragility_core.arithmetic.formats import get_format
from fragility_core.arithmetic.lowering import LowPrecision, lower
from fragility_core.arithmetic.nested import tensors
from fragility_core.models.tree import block_paths, branch_paths, embedding_paths, head_paths, norm_paths, within
from fragility_core.protection.plans import Plan
from fragility_core.protection.structure import scores_can_be_kept


def cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """``value`` with the tensors of dtype ``source`` in nested tuples, lists and mappings cast to ``target``."""
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype == source else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, source, target) for item in value)
    if type(value) is dict or isinstance(value, ModelOutput):
        return type(value)(**{key: cast(item, source, target) for key, item in value.items()})
    return value


# Hooks are partial functions of a module, so that a protected model can be pickled.


def cast_inputs(module: nn.Module, source: torch.dtype, target: torch.dtype) -> None:
    """Let ``module`` receive what is of dtype ``source`` in ``target``."""
    module.register_forward_pre_hook(partial(_cast_inputs, source, target), with_kwargs=True)


def _cast_inputs(source: torch.dtype, target: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    return cast(args, source, target), cast(kwargs, source, target)


def cast_output(module: nn.Module, source: torch.dtype, target: torch.dtype) -> None:
    """Let ``module`` return what is of dtype ``source`` in ``target``."""
    module.register_forward_hook(partial(_cast_output, source, target))


def _cast_output(source: torch.dtype, target: torch.dtype, module: nn.Module, args: tuple, output: Any) -> Any:
    return cast(output, source, target)


def restore_fp32(module: nn.Module, exact: nn.Module, kept: dict[int, nn.Parameter]) -> None:
    """Give ``module`` what its fp32 twin ``exact`` has; others that shared its parameters keep theirs.

    ``kept`` has those given to modules before, by the id of the twin's: a table that two share stays one.
    """
    for owner, twin in zip(module.modules(), exact.modules(), strict=True):
        for name, parameter in twin.named_parameters(recurse=False):
            if id(parameter) not in kept:
                kept[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            owner._parameters[name] = kept[id(parameter)]
        for name, buffer in twin.named_buffers(recurse=False):
            owner._buffers[name] = buffer.clone()


def keep_module(
    module: nn.Module, exact: nn.Module, compute_dtype: torch.dtype, kept: dict[int, nn.Parameter], narrow: bool = True
) -> None:
    """Let ``module`` compute in fp32 with the parameters of ``exact``; with ``narrow`` its output is cast back.

    For ``kept`` see ``restore_fp32``.
    """
    restore_fp32(module, exact, kept)
    cast_inputs(module, compute_dtype, torch.float32)
    if narrow:
        cast_output(module, torch.float32, compute_dtype)


def keep_stream(model: nn.Module, compute_dtype: torch.dtype, modules: Collection[str]) -> None:
    """Let the residual stream of ``model`` be fp32: it begins so, and sums with it stay so.

    ``modules`` are kept whole: what is inside of them is left alone.
    """
    parts = {path: m for path, m in model.named_modules() if not any(p != path and within(path, p) for p in modules)}
    for path in parts.keys() & embedding_paths(model):
        cast_output(parts[path], compute_dtype, torch.float32)
    for path in parts.keys() & norm_paths(model):
        parts[path].register_forward_pre_hook(widen_with_input)
        cast_output(parts[path], torch.float32, compute_dtype)
    for path in parts.keys() & branch_paths(model):
        parts[path].register_forward_pre_hook(partial(raise_lowest, torch.finfo(compute_dtype).min), with_kwargs=True)
        cast_inputs(parts[path], torch.float32, compute_dtype)


def raise_lowest(lowest: float, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """An additive mask, fp32 beside an fp32 stream, holds fp32's lowest number, and at least that of the format."""
    mask = kwargs.get("attention_mask")
    additive = mask is not None and mask.dtype == torch.float32
    return args, kwargs | {"attention_mask": mask.clamp_min(lowest)} if additive else kwargs


def widen_with_input(norm: nn.Module, args: tuple) -> None:
    """A norm that is given fp32 computes in fp32, with its weights as they are."""
    if args[0].dtype == torch.float32:
        for parameter in norm.parameters():
            parameter.data = parameter.data.float()


def require_scores(model: nn.Module) -> None:
    """Raises ValueError for a model whose attention is more than a softmax of scaled products."""
    if not scores_can_be_kept(model):
        raise ValueError(
            "scores can be kept in models whose attention comes from transformers' attention interface and neither "
            f"caps scores nor adds to them, got {type(model).__name__}: keep its attention modules instead"
        )


@torch.no_grad()
def apply(model: nn.Module, plan: Plan, execution: str = "auto", tokens: Tensor | None = None) -> LowPrecision:
    """The fp32 ``model`` in the plan's format, but for what the plan keeps; ``model`` itself stays as it is.

    ``execution`` is that of ``lowering.lower``, unless given "weights" for a plan that was made for weights
    alone. A pass over ``tokens`` (B, T), two zeros unless given, checks that everything named computes in
    fp32 indeed. Raises ValueError for an unknown module, one that does not run or whose dtype did not
    change, and for a stream or scores that cannot be kept.
    """
    require_modules(model, plan.modules)
    if get_format(plan.format).compute_dtype == torch.float32:
        raise ValueError(f"keeping parts in fp32 needs a format that rounds results, got {plan.format}")
    if plan.scores:
        require_scores(model)
    low = lower(model, plan.format, "weights" if plan.weights_only and execution == "auto" else execution)
    compute_dtype = torch.float32 if low.weights_only else low.format.compute_dtype
    # Outputs that stay fp32: the stream, where it is kept, and the logits, after which nothing follows.
    wide = {*head_paths(model), *(plan.residual * [*embedding_paths(model), *block_paths(model)])}
    if tokens is None:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    returned = dtypes_of(plan.modules, low, tokens)[1]  # some models keep the stream in fp32 of their own accord
    wide |= {path for path, dtypes in returned.items() if {*dtypes} == {torch.float32}}
    if plan.residual:
        keep_stream(low.model, compute_dtype, plan.modules)
    kept: dict[int, nn.Parameter] = {}
    for path in plan.modules:
        keep_module(low.model.get_submodule(path), model.get_submodule(path), compute_dtype, kept, path not in wide)
    if plan.scores:
        set_attention(low.model, FP32_SCORES)
    check(low, plan, tokens, wide, compute_dtype)
    return low


def require_modules(model: nn.Module, paths: Collection[str]) -> None:
    """Raises ValueError for a path at which ``model`` has no module with parameters, naming those most like it."""
    modules = dict(model.named_modules())
    known = [path for path, module in modules.items() if path and next(module.parameters(), None) is not None]
    for path in paths:
        if isinstance(modules.get(path), (nn.ModuleList, nn.ModuleDict)):
            inside = ", ".join(f"{path}.{name}" for name, _ in modules[path].named_children())
            raise ValueError(f"a module to keep must run itself, got {path!r}, which only holds others: name {inside}")
        if path not in known:
            like = ", ".join(get_close_matches(path, known)) or ", ".join(known[:5])
            raise ValueError(f"a module to keep must be one of the model's with parameters, got {path!r}: see {like}")


def check(low: LowPrecision, plan: Plan, tokens: Tensor, wide: Collection[str], compute_dtype: torch.dtype) -> None:
    """Raises ValueError unless, in a pass over ``tokens``, what ``plan`` names is in fp32 and the rest is not.

    Kept modules take fp32 and give ``compute_dtype``, those in ``wide`` fp32. With ``residual`` every block gives fp32.
    """
    blocks = block_paths(low.model) if plan.residual else []  # of these, some may not run: a vision tower's
    received, returned = dtypes_of({*plan.modules, *blocks}, low, tokens)
    for path in plan.modules:
        parameters = {p.dtype for p in low.model.get_submodule(path).parameters()}
        require(path, "run in the checking pass", path in returned, "no call of it: give tokens that reach it")
        require(path, "have fp32 parameters", parameters == {torch.float32}, parameters)
        require(path, "receive fp32", {*received[path]} <= {torch.float32}, {*received[path]})
        expected = torch.float32 if path in wide else compute_dtype
        require(path, f"return {expected}", {*returned[path]} == {expected}, {*returned[path]})
    for path in (path for path in blocks if path in returned):
        stream = returned[path][0] if returned[path] else None  # attention weights may come after it
        require(path, "keep the residual stream in fp32", stream == torch.float32, stream)


def require(path: str, invariant: str, holds: bool, found: object) -> None:
    """Raises ValueError unless it ``holds``."""
    if not holds:
        raise ValueError(f"the plan is not in force: {path} must {invariant}, got {found}")


def dtypes_of(
    paths: Collection[str], low: LowPrecision, tokens: Tensor
) -> tuple[dict[str, list[torch.dtype]], dict[str, list[torch.dtype]]]:
    """Dtypes of the floating tensors that the modules at ``paths``, those that run, receive and return, in order."""
    received, returned = {}, {}

    def floating(values: Any) -> list[torch.dtype]:
        return [x.dtype for x in tensors(values) if x.is_floating_point()]

    with ExitStack() as stack:
        for path in paths:

            def note(module, args, kwargs, output, path=path):
                returned[path] = floating(output)

            def look(module, args, kwargs, path=path):
                received[path] = floating((args, kwargs))

            module = low.model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        with low.running():
            low.model(tokens, **({"use_cache": False} if isinstance(low.model, PreTrainedModel) else {}))
    return received, returned
