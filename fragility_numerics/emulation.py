"""Emulation: every kernel (ATen op) of a model computes in fp32, and its result is rounded to a format once.

Tensors are stored in the format (protocol section 1). Native kernels do the same: they accumulate in fp32 and round
their output. TF32 differs by definition: only the factors of matrix products are rounded, the rest is fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fragility_numerics.formats import CHUNK_ELEMENTS, NumberFormat
from fragility_numerics.internals import TorchDispatchMode, current_dispatch_mode, is_composite, schema_of
from fragility_numerics.kernels import CAST, EXACT, FACTORS, FILLING, SOFTMAXES, deciding
from fragility_numerics.nested import map_tensors, tensors


class Kind:
    """What emulation asks of a ``kernel``. It is known from then on: torch takes longer to tell than a small kernel."""

    def __init__(self, kernel: Any):
        schema = schema_of(kernel)
        self.kernel, self.name, self.is_view = kernel, kernel.overloadpacket.__name__, kernel.is_view
        self.is_composite, self.is_mutable = is_composite(kernel), schema.is_mutable
        self.elementwise = torch.Tag.pointwise in kernel.tags and len(schema.returns) == 1 and not schema.is_mutable
        KINDS[id(kernel)] = self


KINDS: dict[int, Kind] = {}  # by the ``id`` of kernels, which they hold


def fits_in_chunks(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a kernel is elementwise, over large contiguous tensors of one shape on the CPU."""
    if not kind.elementwise or any(map(torch.is_tensor, kwargs.values())):
        return False
    arrays = [x for x in tensors(args) if x.ndim]
    large = all(x.numel() > CHUNK_ELEMENTS and x.device.type == "cpu" and x.is_contiguous() for x in arrays)
    return large and len({x.shape for x in arrays}) == 1


def written(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an in-place or out= ``kernel`` writes to."""
    arguments = [
        kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]
        for i, a in enumerate(schema_of(kernel).arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return list(tensors(arguments))


class Emulation(TorchDispatchMode):  # type: ignore[misc]  # found by its name (numerics/internals.py)
    """A context in which the result of every kernel is rounded to ``format``; see the module docstring.

    PyTorch's type promotion holds: the result of a kernel with an fp32 operand is fp32 and is not rounded. Models
    that compute a norm or a softmax in fp32 are emulated so.

    With a ``generator``, on whose device the bits are drawn, results are rounded stochastically: one random realisation
    of the format's rounding errors. Only what ``copy_`` reads from a wider tensor is rounded to nearest first, to the
    dtype that holds the format's numbers. Batches may hold several ``copies`` of the same windows, one after another.
    All copies then get the same random bits.
    """

    def __init__(self, format: NumberFormat, generator: torch.Generator | None = None):
        super().__init__()
        self.format = format
        self.generator = generator
        self.copies = 1
        self.active = True
        # A kernel stores a constant in the compute dtype. That of fp8 is wider: the constant must still be rounded.
        self._exact = EXACT - FILLING if format.is_storage_only else EXACT

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which kernels run as they are: for statistics, which are not part of the model.

        The mode is left, since its detour through Python takes a quarter of a short monitored pass. Where another mode
        is above it, or where it was entered twice, it cannot be left: it is then not ``active``.
        """
        self.active, before = False, self.active
        innermost = before and current_dispatch_mode() is self
        try:
            if innermost:
                self.__exit__(None, None, None)
            yield
        finally:
            if innermost:
                self.__enter__()
            self.active = before

    def __torch_dispatch__(self, kernel: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return kernel(*args, **kwargs)
        kind = KINDS.get(id(kernel)) or Kind(kernel)
        if kind.is_composite:
            with self:
                return kernel.decompose(*args, **kwargs)
        result = self._rounded(kind, args, kwargs)
        if kind.is_mutable and self.format.is_storage_only:
            for target in written(kernel, args, kwargs):  # copy_ may read wider tensors
                if target.dtype == self.format.compute_dtype:
                    target.copy_(self._round(target.float()))
        return result

    def _rounded(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel, name = kind.kernel, kind.name
        if name == "lift_fresh" and self.format.is_storage_only:  # a constant that torch.tensor() made
            return self._round(args[0].float()) if args[0].dtype == self.format.compute_dtype else args[0]
        if kind.is_view or name in self._exact:
            return kernel(*args, **kwargs)
        if self.format.name == "tf32":
            factors = FACTORS.get(name, ())
            return kernel(*[self._narrow(x) if i in factors else x for i, x in enumerate(args)], **kwargs)
        if name == CAST:
            return self._cast(kernel, args, kwargs)
        if not self._is_low(args, kwargs):
            return kernel(*args, **kwargs)
        in_chunks = self.format.elementwise and self.copies == 1 and fits_in_chunks(kind, args, kwargs)
        return (self._in_chunks if in_chunks else self._in_fp32)(kind, args, kwargs)

    def _is_low(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the result of a kernel must be rounded."""
        operands = deciding(tensors((*args, *kwargs.values())))
        if not operands and self.format.is_storage_only:  # torch.full() and the like
            return kwargs.get("dtype") == self.format.compute_dtype
        return {x.dtype for x in operands} == {self.format.compute_dtype}

    def drawing(self, x: Tensor) -> tuple[torch.Generator | None, int]:
        """The generator by which ``x`` is rounded, and its copies: 1 for a tensor that all copies share."""
        return self.generator, self.copies if x.ndim and len(x) % self.copies == 0 else 1

    def _round(self, x: Tensor) -> Tensor:
        return self.format.round(x, *(self.drawing(x) if self.generator else ())).to(self.format.compute_dtype)

    def _narrow(self, x: Tensor) -> Tensor:
        return self._round(x) if x.dtype == torch.float32 else x

    def _widen(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == self.format.compute_dtype else x

    def _in_fp32(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wide_args, wide_kwargs = map_tensors((args, kwargs), self._widen)
        requested = kwargs.get("dtype")
        if kind.name in SOFTMAXES and wide_args[2]:  # half_to_float: fp32 on output, on CUDA
            wide_args, requested = (*wide_args[:2], False), torch.float32
        if requested == self.format.compute_dtype:
            wide_kwargs["dtype"] = torch.float32
        result = kind.kernel(*wide_args, **wide_kwargs)
        if kind.is_mutable:
            return self._write_back(kind.kernel, (args, kwargs), (wide_args, wide_kwargs), result)
        return result if requested == torch.float32 else map_tensors(result, self._narrow)

    def _in_chunks(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute in fp32 chunk by chunk: the fp32 copy of a chunk stays in cache, that of a tensor would not."""
        whole = next(x for x in tensors(args) if x.ndim)
        flat = (x.view(-1).split(CHUNK_ELEMENTS) if torch.is_tensor(x) and x.ndim else repeat(x) for x in args)
        parts = (self._in_fp32(kind, chunk, kwargs) for chunk in zip(*flat))
        first = next(parts)
        result = torch.empty_like(whole, dtype=first.dtype)
        for target, part in zip(result.view(-1).split(CHUNK_ELEMENTS), chain([first], parts)):
            target.copy_(part)
        return result

    def _write_back(self, kernel: Any, given: tuple[Any, Any], wide: tuple[Any, Any], result: Any) -> Any:
        """Store what an in-place kernel wrote to widened copies into the tensors it was given."""
        targets = dict(zip(map(id, written(kernel, *wide)), written(kernel, *given)))
        for source in written(kernel, *wide):
            targets[id(source)].copy_(self._narrow(source))
        return map_tensors(result, lambda x: targets[id(x)] if id(x) in targets else self._narrow(x))

    def _cast(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        narrowed = kwargs.get("dtype") == self.format.compute_dtype != args[0].dtype
        if narrowed and (self.format.is_storage_only or self.generator is not None):
            return kernel(self._round(args[0].float()), **kwargs)
        return kernel(*args, **kwargs)
