"""The form of a diagnosis without a browser: values, refusals, a run with its page, a stop, and a run that fails."""

import json
import os
import shlex
import shutil
import subprocess
import time
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import forks
import pytest

from fragility_explorer import job
from fragility_explorer.fields import LABELS, OTHER, UNITS, BudgetField
from fragility_explorer.form import Form
from fragility_explorer.recipes_in_words import BOTH, RESULTS, WEIGHTS, groups
from fragility_lab.diagnosis.options import Options
from fragility_lab.diagnosis.request import Request
from fragility_lab.paths import OUTPUTS
from fragility_quantization.recipes import ENGINES, GGUF, RECIPES, get_recipe

SMALL = Request(windows=1, length=8, probes=1)
ENOUGH = 300  # seconds on a busy machine


def set_value(form: Form, name: str, value) -> None:
    form.fields[name].controls[-1].value = value


def refused(form: Form) -> dict[str, str]:
    """What the form says is wrong, by option."""
    return {name: field.told.value for name, field in form.fields.items() if 'role="alert"' in field.told.value}


def words(form: Form) -> list[str]:
    """The words of the command that the form shows."""
    text = form.command.value.partition(">make diagnose ")[2].partition("</pre>")[0]
    return shlex.split(text.replace("&#x27;", "'"))


def wait_until(known, seconds: float = ENOUGH) -> None:
    deadline = time.monotonic() + seconds
    while not known():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_end(form: Form) -> None:
    """Wait until the job has ended and the form has shown all of it."""
    form.job.thread.join(ENOUGH)
    assert not form.job.thread.is_alive()


def test_every_option_has_a_field_and_every_recipe_an_entry():
    assert [*Form(SMALL, "smoke").fields] == [option.name for option in fields(Request)]
    assert LABELS.keys() == {option.name for option in fields(Request)}
    listed = [name for group in groups().values() for name in group.values()]
    every = {name for name, recipe in (RECIPES | GGUF | ENGINES).items() if recipe.rounds} - {"given"}
    assert len(listed) == len(every) and {*listed} == every
    assert "w4a16-zero-g128: int4, groups of 128, under a bf16 scale, asymmetric" in groups()[WEIGHTS]
    assert "w8a8-int8: int8, one scale a channel; inputs int8, one scale a token" in groups()[BOTH]


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(model="embedded-llama", data="embedded:training", format="fp8-dynamic+kv-fp8", budget="2 sites"),
        Request(format="w4a16-g128", budget="5.5 bits", target="logprob", keep="residual head", weights_only=True),
        Request(format="nvfp4-w@fp16", budget="KL 0.01", windows=7, length=9, probes=3, seed=4, attention="eager"),
        Request(format="given", reference_model="embedded", model="embedded-llama", reference="no", form="whole"),
    ],
    ids=lambda request: request.format,
)
def test_the_form_begins_with_its_request_and_its_command_asks_for_it(request_):
    form = Form(request_, "smoke")
    assert refused(form) == {} and form.request == request_ and not form.button.disabled
    assert words(form)[-1] == "RESULTS=smoke-custom"
    assert Request(**Options.parsed(words(form)[:-1])) == request_


@pytest.mark.parametrize("unit", UNITS.values())
def test_a_budget_of_every_kind_is_written_as_it_is_read(unit):
    for number in ("1", "12"):
        field = BudgetField(f"KL {number}" if unit == "KL" else f"{number} {unit}")
        assert (field.number.value, field.unit.value) == (number, unit)
        assert BudgetField(field.value).value == field.value
    asked = replace(SMALL, format="w4a16-g128", budget=field.value)
    assert asked.parsed_budget[0] == 12 * (10**6 if unit == "MB" else 1)


def test_wrong_values_are_answered_beside_their_fields_by_the_checks_of_the_request():
    form = Form(SMALL, "smoke")
    set_value(form, "windows", 0)
    form.fields["budget"].number.value = "two"
    found = refused(form)
    assert found.keys() == {"windows", "budget"} and form.button.disabled and words(form) == []
    assert "windows must be at least 1, got 0" in found["windows"] and "a budget is a number" in found["budget"]
    set_value(form, "windows", 1)
    form.fields["budget"].number.value = "5"
    assert refused(form) == {} and not form.button.disabled
    set_value(form, "budget", "bits")
    assert refused(form).keys() == {"budget"} and "divides the weights between schemes" in refused(form)["budget"]
    form.fields["format"].kind.value = WEIGHTS
    assert refused(form) == {} and form.request.format == "w4a16-g128"
    assert "one of these: w4a16-g128, w8a16-g128, bf16." in form.fields["budget"].told.value
    form.fields["format"].kind.value = RESULTS
    assert refused(form).keys() == {"budget"}, "the field whose default mends the error, not the one changed last"


def test_values_that_contradict_each_other_blame_the_one_that_was_changed_last():
    form = Form(replace(SMALL, format="w4a16-g128", budget="KL 0.1"), "smoke")
    set_value(form, "target", "logprob")
    assert refused(form).keys() == {"target"} and "leave TARGET= away" in refused(form)["target"]
    set_value(form, "target", "hidden")
    assert form.request.measured_in == "kl" and "measured in KL" in form.fields["target"].told.value


def test_a_recipe_may_be_any_name_and_a_reference_model_takes_its_place(tmp_path):
    form = Form(SMALL, "smoke")
    recipe = form.fields["format"]
    recipe.kind.value, recipe.text.value = OTHER, "fp8-dynamics"
    assert "do you mean fp8-dynamic" in refused(form)["format"]
    recipe.text.value = "fp8-dynamic+kv-fp8"
    assert refused(form) == {} and form.request.format == "fp8-dynamic+kv-fp8"
    set_value(form, "reference_model", "embedded-llama")
    assert form.request.format == "given" and recipe.menu.disabled
    set_value(form, "reference_model", "")
    assert form.request.format == "fp8-dynamic+kv-fp8" and not recipe.menu.disabled


def test_what_is_not_there_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = Form(SMALL, "smoke")
    set_value(form, "model", "no/such/model")
    set_value(form, "data", "missing.txt")
    assert refused(form).keys() == {"model", "data"}
    (tmp_path / "missing.txt").write_text("Now it is there.\n")
    set_value(form, "model", "owner/name")  # of the hub, which nobody asks before the run
    set_value(form, "data", "")
    set_value(form, "data", "missing.txt")
    assert refused(form) == {} and form.request.data == str(tmp_path / "missing.txt")
    (tmp_path / "text.doc").write_text("Of another kind.\n")
    set_value(form, "data", "text.doc")
    assert "a text file must end in" in refused(form)["data"]


def test_options_that_few_need_are_folded():
    form = Form(SMALL, "smoke")
    assert form.rest.layout.display == "none"
    form.more.click()
    assert form.rest.layout.display is None and form.more.description.startswith("Fewer")
    form.more.click()
    assert form.rest.layout.display == "none"


@pytest.fixture
def results(monkeypatch):
    """A folder of results that is gone afterwards. Processes that run a diagnosis are forks."""
    monkeypatch.setattr(job, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.popen}))
    yield f"form-test-{os.getpid()}"  # tests of other processes have a folder of their own
    shutil.rmtree(OUTPUTS / f"form-test-{os.getpid()}-custom", ignore_errors=True)


def test_the_button_runs_the_diagnosis_and_shows_its_page(results):
    form, told = Form(replace(SMALL, format="fp16"), results), []
    form.status.observe(lambda change: told.append(change.new), names="value")
    form.button.click()
    assert form.button.disabled and not form.stopping.disabled
    form.button.click()  # which starts no second one
    wait_for_end(form)
    assert "Done in" in form.status.value and not form.button.disabled
    assert not form.job.running and form.stopping.disabled
    page = OUTPUTS / f"{results}-custom" / "diagnosis.html"
    assert "fp16" in page.read_text("utf-8")
    assert f"../outputs/{results}-custom/diagnosis.html" in form.shown.outputs[0]["data"]["text/html"]
    assert form.shown.layout.display is None
    everything = " ".join(told)
    first = everything.index("of additional memory")
    assert first < everything.index("Step 1 of 12: predicting") < everything.index("Step 12 of 12: continuing a text")
    assert "predicting: 1 of 1" in everything and "Executing" not in everything


def test_a_run_that_fails_says_why_and_leaves_the_form_usable(results):
    form = Form(replace(SMALL, budget="99 blocks"), results)
    form.button.click()
    wait_for_end(form)
    assert "the budget must be between 0 and the 12 blocks of the model, got 99" in form.status.value
    assert 'role="alert"' in form.status.value and form.shown.outputs == () and form.job.written is None
    assert form.shown.layout.display == "none"
    assert not form.button.disabled and form.stopping.disabled


def test_a_refusal_of_the_check_is_told_without_the_name_of_the_command(results, tmp_path):
    """The run's process ends with the message of such an error, as that of the test above does."""
    (tmp_path / "a.jsonl").write_text('{"words": "a"}\n')
    request = replace(SMALL, data=str(tmp_path / "a.jsonl"))
    assert refused(Form(request, results)) == {}, "a text is read by the run alone"
    with pytest.raises(ValueError, match='^data must have a column "text"'):
        job.main([f"{results}-custom", json.dumps(asdict(request))])


def test_a_budget_of_kl_passes_the_checks_of_the_run(results, capsys):
    request = replace(SMALL, format="w8a16-g128", budget="KL 0.5")
    job.main([f"{results}-custom", json.dumps(asdict(request))])
    assert "step 12 of 12" in capsys.readouterr().out
    assert "KL 0.5" in (OUTPUTS / f"{results}-custom" / "diagnosis.html").read_text("utf-8")


def test_stop_ends_the_process_and_the_next_run_starts(results, monkeypatch):
    form = Form(replace(SMALL, windows=64, length=256), results)
    form.button.click()
    wait_until(lambda: form.job.step >= 1)
    form.stopping.click()
    assert "Stopping" in form.status.value or not form.job.running
    wait_for_end(form)
    assert not form.job.running
    assert "Stopped after" in form.status.value and form.job.process.poll() is not None
    assert not form.button.disabled and form.stopping.disabled and get_recipe(form.request.format).rounds
    form.start()
    assert form.job.running
    form.job.stop()
    wait_for_end(form)
    assert not form.job.running


def test_without_a_kernel_the_values_and_the_command_are_there():
    shown = Form(Request(keep="head", format="w4a16-g128", budget="5 bits"), "smoke")._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    static = shown["text/html"]
    assert "w4a16-g128</td>" in static and "5 bits</td>" in static and "make diagnose FORMAT=w4a16-g128" in static
