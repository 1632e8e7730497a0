"""One page on one model. It stands alone: style, figures and the script of its explorer are inside."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fragility_exports.libraries import Export
from fragility_exports.llama_cpp import LIBRARIES
from fragility_lab import paths
from fragility_lab.diagnosis import sections
from fragility_lab.diagnosis.bulk import of_bulk
from fragility_lab.diagnosis.found import Diagnosis, Failure
from fragility_lab.diagnosis.means import estimate, means, writer
from fragility_lab.diagnosis.plans import export_file, of_plan, title_of_plan
from fragility_lab.diagnosis.run import STEPS
from fragility_lab.diagnosis.sentence import of_sentence, title_of_sentence
from fragility_lab.inputs.checkpoints import EMBEDDED
from fragility_lab.reporting.html import template
from fragility_lab.reporting.tables import number, percent
from fragility_lab.running.files import write_whole


@dataclass(frozen=True)
class Section:
    """A section of the page, in a template of its ``name``.

    ``shown`` is True if its values are known. In its place the page says which of its ``steps`` have failed or are to
    come. ``values`` returns the values that the template takes beside those of ``common``. A section of ``errors`` is
    left out where nothing is rounded.
    """

    name: str
    title: str | Callable[[Diagnosis], str]
    values: Callable[[Diagnosis, dict], dict] = lambda diagnosis, common: {}
    shown: Callable[[Diagnosis], bool] = lambda diagnosis: True
    steps: tuple[str, ...] = ()
    errors: bool = False


WRITING = "page: "  # prefix in ``Diagnosis.failed`` of sections that failed when the page was written
SECTIONS = (
    Section("summary", "In short", sections.of_summary),
    Section(
        "tokens", "What it does to the tokens", sections.of_tokens,
        lambda d: d.measured is not None and means(d)[0].any(), ("measurement", "experts", "choices", "growth"),
    ),
    Section("by_token", "Which tokens", of_bulk, lambda d: d.by_token is not None, ("tokens",), errors=True),
    Section(
        "where", "Where it comes from", sections.of_causes,
        lambda d: d.contributions is not None, ("prediction",), errors=True,
    ),
    Section(
        "coherence", "Errors that act together", sections.of_coherence,
        lambda d: d.coherence is not None, ("coherence",), errors=True,
    ),
    Section("range", "Range", sections.of_range, lambda d: d.ranges is not None, ("remedy", "mended")),
    Section("plan", title_of_plan, of_plan, lambda d: d.plan is not None, ("plan", "plan measured"), errors=True),
    Section("explore", "Other plans", sections.of_explorer, lambda d: d.contributions is not None, errors=True),
    Section("words", "Words"),
    Section("run", "How this page was made", sections.of_run),
    Section("sentence", title_of_sentence, of_sentence, lambda d: d.sentence is not None, ("sentence",)),
)  # fmt: skip


def rendered(section: Section, diagnosis: Diagnosis, known: dict) -> dict | None:
    """The ``section`` as the page takes it, with its own failure and those of its steps; None if it is not shown."""
    failures = [diagnosis.failed[step] for step in section.steps if step in diagnosis.failed]
    pending = [step.doing for step in STEPS if step.name in section.steps and step.name in diagnosis.pending]
    html = ""
    try:
        if section.shown(diagnosis) and (diagnosis.rounds or not section.errors):
            filters = {
                "number": number, "percent": percent,
                "estimate": partial(estimate, write=writer(diagnosis.request)),
            }  # fmt: skip
            values = known | section.values(diagnosis, known)
            html = template(f"diagnosis/sections/{section.name}.html.jinja", **filters).render(values)
    except Exception as error:  # the page has all other sections
        failures.append(Failure.of(f"writing “{section.name}”", error))
        diagnosis.failed[WRITING + section.name] = failures[-1]
    if not (html or failures or pending):
        return None
    title = section.title if isinstance(section.title, str) else section.title(diagnosis)
    return {"name": section.name, "title": title, "html": html, "failures": failures, "pending": pending}


def page(diagnosis: Diagnosis, results: str = EMBEDDED) -> str:
    """The page as HTML, for the folder ``results`` under outputs, as far as the diagnosis has come.

    If a section fails, the page says so in its place, and the section is in ``Diagnosis.failed``.
    """
    diagnosis.failed = {name: each for name, each in diagnosis.failed.items() if not name.startswith(WRITING)}
    known = sections.common(diagnosis, results)
    found = [rendered(each, diagnosis, known) for each in reversed(SECTIONS)]  # summary last: it tells other failures
    shown = [section for section in reversed(found) if section is not None]
    return template("diagnosis/page.html.jinja").render(**known, sections=shown)


def write(diagnosis: Diagnosis, profile: str) -> Path:
    """Write ``outputs/<profile>/diagnosis.html`` and the plan for other libraries; return the path of the page."""
    for library in LIBRARIES:
        beside, export = paths.output_folder(profile) / export_file(library), diagnosis.exports.get(library)
        if isinstance(export, Export):
            write_whole(beside, export.text() + "\n")
        else:
            beside.unlink(missing_ok=True)  # of another plan
    write_whole(path := paths.output_folder(profile) / "diagnosis.html", page(diagnosis, profile))
    return path
