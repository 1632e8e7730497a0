"""Words of the lessons have the glossary's definition, and every symbol has one before a question asks for it."""

import html
import re

import nbformat
import pytest

from fragility_lab.paths import PROJECT
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons.coding import listed

LESSONS = sorted(name for name in notebook_names() if name.startswith("theory/"))
DEFINED = re.compile(r'<abbr title="([^"]*)">(.+?)</abbr>', re.S)
ROW = re.compile(r"^\| ([^|]+?) \| (.+?) \| ", re.M)
# What cannot be a word, unlike "a" or "A".
SPELLED = re.compile(r"[Α-Ωα-ω]|_|\(|^u$")


def glossary() -> dict[str, str]:
    """The meanings of the rows of docs/glossary.md, by symbols."""
    rows = dict(ROW.findall((PROJECT / "docs/glossary.md").read_text(encoding="utf-8")))
    del rows["symbol"]
    return rows


def symbols(row: str) -> set[str]:
    """The symbols of a row that cannot be taken for a word."""
    return {symbol for symbol in row.split(", ") if SPELLED.search(symbol)}


def asked(question: str) -> set[str]:
    """The symbols of the glossary in a ``question``."""
    text = html.unescape(re.sub(r"<[^>]*>", "", question))
    known = {symbol for row in glossary() for symbol in symbols(row)}
    return {symbol for symbol in known if re.search(rf"(?<![\w_]){re.escape(symbol)}(?![\w_])", text)}


def cells(name: str) -> list:
    return nbformat.read(notebook_path(name), as_version=4).cells


def test_symbols_are_found_in_a_question():
    assert asked("Which <b>ρ_LN</b> has a row of σ² = 3? Is a M_LN larger?") == {"ρ_LN", "σ²", "M_LN"}
    assert len(glossary()) > 40


@pytest.mark.parametrize("name", LESSONS)
def test_a_definition_is_that_of_the_glossary(name):
    rows = glossary()
    titles = [html.unescape(title) for cell in cells(name) for title, _ in DEFINED.findall(cell.source)]
    assert titles
    for title in titles:
        row = next(row for row in rows if title.startswith(f"{row}: "))
        assert title == f"{row}: {rows[row]}"


def test_no_symbol_is_asked_for_before_it_is_defined():
    defined, missing = set(), []
    for name in LESSONS:
        for cell in cells(name):
            if cell.cell_type == "markdown":
                titles = [html.unescape(title) for title, _ in DEFINED.findall(cell.source)]
                defined |= {
                    symbol
                    for row in glossary()
                    for title in titles
                    if title.startswith(f"{row}: ")
                    for symbol in symbols(row)
                }
            elif found := re.fullmatch(r"(\w+)\.EXERCISES\[(\d+)\]", cell.source):
                lacking = asked(listed()[found[1]][int(found[2])]["question"]) - defined
                missing += [(name, found[0], symbol) for symbol in sorted(lacking)]
    assert not missing
