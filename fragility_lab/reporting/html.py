"""Pages that stand alone: style and figures inside, no script."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from fragility_lab.paths import ASSETS

STYLE = ASSETS / "report" / "style.css"


def template(folder: Path, **filters) -> Template:
    """The template of a page in ``folder``, given its ``style`` and, by name, what formats its values."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    environment.globals["style"] = STYLE.read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja")


def data_uri(png: bytes) -> str:
    """An address that holds the image itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
