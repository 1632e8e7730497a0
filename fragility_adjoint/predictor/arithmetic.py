"""Low-precision arithmetic that can be differentiated.

A model runs unchanged. Its kernels compute in fp32, and each result that the format would store is rounded to the
format. ``tensor.dtype`` is the low dtype, so that the model computes as it would in the format. Gradients are fp32.
They pass through a rounding as through the identity.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fragility_adjoint.internals import copy_marks, is_stream, is_view, mark_stored, mark_stream, read_as, stored_as
from fragility_adjoint.predictor.calls import FunctionCall
from fragility_adjoint.predictor.parameters import ParameterTable
from fragility_adjoint.predictor.recomputed import fast_products, look_up_rows
from fragility_adjoint.predictor.recorder import ErrorRecorder
from fragility_adjoint.predictor.sites import SUMS
from fragility_core.models.paths import is_block
from fragility_numerics import internals
from fragility_numerics.formats import NumberFormat
from fragility_numerics.kernels import CASTS, FILLING_FUNCTIONS, OFTEN_EXACT, deciding
from fragility_numerics.modes import FunctionMode
from fragility_numerics.nested import map_tensors
from fragility_numerics.rounding_errors import has_short_range, local_error, stochastic_error
from fragility_quantization.operands import storages
from fragility_quantization.recipes import Operands, Recipe

PROPERTIES: Any = Tensor  # on the class, torch's types take a property for its value
GET_DTYPE = PROPERTIES.dtype.__get__
# Half of the calls that a model makes. They take a short way: questions about a tensor, and moves of one tensor.
QUESTIONS = {Tensor.size, Tensor.dim, Tensor.numel, PROPERTIES.shape.__get__, PROPERTIES.device.__get__}
QUESTIONS |= {Tensor.requires_grad_, Tensor.retain_grad}  # these change no number
MOVES = {
    Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.split, Tensor.contiguous, Tensor.cpu, Tensor.cuda,
    functional.dropout,
}  # fmt: skip


@cache
def with_visible_kernels(func: FunctionType) -> FunctionType | None:
    """A copy of ``func``, a Python function of torch, that does not ask for modes; None if ``func`` does not either.

    ``func`` would hand itself to the mode as a whole. The copy runs, and the mode sees the kernels inside.
    """
    if not set(internals.ASKING_FOR_MODES) & set(func.__code__.co_names):
        return None
    names = func.__globals__ | dict.fromkeys(internals.ASKING_FOR_MODES, lambda *tensors: False)
    inside = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside


class WithHistory(torch.autograd.Function):
    """Return ``value``, in the same memory, with the autograd history of ``y``.

    The result is no view: autograd drops the hooks of a view that is changed in place.
    """

    @staticmethod
    def forward(ctx, y: Tensor, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class Dequantized:
    """Numbers as ``stored`` rounds them, read again in ``dtype``; a stand-in for a format.

    A scale of int8 in fp32 gives numbers that bf16 does not hold.
    """

    def __init__(self, stored: NumberFormat, dtype: torch.dtype):
        self.stored, self.read = stored, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    def round(self, x: Tensor) -> Tensor:
        """``x`` rounded by ``stored``, in ``dtype``."""
        return self.stored.round(x).to(self.read)


class LowArithmetic(FunctionMode):
    """A context in which kernels compute as ``recipe`` says. Every rounding is recorded on ``recorder``.

    - ``parameters`` has the fp32 tensors that stand for parameters and buffers.
    - ``stochastic``: recorded is the standard deviation of stochastic rounding, not the error of rounding to nearest.
    - ``rounding`` is False where the results of kernels are in fp32.
    - ``exact``: errors are recorded, but results stay as they were before rounding.
    """

    def __init__(
        self, recipe: Recipe, recorder: ErrorRecorder, parameters: ParameterTable,
        stochastic: bool = False, rounding: bool = True, exact: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.recipe, self.format, self.recorder, self.parameters = recipe, recipe.kernels, recorder, parameters
        self.stochastic, self.rounding, self.exact = stochastic, rounding, exact
        self.operand: tuple[int, Tensor] | None = None  # place and error of the latest input that was rounded
        self._running: set[FunctionType] = set()  # Python functions of torch, see ``with_visible_kernels``

    @contextmanager
    def with_parameters(self, parameters: ParameterTable) -> Iterator[None]:
        """A context in which ``parameters`` stands for more parameters and buffers."""
        before = self.parameters
        pairs: Any = zip(before, parameters)
        self.parameters = ParameterTable(*({**old, **new} for old, new in pairs))
        try:
            yield
        finally:
            self.parameters = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **kwargs)
        if func in MOVES:
            return self._move(func, args, kwargs)
        if isinstance(func, FunctionType) and func not in self._running and (visible := with_visible_kernels(func)):
            self._running.add(func)  # its C++ part calls the mode again under the same name
            try:
                with self:
                    return visible(*args, **kwargs)
            finally:
                self._running.remove(func)
        if func == GET_DTYPE:
            return self.dtype(args[0])
        call = FunctionCall(func, args, kwargs, self._to_fp32)
        attends = self.recorder.path[-1] in self.recorder.roles["attention"]
        if call.name == "topk" or (call.largest and not attends):  # a softmax may take the largest score
            self.recorder.mark_module("router")
        elif call.product == "values":
            self.recorder.mark_module("attention")
        if call.product == "weights" and self.parameters.linear:
            self._round_inputs(call)
        if self.rounding:
            return self._run(call)
        result = self.call(func, *call.args, **call.kwargs)
        return map_tensors(result, lambda y: self._same_weight(y, call)) if self.parameters.linear else result

    def call(self, func: Callable, *args, **kwargs) -> Any:
        """The result of ``func`` before it is rounded."""
        return func(*args, **kwargs)

    def function(self, call: FunctionCall) -> Callable:
        """The function that computes ``call``: for a product or a lookup one whose gradients take less time."""
        if call.name == "embedding":
            return partial(look_up_rows, self.recorder)
        fast = fast_products(call.floating[0].device) if call.product else {}
        return fast.get((call.name, call.product), call.func)

    def _same_weight(self, y: Tensor, call: FunctionCall) -> Tensor:
        """``y``, known as a weight if it is one whose entries were only moved, such as its transpose."""
        weights = {*map(stored_as, call.floating)} == {"weight"} and call.name != "embedding"  # rows of it are values
        return mark_stored(y, "weight") if weights and call.only_moves(y) else y

    def round_stored(self, x: Tensor, name: str, stored: NumberFormat) -> Tensor:
        """``x`` as ``stored`` rounds it between two kernels, in memory of its own. The place is called ``name``."""
        if not x.is_floating_point():
            return x
        with internals.without_function_modes():
            numbers: Any = Dequantized(stored, self.dtype(x))
            return self.round(self.call(Tensor.clone, x), name, format=numbers)

    def dtype(self, x: Tensor) -> torch.dtype:
        """The dtype that ``x`` has in the low-precision pass; of weights that are multiplied in fp32, the format's."""
        low = self.rounding and stored_as(self.parameters.weights.get(id(x), x))
        return self.format.compute_dtype if low else x.dtype

    def _to_fp32(self, x: Tensor) -> Tensor:
        """The fp32 tensor that stands for ``x`` if ``x`` is of the low dtype, else ``x``."""
        if id(x) in self.parameters.weights:
            return self.parameters.weights[id(x)]
        if id(x) in self.parameters.buffers:
            return mark_stored(self.call(Tensor.clone, self.parameters.buffers[id(x)]))  # a model may write to it
        return mark_stored(self.call(Tensor.float, x)) if self.rounding and x.dtype == self.format.compute_dtype else x

    def _move(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = self._to_fp32(args[0])
        kind, stream = stored_as(x), is_stream(x)
        moved = self.call(func, x, *args[1:], **kwargs)
        return moved if kind is None else map_tensors(moved, lambda y: mark_stored(mark_stream(y, stream), kind))

    def _run(self, call: FunctionCall) -> Any:
        requested = self._requested_dtype(call)
        if call.func in CASTS and (requested is not None or call.func == Tensor.to):
            return self._moved_cast(call, requested)
        low = requested == self.format.compute_dtype
        if low:
            call.args = tuple(torch.float32 if x is requested else x for x in call.args)
            call.kwargs = {key: torch.float32 if x is requested else x for key, x in call.kwargs.items()}
        elif requested is None:  # type promotion decides
            operands = [call.args[0]] if call.in_place else deciding(call.floating)
            low = bool(operands) and all(map(stored_as, operands))
        stored = call.of_stored(self.recipe.kernels) if self.exact and low and call.name in OFTEN_EXACT else None
        result = self.call(self.function(call), *call.args, **call.kwargs)
        if not low:
            return result
        if call.in_place:
            self._round_result(call.args[0], call, stored)
            return result
        return map_tensors(result, lambda y: self._round_result(y, call, stored))

    def _requested_dtype(self, call: FunctionCall) -> torch.dtype | None:
        """The dtype that the caller asks for, if any: ``x.float()``, ``x.to(y)``, ``softmax(dtype=...)``."""
        if dtype := CASTS.get(call.func):
            return dtype
        if call.func in CASTS and len(call.args) > 1 and isinstance(call.args[1], Tensor):
            return self.dtype(call.args[1])
        return next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.dtype)), None)

    def _moved_cast(self, call: FunctionCall, dtype: torch.dtype | None) -> Tensor:
        """The tensor of ``call`` as ``dtype``, if that is given, on the device that the call names, if it does."""
        x, *given = call.args
        if dtype is None:
            return self._move(call.func, call.args, call.kwargs)
        places = (x.device if isinstance(x, Tensor) else x for x in (*given, *call.kwargs.values()))
        device = next((place for place in places if isinstance(place, torch.device)), x.device)
        return self._cast(x if device == x.device else self._move(Tensor.to, (x, device), {}), dtype)

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self.dtype(x):
            return x
        if dtype != self.format.compute_dtype:
            return self.call(Tensor.to, x, dtype, copy=True)
        return self.round(self.call(Tensor.to, x, torch.float32, copy=True), "to")

    def _round_inputs(self, call: FunctionCall) -> None:
        """Round what is multiplied by the weights of a layer whose inputs are stored in other numbers."""
        linear = self.parameters.linear
        operands = next((linear[address] for address in storages(call.floating) & linear.keys()), Operands())
        if (stored := operands.inputs) is not None:

            def change(x: Tensor) -> Tensor:
                if not x.is_floating_point() or stored_as(x) == "weight" or (self.rounding and not stored_as(x)):
                    return x
                return self._read(x, stored)

            call.args, call.kwargs = map_tensors(call.args, change), map_tensors(call.kwargs, change)

    def _read(self, x: Tensor, stored: NumberFormat) -> Tensor:
        """The input ``x`` of a linear layer as ``stored`` rounds it, once for all layers that read the same tensor."""
        y, first, position = read_as(x).get(stored, (x, None, None))
        if position is not self.recorder.now or not self.recorder.alike:  # a constant is there in several passes
            y = self.round(self.call(Tensor.clone, x), "operand", "weights", format=stored)
            read_as(x)[stored] = y, self.operand, self.recorder.now
        elif first is not None and y.requires_grad:
            y = copy_marks(y, y.view_as(y))
            self.recorder.watch_reader(self.recorder.kernel("operand", "weights"), y, *first)
        return y

    def _round_result(self, y: Tensor, call: FunctionCall, stored: Tensor | None = None) -> Tensor:
        if not y.is_floating_point():
            return y
        stream = any(map(is_stream, call.floating))
        if call.only_moves(y):
            if call.name in FILLING_FUNCTIONS and not self.exact:  # the constant may be no number of the format
                y.data.copy_(self.format.round(y.data).float())
            moved = {*map(stored_as, call.floating)} == {"weight"} and call.name != "embedding"  # its rows are values
            return mark_stored(mark_stream(y, stream), "weight" if moved else "value")
        constant = not call.floating or (call.in_place and not y.requires_grad)
        stream = stream and call.name in SUMS and is_block(self.recorder.path[-1])
        return mark_stream(
            self.round(y, call.name, call.product, stream, constant, call.in_place, None, stored), stream
        )

    def round(
        self, y: Tensor, name: str, product: str = "", stream: bool = False, constant: bool = False,
        in_place: bool = False, format: NumberFormat | None = None, of_stored: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The result ``y`` of the kernel ``name``, rounded in its own memory; its error is recorded on the recorder.

        ``product`` and ``stream`` are those of ``recorder.Place``. A ``constant`` is rounded without a record.
        ``format`` is that of the context unless given. The error is that of the result ``of_stored`` operands if given:
        where results stay unrounded, a kernel that keeps what is rounded, such as a product with 1, would seem to round
        once more. If ``y`` has no gradient, a tensor that has one is returned for it.
        """
        format = format or self.format
        exact = y.data  # a change of it is none for autograd: the value that it saved is the one stored
        rounded = format.round(exact).float()
        if constant:
            if not self.exact:
                exact.copy_(rounded)
            return self._marked(y)
        place = self.recorder.kernel(name, product, stream)
        error = (
            local_error(exact, rounded)
            if of_stored is None
            else local_error(of_stored, format.round(of_stored).float())
        )
        if has_short_range(format):
            self.recorder.record_extremes(place, rounded)
        if self.stochastic:
            error = stochastic_error(error, exact, format)
        if name == "operand":
            self.operand = place, error
        if not self.exact:
            exact.copy_(rounded)
        if y.requires_grad and is_view(y) and in_place:
            self.recorder.watch_view(place, y, error)
        elif y.requires_grad:
            y = WithHistory.apply(y, y.data) if is_view(y) else y
            self.recorder.watch(place, y, error)
        else:
            leaf = y.detach().requires_grad_()
            self.recorder.watch_leaf(place, leaf, lambda gradient: [error * gradient])
            self.recorder.now.leaves.append(leaf)
            with torch.enable_grad():
                y = leaf.clone()
        return self._marked(y)

    def _marked(self, y: Tensor) -> Tensor:
        return mark_stored(y) if self.rounding else y
