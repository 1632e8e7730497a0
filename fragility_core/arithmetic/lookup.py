"""Elementwise functions of 16-bit numbers, read off a table: there are only 65,536 of them."""

import math

import torch
from torch import Tensor, nn
from transformers import activations

from fragility_core.arithmetic.formats import chunks

LOOKUP_CHUNK = 2**19  # numbers read at once: their rows take 2 MiB, and short parts more time than they save


def elementwise_modules(model: nn.Module) -> list[nn.Module]:
    """The activations of transformers in ``model`` that have no parameters."""
    return [m for m in model.modules() if type(m).__module__ == activations.__name__ and not list(m.parameters())]


def every_number(compute_dtype: torch.dtype, device: torch.device) -> Tensor:
    """All bit patterns (65536,) of the 16-bit dtype ``compute_dtype``, infinities and NaN among them."""
    return torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(compute_dtype)


def _by_gather(device: torch.device) -> bool:
    """A CPU's ``index_select`` of single numbers keeps to one thread, which takes no longer than two of ``gather``."""
    return device.type == "cpu" and torch.get_num_threads() > 2


def row_of(numbers: Tensor) -> Tensor:
    """Where 16-bit ``numbers`` stand in ``every_number``."""
    return numbers.view(torch.uint16).to(torch.int64 if _by_gather(numbers.device) else torch.int32)


def entries(table: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """``table[rows]``, one-dimensional, into ``out``."""
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
