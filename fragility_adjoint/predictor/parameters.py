"""The fp32 tensors that stand for a model's weights in a differentiated pass, and the errors of the weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fragility_adjoint.internals import mark_stored, refer
from fragility_adjoint.predictor.recorder import LARGE, ErrorRecorder, LookedUp
from fragility_numerics.formats import NumberFormat
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.presence import filled
from fragility_numerics.rounding_errors import expected_error, local_error
from fragility_quantization.operands import operands_by_storage, owner, stored_weights, weight_schemes
from fragility_quantization.quantized import recipe_of
from fragility_quantization.recipes import Operands

PIECE = 2**16  # entries of a piece, which stays in a CPU's cache
LeafWatch = Callable[[str, int, Tensor, "WeightedError"], None]  # path, place, leaf


class ParameterTable(NamedTuple):
    """Leaves for parameters and for buffers, by the ``id`` of these, and operands by the memory of the leaves."""

    weights: dict[int, Tensor]
    buffers: dict[int, Tensor]
    linear: dict[int, Operands]

    @property
    def leaves(self) -> list[Tensor]:
        """Weights and buffers that have a gradient."""
        return [x for x in {**self.weights, **self.buffers}.values() if x.requires_grad]


class RoundedParameters:
    """Makes leaves for the tensors of ``model``, which holds the parameters and buffers of ``low.model``.

    They have the values of the low model, or ``at_reference`` those of the fp32 ``reference``. Raises ValueError for a
    model without parameters in the format, and for a reference that is not in fp32 or has other parameters.
    """

    def __init__(
        self, low: LowPrecision, model: nn.Module, reference: nn.Module | None, recorder: ErrorRecorder,
        dtype: torch.dtype,
    ):  # fmt: skip
        self.recipe, self.weights_only, self.recorder, self.dtype = recipe_of(low), low.weights_only, recorder, dtype
        self.parameters = {path: p for path, p in model.named_parameters() if p.is_floating_point()}
        if not any(p.dtype == dtype for p in self.parameters.values()):
            raise ValueError(f"the model must store parameters as {dtype}, as lower() does, got none")
        quantized = not (self.recipe.plain or low.weights_only)
        self.linear = stored_weights(model, self.recipe) if quantized else {}
        self._schemes = weight_schemes(model, self.recipe) if quantized else {}
        self._names = {id(p): path for path, p in self.linear.items()}  # of tied modules, that of the head
        self.buffers = {} if low.weights_only else {path: x for path, x in model.named_buffers() if x.dtype == dtype}
        self.tensors = self.parameters | self.buffers
        self.exact = None if reference is None else exact_tensors(reference, self.tensors)
        self.kept: dict[str, Tensor] = {}  # what ``in_fp32`` gives, by path
        for path in filter(self.watched, self.tensors):
            recorder.weight(path)  # numbers the places in this order

    def operands(self, path: str) -> Operands:
        """Operands of the linear layer that has the weight at ``path``, by any of its names."""
        key = id(self.tensors[path])
        found = self.recipe.operands(owner(self._names[key])) if key in self._names else Operands()
        return replace(found, weights=self._schemes.get(key))

    def is_low(self, path: str) -> bool:
        """True if the low-precision model stores the tensor at ``path`` in low precision."""
        return self.tensors[path].dtype == self.dtype or bool(self.operands(path))

    def watched(self, path: str) -> bool:
        """True if rounding the tensor at ``path`` contributes to the error."""
        stays_fp32 = not (self.operands(path) or self.weights_only or self.recipe.kernels.name != "fp32")
        return (self.is_low(path) or self.exact is not None) and not stays_fp32

    def in_fp32(self, path: str) -> Tensor:
        """The entries of the tensor at ``path`` in fp32, without a gradient: those ``kept``, or a copy made now."""
        return self.kept[path] if path in self.kept else self.tensors[path].detach().float()

    def weighted_error(self, path: str, rounded: Tensor) -> "WeightedError":
        """The function that weighs the local error of the tensor at ``path``, whose low entries are ``rounded``."""
        if self.exact is None:
            return WeightedError(rounded, self.operands(path).weights or self.recipe.kernels)
        return WeightedError(rounded, self.exact[path].data)  # fp32 parameters may hold rounded values: norms do

    @contextmanager
    def read(self, paths: Iterable[str]) -> Iterator[None]:
        """A context in which the tensors at ``paths``, and the exact ones, have their entries."""
        paths = list(paths)
        exact = [] if self.exact is None else [self.exact[path] for path in paths]
        with filled(exact), filled([self.tensors[path] for path in paths]):
            yield

    def make_leaves(self, paths: Iterable[str], at_reference: bool, watch: LeafWatch) -> ParameterTable:
        """New leaves for the tensors at ``paths``; ``watch`` is called for those that are ``watched``."""
        made = {}
        with self.read(paths := list(paths)):
            for path in paths:
                rounded = self.in_fp32(path)
                leaf = ((self.exact or {})[path] if at_reference else rounded).detach()
                if self.watched(path):
                    leaf.requires_grad_()
                    watch(path, self.recorder.weight(path), leaf, self.weighted_error(path, rounded))
                    if self.exact is not None and not at_reference:
                        refer(leaf, self.exact[path].detach())
                made[path] = mark_stored(leaf, "weight") if self.is_low(path) and path in self.parameters else leaf
        by_parameter = {id(self.tensors[path]): x for path, x in made.items()}
        weights = {path: by_parameter[id(p)] for path, p in self.linear.items() if id(p) in by_parameter}
        return ParameterTable(
            {id(self.tensors[path]): x for path, x in made.items() if path in self.parameters},
            {id(self.tensors[path]): x for path, x in made.items() if path in self.buffers},
            operands_by_storage(weights, self.recipe),
        )


class WeightedError:
    """The local error of a weight times its gradient."""

    def __init__(self, rounded: Tensor, origin: Tensor | NumberFormat):
        """``rounded`` has its entries, ``origin`` those before they were rounded, or else the format they have."""
        self.rounded, self.origin = rounded, origin

    def error(self, rows: slice | Tensor | EllipsisType) -> Tensor:
        """The local error of ``rows``, or its expected size if only the format is known; in memory of its own."""
        rounded = self.rounded[rows]
        if isinstance(self.origin, Tensor):
            return local_error(self.origin[rows], rounded)
        return expected_error(rounded, self.origin)

    def __call__(self, gradient: Tensor | None, looked_up: LookedUp | None = None) -> Iterator[Tensor]:
        """Error times ``gradient`` (P, ...) in pieces. The gradient of rows ``looked_up`` comes beside it, or alone."""
        if gradient is None:
            assert looked_up is not None
            yield self.error(looked_up.rows) * looked_up.gradient
        elif self.rounded.numel() <= LARGE:
            yield self.error(...) * gradient
        else:
            yield from self._in_pieces(gradient, looked_up)

    def _in_pieces(self, gradient: Tensor, looked_up: LookedUp | None) -> Iterator[Tensor]:
        """Some rows after the other; all pieces share their memory."""
        height = max(1, PIECE * len(self.rounded) // self.rounded.numel())
        memory = torch.empty_like(gradient[:, :height])
        for first in range(0, len(self.rounded), height):
            some = slice(first, first + height)
            error = self.error(some)
            weighted = torch.mul(error, gradient[:, some], out=memory[:, : len(error)])
            if looked_up is not None and len(within := looked_up.between(first, first + height)):
                rows = looked_up.rows[within] - first
                weighted.index_add_(1, rows, error[rows] * looked_up.gradient[:, within])
            yield weighted


def exact_tensors(reference: nn.Module, rounded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the fp32 ``reference`` by path, and those of its buffers that are among ``rounded``.

    Raises ValueError for a reference that is not in fp32, or lacks a tensor of ``rounded`` in the same shape.
    """
    exact: dict[str, Tensor] = dict(reference.named_parameters(remove_duplicate=False))
    if other := sorted({str(p.dtype) for p in exact.values() if p.is_floating_point()} - {"torch.float32"}):
        raise ValueError(f"the reference must be in fp32, before its weights were rounded, got {', '.join(other)}")
    # Some families define a constant in 16 bits, whatever the dtype of the model.
    exact |= {path: x.float() for path, x in reference.named_buffers(remove_duplicate=False) if path in rounded}
    for path, parameter in rounded.items():
        if path not in exact or exact[path].shape != parameter.shape:
            found = f"the shape {tuple(exact[path].shape)}" if path in exact else "no such parameter"
            wanted = f"the model before its weights were rounded, with {path} of shape {tuple(parameter.shape)}"
            raise ValueError(f"the reference must be {wanted}, got {found}")
    return exact
