"""Exercises judge, and the notebooks show them and their pictures within the time allowed."""

import ast
import html
import time
from dataclasses import replace
from functools import cache

import nbformat
import pytest

from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons.explorers import Figure
from fragility_lessons.widgets import Exercise, numbers

LIVE = "application/vnd.jupyter.widget-view+json"


# --- Exercises ----------------------------------------------------------------------------------

NUMBER = Exercise("What is 1/8?", 0.125, "Halve it <b>thrice</b>.", "One over eight.")
CHOICE = Exercise("Which one?", "b", "Not the first.", "It is b.", ("a", "b"))


@pytest.mark.parametrize("answer", ["0.125", " 1/8 ", "125e-3", "0,125", "0.1255", "12.5%", "12.5 %", "2⁻³", "2**-3"])
def test_right_numbers(answer):
    assert NUMBER.is_right(answer)
    assert NUMBER.verdict(answer) == "Right."


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ("375,000", {375_000, 375}),  # a thousands separator or a decimal comma
        ("1,234,567.5", {1_234_567.5}),
        ("375 000", {375_000}),
        ("375'000", {375_000}),
        ("2/0.2", {10}),
        ("1/2/2", {0.25}),
        ("50%", {0.5}),
        ("−0.5", {-0.5}),
        ("1.6 × 10^-5", {1.6e-5}),
        ("1.6·10⁻⁵", {1.6e-5}),
        ("1.6E-5", {1.6e-5}),
        ("10⁶", {1e6}),
    ],
)
def test_ways_to_write_a_number(answer, values):
    assert sorted(numbers(answer)) == pytest.approx(sorted(values), rel=1e-15)


@pytest.mark.parametrize("answer", ["0.13", "-0.125", "0", "8"])
def test_wrong_numbers(answer):
    assert not NUMBER.is_right(answer)
    assert NUMBER.verdict(answer) == "Not yet. Hint: Halve it <b>thrice</b>."


@pytest.mark.parametrize("answer", ["an eighth", "1/0", "nan", "inf", "1e400", "10^400", "2^3^4", "1,00,0", "×", "<b>"])
def test_what_is_no_number_is_named(answer):
    told = f"An answer is a number such as 0.01, 1e-2, 1/100 or 1 %, not {answer!r}."
    assert NUMBER.verdict(answer) == html.escape(told)


def test_choices():
    assert CHOICE.is_right("b")
    assert not CHOICE.is_right("a")
    with pytest.raises(ValueError, match=r"one of the options \('a', 'b'\), got 'c'"):
        Exercise("Which one?", "c", "Think.", "None.", ("a", "b"))


@pytest.mark.parametrize(("exercise", "right"), [(NUMBER, "1/8"), (CHOICE, "b")])
def test_check_button_tells_the_verdict(exercise, right):
    panel = exercise.panel()
    field, button = panel.children[1].children
    verdict = panel.children[2]
    button.click()
    assert "Answer first." in verdict.value
    field.value = right
    button.click()
    assert verdict.value == '<p role="status">Right.</p>'


OPEN = "<details open><summary>Show the answer</summary>"


@pytest.mark.parametrize(("exercise", "right", "wrong"), [(NUMBER, "1/8", ("1", "2")), (CHOICE, "c", ("a", "b"))])
def test_the_explanation_opens_after_an_answer(exercise, right, wrong):
    exercise = replace(exercise, options=("a", "b", "c"), solution="c") if exercise.options else exercise
    panel = exercise.panel()
    field, button = panel.children[1].children
    button.click()
    assert not panel.children[3].value.startswith(OPEN)  # no answer yet
    field.value = wrong[0]
    for _ in range(3):
        button.click()
    assert not panel.children[3].value.startswith(OPEN)  # one wrong answer gets a hint, however often it is checked
    field.value = wrong[1]
    button.click()
    assert panel.children[3].value.startswith(OPEN)
    second = exercise.panel()
    second.children[1].children[0].value = right
    second.children[1].children[1].click()
    assert second.children[3].value.startswith(OPEN)


def test_a_verdict_goes_when_the_choice_changes():
    panel = CHOICE.panel()
    field, button = panel.children[1].children
    field.value = "a"
    button.click()
    assert panel.children[2].value == '<p role="status">Not yet. Hint: Not the first.</p>'
    field.value = "b"
    assert panel.children[2].value == ""


def test_another_number_is_judged_anew():
    panel = NUMBER.panel()
    field, _ = panel.children[1].children
    for answer, told in (("1", "Not yet"), ("1/8", "Right")):
        field.value = answer
        assert told in panel.children[2].value


def test_answer_is_folded_away_with_and_without_a_kernel():
    folded = "<details><summary>Show the answer</summary><p>It is b.</p></details>"
    assert CHOICE.panel().children[3].value == folded
    static = CHOICE._repr_mimebundle_()
    assert static["text/html"] == f"<p>Which one?</p><ul><li>a</li><li>b</li></ul>{folded}"
    assert "<ul>" not in NUMBER._repr_mimebundle_()["text/html"]
    assert static["text/plain"] == "Which one?"
    assert LIVE in static


# --- The notebooks ------------------------------------------------------------------------------

TEACHING = [name for name in notebook_names() if name.startswith("theory/")]
SECONDS: dict[str, list[float]] = {}  # of the cells of a notebook that ran
AT_ONCE = ("theory/1", "theory/2", "theory/3", "theory/5", "theory/7")
MOST_SECONDS = 3


@cache
def run_notebook(name: str) -> tuple[list[Figure], list[Exercise]]:
    """The figures and exercises that the code cells of the notebook ``name`` end with."""
    shown, scope = [], {}
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type != "code":
            continue
        body, before = ast.parse(cell.source).body, time.process_time()
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), scope)
        if last:
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), scope))
            if isinstance(shown[-1], Figure):
                assert "nan" not in shown[-1]._repr_mimebundle_()["text/plain"]
        SECONDS.setdefault(name, []).append(time.process_time() - before)
    return [x for x in shown if isinstance(x, Figure)], [x for x in shown if isinstance(x, Exercise)]


@pytest.mark.parametrize("name", TEACHING)
def test_notebooks_show_figures_and_exercises(name):
    figures, exercises = run_notebook(name)
    assert len(figures) >= 2
    assert 5 <= len(exercises) <= 7


@pytest.mark.parametrize("name", [name for name in TEACHING if name.startswith(AT_ONCE)])
def test_no_cell_makes_a_student_wait(name):
    """Seconds of one processor; what takes longer is shipped (``shipped``)."""
    run_notebook(name)
    assert len(SECONDS[name]) > 10 and max(SECONDS[name]) < MOST_SECONDS, SECONDS[name]
