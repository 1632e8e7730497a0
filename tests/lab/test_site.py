"""The website's table of contents and its check of links; `make site` builds it."""

import json
import re
import sys

import yaml

from fragility_lab.paths import PROJECT

sys.path.append(str(PROJECT / "tools"))
from check_links import dead_links


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
    contents = (PROJECT / "docs" / "site" / "contents.md").read_text(encoding="utf-8")
    patterns = [line for line in contents.splitlines() if re.fullmatch(r"[\w/*.]+", line)]
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
