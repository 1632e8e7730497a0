"""Low-precision arithmetic that can be differentiated: fp32 tensors, each kernel's result rounded.

A model runs unchanged, and as it would in the format: functions of tensors compute in fp32, results
that would be stored in the low dtype are rounded, and ``tensor.dtype`` tells the model that dtype.
Gradients are fp32, and pass through the rounding as through the identity.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fragility_core.adjoint.products import fast_products
from fragility_core.adjoint.rounding import has_short_range, local_error, stochastic_error
from fragility_core.adjoint.sites import SUMS
from fragility_core.adjoint.tape import Tape
from fragility_core.arithmetic import operands
from fragility_core.arithmetic.formats import Format
from fragility_core.arithmetic.kernels import CASTS, EXACT_FUNCTIONS, FILLING, PRODUCTS, deciding
from fragility_core.arithmetic.nested import map_tensors
from fragility_core.models.tree import is_block

GET_DTYPE = Tensor.dtype.__get__
# Half of what a model calls. These are handed on at once: what asks about a tensor, and what moves one tensor.
QUESTIONS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.shape.__get__, Tensor.device.__get__}
MOVES = {Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.split, Tensor.contiguous, functional.dropout}

_DISPATCHING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def with_visible_kernels(func: FunctionType) -> FunctionType | None:
    """A function of torch's Python code that runs instead of being handed over: the kernels inside are seen."""
    if not set(_DISPATCHING) & set(func.__code__.co_names):
        return None
    names = func.__globals__ | dict.fromkeys(_DISPATCHING, lambda *tensors: False)
    inside = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


def stored_as(x: Tensor) -> str | None:
    """ "weight" or "value" for an fp32 tensor that stands for one of the low dtype, else None."""
    return getattr(x, "_stored_as", None)


def store(x: Tensor, kind: str = "value") -> Tensor:
    """Let fp32 ``x`` stand for a tensor of the low dtype."""
    x._stored_as = kind
    return x


def mark_stream(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A hook before the forward of ``block``: what it reads is the residual stream."""
    read = args[0] if args else kwargs.get("hidden_states")
    if isinstance(read, Tensor):
        read._is_stream = True


def is_stream(x: Tensor) -> bool:
    """Whether ``x`` is the residual stream that a running block reads, or a view of it."""
    return getattr(x, "_is_stream", False)


class FunctionCall:
    """A function of tensors with its arguments, those of the low dtype in fp32."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any], widened: Callable[[Tensor], Tensor]):
        self.func, self.name = func, func.__name__
        self.floating: list[Tensor] = []  # all floating operands

        self.args = tuple(self._widen(args, widened))
        self.kwargs = dict(zip(kwargs, self._widen(kwargs.values(), widened)))

    def _widen(self, values: Iterable, widened: Callable[[Tensor], Tensor]) -> Iterator:
        for value in values:
            if isinstance(value, Tensor):
                value = widened(value)
                if value.is_floating_point():
                    self.floating.append(value)
            elif type(value) in (tuple, list):
                value = type(value)(self._widen(value, widened))
            yield value

    @property
    def writes(self) -> bool:
        """Whether the first argument is changed in place."""
        return self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))

    @property
    def product(self) -> str:
        """See ``tape.Place``."""
        if self.name not in PRODUCTS:
            return ""
        return "weights" if any(stored_as(x) == "weight" for x in self.floating) else "values"

    @property
    def of_stream(self) -> bool:
        """Whether the residual stream is an operand."""
        return any(map(is_stream, self.floating))

    def moves(self, y: Tensor) -> bool:
        """Whether the result ``y`` holds stored values again."""
        if self.name in EXACT_FUNCTIONS:
            return all(map(stored_as, self.floating))
        if self.writes or not (y._is_view() or any(y is x for x in self.floating)):
            return False
        memory = y.untyped_storage().data_ptr()
        return any(x.untyped_storage().data_ptr() == memory for x in self.floating)

    def promotes_to_low(self) -> bool:
        """Type promotion: zero-dimensional operands decide only where there are no others."""
        operands = deciding(self.floating)
        return bool(operands) and all(map(stored_as, operands))


class Owned(torch.autograd.Function):
    """A tensor in the memory of a view. Of a view that is changed in place, autograd would forget the hooks."""

    @staticmethod
    def forward(ctx, view: Tensor) -> Tensor:
        return view.data

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class LowArithmetic(TorchFunctionMode):
    """The arithmetic of ``format``, every rounding of which is put on ``tape``.

    ``weights`` holds the fp32 tensors that stand for parameters, by the parameter's id, ``buffers`` likewise. Those
    stored at ``linear`` multiply operands that are rounded to ``format.operands``.
    ``stochastic`` records the standard deviation of stochastic rounding in place of the known error
    of rounding to nearest. With ``rounding`` off only the parameters are in the format.
    """

    def __init__(
        self, format: Format, tape: Tape, weights: dict[int, Tensor], buffers: dict[int, Tensor],
        linear: set[int], stochastic: bool = False, rounding: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.format, self.tape, self.weights, self.buffers = format, tape, weights, buffers
        self.linear, self.stochastic, self.rounding = linear, stochastic, rounding
        self._fast = fast_products(next(iter(weights.values())).device) if weights else {}
        self._open: set[FunctionType] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        if func in MOVES:
            return self._move(func, args, kwargs)
        if isinstance(func, FunctionType) and func not in self._open and with_visible_kernels(func):
            self._open.add(func)  # its own C++ part asks again under its name
            try:
                with self:
                    return with_visible_kernels(func)(*args, **kwargs)
            finally:
                self._open.remove(func)
        if func == GET_DTYPE:
            return self.dtype(args[0])
        call = FunctionCall(func, args, kwargs, self._wide)
        if call.name == "topk":
            self.tape.note("router")
        elif call.product == "values":
            self.tape.note("attention")
        return self._run(call) if self.rounding else func(*call.args, **call.kwargs)

    def dtype(self, x: Tensor) -> torch.dtype:
        """The dtype that ``x`` has in the low-precision pass."""
        return self.format.compute_dtype if self.rounding and stored_as(x) else x.dtype

    def _wide(self, x: Tensor) -> Tensor:
        """The fp32 tensor that stands for a parameter, a buffer or another of the low dtype; others as they are."""
        if id(x) in self.weights:
            return self.weights[id(x)]
        if id(x) in self.buffers:
            return store(self.buffers[id(x)].clone())  # a model may write to it
        return store(x.float()) if x.dtype == self.format.compute_dtype else x

    def _move(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = self._wide(args[0])
        kind, stream = stored_as(x), is_stream(x)

        def mark(y: Tensor) -> Tensor:
            y._is_stream = stream
            return store(y, kind)

        moved = func(x, *args[1:], **kwargs)
        return moved if kind is None else map_tensors(moved, mark)

    def _run(self, call: FunctionCall) -> Any:
        requested = self._requested_dtype(call)
        if call.func in CASTS and requested is not None:
            return self._cast(call.args[0], requested)
        low = requested == self.format.compute_dtype
        if low:
            call.args = tuple(torch.float32 if x is requested else x for x in call.args)
            call.kwargs = {key: torch.float32 if x is requested else x for key, x in call.kwargs.items()}
        elif requested is None:
            low = stored_as(call.args[0]) is not None if call.writes else call.promotes_to_low()
        if self.linear and call.product == "weights" and self.linear & operands.storages(call.floating):
            call.args, call.kwargs = (map_tensors(given, self._operand) for given in (call.args, call.kwargs))
        result = self._compute(call)
        if not low:
            return result
        if call.writes:
            self._settle(call.args[0], call)
            return result
        return map_tensors(result, lambda y: self._settle(y, call))

    def _compute(self, call: FunctionCall) -> Any:
        return self._fast.get((call.name, call.product), call.func)(*call.args, **call.kwargs)

    def _operand(self, x: Tensor) -> Tensor:
        if stored_as(x) != "value":
            return x
        return self.round(x.clone(), "operand", "weights", format=self.format.operands)

    def _requested_dtype(self, call: FunctionCall) -> torch.dtype | None:
        """The dtype that the caller asks for, if any: ``x.float()``, ``x.to(y)``, ``softmax(dtype=...)``."""
        if dtype := CASTS.get(call.func):
            return dtype
        if call.func in CASTS and len(call.args) > 1 and isinstance(call.args[1], Tensor):
            return self.dtype(call.args[1])
        return next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.dtype)), None)

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self.dtype(x):
            return x
        if dtype != self.format.compute_dtype:
            return x.to(dtype, copy=True)
        return self.round(x.to(torch.float32, copy=True), "to")

    def _settle(self, y: Tensor, call: FunctionCall) -> Tensor:
        """Make a result of ``call`` one of the low dtype."""
        if not y.is_floating_point():
            return y
        if call.moves(y):
            if call.name in FILLING:  # with a constant, which is no number of the format
                y.data.copy_(self.format.round(y.data))
            y._is_stream = call.of_stream
            return store(y, "weight" if {*map(stored_as, call.floating)} == {"weight"} else "value")
        constant = not call.floating or (call.writes and not y.requires_grad)
        stream = call.name in SUMS and call.of_stream and is_block(self.tape.path[-1])
        y = self.round(y, call.name, call.product, stream, constant, call.writes)
        y._is_stream = stream
        return y

    def round(
        self,
        y: Tensor,
        name: str,
        product: str = "",
        stream: bool = False,
        constant: bool = False,
        written: bool = False,
        format: Format | None = None,
    ) -> Tensor:
        """Round what the kernel ``name`` computed, or has ``written`` to ``y``, to its own format or to ``format``.

        A result to which no gradient would come is replaced by one.
        """
        format = format or self.format
        exact = y.data  # not counted as a change: what autograd saved of y is what was stored
        rounded = format.round(exact).float()
        if constant:
            exact.copy_(rounded)
            return store(y)
        place, error = self.tape.kernel(name, product, stream), local_error(exact, rounded)
        if has_short_range(format):
            self.tape.note_largest(place, rounded)
        if self.stochastic:
            error = stochastic_error(error, exact, format)
        exact.copy_(rounded)
        if y.requires_grad and y._is_view() and written:
            self.tape.watch_part(place, y, error)
        elif y.requires_grad:
            y = Owned.apply(y) if y._is_view() else y
            self.tape.watch(place, y, error)
        else:
            leaf = y.detach().requires_grad_()
            self.tape.watch_leaf(place, leaf, lambda: error)
            with torch.enable_grad():
                y = leaf.clone()
        return store(y)
