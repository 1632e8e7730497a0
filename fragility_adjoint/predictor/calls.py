"""Calls of functions of tensors, as a function mode sees them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fragility_adjoint.internals import is_view, stored_as
from fragility_numerics.formats import NumberFormat
from fragility_numerics.internals import without_function_modes
from fragility_numerics.kernels import EXACT_FUNCTIONS, PRODUCTS
from fragility_numerics.nested import map_tensors
from fragility_quantization.operands import storages


def in_place(func: Callable) -> bool:
    """True if ``func`` changes its first argument in place."""
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class FunctionCall:
    """A call of a function of tensors; tensors of the low dtype among its arguments are replaced by fp32 ones."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any], to_fp32: Callable[[Tensor], Tensor]):
        self.func, self.name = func, func.__name__
        self.floating: list[Tensor] = []  # all floating operands
        self.args = tuple(self._converted(args, to_fp32))
        self.kwargs = dict(zip(kwargs, self._converted(kwargs.values(), to_fp32)))

    def _converted(self, values: Iterable, to_fp32: Callable[[Tensor], Tensor]) -> Iterator:
        for value in values:
            if isinstance(value, Tensor):
                value = to_fp32(value)
                if value.is_floating_point():
                    self.floating.append(value)
            elif type(value) in (tuple, list):
                value = type(value)(self._converted(value, to_fp32))
            yield value

    @property
    def in_place(self) -> bool:
        """True if the call changes its first argument in place."""
        return in_place(self.func)

    @property
    def product(self) -> str:
        """The other factor of a matrix product of values, "weights" or "values" (``recorder.Place``)."""
        if self.name not in PRODUCTS:
            return ""
        return "weights" if any(stored_as(x) == "weight" for x in self.floating) else "values"

    @property
    def largest(self) -> bool:
        """True if the call takes the largest entry along a dimension, as routers of Phi-3.5-MoE do twice a token."""
        return self.name == "max" and ("dim" in self.kwargs or any(type(each) is int for each in self.args))

    def only_moves(self, y: Tensor) -> bool:
        """True if the result ``y`` holds numbers that were stored before."""
        if self.name in EXACT_FUNCTIONS:
            return all(map(stored_as, self.floating))
        if self.in_place or not (is_view(y) or any(y is x for x in self.floating)):
            return False
        return bool(storages([y]) & storages(self.floating))

    def of_stored(self, format: NumberFormat) -> Tensor:
        """The result for operands as ``format`` stores them, before it is rounded itself. Nothing else changes."""

        def read(x: Tensor) -> Tensor:
            low = stored_as(x) and x.is_floating_point()
            return format.round(x.detach()).float() if low else x.detach().clone()

        with torch.no_grad(), without_function_modes():
            return self.func(*map_tensors(self.args, read), **map_tensors(self.kwargs, read))
