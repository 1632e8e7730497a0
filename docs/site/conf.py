"""How ``make site`` builds one static website of README, docs, notebooks, pages and API (Sphinx with MyST).

The sources are the files of the project as they are. Notebooks show their committed outputs and are not run.
"""

import filecmp
import re
import shutil
from pathlib import Path

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

html_extra_path = ["index.html"]  # the way from the folder to the first page
html_theme = "sphinx_book_theme"
html_title = project
html_theme_options = {"show_toc_level": 1, "navbar_persistent": [], "use_download_button": False}
html_copy_source = html_show_copyright = False

nb_execution_mode = "off"
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4

API = ("fragility_core", "fragility_numerics", "fragility_adjoint", "fragility_quantization")
autoapi_dirs = [str(PROJECT / name) for name in API]
autoapi_options = ["members", "show-module-summary"]
autoapi_add_toctree_entry = False


def prepare(app, document: str, source: list[str]) -> None:
    """Add contents.md to README, and point links to pages of a smoke run, which are not kept, to the embedded ones."""
    if document == root_doc:
        source[0] += "\n" + (SITE / "contents.md").read_text(encoding="utf-8")
    source[0] = source[0].replace("outputs/smoke/", "outputs/embedded/")


def copy_pages(app, error) -> None:
    """The pages that stand alone, and the plans that they link, are where links expect them."""
    outputs = PROJECT / "outputs"
    for page in sorted([*outputs.glob("embedded*/*.html"), *outputs.glob("embedded*/plan.*")]):
        there = Path(app.outdir) / page.relative_to(PROJECT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, there)
    # Sphinx copies a page that a document links into a folder of its own, without the plans beside it.
    for copied in Path(app.outdir).glob("_downloads/*/diagnosis.html"):
        for page in outputs.glob("embedded*/diagnosis.html"):
            if filecmp.cmp(copied, page, shallow=False):
                for plan in page.parent.glob("plan.*"):
                    shutil.copy(plan, copied.parent)


def escape_bars(app, kind, name, found, options, lines: list[str]) -> None:
    """Bars of norms are text."""
    text = BARS.sub(lambda match: match[1] or r"\|", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app) -> None:
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("build-finished", copy_pages)
