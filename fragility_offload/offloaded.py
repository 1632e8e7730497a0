"""Offloaded models: parameters without memory, which are read when the part that owns them runs, and dropped after it.

A part is a block, or a module outside of blocks that owns parameters, such as an embedding, the final norm or the head.
An offloaded model takes the memory of its largest part, and the rest of the project uses it like any other: it can be
lowered, run, monitored and estimated (``numerics.presence``).
"""

import ctypes
import math
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fragility_core.models.paths import block_paths
from fragility_numerics.internals import replace_forward
from fragility_numerics.nested import entering
from fragility_numerics.presence import loaded, set_source, source_of
from fragility_offload.lockstep import barrier

M_MMAP_THRESHOLD = -3  # its number in malloc.h


class Source:
    """Fills an offloaded parameter with what ``read`` returns, while at least one context asks for it."""

    def __init__(self, read: Callable[[], Tensor], empty: Tensor):
        self.read, self.empty, self.asked = read, empty, 0

    @contextmanager
    def present(self, parameter: Tensor) -> Iterator[None]:
        """A context in which ``parameter`` has its entries. Contexts may be nested."""
        try:
            self.asked += 1
            if self.asked == 1:
                parameter.data = self.read()
            yield
        finally:
            self.asked -= 1
            if not self.asked:
                parameter.data = self.empty

    def another(self, *of: Any) -> nn.Parameter:
        """``offloaded_parameter`` of these arguments."""
        return offloaded_parameter(*of)


def offloaded_parameter(shape: torch.Size, dtype: torch.dtype, device: torch.device, read: Callable[[], Tensor]):
    """A parameter that takes four bytes until ``loaded`` fills it with what ``read`` returns.

    It has its shape, dtype and device at all times. All its entries are NaN while it is offloaded, so that a
    computation with it is noticed.
    """
    empty = torch.full((), math.nan, dtype=dtype, device=device).expand(shape)
    parameter = nn.Parameter(empty, requires_grad=False)
    set_source(parameter, Source(read, empty))
    return parameter


def widen(parameter: nn.Parameter) -> None:
    """Let ``parameter`` have its entries in fp32 from now on."""
    source: Any = source_of(parameter)  # only this module makes one
    if source is None or parameter.dtype == torch.float32:
        parameter.data = parameter.data.float()
        return
    read = source.read
    source.read = lambda: read().float()
    source.empty = torch.full((), math.nan, device=parameter.device).expand(parameter.shape)
    parameter.data = parameter.data.float() if source.asked else source.empty


def is_offloaded(model: nn.Module) -> bool:
    """True if some parameter of ``model`` is offloaded."""
    return any(source_of(parameter) is not None for parameter in model.parameters())


def parameter_copy(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of ``parameter``; that of an offloaded one is offloaded, too, and reads the same entries."""
    source: Any = source_of(parameter)
    if source is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return offloaded_parameter(parameter.shape, parameter.dtype, parameter.device, source.read)


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by path, whose parameters are read together: blocks, and others that own parameters.

    A module that owns parameters beside parts inside it is none; its own parameters are few, and are read at once.
    """
    blocks = block_paths(model)
    inside = {id(m) for path in blocks for m in model.get_submodule(path).modules()}
    owning = [
        path for path, module in model.named_modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    ]  # fmt: skip
    found = {path: model.get_submodule(path) for path in [*owning, *blocks]}
    numbers = {id(module) for module in found.values()}
    return {path: m for path, m in found.items() if not any(id(c) in numbers for c in m.modules() if c is not m)}


def with_shared(forward: Callable, names: Collection[str], *args, **kwargs) -> tuple[Any, dict[str, dict]]:
    """The result of a part's ``forward``, and what it wrote to its arguments ``names``, dictionaries of layers."""
    given = {name: UserDict(kwargs[name]) for name in names}
    result = forward(*args, **kwargs | given)
    return result, {name: {k: x for k, x in new.items() if x is not kwargs[name].get(k)} for name, new in given.items()}


class Loading:
    """The forward of a part, with its parameters read before and dropped after it."""

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward

    def __call__(self, *args, **kwargs):
        args, kwargs = entering(self.module, args, kwargs)
        if (last := barrier()) is not None:
            last.ask(id(self.module), partial(loaded, self.module))
        with loaded(self.module):
            return self.forward(*args, **kwargs)


def return_freed_memory() -> None:
    """Let glibc give the memory of each tensor of 64 KiB or more back to the system, from now on in this process.

    Left to itself it keeps holes between tensors that stay: 0.2 GB for each block of 51 M parameters.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)


def load_when_running(model: nn.Module) -> None:
    """Let every part of the offloaded ``model`` read its parameters when it runs; read all others now, to stay."""
    return_freed_memory()
    found = parts(model)
    for module in found.values():
        replace_forward(module, Loading(module))
    inside = {id(p) for module in found.values() for p in module.parameters()}
    for parameter in model.parameters():
        source: Any = source_of(parameter)
        if id(parameter) not in inside and source is not None:
            parameter.data = source.read()
            set_source(parameter, None)
