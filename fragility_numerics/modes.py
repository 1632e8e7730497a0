"""Function modes that the code inside of them can find: in some of them attention and activations run differently."""

from contextvars import ContextVar
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """A context that sees every function of torch; ``current_function_mode`` gives it inside."""

    keeps_activations = False  # whether a table of an activation holds in it, too (``lookup.LookUp``)
    follows_changes = False  # whether values may change only in functions that it sees (``attention.Hiding``)

    def __enter__(self) -> Any:
        _entered.set((*_entered.get(), self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _entered.set(_entered.get()[:-1])


_entered: ContextVar[tuple[FunctionMode, ...]] = ContextVar("entered", default=())


def current_function_mode() -> Any:
    """The innermost ``FunctionMode`` that is entered; None if none is."""
    return _entered.get()[-1] if _entered.get() else None
