"""The page of a comparison: the verdict, and what it rests on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fragility_engines.comparison import figures
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.remedies import Remedy
from fragility_engines.comparison.signs import described, patterns
from fragility_engines.comparison.slopes import Slope
from fragility_engines.comparison.verdict import Verdict
from fragility_lab.diagnosis.causes import SITE_NAMES
from fragility_lab.inputs.names import titled
from fragility_lab.reporting.figures import uri
from fragility_lab.reporting.html import template
from fragility_lab.reporting.tables import number, percent

SHOWN = 8  # suspects and sites in tables
OTHER_WEIGHTS = (
    "If the engine may have other weights (of an earlier step, or without an adapter), give them as CHECKPOINT= and "
    "compare again."
)
NAMES = {
    "rms": "root mean square", "mean": "mean", "k1": "KL, estimate k1", "k3": "KL, estimate k3",
    "clipped": "tokens whose ratio leaves [1/2, 2]",
}  # fmt: skip
TOPS: list[tuple[str, str, Callable[[float], str]]] = [
    ("kl", "KL, at least (most probable tokens, all others as one)", lambda value: number(value, ".3g")),
    ("flip", "positions where another token is most probable", percent),
]


@dataclass(frozen=True)
class Compared:
    """A comparison of the ``log`` of an engine with ``model``, or with the log ``against``, and what was found.

    ``tried`` is the number of suspects; those of another ``checkpoint`` are among them if it has a name.
    """

    log: str
    model: str
    against: str
    gap: Gap
    found: list[Slope]
    further: list[Slope]
    verdict: Verdict
    tried: int
    remedies: list[Remedy] = field(default_factory=list)
    checkpoint: str = ""

    @property
    def signs(self) -> list[str]:
        """Sentences on how a gap that neither rounding nor a suspect explains looks, and on what else may be tried."""
        if self.verdict.kind != "more" or not (self.verdict.cause is None or self.verdict.partial):
            return []
        found = patterns(self.gap)
        return [*described(found), *([] if self.checkpoint or found["rows"] or found["drawn"] else [OTHER_WEIGHTS])]


def numbers(gap: Gap) -> list[list[str]]:
    """Rows of the table of numbers: what it is, observed, and in an emulated pass."""
    observed, emulated = gap.divergences(), gap.divergences("emulated")
    both = gap.tokens.emulated.any()
    expected = number(gap.predicted, ".3g")
    rows = [] if gap.fails else [["root mean square, predicted", *(["–", expected] if both else [expected, "–"])]]
    for name, words in NAMES.items():
        write = percent if name == "clipped" else lambda value: number(value, ".3g")
        rows.append([words, write(observed[name]), write(emulated[name]) if both else "–"])
    for name, words, form in TOPS:
        if name in gap.tops:
            own = form(gap.tops[f"{name}_rounding"]) if both else "–"
            rows.append([words, form(gap.tops[name]), own])
    return rows


def suspected(found: list[Slope], verdict: Verdict) -> list[list[str]]:
    """Rows of the table of suspects: name, what the test says, share, size, its standard error, and the least size."""
    rows = []
    for each in sorted(found, key=lambda each: each.share, reverse=True)[:SHOWN]:
        cause = "most like the gap" if verdict.partial else "explains the gap"
        said = cause if each is verdict.cause else "in part along it" if each.certain else "no"
        said += f": {each.owner}" * bool(each.owner and each.certain)
        sizes = number(each.size, ".3g"), number(each.error, ".2g"), number(each.least, ".2g")
        rows.append([each.suspect.name, said, percent(max(0.0, each.share)), *sizes])
    return rows


def widened(sites: pd.Series) -> list[list[str]]:
    """Rows of the table of sites: name, its share of the predicted square, and the RMS that stays if it is in fp32."""
    return [
        [SITE_NAMES.get(str(site), str(site)), percent(share), percent((1 - share) ** 0.5)]
        for site, share in sites.head(SHOWN).items()
    ]


def wider(remedies: list[Remedy]) -> list[list[str]]:
    """Rows of the table of remedies: part, the RMS that fp32 leaves, predicted and emulated, and what that says."""
    return [
        [each.part, percent(each.predicted), percent(each.emulated) if np.isfinite(each.emulated) else "–", each.words]
        for each in remedies
    ]


def page(compared: Compared) -> str:
    """The page as HTML."""
    gap, verdict = compared.gap, compared.verdict
    return template("engines/page.html.jinja").render(
        compared=compared, model=titled(compared.model),
        recipe=gap.recipe.name, verdict=verdict, kind=verdict.title,
        tokens=len(gap.tokens), sequences=len(gap.sequences), overflowed=len(gap.sequences) - len(gap.known),
        patterns=compared.signs,
        numbers=numbers(gap), sites=widened(gap.sites), remedies=wider(compared.remedies),
        suspects=suspected(compared.found, verdict), further=suspected(compared.further, verdict)[:4],
        images={"spread": uri(figures.spread(gap)), "positions": uri(figures.positions(gap))},
    )  # fmt: skip
