"""Secant slopes: gradients by which signed contributions add up to the error of a pass, at any size of it.

A gradient is the slope of a tangent. Here the low-precision pass and the fp32 pass run side by side. The slope of every
kernel f is that of the secant from its arguments x in fp32 to its arguments x' in low precision, a linear map S with

    f(x') - f(x) = S (x' - x).

The errors e_i of all roundings then reach the output through products of such maps, without a remainder:

    X_L' - X_L = sum_i S_i e_i.

The signed contributions <S_i' v, e_i> to a probe v add up to v.E_L for the measured error E_L, apart from what fp32
rounds. This is the rescale rule of DeepLIFT (Shrikumar et al. 2017, arXiv:1704.02685) for roundings in place of inputs.

- An elementwise function has the quotient of the differences as its slope.
- A product is exact with both factors halfway between the two passes, as is all that is at most quadratic.
- A softmax p of x has S = diag(m) - m m' / sum(m), where m is the logarithmic mean of p' and p:
  p' - p = m (log p' - log p), and log p' - log p is x' - x up to a constant, under which differences of p add up to 0.
- Norms, quotients and fused attention are taken apart into these.

Any other kernel gets its gradient halfway, which is exact to second order. Choices, as those of experts, are taken from
the low-precision pass. A fp32 pass that would choose otherwise is not the one that stands beside it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fragility_core.adjoint.arithmetic import FunctionCall, LowArithmetic
from fragility_core.adjoint.leaves import Held
from fragility_core.adjoint.tape import Tape
from fragility_core.arithmetic.internals import has_reference, refer, reference_of
from fragility_core.arithmetic.kernels import EXACT_FUNCTIONS
from fragility_core.arithmetic.nested import map_tensors, tensors
from fragility_core.arithmetic.recipes import Recipe

CLOSE = 1e-7  # relative difference in fp64 up to which a secant is a tangent; its relative error is the square of that
CUT = {Tensor.detach, Tensor.data.__get__}  # functions that give a tensor without a history
# Linear in tensors of floating point, and so with the same slopes everywhere. Some of EXACT_FUNCTIONS only select.
LINEAR = EXACT_FUNCTIONS - {"abs", "relu", "max", "min", "maximum", "minimum", "amax", "sort"} | {
    "__get__", "view", "view_as", "reshape_as", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze",
    "split", "chunk", "unbind", "movedim", "unflatten", "narrow", "select", "swapaxes", "t", "to", "float", "double",
    "type", "type_as", "cpu", "cuda", "add", "add_", "sub", "sub_", "__rsub__", "__radd__", "sum", "mean", "cumsum",
    "index_add", "index_add_", "scatter_add", "scatter_add_", "pad", "hstack", "vstack", "requires_grad_",
}  # fmt: skip
ELEMENTWISE = {
    "abs", "relu", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "square", "sin", "cos",
    "tanh", "sigmoid", "erf", "gelu", "silu", "mish", "softplus", "relu6", "leaky_relu", "elu", "hardswish",
    "hardsigmoid", "hardtanh", "logsigmoid", "log_sigmoid", "clamp", "clamp_min", "clamp_max", "__rdiv__", "__rpow__",
}  # fmt: skip


class Given(torch.autograd.Function):
    """The ``value``, with the slopes of ``y``."""

    @staticmethod
    def forward(ctx, y: Tensor, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def halfway(x: Tensor) -> Tensor:
    """``x`` moved halfway to its reference; what is infinite in both stays."""
    if not has_reference(x) or not x.is_floating_point():
        return x
    return x + (reference_of(x) - x).detach().div_(2).nan_to_num_(0.0, 0.0, 0.0)


def at_halfway(function: Callable, *args, **kwargs) -> Any:
    """``function`` with all its tensors halfway to their references."""
    return function(*map_tensors(args, halfway), **map_tensors(kwargs, halfway))


def elementwise(function: Callable, x: Tensor, *args, **kwargs) -> Any:
    """``x`` times the quotient of differences of ``function``, or times its slope where ``x`` hardly differs."""
    if any(map(has_reference, tensors((args, kwargs)))):
        return at_halfway(function, x, *args, **kwargs)
    with torch.enable_grad():
        low, reference = x.detach().double(), reference_of(x).detach().double()
        middle = ((low + reference) / 2).requires_grad_()
        (tangent,) = torch.autograd.grad(function(middle, *args, **kwargs).sum(), middle)
    run = low - reference
    rise = function(low, *args, **kwargs) - function(reference, *args, **kwargs)
    close = run.abs() <= CLOSE * (low.abs() + reference.abs())
    slope = torch.where(close, tangent, rise / run.masked_fill(close, 1.0))
    return x * slope.to(x.dtype)


def logarithmic_mean(x: Tensor, dim: int) -> Tensor:
    """The logarithmic mean of softmax(x) and softmax of its reference, 0 where both are."""
    low, reference = (torch.log_softmax(z.detach().double(), dim) for z in (x, reference_of(x)))
    gap = (low - reference).abs()
    quotient = torch.where(gap < CLOSE, 1 - gap / 2, -torch.expm1(-gap) / gap.clamp_min(CLOSE))
    return (torch.maximum(low, reference).exp() * quotient).nan_to_num(0.0).to(x.dtype)


def softmax(function: Callable, x: Tensor, *args, **kwargs) -> Tensor:
    """What has the secant slopes of ``function``, a softmax or its logarithm."""
    dim = kwargs.get("dim", next((a for a in args if type(a) is int), -1))
    mean = logarithmic_mean(x, dim)
    centred = x - (mean / mean.sum(dim, keepdim=True) * x).sum(dim, keepdim=True)
    return centred if "log" in function.__name__ else mean * centred


def normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """``x`` over the root of its mean square."""
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def layer_norm(x: Tensor, shape, weight=None, bias=None, eps: float = 1e-5, *options) -> Tensor:
    """As ``torch.layer_norm``, of elementary functions."""
    dims = tuple(range(-len(shape), 0))
    y = normalized(x - x.mean(dims, keepdim=True), dims, eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Tensor, shape, weight=None, eps: float | None = None) -> Tensor:
    """As ``torch.rms_norm``, of elementary functions."""
    y = normalized(x, tuple(range(-len(shape), 0)), torch.finfo(x.dtype).eps if eps is None else eps)
    return y if weight is None else y * weight


def quotient(x: Tensor, divisor: Tensor | float) -> Tensor:
    """As ``torch.div``, of elementary functions."""
    return x * (torch.reciprocal(divisor) if isinstance(divisor, Tensor) else 1 / divisor)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """As ``torch.nn.functional.scaled_dot_product_attention`` without dropout, of elementary functions."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
    return torch.softmax(scores, -1) @ value


RULES = {"softmax": softmax, "log_softmax": softmax} | dict.fromkeys(ELEMENTWISE, elementwise)
MADE_OF = {
    "layer_norm": layer_norm, "rms_norm": rms_norm, "div": quotient, "true_divide": quotient,
    "scaled_dot_product_attention": attention,
}  # fmt: skip


class SecantSlopes(TorchFunctionMode):
    """A context in which functions have secant slopes. A tensor's reference is its value in the fp32 pass."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` in low precision, with its reference and secant slopes."""
        if not any(map(has_reference, tensors((args, kwargs)))):
            return func(*args, **kwargs)
        if FunctionCall.in_place_by(func) and not has_reference(args[0]):
            refer(args[0], args[0].detach().clone())
        result = self._with_slopes(func, args, kwargs)  # first: ``func`` may change references in place
        with torch.no_grad():
            reference = func(*map_tensors(args, reference_of), **map_tensors(kwargs, reference_of))
        if func.__name__ == "topk":  # among the same
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            reference = (reference_of(args[0]).gather(dim, result[1]), result[1])
        for x, its in zip(tensors(result), tensors(reference)):
            if x.is_floating_point() and x is not its:
                refer(x, its)
        return result

    def _with_slopes(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name in LINEAR:
            return func(*args, **kwargs)
        if FunctionCall.in_place_by(func):
            return args[0].copy_(self._with_slopes(getattr(torch, name[:-1]), args, kwargs))
        with torch.no_grad():
            value = func(*args, **kwargs)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return func(*args, **kwargs)
        if name in MADE_OF:
            with self:
                y = MADE_OF[name](*args, **kwargs)
        else:
            y = RULES.get(name, at_halfway)(func, *args, **kwargs)
        return Given.apply(y, value)


class SecantArithmetic(LowArithmetic):
    """As ``LowArithmetic``, with secant slopes.

    ``between`` says where constants of a target are taken: 0 is the value in fp32, and 1 that in low precision.
    """

    def __init__(self, recipe: Recipe, tape: Tape, held: Held, rounding: bool, between: float):
        super().__init__(recipe, tape, held, rounding=rounding)
        self.slopes, self.between = SecantSlopes(), between

    def call(self, func: Callable, *args, **kwargs) -> Any:
        """The result of ``func``, with its reference and secant slopes."""
        if func in CUT and has_reference(args[0]) and self.tape.path == [""]:  # outside of the model: in a target
            return torch.lerp(reference_of(args[0]), args[0].detach(), self.between)
        return self.slopes.call(func, args, kwargs)

    def product(self, call: FunctionCall) -> Callable:
        """The function of ``call`` itself: the fast ones have slopes of their own."""
        return call.func

    def round(self, y: Tensor, *args, **kwargs) -> Tensor:
        """As ``LowArithmetic.round``; the reference of ``y`` is not rounded."""
        reference = reference_of(y) if has_reference(y) else y.detach().clone()
        rounded = super().round(y, *args, **kwargs)
        return refer(rounded, reference) if rounded.requires_grad else rounded  # else it is a constant
