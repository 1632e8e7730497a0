"""The tensors in nested arguments and results: tuples, lists, dictionaries, named tuples, outputs of transformers.

torch's pytree knows all of these, but takes several times as long, and emulation asks for every kernel. So tuples,
lists and dictionaries are handled here. Caches and other objects that pytree does not know are left as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fragility_numerics.internals import tree_leaves, tree_map_only

PLAIN = (int, float, bool, str, type(None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind([map_tensors(item, change) for item in value])
    if kind is dict:
        return {name: map_tensors(item, change) for name, item in value.items()}
    return tree_map_only(Tensor, change, value)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from tensors(item)
    elif type(value) not in PLAIN:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def together(values: Iterable[Tensor]) -> list[Tensor]:
    """``values`` on the device of the first one. The parts of a model may lie on several, and each keeps its own."""
    values = list(values)
    return [x.to(values[0].device) for x in values]


def entering(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[..., Tensor] = Tensor.to
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """A hook before the forward of ``module``: its arguments on its device, where accelerate would move them later.

    The module's other hooks and its children then see the same tensors. ``move`` is given a tensor and the device.
    """
    own = next(module.parameters(), None)
    device = None if own is None else own.device
    return map_tensors((args, kwargs), lambda x: x if device in (None, x.device) else move(x, device))
