"""How ``make site`` builds one static website of README, docs, notebooks, pages and API (Sphinx with MyST).

The sources are the files of the project as they are. Notebooks show their committed outputs and are not run. The first
page is ``templates/landing.html``. Where the environment's SITE_URL says where the site will lie, pages say their
address, and previews find their picture from anywhere.
"""

import html
import json
import os
import re
import shutil
from pathlib import Path

from jinja2 import Environment

SITE = Path(__file__).parent
PROJECT = SITE.parents[1]
BARS = re.compile(r"(``.*?``)|\|", re.S)  # a literal, or a bar: |x| is a norm in docstrings, to Sphinx a substitution

project = "Numerical fragility in Transformers"
author = "The fragility-core authors"
extensions = ["sphinx.ext.autodoc", "autoapi.extension", "myst_nb", "sphinx_copybutton", "sphinx-mathjax-offline"]
root_doc = "README"
include_patterns = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "notebooks/*.ipynb", "notebooks/theory/*.ipynb",
    "outputs/README.md",
    "fragility_lab/assets/README.md", "autoapi/**",
]  # fmt: skip

templates_path = ["templates"]
html_additional_pages = {"index": "landing.html"}
html_static_path = ["static", "../finding.svg"]
html_css_files = ["site.css"]
html_js_files = ["excerpts.js", "site.js"]
html_show_search_summary = False  # Sphinx's own are fetched, which fails in a folder: excerpts.js makes them
html_search_scorer = str(SITE / "static" / "scorer.js")
html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {"show_toc_level": 1, "navbar_persistent": [], "use_download_button": False}
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "pages.html", "sbt-sidebar-nav.html"]}
PARTS_OF_SENTENCE = ("sentence.css", "sentence.js", "component.html.jinja")


def broken_sentence() -> str:
    """The component of ``fragility_lab.explorer.sentence``, whose package is not installed here."""
    folder = PROJECT / "fragility_lab" / "assets" / "sentence"
    data = (folder / "smollm2-135m.json").read_text(encoding="utf-8")
    css, script, source = ((folder / name).read_text(encoding="utf-8") for name in PARTS_OF_SENTENCE)
    shown = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return shown.render(css=css, script=script, data=data.replace("<", "\\u003c"), text=json.loads(data)["texts"][0])


html_context = {"default_mode": "auto", "broken_sentence": broken_sentence()}
html_baseurl = os.environ.get("SITE_URL", "")
html_copy_source = html_show_copyright = False

nb_execution_mode = "off"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4

API = (
    "fragility_core",
    "fragility_numerics",
    "fragility_adjoint",
    "fragility_quantization",
    "fragility_exports",
    "fragility_offload",
    "fragility_gguf",
)
autoapi_dirs = [str(PROJECT / name) for name in API]
autoapi_options = ["members", "show-module-summary"]
autoapi_add_toctree_entry = False

ABOUT = "What low precision does to a Transformer, layer by layer: an explorer, lessons, and a diagnosis of your model."
LEFT_OUT = ("fragility_lab/assets/README",)  # of the contents; links lead there
NO_PROSE = ("math", "math_block", "literal_block", "raw")
NOTHING_RUNS = "Read it here, or run it after `make lab`."


def prepare(app, document: str, source: list[str]) -> None:
    """Add contents.md to README, lead to the embedded pages instead of a smoke run's, and ask nobody to run cells."""
    if document == root_doc:
        source[0] += "\n" + (SITE / "contents.md").read_text(encoding="utf-8")
    if document in LEFT_OUT:
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    source[0] = source[0].replace("outputs/smoke/", "outputs/embedded/").replace("Run all cells.", NOTHING_RUNS)


def summary(document) -> str:
    """The first paragraph of a ``document`` in at most 200 characters; ABOUT if it has none."""
    paragraphs = [] if document is None else document.findall(lambda node: node.tagname == "paragraph")
    texts = (" ".join(paragraph.astext().split()) for paragraph in paragraphs)
    text = next((text for text in texts if len(text) > 40 and NOTHING_RUNS not in text), ABOUT)
    return text if len(text) <= 200 else f"{text[:200].rpartition(' ')[0]} …"


def preview(title: str, about: str, image: str, address: str = "") -> str:
    """The tags from which search engines and chats make a preview of a page."""
    found = {
        "og:type": "website",
        "og:site_name": project,
        "og:title": title,
        "og:description": about,
        "og:image": image,
    }
    found |= {"og:url": address} if address else {}
    tags = [f'<meta property="{name}" content="{html.escape(text)}">' for name, text in found.items()]
    named = {"description": about, "twitter:card": "summary_large_image"}
    return "\n".join([*tags, *(f'<meta name="{name}" content="{html.escape(text)}">' for name, text in named.items())])


def image_from(page: str) -> str:
    """The address of the picture of every preview, from the page at the path ``page``."""
    there = "_static/preview.png"
    return f"{html_baseurl.rstrip('/')}/{there}" if html_baseurl else f"{'../' * page.count('/')}{there}"


def add_preview(app, page: str, template: str, context: dict, document) -> None:
    """Description and preview of a page of Sphinx."""
    title = re.sub(r"<[^>]*>", "", context.get("title") or "")
    title = html.unescape(title) if page not in ("index", root_doc) and title else project
    address = f"{html_baseurl.rstrip('/')}/{page}.html" if html_baseurl else ""
    context["metatags"] = context.get("metatags", "") + preview(title, summary(document), image_from(page), address)


def with_preview(text: str, page: str) -> str:
    """The page that stands alone with the ``text``, with a description and preview if it has none."""
    title = re.search(r"<title>(.*?)</title>", text, re.S)
    if "og:title" in text or not title:
        return text
    first = re.search(r"<p>(.*?)</p>", text[title.end() :], re.S)
    about = " ".join(html.unescape(re.sub(r"<[^>]*>", "", first[1])).split())[:200] if first else ABOUT
    tags = preview(html.unescape(title[1]), about, image_from(page))
    return f"{text[: title.end()]}\n{tags}{text[title.end() :]}"


def on_site(text: str, page: str) -> str:
    """The page that stands alone with the ``text``, with links for the site, and one to its first page."""
    text = text.replace("../../docs/site/static/", "../../_static/").replace('"../../README.md"', '"../../index.html"')
    text = re.sub(r'"(\.\./\.\./notebooks/[\w/]+)\.ipynb"', r'"\1.html"', text)
    if "/index.html" not in text:
        text = re.sub(
            r"(<body[^>]*>)",
            r'\1\n<nav aria-label="Site"><a href="../../index.html">Front page</a></nav>',
            text,
            count=1,
        )
    return with_preview(text, page)


def copy_pages(app, error) -> None:
    """The pages that stand alone, and the plans that they link, are where links expect them."""
    outputs = PROJECT / "outputs"
    for page in sorted([*outputs.glob("embedded*/*.html"), *outputs.glob("embedded*/plan.*")]):
        name = page.relative_to(PROJECT).as_posix()
        there = Path(app.outdir) / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".html":
            there.write_text(on_site(page.read_text(encoding="utf-8"), name), encoding="utf-8")
        else:
            shutil.copy(page, there)


def link_pages(app, document) -> None:
    """Links to pages that stand alone lead to where they are, beside what they link; Sphinx would copy each alone."""
    from docutils.nodes import reference  # of Sphinx's environment alone: tests import the rest without it

    here = app.env.docname
    for node in list(document.findall(lambda node: node.tagname == "download_reference")):
        name = app.env.relfn2path(node["reftarget"], here)[0]
        if re.fullmatch(r"outputs/embedded[\w-]*/\w+\.html", name):
            node.replace_self(reference("", "", *node.children, refuri=f"{'../' * here.count('/')}{name}"))


def prose(document) -> str:
    """The text of a ``document``, without formulas, code and tables of notebooks."""
    texts = document.findall(lambda node: node.tagname == "#text" and node.parent.tagname not in NO_PROSE)
    return " ".join(" ".join(texts).split())


def write_texts(app, error) -> None:
    """The texts of all pages as a script, from which excerpts.js takes what a search shows."""
    if error is None:
        names = (name for name in sorted(app.env.found_docs) if not name.startswith("autoapi/"))
        texts = {name: prose(app.env.get_doctree(name)) for name in names}
        script = f"window.PAGE_TEXTS = {json.dumps(texts, ensure_ascii=False)};"
        (Path(app.outdir) / "_static" / "page_texts.js").write_text(script, encoding="utf-8")


def escape_bars(app, kind, name, found, options, lines: list[str]) -> None:
    """Bars of norms are text."""
    text = BARS.sub(lambda match: match[1] or r"\|", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app) -> None:
    app.connect("source-read", prepare)
    app.connect("doctree-read", link_pages, priority=100)  # before Sphinx collects what it copies
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("html-page-context", add_preview)
    app.connect("build-finished", copy_pages)
    app.connect("build-finished", write_texts)
