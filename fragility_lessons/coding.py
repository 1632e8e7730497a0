"""Exercises in which a student writes a function, and the check that compares it with the library's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Coding:
    """A function for a student to write.

    ``reference`` is the library's function, and ``cases`` are arguments to try. ``mistakes`` are wrong functions, each
    under the hint for a student who makes the same mistake. ``solution`` is a worked answer as source. ``returns`` says
    what the function is to return.
    """

    reference: Callable
    cases: Sequence[tuple]
    mistakes: Mapping[str, Callable]
    solution: str
    returns: str = "return one number"

    def check(self, function: Callable) -> str:
        """The response to a student's ``function``. An exception inside the function is passed on to the student."""
        found = [function(*arguments) for arguments in self.cases]
        right = self._values(self.reference)
        try:
            values = [np.asarray(value, dtype=float) for value in found]
        except (TypeError, ValueError):
            return f"Not yet. Hint: {self.returns}."
        if any(value.shape != wanted.shape for value, wanted in zip(values, right)):
            return f"Not yet. Hint: {self.returns}."
        if _equal(values, right):
            return "Right."
        hints = [hint for hint, wrong in self.mistakes.items() if _equal(values, self._values(wrong))]
        return f"Not yet. Hint: {hints[0] if hints else self._first_difference(values, right)}"

    def _values(self, function: Callable) -> list[np.ndarray]:
        return [np.asarray(function(*arguments), dtype=float) for arguments in self.cases]

    def _first_difference(self, found: list[np.ndarray], right: list[np.ndarray]) -> str:
        place = next(place for place, pair in enumerate(zip(found, right)) if not _equal(*([each] for each in pair)))
        given = ", ".join(map(_shown, self.cases[place]))
        wanted, value = _shown(right[place]), _shown(found[place])
        return f"for the arguments {given} the library gives {wanted}, and your function {value}."


def _shown(value: object) -> str:
    array = np.asarray(value, dtype=float)
    return np.array2string(array, separator=", ", formatter={"float": "{:.4g}".format}).replace("\n", "")


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.allclose(value, other, rtol=1e-4, atol=0) for value, other in zip(found, wanted))
