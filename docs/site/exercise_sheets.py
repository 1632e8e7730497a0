"""The exercises of the lessons to print (``make exercises``): a sheet with space to answer, and the solutions apart."""

from collections.abc import Iterator
from pathlib import Path

import nbformat

from fragility_lab import paths
from fragility_lab.reporting.html import template
from fragility_lab.running.files import write_whole
from fragility_lessons.coding import listed
from fragility_lessons.exercises import LESSONS, exercises

SHEETS = {"exercises.html": False, "solutions.html": True}  # whether a sheet has the solutions


def lessons() -> Iterator[dict]:
    """The lessons by number: the title, what is given, the questions, and the function to write with its signature."""
    for name, notebook in zip(LESSONS, sorted((paths.NOTEBOOKS / "theory").glob("*.ipynb")), strict=True):
        title = nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        coding = listed()["coding"][name]
        signature = coding["solution"].splitlines()[0]
        given = listed()["sheet"][name]
        yield {"title": title, "given": given, "questions": exercises(name), "coding": coding, "signature": signature}


def write(folder: Path) -> list[Path]:
    """The paths of both sheets, written into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, solved in SHEETS.items():
        page = template("exercises/sheet.html.jinja").render(lessons=list(lessons()), solved=solved)
        write_whole(folder / name, page)
    return [folder / name for name in SHEETS]


if __name__ == "__main__":
    for path in write(paths.OUTPUTS / "exercises"):
        print(path.relative_to(paths.PROJECT))
