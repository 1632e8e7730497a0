"""Pages that stand alone: style, figures and scripts are inside."""

import base64
import html
import os
from pathlib import Path

from IPython.display import HTML
from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.bccache import Bucket

from fragility_lab import paths


class _Compiled(BytecodeCache):
    """The templates that this process has compiled, which takes longer than to fill them in."""

    def __init__(self) -> None:
        self.code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.code:
            bucket.bytecode_from_string(self.code[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.code[bucket.key] = bucket.bytecode_to_string()


COMPILED = _Compiled()


def template(name: str, **filters) -> Template:
    """The template ``fragility_lab/assets/<name>``; ``filters`` format values in it."""
    environment = Environment(
        loader=FileSystemLoader(paths.ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, bytecode_cache=COMPILED,
    )  # fmt: skip
    environment.filters |= filters
    style = (paths.ASSETS / "report" / "style.css").read_text(encoding="utf-8")
    return environment.get_template(name, globals={"style": style, "zip": zip})


def data_uri(png: bytes) -> str:
    """An address that holds the image itself (a data URI)."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def inline(page: Path, title: str) -> HTML:
    """Show the file ``page`` of this project in a notebook, below a link to it."""
    address = html.escape(Path(os.path.relpath(page, paths.NOTEBOOKS)).as_posix())
    name = html.escape(page.relative_to(paths.PROJECT).as_posix())
    return HTML(
        f'<p><a href="{address}" target="_blank">{name}</a></p>\n'
        f'<iframe src="{address}" title="{html.escape(title)}" width="100%" height="800"></iframe>'
    )
