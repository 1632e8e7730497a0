"""The options of a diagnosis: each is declared once, and all that names them follows the declaration."""

import json
import re
import shlex
import subprocess
from dataclasses import dataclass, fields

import pytest

from fragility_lab.diagnosis import Request, sections
from fragility_lab.diagnosis import __main__ as make_diagnose
from fragility_lab.diagnosis.options import Options, option
from fragility_lab.paths import PROJECT
from fragility_lab.running import execute

WORDS = {  # another value than the default of every option
    "MODEL": "embedded-llama", "DATA": "a 'b'.txt", "RECIPE": "w4a16-g128", "FORMAT": "w4a16-g128", "BUDGET": "5 bits",
    "WINDOWS": "012", "LENGTH": "8", "PROBES": "1", "SEED": "3", "ATTENTION": "eager", "REFERENCE": "no",
    "WEIGHTS_ONLY": "yes", "TARGET": "kl", "KEEP": "head norms", "FORM": "streamed",
}  # fmt: skip
TYPED = WORDS | {"WINDOWS": 12, "LENGTH": 8, "PROBES": 1, "SEED": 3, "WEIGHTS_ONLY": True}
HEAD = ("option", "meaning", "default in `smoke`")


@dataclass(frozen=True)
class More(Options):
    """The options and one more."""

    layers: int = option(7, "layers that count", least=1)


def test_one_declaration_adds_an_option():
    assert {*More.variables()} == {*Options.variables(), "LAYERS"}
    assert "  LAYERS            layers that count (7)" in More.help().splitlines()
    assert [*More.rows()] == [*Options.rows(), ("`LAYERS`", "layers that count", "`7`")]
    assert More.of({"layers": 3, "other": 1}) == More(layers=3)
    assert More.parsed(["LAYERS=09"]) == {"layers": 9}
    with pytest.raises(ValueError, match="layers must be a whole number, got 'x'"):
        More.parsed(["LAYERS=x"])
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        More(layers=0)


def test_every_option_is_in_the_help_the_protocol_and_the_notebook(capsys):
    with pytest.raises(SystemExit, match="0"):
        make_diagnose.main(["--help"])
    said = capsys.readouterr().out
    helped = subprocess.run(["make", "help"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for variable in Options.variables():
        assert f" {variable} " in said and f" {variable} " in helped
    table = "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, ["---"] * 3, *Options.rows()))
    assert f"\n{table}\n" in (PROJECT / "docs" / "protocol.md").read_text(encoding="utf-8"), f"put it there:\n{table}"
    shown = execute.defaults(execute.notebook_path("diagnose_my_model"))
    assert shown.pop("profile") == execute.SMOKE
    assert shown == {known.name: known.default for known in fields(Request)}


@pytest.mark.parametrize("variable", Options.variables())
def test_every_option_reaches_the_notebook(variable, monkeypatch, capsys):
    """As make's command line gives it, beside what a diagnosis needs with it; the values of the environment do not."""
    given = {"REFERENCE_MODEL": "embedded"} if variable == "REFERENCE_MODEL" else {variable: WORDS[variable]}
    checked, asked = [], []
    monkeypatch.setattr(make_diagnose.subprocess, "run", lambda words: checked.append(words) or Done)
    monkeypatch.setattr(execute, "main", asked.extend)
    for name in Options.variables():
        monkeypatch.setenv(name, given.get(name, "of the environment"))
    monkeypatch.setenv(make_diagnose.GIVEN, f"OMP_NUM_THREADS {variable} PROFILE")
    make_diagnose.main(["--profile", "laptop"])
    assert checked[0][-2:] == ["--", f"{variable}={given[variable]}"]
    assert asked[:5] == ["diagnose_my_model", "--profile", "laptop", "-p", "profile=laptop-custom"]
    assert capsys.readouterr().out == "\npage: outputs/laptop-custom/diagnosis.html\n"
    values = execute.parameters("diagnose_my_model", "laptop", asked[4::2])
    name = Options.variables()[variable]
    assert values[name] == (given | TYPED)[variable]
    assert values.keys() - {name} <= {"profile", "model", "data", "windows", "length", "format"}
    assert values.get("format") == {"REFERENCE_MODEL": "given"}.get(variable, values.get("format"))


class Done:
    returncode = 0


@pytest.mark.parametrize(
    ("profile", "given", "folder"),
    [
        ("embedded", {}, "embedded"), ("smoke", {}, "smoke"), ("embedded", {"format": "fp16"}, "embedded-custom"),
        ("embedded", {"model": "embedded-llama"}, "embedded-llama"), ("embedded", {"model": "gpt2"}, "embedded-custom"),
        ("embedded", {"model": "embedded-llama", "windows": 1}, "embedded-llama-custom"),
        ("embedded", {"model": "embedded", "format": "fp16"}, "embedded-custom"),
        ("laptop", {"model": "embedded-llama"}, "laptop-custom"),
    ],
)  # fmt: skip
def test_a_diagnosis_of_ones_own_leaves_the_committed_pages_as_they_are(profile, given, folder):
    assert make_diagnose.results_of(profile, given) == folder


def test_a_wrong_folder_of_results_is_refused_before_the_check_which_may_convert_a_model(monkeypatch):
    monkeypatch.setattr(make_diagnose.subprocess, "run", lambda words: pytest.fail("checked"))
    with pytest.raises(SystemExit, match="make diagnose: results go to a folder in outputs, .* got 'a/b'"):
        make_diagnose.main(["--results", "a/b"])


def test_a_refusal_of_the_check_ends_before_a_kernel_starts(monkeypatch):
    monkeypatch.setattr(make_diagnose.subprocess, "run", lambda words: type("Refused", (), {"returncode": 3}))
    monkeypatch.setattr(execute, "main", lambda words: pytest.fail("a kernel starts"))
    with pytest.raises(SystemExit, match="^3$"):
        make_diagnose.main([])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["WINDOW=3"], r"an option must be NAME=VALUE with one of MODEL.*, got 'WINDOW=3' \(do you mean WINDOWS=\?\)"),
        (["COLOUR=red"], "an option must be NAME=VALUE with one of MODEL, .*, got 'COLOUR=red'"),
        (["LENGTH"], r"an option must be NAME=VALUE with .*, got 'LENGTH' \(do you mean LENGTH=\?\)"),
        (["FORMAT=fp16", "RECIPE=bf16"],
         "format must be given once, got 'fp16' and RECIPE='bf16': leave one out"),
        (["SEED=1", "SEED=01"], "seed must be given once, got '1' and SEED='01': leave one out"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_in_one_line(words, line):
    with pytest.raises(SystemExit, match=f"^make diagnose: {line}$"):
        make_diagnose.main(words)


def test_make_refuses_a_variable_that_looks_like_an_option_only():
    environment = {"WINDOW": "3", "FORMAT": "", "KEEP": "a b", "HF_HOME": "x", "STALE": "keep", "length": "9"}
    given = {make_diagnose.GIVEN: "HF_HOME STALE WINDOW KEEP length FORMAT a.b"}
    assert make_diagnose.words_of_make(environment | given) == ["WINDOW=3", "KEEP=a b", "length=9"]
    assert make_diagnose.words_of_make(environment) == []
    assert Options.parsed(["FORMAT=fp16", "RECIPE=fp16"]) == {"format": "fp16"}
    assert Options.parsed(["REFERENCE_MODEL=x"]) == {"format": "given", "reference_model": "x"}
    assert Options.parsed(["REFERENCE_MODEL=x", "RECIPE=bf16"])["format"] == "bf16"  # which the request refuses


@pytest.mark.parametrize("target", ["diagnose", "compare", "reproduce"])
def test_make_refuses_variables_that_are_not_in_capitals(target):
    """make would take them for its own, and the command would run without them."""
    command = ["make", "--dry-run", "--no-print-directory", target, "windows=1", "WINDOWS=2", "model=x y"]
    refused = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and not refused.stdout
    assert re.search(r"the variables of make are in capitals, got (windows model|model windows)\.", refused.stderr)


@pytest.mark.parametrize("target", ["reproduce", "predictor", "seeds", "real"])
@pytest.mark.parametrize("option", ["SEED", "WINDOWS", "LENGTH"])
def test_make_refuses_sizes_of_an_experiment_which_a_profile_has(target, option):
    command = ["make", "--dry-run", "--no-print-directory", target, f"{option}=3"]
    refused = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and not refused.stdout
    assert f"{option}= is for make diagnose and make score: experiments have their seeds" in refused.stderr
    asked = subprocess.run([*command[:3], "diagnose", f"{option}=3"], cwd=PROJECT, capture_output=True, check=False)
    assert asked.returncode == 0


def test_an_interrupt_of_the_check_is_one_line(monkeypatch, capsys):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_diagnose.subprocess, "run", interrupted)
    with pytest.raises(SystemExit) as stopped:
        make_diagnose.main(["WINDOWS=1"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command starts again\n"
    monkeypatch.setattr(make_diagnose, "require_possible", interrupted)
    with pytest.raises(SystemExit) as stopped:
        make_diagnose.main(["--check", "WINDOWS=1"])
    assert stopped.value.code == 130 and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", None, "cannot load the text .*there is no such file"),
        ("a.txt", "", "data must hold text, but .* is empty"),
        ("a.md", "text", "a text file must end in one of"),
        ("a.jsonl", '{"words": "a"}', 'data must have a column "text"'),
        ("a.json", "{", ".* must be readable as .json"),
        ("embedded:nothing", None, "the embedded texts are"),
    ],
)
def test_the_check_refuses_a_text_before_a_kernel_starts(tmp_path, name, content, line):
    path = name if name.startswith("embedded") else str(tmp_path / name)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=f"^make diagnose: {line}"):
        make_diagnose.main(["--check", f"DATA={path}"])


def test_a_value_of_another_type_is_refused():
    """Papermill gives text for what is none, such as ``-r weights_only yes``."""
    with pytest.raises(ValueError, match="weights_only must be of type bool, got 'yes'"):
        Request(weights_only="yes")


def test_the_command_of_a_page_asks_for_the_same():
    values = Options.parsed(f"{name}={text}" for name, text in WORDS.items())
    request = Request(**values)
    words = shlex.split(sections.command(request, "mine"))[2:]
    assert words.pop() == "RESULTS=mine"
    assert Request(**Options.parsed(words)) == request
    assert {known.name for known in fields(Request)} - values.keys() == {"reference_model"}


def test_the_notebook_makes_its_request_by_name():
    cells = json.loads((PROJECT / "notebooks" / "diagnose_my_model.ipynb").read_text(encoding="utf-8"))["cells"]
    assert sum("".join(cell["source"]).count("Request.of(globals())") for cell in cells) == 1
    names = {"windows": 7, "format": "fp16", "profile": "smoke", "unknown": object()}
    assert Request.of(names) == Request(windows=7, format="fp16")
