"""Elementwise functions of 16-bit numbers, read from a table: there are only 65,536 such numbers."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function
from transformers import activations

from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import NumberFormat, chunks
from fragility_numerics.internals import current_dispatch_mode, differentiated
from fragility_numerics.modes import current_function_mode

LOOKUP_CHUNK = 2**19  # numbers looked up at once: their rows take 2 MiB; for shorter chunks each call costs too much


def elementwise_modules(model: nn.Module) -> list[nn.Module]:
    """The activations of transformers in ``model`` that have no parameters."""
    return [m for m in model.modules() if type(m).__module__ == activations.__name__ and not list(m.parameters())]


def every_number(compute_dtype: torch.dtype, device: torch.device) -> Tensor:
    """All numbers of the 16-bit ``compute_dtype`` in the order of their bits, (65536,), with infinities and NaN."""
    return torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(compute_dtype)


def _by_gather(device: torch.device) -> bool:
    """True if ``gather`` is faster: with three threads or more, since ``index_select`` of single numbers uses one."""
    return device.type == "cpu" and torch.get_num_threads() > 2


def row_of(numbers: Tensor) -> Tensor:
    """The rows of a table that belong to 16-bit ``numbers``: their positions in ``every_number``."""
    return numbers.view(torch.uint16).to(torch.int64 if _by_gather(numbers.device) else torch.int32)


def entries(table: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """``table[rows]``, one-dimensional, written to ``out``."""
    if not _by_gather(table.device):
        return torch.index_select(table, 0, rows, out=out)
    parts = math.gcd(max(1, len(rows)), 1024)
    torch.gather(table.expand(parts, -1), 1, rows.view(parts, -1), out=out.view(parts, -1))
    return out


def look_up(table: Tensor, numbers: Tensor) -> Tensor:
    """The entries of ``table`` (65536,) for 16-bit ``numbers``, in their shape."""
    numbers = numbers.contiguous()
    found = torch.empty(numbers.shape, dtype=table.dtype, device=table.device)
    for part, out in chunks(numbers, found, length=LOOKUP_CHUNK):
        entries(table, row_of(part), out)
    return found


class LookUp:
    """Stands in for the forward of an activation: reads a table of what ``module`` gives for every 16-bit number.

    The result is the same bit for bit. It takes a fraction of the time where the module is a chain of kernels: GPT-2's
    eight take longer on a CPU than its matrix products. The module's own forward runs for another dtype, for
    derivatives, under random rounding and under other modes of torch.
    """

    def __init__(self, module: nn.Module, format: NumberFormat, emulated: bool):
        self.module, self.format, self.emulated = module, format, emulated
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        mode = current_dispatch_mode()
        if not self._applies(x, mode):
            return self._compute(x)
        if self.table is None or self.table.device != x.device:
            self.table = self._compute(every_number(self.format.compute_dtype, x.device))
        with nullcontext() if mode is None else mode.paused():
            return look_up(self.table, x)

    def _compute(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x)

    def _applies(self, x: Tensor, mode: object) -> bool:
        in_mode = has_torch_function((x,))  # ours, or someone else's
        if type(x) is not Tensor or (in_mode and not getattr(current_function_mode(), "keeps_activations", False)):
            return False
        emulating = isinstance(mode, Emulation) and mode.active and mode.format == self.format and not mode.generator
        as_made = emulating if self.emulated else mode is None
        return as_made and x.dtype == self.format.compute_dtype and not differentiated(x)
