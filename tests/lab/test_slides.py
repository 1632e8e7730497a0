"""Every section of a lesson has notes for the speaker, and together they fit the time of the lesson."""

import html
import re
import runpy

import nbformat
import pytest
import yaml

from fragility_lab.paths import PROJECT
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons.coding import listed
from fragility_lessons.exercises import LESSONS as LESSON_MODULES
from fragility_lessons.exercises import exercises

LESSONS = [name for name in notebook_names() if name.startswith("theory/")]
NOTES = yaml.safe_load((PROJECT / "docs/site/slides/notes.yaml").read_text(encoding="utf-8"))


def headings(name: str) -> list[str]:
    cells = nbformat.read(notebook_path(name), as_version=4).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    return [found for text in texts for found in re.findall(r"^##? (.+)$", text, re.M)]


def test_every_lesson_has_notes():
    assert [f"theory/{lesson}" for lesson in NOTES] == LESSONS


@pytest.mark.parametrize("name", LESSONS)
def test_every_section_has_notes_and_every_note_a_section(name):
    assert list(NOTES[name.removeprefix("theory/")]) == headings(name)


@pytest.mark.parametrize("name", LESSONS)
def test_the_minutes_of_the_notes_are_those_of_the_lesson(name):
    notes = NOTES[name.removeprefix("theory/")].values()
    assert all(
        note.keys() - {"ask", "answer"} == {"minutes", "say"} and note["say"].endswith((".", "?")) for note in notes
    )
    assert all(("ask" in note) == ("answer" in note) for note in notes)
    assert all("?" in note["ask"] or note["ask"].endswith(".") for note in notes if "ask" in note)
    assert all(note["answer"].endswith(".") for note in notes if "answer" in note)
    first = nbformat.read(notebook_path(name), as_version=4).cells[0].source
    minutes = int(re.search(r"About (\d+) minutes", " ".join(first.split()))[1])
    assert sum(note["minutes"] for note in notes) == minutes


def test_the_hour_for_lecturers_takes_the_minutes_of_its_sections():
    page = (
        (PROJECT / "docs/teaching.md").read_text(encoding="utf-8").partition("\n## One hour\n")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (\d+) \| (?:\[\d\]\(\.\./notebooks/theory/(\w+)\.ipynb\)|\d) \| ([^|]+) \|", page, re.M)
    assert len(rows) > 5 and sum(int(minutes) for minutes, *_ in rows) == 60
    for minutes, lesson, sections in rows:
        if lesson:
            assert int(minutes) == sum(NOTES[lesson][section]["minutes"] for section in sections.split("; "))


# --- Sheets of exercises --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> dict[str, str]:
    """Both sheets, as a browser would show them: without style and tags."""
    found = runpy.run_path(PROJECT / "docs/site/exercise_sheets.py")["write"](tmp_path_factory.mktemp("sheets"))
    return {path.stem: path.read_text(encoding="utf-8") for path in found}


def test_both_sheets_ask_every_question_and_one_has_the_solutions(sheets):
    for lesson in LESSON_MODULES:
        for exercise in exercises(lesson):
            assert all(sheet.count(f"<p>{exercise.question}</p>") == 1 for sheet in sheets.values())
            assert exercise.explanation in sheets["solutions"] and exercise.explanation not in sheets["exercises"]
        given, coding = listed()["sheet"][lesson], listed()["coding"][lesson]
        assert given in sheets["exercises"] and given not in sheets["solutions"]
        solution = html.escape(coding["solution"])
        assert all(coding["task"] in sheet for sheet in sheets.values())
        assert solution in sheets["solutions"] and solution not in sheets["exercises"]
        assert solution.splitlines()[0] in sheets["exercises"]
    choices = sum(bool(exercise.options) for lesson in LESSON_MODULES for exercise in exercises(lesson))
    assert sheets["solutions"].count('<li class="solution">') == choices
    assert "☑" not in sheets["exercises"].split("</style>")[1] and 'class="solution"' not in sheets["exercises"]
