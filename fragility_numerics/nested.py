"""The tensors in nested arguments and results: tuples, lists, dictionaries, named tuples, outputs of transformers.

Caches and other objects are left as they are.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):  # faster than their union
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = copy.copy(value)  # an output of transformers has attributes, too
        for name, item in value.items():
            changed[name] = map_tensors(item, change)
        return changed
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from (item,) if isinstance(item, Tensor) else tensors(item)


def together(values: Iterable[Tensor]) -> list[Tensor]:
    """``values`` on the device of the first one. The parts of a model may lie on several, and each keeps its own."""
    values = list(values)
    return [x.to(values[0].device) for x in values]


def entering(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[..., Tensor] = Tensor.to
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """A hook before the forward of ``module`` that moves its arguments to its device, before accelerate would do so.

    The module's other hooks and its children then see the moved tensors. ``move`` gets a tensor and the device.
    """
    own = next(module.parameters(), None)
    device = None if own is None else own.device
    return map_tensors((args, kwargs), lambda x: x if device in (None, x.device) else move(x, device))
