"""The coding exercises: the worked answer is right, every foreseen mistake gets its hint, any other a comparison."""

import importlib
import math
import pkgutil

import matplotlib
import pytest

matplotlib.use("Agg")

import fragility_lessons as lessons
from fragility_lessons.coding import Coding

MODULES = [
    importlib.import_module(f"fragility_lessons.{found.name}") for found in pkgutil.iter_modules(lessons.__path__)
]
EXERCISES = {module.__name__.rpartition(".")[2]: module.CODING for module in MODULES if hasattr(module, "CODING")}
MISTAKES = [(lesson, hint) for lesson, coding in EXERCISES.items() for hint in coding.mistakes]


@pytest.mark.parametrize("lesson", EXERCISES)
def test_the_worked_answer_is_right(lesson):
    assert EXERCISES[lesson].check(EXERCISES[lesson].written()) == "Right."


@pytest.mark.parametrize(("lesson", "hint"), MISTAKES)
def test_a_mistake_gets_its_own_hint(lesson, hint):
    coding = EXERCISES[lesson]
    assert coding.check(coding.written(hint)) == f"Not yet. Hint: {hint}"


@pytest.mark.parametrize("lesson", EXERCISES)
def test_the_function_as_it_stands_in_the_notebook_is_told_what_to_return(lesson):
    coding = EXERCISES[lesson]
    assert coding.check(lambda *arguments: ...) == f"Not yet. Hint: {coding.returns}."


DOUBLE = {"that is the double.": {"x / 2": "2 * x"}}
HALF = Coding(lambda x: x / 2, [(4.0,), (6.0,)], "def half(x): return x / 2", DOUBLE)


def test_any_other_value_is_compared_with_the_librarys():
    said = HALF.check(lambda x: 2.0)  # right for the first case
    assert said == "Not yet. Hint: for the arguments 6 the library gives 3, and your function 2."
    said = EXERCISES["residual_depth"].check(lambda rho: [1.0] * len(rho))
    assert said.endswith("the library gives [3.12, 2.6, 1.3, 1], and your function [1, 1, 1, 1].")


def test_another_shape_is_told_and_an_exception_is_not_swallowed():
    assert HALF.check(lambda x: [x, x]) == "Not yet. Hint: return one number."
    assert HALF.check(lambda x: math.nan).startswith("Not yet. Hint: for the arguments 4 the")
    with pytest.raises(ZeroDivisionError):
        HALF.check(lambda x: x / 0)
