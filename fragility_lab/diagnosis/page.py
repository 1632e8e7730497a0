"""One page on one model. It stands alone: style, figures and the script of its explorer are inside."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fragility_lab import paths
from fragility_lab.diagnosis.bulk import of_bulk
from fragility_lab.diagnosis.found import Diagnosis, Failure
from fragility_lab.diagnosis.means import estimate, means, writer
from fragility_lab.diagnosis.parts import (
    common,
    of_causes,
    of_explorer,
    of_range,
    of_run,
    of_signs,
    of_summary,
    of_tokens,
)
from fragility_lab.diagnosis.plans import of_plan, title_of_plan
from fragility_lab.diagnosis.run import STEPS
from fragility_lab.inputs.checkpoints import EMBEDDED
from fragility_lab.reporting.html import template
from fragility_lab.reporting.tables import number, percent
from fragility_lab.running.files import write_whole


@dataclass(frozen=True)
class Part:
    """A part of the page, whose template has its ``name``.

    ``shown`` is True if its values are known. In the part's place the page says which of its ``steps`` have failed or
    are to come. ``values`` returns the values that the template takes beside those of ``common``.
    """

    name: str
    title: str | Callable[[Diagnosis], str]
    values: Callable[[Diagnosis, dict], dict] = lambda diagnosis, common: {}
    shown: Callable[[Diagnosis], bool] = lambda diagnosis: True
    steps: tuple[str, ...] = ()


WRITING = "page: "  # prefix in ``Diagnosis.failed`` of parts that failed when the page was written
PARTS = (
    Part("summary", "In short", of_summary),
    Part(
        "tokens", "What it does to the tokens", of_tokens,
        lambda d: d.measured is not None and means(d)[0].any(), ("measurement", "experts", "choices", "growth"),
    ),
    Part("by_token", "Which tokens", of_bulk, lambda d: d.by_token is not None, ("tokens",)),
    Part("where", "Where it comes from", of_causes, lambda d: d.contributions is not None, ("prediction",)),
    Part("together", "Errors that act together", of_signs, lambda d: d.coherence is not None, ("together",)),
    Part("range", "Range", of_range, lambda d: d.ranges is not None, ("remedy", "mended")),
    Part("plan", title_of_plan, of_plan, lambda d: d.plan is not None, ("plan", "plan measured")),
    Part("explore", "Other plans", of_explorer, lambda d: d.contributions is not None),
    Part("words", "Words"),
    Part("run", "How this page was made", of_run),
)  # fmt: skip


def rendered(part: Part, diagnosis: Diagnosis, known: dict) -> dict | None:
    """The ``part`` as the page takes it, with its own failure and those of its steps; None if it is not shown."""
    failures = [diagnosis.failed[step] for step in part.steps if step in diagnosis.failed]
    pending = [step.doing for step in STEPS if step.name in part.steps and step.name in diagnosis.pending]
    html = ""
    try:
        if part.shown(diagnosis):
            filters = {
                "number": number, "percent": percent,
                "estimate": partial(estimate, write=writer(diagnosis.request)),
            }  # fmt: skip
            values = known | part.values(diagnosis, known)
            html = template(f"diagnosis/parts/{part.name}.html.jinja", **filters).render(values)
    except Exception as error:  # the page has all other parts
        failures.append(Failure.of(f"writing “{part.name}”", error))
        diagnosis.failed[WRITING + part.name] = failures[-1]
    if not (html or failures or pending):
        return None
    title = part.title if isinstance(part.title, str) else part.title(diagnosis)
    return {"name": part.name, "title": title, "html": html, "failures": failures, "pending": pending}


def page(diagnosis: Diagnosis, results: str = EMBEDDED) -> str:
    """The page as HTML, for the folder ``results`` under outputs, as far as the diagnosis has come.

    If a part fails, the page says so in its place, and the part is in ``Diagnosis.failed``.
    """
    diagnosis.failed = {name: each for name, each in diagnosis.failed.items() if not name.startswith(WRITING)}
    known = common(diagnosis, results)
    parts = [rendered(part, diagnosis, known) for part in reversed(PARTS)]  # summary last: it tells other failures
    shown = [part for part in reversed(parts) if part is not None]
    return template("diagnosis/page.html.jinja").render(**known, parts=shown)


def write(diagnosis: Diagnosis, profile: str) -> Path:
    """Write ``outputs/<profile>/diagnosis.html`` and return its path."""
    write_whole(path := paths.output_folder(profile) / "diagnosis.html", page(diagnosis, profile))
    return path
