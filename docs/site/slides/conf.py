"""How ``make slides`` turns the lessons into slides (Sphinx with reveal.js).

A section is a slide. Code is left out, except the functions that students write.
"""

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
revealjs_script_conf = {
    "hash": True, "slideNumber": "c/t", "center": False, "width": 1280, "height": 800, "margin": 0.05,
}  # fmt: skip
