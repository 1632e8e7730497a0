"""Parameters whose entries may lie elsewhere: read when they are needed, and dropped after.

Code that reads weights outside of a forward does so inside of ``loaded``, which does nothing for ordinary parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn


class Source(Protocol):
    """A source of the entries of a parameter."""

    def present(self, parameter: Tensor) -> AbstractContextManager[None]:
        """A context in which ``parameter`` has its entries. Contexts may be nested."""

    def another(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, read: Callable[[], Tensor]
    ) -> nn.Parameter:  # fmt: skip
        """A parameter with a source of this kind, whose entries are what ``read`` returns."""


def source_of(parameter: Tensor) -> Source | None:
    """The source of ``parameter``; None for one that has its entries at all times."""
    return getattr(parameter, "_source", None)


def set_source(parameter: Tensor, source: Source | None) -> None:
    """Let ``source`` give the entries of ``parameter``; with None it has them itself."""
    vars(parameter)["_source"] = source


@contextmanager
def filled(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which all ``parameters`` have their entries."""
    with ExitStack() as stack:
        for parameter in parameters:
            if (source := source_of(parameter)) is not None:
                stack.enter_context(source.present(parameter))
        yield


def loaded(*modules: nn.Module) -> AbstractContextManager[None]:
    """A context in which all parameters of ``modules`` have their entries."""
    return filled(parameter for module in modules for parameter in module.parameters())


def entries(parameter: nn.Parameter) -> Tensor:
    """The entries of ``parameter``, read anew if they lie elsewhere."""
    with filled([parameter]):
        return parameter.detach()
