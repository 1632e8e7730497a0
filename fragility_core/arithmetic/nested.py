"""The tensors among nested arguments and results."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``change`` applied to every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)
