"""Elementwise functions of 16-bit numbers, read off a table: there are only 65,536 of them."""

import torch
from torch import Tensor, nn
from transformers import activations

from fragility_core.formats import pieces


def elementwise_modules(model: nn.Module) -> list[nn.Module]:
    """The activations of transformers in ``model`` that have no parameters."""
    return [m for m in model.modules() if type(m).__module__ == activations.__name__ and not list(m.parameters())]


def every_number(carrier: torch.dtype, device: torch.device) -> Tensor:
    """All bit patterns (65536,) of the 16-bit dtype ``carrier``, infinities and NaN among them."""
    return torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(carrier)


def row_of(numbers: Tensor) -> Tensor:
    """Where 16-bit ``numbers`` stand in ``every_number``."""
    return numbers.view(torch.uint16).int()


def look_up(table: Tensor, numbers: Tensor) -> Tensor:
    """The entries of ``table`` (65536,) for 16-bit ``numbers``, in their shape."""
    numbers = numbers.contiguous()
    found = torch.empty(numbers.shape, dtype=table.dtype, device=table.device)
    for part, out in pieces(numbers, found):
        torch.index_select(table, 0, row_of(part), out=out)
    return found
