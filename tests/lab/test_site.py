"""The website's table of contents and its check of links; `make site` builds it."""

import html
import importlib.util
import json
import re
import sys
from types import ModuleType

import pytest
import yaml

from fragility_lab.paths import PROJECT
from fragility_lab.reporting.results_sinks import present

sys.path.append(str(PROJECT / "tools"))
from check_links import dead_links

SITE = PROJECT / "docs" / "site"


def loaded(name: str) -> ModuleType:
    """The module ``docs/site/<name>.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conf, finding, engine_tables = loaded("conf"), loaded("finding"), loaded("engine_tables")


def write_page(folder, name: str, body: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"<!doctype html><body>{body}</body>", encoding="utf-8")


def test_links_that_lead_somewhere_are_not_dead(tmp_path):
    write_page(
        tmp_path,
        "a.html",
        '<a href="b/c.html#here">c</a> <a href="#top" id="top">t</a> <a href="https://x.org/y">y</a>',
    )
    write_page(tmp_path, "b/c.html", '<p id="here">h</p><a href="../a%20b.html">a b</a><img src="../a.html">')
    write_page(tmp_path, "a b.html", '<a href="b">a folder with an index</a>')
    write_page(tmp_path, "b/index.html", "")
    write_page(tmp_path, "_static/template.html", '<a href="{{ nowhere }}">t</a>')
    assert dead_links(tmp_path) == []


def test_dead_links_are_found(tmp_path):
    write_page(tmp_path, "a.html", '<a href="gone.html">g</a> <a href="b.html#gone">f</a> <img src="gone.png">')
    write_page(tmp_path, "b.html", '<a href="#away">a</a>')
    found = {(str(name), link) for name, link in dead_links(tmp_path)}
    expected = {("a.html", "gone.html"), ("a.html", "b.html#gone"), ("a.html", "gone.png"), ("b.html", "#away")}
    assert found == expected


def test_the_contents_have_every_page():
    contents = (SITE / "contents.md").read_text(encoding="utf-8")
    patterns = re.findall(r"^(?:[\w ]+<)?([\w/*.]+)>?$", contents, re.M)
    listed = {path.relative_to(PROJECT) for pattern in patterns for path in PROJECT.glob(f"{pattern}.*")}
    pages = [*PROJECT.glob("notebooks/*.ipynb"), *PROJECT.glob("notebooks/theory/*.ipynb"), *PROJECT.glob("docs/*.md")]
    assert {path.relative_to(PROJECT) for path in pages} <= listed


def test_workflow_and_container_call_targets_that_exist():
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    workflow = yaml.safe_load((PROJECT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    container = json.loads((PROJECT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    for command in (*commands, container["postCreateCommand"]):
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.M), command


def test_what_is_for_operators_comes_last_and_assets_are_left_out():
    start, _, operators = (SITE / "contents.md").read_text(encoding="utf-8").partition(":caption: For operators")
    assert "docs/clusters" in operators and ":caption:" not in operators
    assert "clusters" not in start and "assets" not in start + operators


def test_pages_of_the_front_page_and_the_navigation_exist():
    templates = [(SITE / "templates" / name).read_text(encoding="utf-8") for name in ("landing.html", "pages.html")]
    named = re.findall(r"pathto\('([^']+)'", templates[0]) + re.findall(r'\("([^"]+\.html)",', templates[1])
    for name in set(named) - {"index.html", "README.html"}:
        assert any((PROJECT / f"{name}{end}").is_file() for end in ("", ".md", ".ipynb")), name
    for page in ("explorer", "report", "diagnosis"):
        assert f"outputs/embedded/{page}.html" in named


def test_no_page_asks_to_run_cells_where_nothing_runs():
    for path in PROJECT.glob("notebooks/theory/*.ipynb"):
        source = [path.read_text(encoding="utf-8")]
        conf.prepare(None, f"notebooks/theory/{path.stem}", source)
        assert "Run all" not in source[0] and json.loads(source[0])["cells"]


def test_a_page_that_stands_alone_gets_a_preview_once(monkeypatch):
    page = "<head><title>A &amp; B</title></head><body><p>It <b>says</b>\n what.</p></body>"
    found = conf.with_preview(page, "outputs/embedded/a.html")
    assert '<meta property="og:title" content="A &amp; B">' in found
    assert '<meta name="description" content="It says what.">' in found
    assert '<meta property="og:image" content="../../_static/preview.png">' in found
    assert conf.with_preview(found, "outputs/embedded/a.html") == found
    monkeypatch.setattr(conf, "html_baseurl", "https://example.org/site/")
    assert 'content="https://example.org/site/_static/preview.png"' in conf.with_preview(
        page, "outputs/embedded/a.html"
    )


def test_the_finding_and_its_figure_are_those_of_the_tables():
    rows = finding.agreement(present())
    assert finding.FINDING.read_text(encoding="utf-8") == finding.finding(rows), "run `make docs` and commit"
    assert finding.FIGURE.read_bytes() == finding.saved(rows, "svg"), "run `make docs` and commit"
    assert rows.real.sum() == 2 and (rows.predicted > rows.score + 0.3).all()  # README says: far above
    moved = rows.assign(off=0.5, score=0.25)
    assert "<strong>50\N{NO-BREAK SPACE}%</strong>" in finding.finding(moved)
    assert finding.saved(moved, "svg") != finding.FIGURE.read_bytes()


def test_the_picture_of_previews_has_the_shape_that_they_show():
    content = finding.PREVIEW.read_bytes()
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1200, 630)


def test_a_page_that_stands_alone_leads_to_the_first_page_of_the_site():
    page = '<head><title>A</title></head><body class="b"><a href="../../README.md">r</a></body>'
    assert '<a href="../../index.html">r</a>' in conf.on_site(page, "outputs/embedded/a.html")
    found = conf.on_site(page.replace("README.md", "notebooks/e1.ipynb"), "outputs/embedded/a.html")
    assert '<body class="b">\n<nav aria-label="Site"><a href="../../index.html">Front page</a></nav>' in found
    assert 'href="../../notebooks/e1.html"' in found


def test_the_picture_of_the_broken_sentence_is_that_of_the_data():
    sentence = loaded("sentence")
    data = json.loads(sentence.DATA.read_text("utf-8"))
    drawn = sentence.figure(**data)
    assert sentence.FIGURE.read_text(encoding="utf-8") == drawn, "run `make docs` and commit"
    text = data["texts"][0]
    for row in [{"words": text["words"]}, *text["recipes"]]:
        lines = [re.sub("<[^>]*>", "", line) for line in sentence.lines_of(text, row["words"])]
        assert html.unescape(" ".join(lines)) == " ".join("".join(row["words"]).split())
        first = re.findall('<tspan class="first">(.*?)</tspan>', "".join(sentence.lines_of(text, row["words"])))
        parted = [b for a, b in zip(text["words"], row["words"]) if a != b]
        assert [html.unescape(word) for word in first] == [word.strip() for word in parted[:1]]


@pytest.mark.parametrize("name", engine_tables.TABLES)
def test_tables_of_engines_are_those_of_the_committed_ones(name, monkeypatch):
    page, file, _ = engine_tables.TABLES[name]
    expected = engine_tables.written(name)
    lines = expected.splitlines()
    assert len(lines) > (2 if name == "seconds of runs" else 5) and len({line.count("|") for line in lines}) == 1
    assert f"<!-- {name}: make docs -->\n\n{expected}\n" in (PROJECT / "docs" / page).read_text(encoding="utf-8")
    having = [
        each
        for each in engine_tables.MODELS.values()
        if (engine_tables.OUTPUTS / each / "tables" / f"{file}.csv").exists()
    ]
    monkeypatch.setattr(engine_tables, "MODELS", {"another name": having[-1]})
    assert engine_tables.written(name) != expected and "another name" in engine_tables.written(name)


def test_a_page_without_a_place_for_its_table_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "engines.md").write_text("# Engines\n", encoding="utf-8")
    monkeypatch.setattr(engine_tables, "PROJECT", tmp_path)
    with pytest.raises(ValueError, match=r"engines.md must have one place for the table 'proving ground'.* got 0"):
        engine_tables.main()
