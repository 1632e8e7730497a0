"""Exercises in which a student writes a function, and the check that compares it with the library's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import yaml

from fragility_lab.paths import ASSETS


@cache
def listed() -> dict[str, Any]:
    """The contents of ``fragility_lab/assets/exercises.yaml``."""
    return yaml.safe_load((ASSETS / "exercises.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Coding:
    """A function for a student to write.

    ``reference`` is the library's function, and ``cases`` are arguments to try. ``solution`` is a worked answer as
    source. ``mistakes`` are changes of its text, each under the hint for a student who makes the same mistake.
    ``task`` says what it computes, as HTML, and ``returns`` what it is to return.
    """

    reference: Callable
    cases: Sequence[tuple]
    solution: str
    mistakes: Mapping[str, Mapping[str, str]]
    task: str = ""
    returns: str = "return one number"

    def written(self, hint: str = "") -> Callable:
        """The worked answer, or the one with the mistake of a ``hint``."""
        source, names = self.solution, dict[str, Callable]()
        for right, wrong in self.mistakes.get(hint, {}).items():
            source = source.replace(right, wrong)
        exec(source, {}, names)
        return next(iter(names.values()))

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
        hints = [hint for hint in self.mistakes if _equal(values, self._values(self.written(hint)))]
        return f"Not yet. Hint: {hints[0] if hints else self._first_difference(values, right)}"

    def _values(self, function: Callable) -> list[np.ndarray]:
        return [np.asarray(function(*arguments), dtype=float) for arguments in self.cases]

    def _first_difference(self, found: list[np.ndarray], right: list[np.ndarray]) -> str:
        place = next(place for place, pair in enumerate(zip(found, right)) if not _equal(*([each] for each in pair)))
        given = ", ".join(map(_shown, self.cases[place]))
        wanted, value = _shown(right[place]), _shown(found[place])
        return f"for the arguments {given} the library gives {wanted}, and your function {value}."


def coding(lesson: str, reference: Callable, cases: Sequence[tuple]) -> Coding:
    """The exercise of the module ``lesson`` whose answer is compared with ``reference``."""
    return Coding(reference, cases, **listed()["coding"][lesson])


def _shown(value: object) -> str:
    array = np.asarray(value, dtype=float)
    return np.array2string(array, separator=", ", formatter={"float": "{:.4g}".format}).replace("\n", "")


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.allclose(value, other, rtol=1e-4, atol=0) for value, other in zip(found, wanted))
