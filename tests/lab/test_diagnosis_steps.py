"""Steps that fail: the page comes all the same, with all other parts, and says what failed."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tiny import TINY, random_gpt2, random_tokens

from fragility_lab import diagnosis
from fragility_lab.diagnosis import page, run
from fragility_lab.diagnosis.found import Failure, IncompleteError
from fragility_lab.diagnosis.needs import Forecast
from fragility_lab.diagnosis.request import Request
from fragility_lab.inputs.loading import Inputs

REQUEST = Request("some/model", "embedded", "bf16", "1 block", windows=2, length=16)
TOKENS = random_tokens(2, 16)
# What cannot be known without a step, by the names of the page's parts.
GOES = {
    "prediction": {"where", "plan", "explore", "coherence"}, "measurement": {"tokens", "range"},
    "plan": {"plan"}, "coherence": {"coherence"},
}  # fmt: skip
ALL = {section.name for section in page.SECTIONS}


def work(report=None, request=REQUEST):
    model = random_gpt2(TINY)
    return diagnosis.diagnose(request, Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None), report)


def sections_of(html: str) -> dict[str, str]:
    """The parts of a page by name."""
    return dict(re.findall(r'<section aria-labelledby="(\w+)">(.*?)</section>', html, re.DOTALL))


def breaking(monkeypatch, step: str, error: BaseException) -> None:
    """Let the ``step`` raise ``error``."""

    def fail(work):
        raise error

    steps = tuple(replace(each, run=fail) if each.name == step else each for each in run.STEPS)
    monkeypatch.setattr(run, "STEPS", steps)


@pytest.mark.parametrize("step", [step.name for step in run.STEPS if step.name not in ("experts", "remedy", "mended")])
def test_a_step_that_fails_leaves_the_page_with_all_other_parts(monkeypatch, step):
    breaking(monkeypatch, step, KeyError("['layer'] not in index"))
    found = work()
    assert [*found.failed] == [step] and not found.pending
    shown = sections_of(page.page(found))
    assert ALL - GOES.get(step, set()) <= {*shown}
    told = [name for name, html in shown.items() if "['layer'] not in index" in html.replace("&#39;", "'")]
    assert "summary" in told and len(told) == 2
    html = shown[next(name for name in told if name != "summary")]
    assert "failed</b> for <code>some/model</code>, bf16" in html and "test_diagnosis_steps.py" in html
    with pytest.raises(IncompleteError, match=r"of 'some/model' these failed: .*KeyError: .*'layer'"):
        found.require_complete()


@pytest.fixture(scope="module")
def whole():
    """A diagnosis in which nothing failed; each page that is written forgets what failed in another."""
    return work()


@pytest.mark.parametrize("section", [section.name for section in page.SECTIONS])
def test_a_part_of_the_page_that_fails_leaves_all_others(monkeypatch, section, whole):
    def fail(found, known):
        raise ZeroDivisionError("nothing to divide by")

    broken = tuple(replace(each, values=fail) if each.name == section else each for each in page.SECTIONS)
    monkeypatch.setattr(page, "SECTIONS", broken)
    shown = sections_of(page.page(whole))
    assert {*shown} == ALL
    assert "ZeroDivisionError: nothing to divide by" in shown[section]
    assert section == "summary" or "ZeroDivisionError" in shown["summary"]
    with pytest.raises(IncompleteError, match="ZeroDivisionError"):
        whole.require_complete()
    assert [*whole.failed] == [page.WRITING + section]  # what failed before is forgotten


def test_what_failed_once_is_forgotten_once_it_is_written(whole):
    whole.failed[page.WRITING + "plan"] = Failure.of("writing", ZeroDivisionError())
    page.page(whole)
    whole.require_complete()


def test_an_interrupt_leaves_what_was_written(monkeypatch):
    monkeypatch.setattr(run, "SELDOM", 0)
    breaking(monkeypatch, "plan measured", KeyboardInterrupt())
    pages = []
    with pytest.raises(KeyboardInterrupt):
        work(lambda found: pages.append(page.page(found)))
    assert len(pages) == 5
    last = sections_of(pages[-1])
    assert {"where", "plan", "tokens"} <= {*last} and "steps are still to come" in last["summary"]
    assert "measuring the plan: not computed yet" in last["plan"]


def test_reports_wait_for_five_times_their_own_seconds(monkeypatch):
    """By a clock on which a step takes a second and a report 0.7: the next one comes 4 steps later."""
    now, ran = [0.0], []

    def timed(step, work):
        now[0] += 1
        step.run(work)

    def report(found):
        now[0] += 0.7
        ran.append(len(found.seconds))

    monkeypatch.setattr(run, "STEPS", tuple(replace(step, run=partial(timed, step)) for step in run.STEPS))
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = work(report)
    assert ran[:-1] == [*range(1, len(found.seconds), 4)] and ran[-1] == len(found.seconds) > 5 and not found.pending


def test_the_page_is_written_after_each_step_what_is_known_first_first(monkeypatch):
    monkeypatch.setattr(run, "SELDOM", 0)
    pages = []
    work(lambda found: pages.append(sections_of(page.page(found))))
    assert len(pages) == len(run.STEPS)
    assert "where" in pages[0] and "Measured against fp32" not in pages[0]["summary"]
    assert "Nothing was measured" not in pages[0]["summary"]
    assert "Measured against fp32" in pages[1]["summary"] and "plan" not in pages[0].keys() - {"plan"}
    assert "still to come" not in pages[-1]["summary"] and "not computed yet" not in "".join(pages[-1].values())


def test_each_step_says_what_is_next_and_how_long_it_takes(capsys):
    model = random_gpt2(TINY)
    inputs = Inputs(model, TOKENS.flatten(), "")
    expected = diagnosis.forecast(REQUEST, inputs, TOKENS)
    diagnosis.diagnose(REQUEST, inputs, TOKENS, expected)
    *lines, last = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step ", "all "))]
    assert re.fullmatch(r"all steps took [\d.]+ ?\w+; the forecast was [\d.]+ ?\w+", last)
    assert len(lines) == len(run.STEPS) - 3  # no experts, no overflow, nothing to mend
    assert all(re.fullmatch(r"step \d+ of \d+: [\w ]+, about [\d.]+ ?\w+", line) for line in lines)
