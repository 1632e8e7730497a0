"""A broken sentence: one text, continued in fp32 and in low precision, as HTML that stands alone."""

import json
from collections.abc import Sequence
from typing import Any

from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import template

DATA = ASSETS / "sentence" / "smollm2-135m.json"  # as ``continued`` has computed it


class Sentence:
    """A broken sentence as HTML, from ``texts`` of ``continued`` by ``model``; in a notebook, the value of a cell."""

    def __init__(self, texts: Sequence[dict[str, Any]], model: str):
        self.texts, self.model = texts, model

    @classmethod
    def shipped(cls) -> "Sentence":
        """The sentence of SmolLM2, as it was computed once."""
        return cls(**json.loads(DATA.read_text("utf-8")))

    @property
    def html(self) -> str:
        """The component, to be placed once or several times on any page."""
        css, script = ((ASSETS / "sentence" / f"sentence.{kind}").read_text("utf-8") for kind in ("css", "js"))
        data = json.dumps({"texts": self.texts, "model": self.model}, ensure_ascii=False)
        data = data.replace("<", "\\u003c")
        return template("sentence/component.html.jinja").render(css=css, script=script, data=data, text=self.texts[0])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": "a text in fp32 and in low precision"}
