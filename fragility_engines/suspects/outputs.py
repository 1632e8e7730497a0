"""Contexts in which modules give something else: nothing, their input, twice the work, a multiple.

``model`` is the argument that every change of a suspect takes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def again(modules: Sequence[nn.Module], model: nn.Module) -> Iterator[None]:
    """A context in which what ``modules`` give goes through them again."""
    with giving(modules, lambda module, args, options, output: module.forward(output, *args[1:], **options)):
        yield


@contextmanager
def passing(modules: Sequence[nn.Module], model: nn.Module) -> Iterator[None]:
    """A context in which ``modules`` give back what they are given."""
    with giving(modules, lambda module, args, options, output: args[0]):
        yield


@contextmanager
def multiplied(modules: Sequence[nn.Module], factor: float, model: nn.Module) -> Iterator[None]:
    """A context in which what ``modules`` give is multiplied by ``factor``."""
    with giving(modules, lambda module, args, options, output: output * factor):
        yield


@contextmanager
def giving(modules: Sequence[nn.Module], other: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``modules`` give what ``other`` makes of module, arguments, options and output.

    The first argument is the input, and the output the first one, wherever the model's code has them.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
        if not args:
            name, *names = options
            args, options = (options[name],), {each: options[each] for each in names}
        made = other(module, args, options, first_of(output))
        return first_of(made) if isinstance(output, Tensor) else (first_of(made), *output[1:])

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_of(output: Any) -> Any:
    """The first of the outputs of a module, or its only one."""
    return output if isinstance(output, Tensor) else output[0]
