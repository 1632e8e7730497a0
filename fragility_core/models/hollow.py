"""Hollow models: parameters without memory, which are read when the part that owns them runs, and dropped after it.

A part is a block, or a module outside of blocks that owns parameters, such as an embedding, the final norm or the head.
A hollow model takes the memory of its largest part, and the rest of the project uses it like any other: it can be
lowered, run, monitored and estimated. Code that reads weights outside of a forward does so inside of ``loaded``.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fragility_core.arithmetic.internals import (
    mark_hollow,
    own_forward,
    replace_forward,
    source_of,
    spreading_hooks,
)
from fragility_core.arithmetic.nested import entering
from fragility_core.models.beside import meet
from fragility_core.models.tree import block_paths

M_MMAP_THRESHOLD = -3  # its number in malloc.h


class Source:
    """Fills a hollow parameter with what ``read`` returns, while at least one context asks for it."""

    def __init__(self, read: Callable[[], Tensor], empty: Tensor):
        self.read, self.empty, self.asked = read, empty, 0


def hollow_parameter(shape: torch.Size, dtype: torch.dtype, device: torch.device, read: Callable[[], Tensor]):
    """A parameter that takes four bytes until ``loaded`` fills it with what ``read`` returns.

    It has its shape, dtype and device at all times. All its entries are NaN while it is hollow, so that a computation
    with it is noticed.
    """
    empty = torch.full((), math.nan, dtype=dtype, device=device).expand(shape)
    parameter = nn.Parameter(empty, requires_grad=False)
    mark_hollow(parameter, Source(read, empty))
    return parameter


def widen(parameter: nn.Parameter) -> None:
    """Let ``parameter`` have its entries in fp32 from now on."""
    source = source_of(parameter)
    if source is None or parameter.dtype == torch.float32:
        parameter.data = parameter.data.float()
        return
    read = source.read
    source.read = lambda: read().float()
    source.empty = torch.full((), math.nan, device=parameter.device).expand(parameter.shape)
    parameter.data = parameter.data.float() if source.asked else source.empty


def is_hollow(model: nn.Module) -> bool:
    """Whether some parameter of ``model`` is hollow."""
    return any(source_of(parameter) is not None for parameter in model.parameters())


def require_own_places(model: nn.Module) -> None:
    """Raises ValueError where accelerate moves weights of ``model``, or values between the parts of a hollow one."""
    hooks = spreading_hooks(model)
    if any(getattr(hook, "offload", False) for hook in hooks):
        raise ValueError(
            "weights must stay on their devices, but accelerate has put some on the CPU or the disk: load the model "
            "with a device_map of GPUs alone, or streamed (models.files.open_hollow)"
        )
    if hooks and any(isinstance(own_forward(m), Loading) for m in model.modules()):
        raise ValueError(
            "a streamed model must be opened on its devices, but accelerate has spread this one afterwards: give the "
            "places of its modules to models.files.open_hollow"
        )


@contextmanager
def filled(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which the hollow ones among ``parameters`` have their entries. Contexts may be nested."""
    with ExitStack() as stack:
        for parameter in parameters:
            if (source := source_of(parameter)) is not None:
                stack.callback(drop, parameter, source)
                source.asked += 1
                if source.asked == 1:
                    parameter.data = source.read()
        yield


def drop(parameter: nn.Parameter, source: Source) -> None:
    """End one context that asked for ``parameter``."""
    source.asked -= 1
    if not source.asked:
        parameter.data = source.empty


def loaded(*modules: nn.Module) -> Iterator[None]:
    """A context in which all parameters of ``modules`` have their entries; it does nothing for other parameters."""
    return filled(parameter for module in modules for parameter in module.parameters())


def entries(parameter: nn.Parameter) -> Tensor:
    """The entries of ``parameter``, read anew if it is hollow."""
    with filled([parameter]):
        return parameter.detach()


def parameter_copy(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of ``parameter``; that of a hollow one is hollow, too, and reads the same entries."""
    source = source_of(parameter)
    if source is None:
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    copied = nn.Parameter(source.empty, requires_grad=False)
    mark_hollow(copied, Source(source.read, source.empty))
    return copied


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


class Loading:
    """The forward of a part, with its parameters read before and dropped after it."""

    def __init__(self, module: nn.Module):
        self.module, self.forward = module, module.forward

    def __call__(self, *args, **kwargs):
        args, kwargs = entering(self.module, args, kwargs)
        if (last := meet()) is not None:
            last.ask(id(self.module), partial(loaded, self.module))
        with loaded(self.module):
            return self.forward(*args, **kwargs)


def return_freed_memory() -> None:
    """Let glibc give the memory of each tensor of 64 KiB or more back to the system, from now on in this process.

    Left to itself it keeps holes between tensors that stay: 0.2 GB for each block of 51 M parameters.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)


def load_when_running(model: nn.Module) -> None:
    """Let every part of the hollow ``model`` read its parameters when it runs; read all others now, to stay."""
    return_freed_memory()
    found = parts(model)
    for module in found.values():
        replace_forward(module, Loading(module))
    inside = {id(p) for module in found.values() for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside and (source := source_of(parameter)) is not None:
            parameter.data = source.read()
            mark_hollow(parameter, None)


def replaced(model: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]) -> dict[int, nn.Parameter]:
    """For ``copy.deepcopy``: what takes the place of each parameter in a copy of ``model``, by its ``id``."""
    return {id(p): change(path, p) for path, p in model.named_parameters()}
