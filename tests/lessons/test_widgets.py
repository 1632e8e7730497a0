"""Explorers redraw and never hide an error; exercises judge; the notebooks use both within the time allowed."""

import ast
import base64
import html
import math
import re
import time
from dataclasses import replace
from functools import cache

import matplotlib
import nbformat
import pytest

matplotlib.use("Agg")

from ipywidgets import Dropdown, FloatSlider, IntSlider, Text, ToggleButtons
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fragility_lab.reporting import figures
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons import pictures
from fragility_lessons.widgets import Exercise, Explorer, buttons, choice, numbers, slider

LIVE = "application/vnd.jupyter.widget-view+json"


def line(slope: float, colour: str):
    """A draw function that fails for a negative slope."""
    if slope < 0:
        raise ValueError("a slope <is> not negative")
    left, right = pictures.panels()
    left.plot([0, 1], [0, slope], color=colour)
    left.set(xlabel="place", ylabel="height", title="a line")
    right.text(0, 0, "a < b")
    return [left, right], f"slope {slope:g} & {colour}"


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(line, slope=slider("slope", -1.0, 2.0, 0.5, start=1.0), colour=choice("colour", ["C0", "C1"], "C0"))


def test_controls_are_labelled():
    number, fraction, named = slider("keys", 1, 8, 1, 2), slider("margin", 0, 8, 0.5, 2), choice("format", ["a"], "a")
    row = buttons("block", range(3), start=1)
    assert [type(control) for control in (number, fraction, named, row)] == [
        IntSlider, FloatSlider, Dropdown, ToggleButtons,
    ]  # fmt: skip
    assert [control.description for control in (number, fraction, named, row)] == ["keys", "margin", "format", "block"]


def test_a_button_gives_its_number():
    explorer = Explorer(lambda block: line(block, "C0"), block=buttons("block", range(3), start=1))
    explorer.controls["block"].value = 2
    assert "slope 2" in explorer.picture.value


def test_a_moved_control_redraws_picture_and_numbers(explorer):
    before = explorer.picture.value
    explorer.controls["slope"].value = 2.0
    assert "slope 2 &amp; C0" in explorer.picture.value
    assert explorer.picture.value != before
    explorer.controls["slope"].value = 1.0
    assert explorer.picture.value == before  # the same values, the same picture
    explorer.controls["colour"].value = "C1"
    assert "slope 1 &amp; C1" in explorer.picture.value


def test_each_panel_says_in_words_what_it_shows(explorer):
    for shown in (explorer.picture.value, explorer._repr_mimebundle_()["text/html"]):
        assert re.findall(r'alt="([^"]*)"', shown) == ["a line: height over place", "a &lt; b"]
        assert '<p class="readout" aria-live="polite">slope 1 &amp; C0</p>' in shown


def test_an_error_takes_the_place_of_the_picture_and_is_raised(explorer):
    with pytest.raises(ValueError, match="not negative"):
        explorer.controls["slope"].value = -0.5
    assert '<pre role="alert">' in explorer.picture.value
    assert "ValueError: a slope &lt;is&gt; not negative" in explorer.picture.value
    assert "<img" not in explorer.picture.value
    explorer.controls["slope"].value = 0.5
    assert "alert" not in explorer.picture.value


def test_an_error_at_first_is_the_cells_own():
    with pytest.raises(ValueError, match="not negative"):
        Explorer(line, slope=slider("slope", -1.0, 2.0, 0.5, start=-1.0), colour=choice("colour", ["C0"], "C0"))
    with pytest.raises(TypeError, match="colour"):
        Explorer(line, slope=slider("slope", -1.0, 2.0, 0.5, start=1.0))


def test_a_cell_shows_the_live_panel_and_commits_the_static_figure(explorer):
    bundle = explorer._repr_mimebundle_()
    assert bundle.keys() == {LIVE, "text/html", "text/plain"}
    assert bundle[LIVE]["model_id"] == explorer.panel.model_id
    assert bundle["text/plain"] == "slope 1 & C0"
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', bundle["text/html"])
    assert len(pictures) == 2
    assert all(b"</svg>" in base64.b64decode(picture) for picture in pictures)
    assert bundle["text/html"] == explorer._repr_mimebundle_()["text/html"]  # the same bytes


def test_a_panel_has_a_note_for_readers_whose_kernel_is_gone(explorer):
    for panel in (explorer.panel, NUMBER.panel()):
        assert "lost" in panel.children[-1]._dom_classes
        assert "Run this cell again" in panel.children[-1].value


def test_drawing_leaves_no_figure_open(explorer):
    before = figures.plt.get_fignums()
    explorer.controls["slope"].value = 2.0
    assert figures.plt.get_fignums() == before


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
MILLISECONDS = 150


SECONDS: dict[str, list[float]] = {}  # of the cells of a notebook that ran
AT_ONCE = ("theory/1", "theory/3", "theory/7")
MOST_SECONDS = 3


@cache
def run_notebook(name: str) -> tuple[list[Explorer], list[Exercise]]:
    """The explorers and exercises that the code cells of the notebook ``name`` end with."""
    shown, scope = [], {}
    for cell in nbformat.read(notebook_path(name), as_version=4).cells:
        if cell.cell_type != "code":
            continue
        body, before = ast.parse(cell.source).body, time.process_time()
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), scope)
        if last:
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), scope))
        SECONDS.setdefault(name, []).append(time.process_time() - before)
    return [x for x in shown if isinstance(x, Explorer)], [x for x in shown if isinstance(x, Exercise)]


def readout(picture: str) -> str:
    """The numbers below a picture."""
    return re.search(r'<p class="readout"[^>]*>(.*)</p>$', picture, re.DOTALL)[1]


def settings(control) -> list:
    """Both ends of a slider, the values of all options of a choice, a text as it is."""
    if isinstance(control, Text):
        return [control.value]
    if isinstance(control, ToggleButtons):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    return list(control.options) if hasattr(control, "options") else [control.min, control.max]


@pytest.mark.parametrize("name", TEACHING)
def test_notebooks_controls_work_at_their_ends(name, monkeypatch):
    """At both ends of one control, of all together, and where the panel starts; one end is moved to on the panel."""
    explorers, exercises = run_notebook(name)
    assert explorers
    assert 5 <= len(exercises) <= 7
    for explorer in explorers:
        ends = {name: settings(control) for name, control in explorer.controls.items()}
        start = {name: control.value for name, control in explorer.controls.items()}
        for values in ({name: values[side] for name, values in ends.items()} for side in (0, -1)):
            assert "nan" not in explorer.draw(**values)[1], values
        picture = explorer.picture.value
        assert "nan" not in readout(picture)
        for name, control in explorer.controls.items():
            others = [value for value in ends[name] if value != start[name]]
            for value in others[1:]:
                assert "nan" not in explorer.draw(**{**start, name: value})[1], (name, value)
            for value in others[:1]:
                control.value = value
                assert explorer.picture.value != picture, f"{control.description} changes nothing"
                assert "nan" not in readout(explorer.picture.value), (name, value)
            with monkeypatch.context() as undrawn:  # the picture of the start is known
                undrawn.setattr(explorer, "redraw", lambda: None)
                control.value = start[name]
        explorer.picture.value = picture


@pytest.mark.parametrize("name", [name for name in TEACHING if name.startswith(AT_ONCE)])
def test_no_cell_makes_a_student_wait(name):
    """Seconds of one processor; what takes longer is shipped (``shipped``)."""
    run_notebook(name)
    assert len(SECONDS[name]) > 10 and max(SECONDS[name]) < MOST_SECONDS, SECONDS[name]


@pytest.mark.parametrize("name", TEACHING)
@figures.style()
def test_no_label_leaves_its_picture(name):
    for explorer in run_notebook(name)[0]:
        panels, _ = explorer.draw(**{label: control.value for label, control in explorer.controls.items()})
        for axes in panels:
            figure = axes.get_figure()
            width, height = figure.get_size_inches()
            box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, axes.get_title()


@pytest.mark.parametrize("name", TEACHING)
def test_redrawing_is_fast(name):
    """The aim is 150 ms on two free cores; three times that, of the best of a few, whatever else the machine does."""
    for explorer in run_notebook(name)[0]:
        times = [math.inf]
        while min(times) >= 3 * MILLISECONDS and len(times) < 25:
            before = time.process_time()
            explorer.redraw()
            times.append(1000 * (time.process_time() - before))
        assert min(times) < 3 * MILLISECONDS, f"{explorer.draw.__name__}: {times} ms"


@pytest.mark.parametrize("name", TEACHING)
def test_solutions_are_accepted_and_others_are_not(name):
    for exercise in run_notebook(name)[1]:
        wrong = [option for option in exercise.options if option != exercise.solution]
        wrong = wrong or [repr(float(factor * exercise.solution)) for factor in (0.9, 1.1, -1.0)]
        assert exercise.is_right(str(exercise.solution))
        assert not any(map(exercise.is_right, wrong))
        assert exercise.hint != exercise.explanation and exercise.hint
