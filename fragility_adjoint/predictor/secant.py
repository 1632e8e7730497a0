"""Secant slopes: gradients by which signed contributions add up to the error of a pass, at any size of it.

A gradient is the slope of a tangent. Here the low-precision pass and the fp32 pass run side by side. The slope of every
kernel f is that of the secant between its arguments x in fp32 and x' in low precision, a linear map S with

    f(x) - f(x') = S (x - x').

The errors e_i of all roundings, exact minus rounded, then reach the output through products of such maps alone:

    X_L - X_L' = sum_i S_i e_i.

The signed contributions <S_i' v, e_i> to a probe v add up to v.E_L for the measured error E_L = X_L - X_L', apart from
what fp32 rounds. This is the rescale rule of DeepLIFT (Shrikumar et al. 2017, arXiv:1704.02685) for roundings in place
of inputs.

- An elementwise function of one tensor has the quotient of the differences as its slope.
- A product is exact with both factors halfway between the two passes, as is all that is at most quadratic.
- A softmax p of x has S = diag(m) - m m' / sum(m), where m is the logarithmic mean of p and p':
  p - p' = m (log p - log p'), and log p - log p' is x - x' up to a constant, under which differences of p add up to 0.
- Layer norm, RMS norm, quotients and fused attention are taken apart into these.

Any other function of torch gets its gradient halfway, which is exact to second order. An autograd function of the
model's own keeps its gradient. Choices, such as those of experts, are taken from the low-precision pass, even if the
fp32 pass by itself would choose otherwise. ``Prediction.windows`` has the remainder.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fragility_adjoint.internals import base_of, has_reference, is_view, refer, reference_of
from fragility_adjoint.predictor.arithmetic import PROPERTIES, LowArithmetic, WithHistory
from fragility_adjoint.predictor.calls import FunctionCall, in_place
from fragility_adjoint.predictor.parameters import ParameterTable
from fragility_adjoint.predictor.recorder import ErrorRecorder
from fragility_numerics.kernels import BOUNDING, EXACT_FUNCTIONS
from fragility_numerics.nested import map_tensors, tensors
from fragility_quantization.operands import storages
from fragility_quantization.recipes import Recipe

CLOSE = 1e-7  # relative difference in fp64 up to which a secant is a tangent; its relative error is the square of that
CUT = {Tensor.detach, PROPERTIES.data.__get__}  # functions that give a tensor without a history
# Linear in floating tensors, and so run as they are. To leave one out costs time alone: halfway is exact, too.
# Those of EXACT_FUNCTIONS that look at the size of entries are not linear.
SELECTING = {"max", "min", "topk", "sort", "kthvalue", "median", "mode"}
LINEAR = EXACT_FUNCTIONS - SELECTING - BOUNDING - {"abs", "relu", "maximum", "minimum", "amax"} | {
    "to", "float", "double", "type", "type_as", "cpu", "cuda", "add", "sub", "__rsub__", "sum", "mean", "index_add",
    "scatter_add", "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims",
}  # fmt: skip
MAKING = {"empty", "zeros", "ones", "full", "rand", "randn", "randint"}  # their results depend on no entry
ELEMENTWISE = {
    "abs", "relu", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow",
    "square", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "sigmoid", "erf", "gelu", "silu", "mish", "selu",
    "celu", "elu", "softplus", "softsign", "tanhshrink", "relu6", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh",
    "logsigmoid", "log_sigmoid", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "__rdiv__",
    "__rpow__",
}  # fmt: skip


def halfway(x: Tensor) -> Tensor:
    """``x`` moved halfway to its reference; what is infinite in both stays."""
    if not has_reference(x) or not x.is_floating_point():
        return x
    return x + (reference_of(x) - x).detach().div_(2).nan_to_num_(0.0, 0.0, 0.0)


def at_halfway(function: Callable, *args, **kwargs) -> Any:
    """``function`` with all its tensors halfway to their references."""
    return function(*map_tensors(args, halfway), **map_tensors(kwargs, halfway))


def elementwise(function: Callable, *args, **kwargs) -> Tensor:
    """A tensor times the difference quotient of ``function``; where the passes hardly differ, times the derivative.

    A function of several tensors with references is linearized halfway between the passes (``at_halfway``).
    """
    varying = [x for x in tensors((args, kwargs)) if has_reference(x)]
    x = varying[0]

    def at(point: Tensor) -> Tensor:
        given = map_tensors((args, kwargs), lambda a: point if a is x else a)
        return function(*given[0], **given[1])

    with torch.enable_grad():
        low, reference = x.detach().double(), reference_of(x).detach().double()
        middle = ((low + reference) / 2).requires_grad_()
        result = at(middle)
        if len(varying) > 1 or result.shape != x.shape:
            return at_halfway(function, *args, **kwargs)
        (tangent,) = torch.autograd.grad(result.sum(), middle)
    run, rise = low - reference, at(low) - at(reference)
    close = (low == reference) | (run.abs() <= CLOSE * (low.abs() + reference.abs()))
    return x * torch.where(close, tangent, rise / run.masked_fill(close, 1.0)).to(x.dtype)


def logarithmic_mean(x: Tensor, dim: int) -> Tensor:
    """The logarithmic mean of softmax(x) and softmax of its reference, 0 where both are."""
    low, reference = (torch.log_softmax(z.detach().double(), dim) for z in (x, reference_of(x)))
    gap = (low - reference).abs()
    quotient = torch.where(gap < CLOSE, 1 - gap / 2, -torch.expm1(-gap) / gap.clamp_min(CLOSE))
    return (torch.maximum(low, reference).exp() * quotient).nan_to_num(0.0).to(x.dtype)


def softmax(function: Callable, input: Tensor, *args, **kwargs) -> Tensor:
    """A result with the secant slopes of ``function``, a softmax or its logarithm."""
    dim = kwargs.get("dim", args[0] if args else None)
    if dim is None:
        return at_halfway(function, input, *args, **kwargs)
    mean = logarithmic_mean(input, dim)
    centred = input - (mean / mean.sum(dim, keepdim=True) * input).sum(dim, keepdim=True)
    return centred if "log" in function.__name__ else mean * centred


def normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """``x`` over the root of its mean square."""
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def layer_norm(input: Tensor, normalized_shape, weight=None, bias=None, eps: float = 1e-5, *options) -> Tensor:
    """The result of ``torch.layer_norm``, by elementary functions."""
    dims = tuple(range(-len(normalized_shape), 0))
    y = normalized(input - input.mean(dims, keepdim=True), dims, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(input: Tensor, normalized_shape, weight=None, eps: float | None = None) -> Tensor:
    """The result of ``torch.rms_norm``, by elementary functions."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    y = normalized(input, tuple(range(-len(normalized_shape), 0)), eps)
    return y if weight is None else y * weight


def quotient(input: Tensor, other: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """The result of ``torch.div``, by elementary functions."""
    if rounding_mode is not None:
        return at_halfway(torch.div, input, other, rounding_mode=rounding_mode)
    return input * (torch.reciprocal(other) if isinstance(other, Tensor) else 1 / other)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The result of ``torch.nn.functional.scaled_dot_product_attention`` without dropout, by elementary functions."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    if attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    else:
        hidden = attn_mask == -torch.inf
        scores = scores + attn_mask.masked_fill(hidden, 0.0)
    p = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1)
    return p.masked_fill(hidden.all(-1, keepdim=True), 0.0) @ value  # a row that sees nothing gives 0


RULES = {"softmax": softmax, "log_softmax": softmax} | dict.fromkeys(ELEMENTWISE, elementwise)
MADE_OF: dict[str, Callable] = {
    "layer_norm": layer_norm, "rms_norm": rms_norm, "div": quotient, "true_divide": quotient,
    "scaled_dot_product_attention": attention,
}  # fmt: skip


def out_of_place(func: Callable) -> Callable:
    """A function that runs ``func``, which changes its first argument, on a copy of that argument."""

    def function(x: Tensor, *args, **kwargs) -> Tensor:
        return func(x.clone(), *args, **kwargs)

    function.__name__ = func.__name__.removesuffix("_")
    return function


def refer_to_copy(x: Tensor) -> None:
    """Copy the reference of a constant ``x``, which is about to change; a view gets the view of its base's."""
    base = base_of(x) if is_view(x) else x
    if not has_reference(base):
        refer(base, base.detach().clone())
    if base is not x:
        first = x.storage_offset() - base.storage_offset()
        refer(x, reference_of(base).as_strided(x.shape, x.stride(), first))


def same_entries(name: str, indices: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Entries of the reference that a SELECTING function chose in low precision, by ``indices``."""
    x = reference_of(args[0] if args else kwargs["input"])
    position = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else -1)
    if indices.ndim == x.ndim:
        return x.gather(dim, indices)
    return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


class SecantSlopes(TorchFunctionMode):
    """A context in which functions have secant slopes. A tensor's reference is its value in the fp32 pass."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` in low precision, with its reference and secant slopes."""
        making = func.__name__.removesuffix("_like").removeprefix("new_") in MAKING
        if making or not any(map(has_reference, tensors((args, kwargs)))):
            return func(*args, **kwargs)
        if in_place(func) and not has_reference(args[0]):
            refer_to_copy(args[0])
        result = self._with_slopes(func, args, kwargs)  # first: ``func`` may change references in place
        if func.__name__ in SELECTING and not isinstance(result, Tensor):  # as max(x, y) is
            refer(result[0], same_entries(func.__name__, result.indices, args, kwargs))
            return result
        with torch.no_grad():
            reference = func(*map_tensors(args, reference_of), **map_tensors(kwargs, reference_of))
        for x, its in zip(tensors(result), tensors(reference)):
            if x.is_floating_point() and x is not its:
                refer(x, its)
        return result

    def _with_slopes(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name in LINEAR or name.removesuffix("_") in LINEAR:
            return func(*args, **kwargs)
        if in_place(func):
            return args[0].copy_(self._with_slopes(out_of_place(func), args, kwargs))
        with torch.no_grad():
            value = func(*args, **kwargs)
        results = [x for x in tensors(value) if x.is_floating_point()]
        moved = storages(results) & storages(x for x in tensors((args, kwargs)))
        if not results or moved or name in SELECTING:
            return func(*args, **kwargs)
        if name in MADE_OF:
            with self:
                y = MADE_OF[name](*args, **kwargs)
        else:
            y = RULES.get(name, at_halfway)(func, *args, **kwargs)
        if isinstance(value, Tensor):
            return WithHistory.apply(y, value)
        slopes = dict(zip(map(id, tensors(value)), tensors(y)))
        return map_tensors(value, lambda x: WithHistory.apply(slopes[id(x)], x) if x.is_floating_point() else x)


class SecantArithmetic(LowArithmetic):
    """A ``LowArithmetic`` with secant slopes.

    ``between`` says where constants of a target are taken: 0 is the value in fp32, and 1 that in low precision.
    """

    follows_changes = True

    def __init__(
        self, recipe: Recipe, recorder: ErrorRecorder, parameters: ParameterTable, rounding: bool, between: float
    ):
        super().__init__(recipe, recorder, parameters, rounding=rounding)
        self.slopes, self.between = SecantSlopes(), between

    def call(self, func: Callable, *args, **kwargs) -> Any:
        """The result of ``func``, with its reference and secant slopes."""
        if func in CUT and has_reference(args[0]) and self.recorder.path == [""]:  # outside of the model: in a target
            return torch.lerp(reference_of(args[0]), args[0].detach(), self.between)
        return self.slopes.call(func, args, kwargs)

    def function(self, call: FunctionCall) -> Callable:
        """The function that ``call`` names, not a faster one, whose slopes are no secants."""
        return call.func

    def round(self, y: Tensor, *args, **kwargs) -> Tensor:
        """The result of ``LowArithmetic.round``; the reference of ``y`` is not rounded."""
        reference = reference_of(y) if has_reference(y) else y.detach().clone()
        rounded = super().round(y, *args, **kwargs)
        return refer(rounded, reference) if rounded.requires_grad else rounded  # else it is a constant
