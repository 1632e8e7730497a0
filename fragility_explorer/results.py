"""The committed results of an experiment as a picture in which a reader chooses, as HTML that stands alone."""

import json
from typing import Any

from fragility_explorer import engines, passes, plans, recipes, sinks, training
from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import template

EXPERIMENTS = {
    "E1": passes.e1, "E2": passes.e2, "E2 sinks": sinks.sinks, "E3": passes.e3, "E5": training.policies,
    "E5 course": training.course, "E5 seeds": training.seeds,
    "E5 learning rates": training.rates, "X1": passes.x1, "X1 plans": plans.x1_plans,
    "X2": recipes.x2, "X2 plans": plans.x2_plans, "X2 rivals": recipes.rivals,
    "X3": engines.x3, "X4": engines.x4,
}  # fmt: skip


class Results:
    """The committed results of an ``experiment``, one of EXPERIMENTS; in a notebook, the value of a cell."""

    def __init__(self, experiment: str):
        """Raises ValueError for another experiment."""
        if experiment not in EXPERIMENTS:
            raise ValueError(f"an experiment must be one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
        self.experiment = experiment
        self.data: dict[str, Any] = EXPERIMENTS[experiment]()

    @property
    def html(self) -> str:
        """The component, to be placed once or several times on any page."""
        folder = ASSETS / "results_explorer"
        css, script = ((folder / f"results_explorer.{kind}").read_text("utf-8") for kind in ("css", "js"))
        data = json.dumps(self.data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        shown = template("results_explorer/component.html.jinja")
        return shown.render(css=css, script=script, data=data, models=self.data["models"])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"the committed results of {self.experiment}"}
