"""The explorer as HTML that stands alone: style, data and script are inside, and nothing is fetched."""

import json

import numpy as np

from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import template
from fragility_lab.reporting.tables import percent

SITES = {
    "norm": "norms", "projection": "projections", "scores": "scores", "softmax": "softmax", "context": "context",
    "attention": "attention, other", "mlp": "MLP", "router": "router", "residual": "residual",
}  # fmt: skip
ROWS = {"embedding": "the embedding", "norm": "the final norm", "head": "the head", "rest": "all else"}
TARGETS = {
    "hidden": "mismatch",
    "kl": "KL a token",
    "logprob": "change of log-probability",
    "flips": "change of the margin",
}
KEPT = {"norms": "the norms", "attention": "the attention", "mlp": "the MLP"}
WORDS = {"sites": SITES, "rows": ROWS, "targets": TARGETS, "kept": KEPT}


def share_of_rows(view: dict) -> list[tuple[str, str]]:
    """The share of the squared error by block, and outside of blocks, in a ``view`` of ``terms.keeping``."""
    target = view["targets"][0]
    squares = np.mean(target["c2"], 0)
    rows: dict[str, float] = {}
    for term, square in zip(target["terms"], squares):
        rows[term["row"]] = rows.get(term["row"], 0.0) + square
    order = sorted(rows, key=lambda row: {"embedding": -1, "norm": 1e6, "head": 1e7}.get(row) or int(row))
    return [(ROWS.get(row, f"block {row}"), percent(rows[row] / (squares.sum() or 1.0))) for row in order]


class Component:
    """An explorer with one or more ``views`` of ``terms``. A notebook shows it as the value of a cell."""

    def __init__(self, *views: dict):
        self.views = views

    @property
    def html(self) -> str:
        """The component, to be placed once or several times on any page."""
        css, script = ((ASSETS / "explorer" / f"explorer.{kind}").read_text("utf-8") for kind in ("css", "js"))
        kept = [view for view in self.views if view["kind"] == "keep"]
        words = WORDS | {"parents": kept[0]["parents"] if kept else {}}
        data = json.dumps({"views": self.views, "words": words}, ensure_ascii=False, separators=(",", ":"))
        shares = [(f"Share of the squared error in {view['recipe']}", share_of_rows(view)) for view in kept]
        data = data.replace("<", "\\u003c")
        return template("explorer/component.html.jinja").render(css=css, script=script, data=data, shares=shares)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": "an explorer of plans"}
