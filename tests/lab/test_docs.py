"""The pages in docs: what is generated is up to date, links and sections that are cited exist."""

import io
import re
import subprocess
from functools import cache

import pandas as pd
import pytest
import yaml

import fragility_core
from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.reporting import report, results

SHOWN = subprocess.run(["git", "ls-files", "*.md"], cwd=PROJECT, capture_output=True, text=True, check=False).stdout
PAGES = sorted(PROJECT / name for name in SHOWN.split() if (PROJECT / name).is_file()) or [PROJECT / "README.md"]
HEADING = re.compile(r"^#+ (.+)$", re.M)
PROTOCOL = (PROJECT / "docs" / "protocol.md").read_text(encoding="utf-8")


def committed_tables(name: str) -> dict[str, pd.DataFrame]:
    """The tables of ``outputs/<name>`` as committed: a rerun may have written other numbers over them."""
    tables = {}
    for path in (OUTPUTS / name / "tables").glob("*.csv"):
        shown = subprocess.run(
            ["git", "show", f"HEAD:{path.relative_to(PROJECT)}"],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=False,
        )
        tables[path.stem] = pd.read_csv(io.StringIO(shown.stdout) if shown.returncode == 0 else path)
    return tables


TABLES, OTHER, SECOND = (committed_tables(name) for name in (results.RESULTS, results.OTHER, results.SECOND))


@cache
def committed(template: str) -> str:
    """What ``template`` makes of the committed tables."""
    return results.rendered(template, TABLES, OTHER, SECOND)


def generated(template: str, text: str) -> bool:
    """Whether ``text`` is what ``template`` makes of the committed tables, or of those in the working tree."""
    if text == committed(template):
        return True
    present = [report.read_tables(name) for name in (results.RESULTS, results.OTHER, results.SECOND)]
    return text == results.rendered(template, *present)


def test_results_are_those_of_the_committed_tables():
    assert generated("page.md.jinja", results.PAGE.read_text(encoding="utf-8")), "run `make docs` and commit"


def test_numbers_of_the_page_follow_the_tables(monkeypatch, tmp_path, capsys):
    """Another table makes another page, and ``main`` writes both files without touching the rest of README."""
    moved = TABLES | {"x1_runs": TABLES["x1_runs"].assign(mean_ratio=0.9)}
    page = results.rendered("page.md.jinja", moved, OTHER, SECOND)
    assert "mean of a run: 0.900 to 0.900" in page and page != committed("page.md.jinja")
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    read = results.read_tables
    monkeypatch.setattr(results, "read_tables", lambda name: moved if name == results.RESULTS else read(name))
    before = (PROJECT / "README.md").read_text(encoding="utf-8")
    results.README.write_text(before, encoding="utf-8")
    results.main()
    after = results.README.read_text(encoding="utf-8")
    assert results.PAGE.read_text(encoding="utf-8") == page and "written" in capsys.readouterr().out
    assert "within 10.0 %" in after.replace("\N{NO-BREAK SPACE}", " ") and after != before
    assert results.FINDINGS.sub("", after) == results.FINDINGS.sub("", before)


def test_a_lacking_table_or_column_is_an_error():
    with pytest.raises(KeyError, match="x1_runs"):
        results.rendered("page.md.jinja", {name: t for name, t in TABLES.items() if name != "x1_runs"}, OTHER, SECOND)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.strip()).lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(PROJECT).as_posix())
def test_every_local_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, section = target.partition("#")
        path = (page.parent / name) if name else page
        assert path.exists(), target
        if section:
            assert section in map(anchor, HEADING.findall(path.read_text(encoding="utf-8"))), target


def cited_sections() -> dict[int, str]:
    """Every section of the protocol that code, notebooks, tests or pages cite, and a file that does."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.ipynb", "*.md", "*.jinja"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for name in listed.stdout.split():
        if (PROJECT / name).is_file():
            text = " ".join((PROJECT / name).read_text(encoding="utf-8").split())
            for numbers in re.findall(
                r"protocol(?:\.md)?[^.]{0,40}?,? sections? (\d+(?:(?:, | and | to )\d+)*)", text, re.I
            ):
                found |= {int(number): name for number in re.findall(r"\d+", numbers)}
    return found


def test_every_section_that_is_cited_exists():
    sections = {int(number) for number in re.findall(r"^## (\d+)\. ", PROTOCOL, re.M)}
    cited = cited_sections()
    assert {1, 2, 3, 5, 6} <= cited.keys()
    assert not {name: number for number, name in cited.items() if number not in sections}


def test_the_glossary_has_every_symbol_once_with_unit_citation_and_section():
    rows = re.findall(r"^\| (.+) \|$", (PROJECT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    cells = [re.split(r" \| ", row) for row in rows if not row.startswith("symbol |")]
    symbols = [symbol for symbol, *_ in cells]
    assert len(symbols) > 40 and len(set(symbols)) == len(symbols)
    assert {len(row) for row in cells} == {5}
    sections = set(re.findall(r"^## (\d+)\. ", PROTOCOL, re.M))
    for symbol, _, unit, paper, section in cells:
        assert unit, symbol
        assert paper == "–" or re.fullmatch(r"\S+ \S+ \(`\S+`\)", paper), paper  # test_paper checks number and label
        assert section == "–" or section in sections, section


def test_citation_and_package_have_the_same_version():
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fragility_core.__version__
