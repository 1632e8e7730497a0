"""The tensors in nested arguments and results: tuples, lists, dictionaries, named tuples, outputs of transformers.

torch's pytree knows all of these, but takes several times as long, and emulation asks for every kernel. So tuples,
lists and dictionaries are handled here. Caches and other objects that pytree does not know are left as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fragility_core.arithmetic.internals import tree_leaves, tree_map_only

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
