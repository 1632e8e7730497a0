"""How ``make slides`` turns the lessons into slides (Sphinx with reveal.js).

A slide has one idea: some text with one picture, or one question. Code is left out, except the functions that students
write. Notes for the speaker are those of ``notes.yaml``; press S to see them.
"""

import html
import re
from pathlib import Path

import yaml
from docutils import nodes
from sphinx_revealjs.nodes import revealjs_break

project = "Numerical fragility in Transformers"
extensions = ["myst_nb", "sphinx-mathjax-offline", "sphinx_revealjs"]
root_doc = "notebooks/start"
include_patterns = ["notebooks/start.ipynb", "notebooks/theory/*.ipynb"]

nb_execution_mode = "off"
nb_remove_code_source = True
nb_mime_priority_overrides = [
    ("revealjs", kind, place)
    for place, kind in enumerate(("image/svg+xml", "image/png", "text/html", "text/markdown", "text/plain"))
]
myst_enable_extensions = ["amsmath", "dollarmath"]
suppress_warnings = ["myst.xref_missing", "toc.not_included"]  # other pages are no slides, and slides need no contents

revealjs_style_theme = "white"
revealjs_static_path = ["_static"]
revealjs_css_files = ["slides.css"]
revealjs_js_files = ["fit.js"]
revealjs_script_plugins = [{"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"}]
revealjs_script_conf = {
    "hash": True, "slideNumber": "c/t", "center": False, "width": 1280, "height": 720, "margin": 0.03,
}  # fmt: skip

LINES = 13  # of text on a slide, by a rough count
BESIDE_PICTURE = 6  # of them that leave room for a picture or a question
PRINTED = 6  # lines that a cell prints, and that are no picture
CLOSING = 2.5  # lines that end a section, and stand under its picture with sliders: fit.js makes room
WIDTH = 90  # of a line in letters
NOTES = yaml.safe_load(Path(__file__).with_name("notes.yaml").read_text(encoding="utf-8"))


def printed(node) -> int:
    """How many lines the cell ``node`` prints; 0 if it shows anything else."""
    parts = [part for output in node.children for part in output.children]
    streams = all(part.tagname == "literal_block" and "stream" in part.get("classes", []) for part in parts)
    return sum(len(part.astext().splitlines()) for part in parts) if streams else 0


def is_shown(node) -> bool:
    """Whether ``node`` is a cell with a picture, a table, a question, or more than a few printed lines."""
    return "cell" in node.get("classes", []) and bool(node.children) and not 0 < printed(node) <= PRINTED


def lines(node) -> float:
    """The height of a text in lines, roughly; what is folded away has one."""
    if node.tagname in ("raw", "comment", "target"):
        return 1.5 if "<summary" in node.astext() else 0
    if node.tagname == "math_block":
        return 3
    if "cell" in node.get("classes", []):
        return printed(node) + 1
    if node.tagname in ("table", "bullet_list", "enumerated_list"):
        rows = list(node.findall(lambda part: part.tagname in ("row", "list_item")))
        return sum(max(1, len(row.astext()) / WIDTH) * 1.4 for row in rows)
    return len(node.astext()) / WIDTH + 1


def blocks(children: list) -> list[list]:
    """The ``children`` of a section, those together that cannot be parted: what is folded away."""
    found, depth = [], 0
    for node in children:
        if depth:
            found[-1].append(node)
        else:
            found.append([node])
        if node.tagname == "raw":
            depth += node.astext().count("<details") - node.astext().count("</details")
    return found


def slides(children: list) -> list[list]:
    """The ``children`` of a section by slide: a picture or a question ends one.

    What a colon announces is on the slide of the colon.
    """
    made, height, announced = [[]], 0.0, False
    for block in blocks(children):
        picture = any(map(is_shown, block))
        tall = lines(block[0]) if not picture else 0.0
        if made[-1] and not announced and (height > BESIDE_PICTURE if picture else height + tall > LINES):
            made.append([])
            height = 0.0
        made[-1] += block
        height = LINES if picture else height + tall
        announced = block[-1].astext().rstrip().endswith(":")
    if len(made) > 1 and height <= CLOSING and 'class="sliders"' in made[-2][-1].astext():
        closing = made.pop()
        made[-1] += closing
    return made


def aside(lesson: str, title: str) -> list:
    """What a lecturer says and asks, the answer, and how long it takes, where ``notes.yaml`` has it."""
    note = NOTES.get(lesson, {}).get(title)
    if note is None:
        return []
    minutes = note["minutes"]
    parts = [f"<p>{minutes} minute{'s' * (minutes != 1)} for this section. {html.escape(note['say'])}</p>"]
    parts += [f"<p><b>{key.title()}:</b> {html.escape(note[key])}</p>" for key in ("ask", "answer") if key in note]
    return [nodes.raw("", f'<aside class="notes">{"".join(parts)}</aside>', format="html")]


def split(app, document) -> None:
    """One idea a slide, each with its section's notes. What follows a section's subsections is theirs."""
    lesson = Path(app.env.docname).name
    for section in list(document.findall(nodes.section)):
        title, *children = section.children
        own = [child for child in children if not isinstance(child, nodes.section)]
        first, *more = slides(own)
        notes = aside(lesson, re.sub(r"\s+", " ", title.astext()))
        made = [title, *notes, *first]
        for slide in more:
            made += [revealjs_break(), *[note.deepcopy() for note in notes], *slide]
        section.children = []
        section.extend([*made, *(child for child in children if isinstance(child, nodes.section))])


def setup(app) -> None:
    app.connect("doctree-read", split)
