"""Dependencies are declared once, pinned once, and met by the environment that runs the tests."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fragility_lab.diagnosis.options import Options
from fragility_lab.experiments import e2, e3
from fragility_lab.paths import PROJECT
from fragility_lab.running import environment

PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = PYPROJECT["optional-dependencies"].values()
DECLARED = [Requirement(line) for line in chain(PYPROJECT["dependencies"], *EXTRAS)]
PINNED = [
    Requirement(line) for line in (PROJECT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
]


def pins(python: str) -> dict[str, str]:
    """Pinned version by canonical name, for one version of Python."""
    applying = [pin for pin in PINNED if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [canonicalize_name(pin.name) for pin in applying]
    assert len(set(names)) == len(names), "a package is pinned twice"
    return {name: str(pin.specifier).removeprefix("==") for name, pin in zip(names, applying, strict=True)}


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("requirement", DECLARED, ids=str)
def test_declared_dependency_is_pinned_within_its_range(requirement, python):
    assert requirement.specifier.contains(pins(python)[canonicalize_name(requirement.name)])


def test_constraints_are_exact_and_leave_cuda_to_torch():
    assert all(str(pin.specifier).startswith("==") and "," not in str(pin.specifier) for pin in PINNED)
    assert not [pin.name for pin in PINNED if pin.name.startswith(("nvidia-c", "cuda", "triton"))]
    assert pins("3.11")["torch"] == "2.13.0"


def test_conda_environment_repeats_no_dependency():
    python, pip, through_pip = yaml.safe_load((PROJECT / "environment.yml").read_text())["dependencies"]
    assert python in ("python=3.11", "python=3.12")
    assert pip == "pip"
    assert through_pip == {"pip": ["-c constraints.txt", "-e .[lab,test,gguf]"]}


def test_versions_that_were_seen_to_fail_are_not_allowed():
    """Under transformers 5.0.0 ``patch`` ends in an AttributeError, and OPT is not observed."""
    (declared,) = (each for each in DECLARED if each.name == "transformers")
    assert not declared.specifier.contains("5.0.0") and declared.specifier.contains("5.5.0")


def test_this_environment_meets_the_declared_dependencies(capsys):
    assert environment.unmet() == []
    environment.main()
    assert capsys.readouterr().out == ""


def test_unmet_dependencies_are_named(monkeypatch):
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "papermill":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.5.1+cpu" if name == "torch" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as error:
        environment.main()
    assert str(error.value) == "packages missing here: torch>=2.6 (found 2.5.1+cpu), papermill>=2.6 (not installed)"


def test_bare_environment_is_reported_without_a_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert environment.unmet() == ["packaging (not installed)"]


CODE = {
    "fragility_core/theory.py": "U = 2\n",
    "fragility_adjoint/predictor/estimator.py": "from fragility_adjoint.predictor import parameters\n",
    "fragility_adjoint/predictor/parameters.py": "Y = 1\n",
    "fragility_adjoint/mixed_precision/plans.py": "Y = 1\n",
    "fragility_offload/files.py": "Y = 1\n",
    "fragility_lab/inputs/offloaded.py": "from fragility_offload import files\n",
    "fragility_lab/experiments/patching.py": (
        "from fragility_lab.inputs import offloaded, text\nimport fragility_lab.reporting\n"
        "from fragility_adjoint.predictor import estimator\n"
        "from fragility_lab.measurement import comparison\n"
    ),
    "fragility_lab/experiments/e9.py": "from fragility_lab.experiments import patching\n\nclass Spec:\n    size = 1\n",
    "fragility_lab/experiments/e10.py": "X = 1\n",
    "fragility_lab/measurement/comparison.py": "Y = 1\n",
    "fragility_lab/inputs/text.py": "def read():\n    return 1\n",
    "fragility_lab/reporting/__init__.py": "X = 1\n",
}


def digest(project, monkeypatch, **changes: str) -> str:
    """The digest of the runs of experiment e9 in a project of ``CODE`` with some files changed."""
    for name, code in CODE.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(changes.get(name.split("/")[-1].removesuffix(".py"), code))
    monkeypatch.setattr(environment, "PROJECT", project)
    monkeypatch.setattr(environment.inspect, "getfile", lambda kind: project / "fragility_lab/experiments/e9.py")
    environment._code.cache_clear()
    return environment.code_digest.__wrapped__(object)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"theory": "U = 3\n"}, False),
        ({"e9": CODE["fragility_lab/experiments/e9.py"].replace("1", "2")}, False),
        ({"text": "def read():\n    return 2\n"}, False),
        ({"text": '"""Module."""\n# comment\ndef read():\n    """Doc."""\n\n    return (1)\n'}, True),
        ({"__init__": "X = 2\n"}, True),
        ({"e10": "X = 2\n"}, True),
        ({"comparison": "Y = 2\n"}, False),
        ({"parameters": "Y = 2\n"}, False),
        ({"plans": "Y = 2\n"}, True),
        ({"files": "Y = 2\n"}, True),
    ],
)
def test_the_digest_counts_the_code_that_a_run_depends_on(tmp_path, monkeypatch, changes, same):
    """The core, the experiment and its imports count, the latter but for checks; prose and reports do not."""
    assert (digest(tmp_path, monkeypatch, **changes) == digest(tmp_path, monkeypatch)) == same


def test_runs_of_derived_experiments_depend_on_e2():
    imported = set(environment._imported(PROJECT / "fragility_lab/experiments/e3.py"))
    assert "fragility_lab.experiments.e2" in imported
    assert environment.code_digest(e3.PatchSpec) != environment.code_digest(e2.RunSpec)


def test_runs_of_the_paper_depend_on_no_predictor():
    """A change to the predictor, to recipes or plans makes no run of E2, E3 or E5 stale."""
    for name in ("e2", "e3", "e5"):
        file, found = PROJECT / f"fragility_lab/experiments/{name}.py", set()
        waiting = [file]
        while waiting:
            for module in environment._imported(waiting.pop()):
                path = environment._module(module)
                if module.startswith("fragility_") and module not in found and path is not None:
                    found.add(module)
                    waiting += [] if module in environment.ENDS else [path]
        assert "fragility_lab.inputs.offloaded" in found and len(found) > 30
        assert not [module for module in found if module.startswith("fragility_adjoint")]


def found_by_recipes(name: str, *given: str, **environ: str) -> str:
    """What the commands of a target find in $name, with ``given`` on make's command line."""
    recipe = ["make", "--silent", "--no-print-directory", "--eval", f'show:; @echo "$${name}"', "show", *given]
    environ = os.environ | environ
    return subprocess.run(recipe, cwd=PROJECT, env=environ, capture_output=True, text=True, check=True).stdout.strip()


def test_caches_lie_in_the_project_where_home_cannot_be_written(tmp_path):
    assert found_by_recipes("HOME", HOME=str(tmp_path)) == str(tmp_path)
    assert found_by_recipes("HOME", HOME=str(tmp_path / "absent")) == str(PROJECT / ".home")


@pytest.mark.parametrize("name", ["MODEL", "DATA", "SEED", "WITH", "LOG", "AGAINST", "RECIPE", "STALE", "SCHEDULER"])
def test_values_come_from_the_command_line_only(name):
    assert found_by_recipes(name, **{name: "7"}) == ""
    # A make inside of another has RESULTS in its environment.
    assert found_by_recipes("RESULTS", "MODEL=a/b", RESULTS="embedded") == "embedded-custom"
    assert found_by_recipes(name, f"{name}=7") == "7"


def test_options_of_a_diagnosis_come_from_the_command_line_only():
    given = dict.fromkeys(Options.variables(), "7")
    assert found_by_recipes("FRAGILITY_GIVEN", **given, FRAGILITY_GIVEN="FORMAT") == ""
    words = [f"{variable}={text}" for variable, text in given.items()]
    assert {*found_by_recipes("FRAGILITY_GIVEN", *words).split()} == given.keys()
    assert found_by_recipes("FORMAT", *words) == "7"


NAMES = ["MODEL", "DATA", "RECIPE", "BUDGET", "RESULTS", "STALE", "SCHEDULER", "WITH", "KEEP", "LOG", "AGAINST"]


@pytest.mark.parametrize(
    "value", ["a$b", "$(shell touch {made})", "$(x)", "a; touch {made}", "`touch {made}`", 'it\'s "q"']
)
@pytest.mark.parametrize("name", NAMES)
def test_a_given_value_is_neither_expanded_nor_run(name, value, tmp_path):
    value = value.format(made=tmp_path / "made")
    assert found_by_recipes(name, f"{name}={value}") == value
    assert not (tmp_path / "made").exists()
    if name == "MODEL":  # results of another model do not take the place of the profile's
        assert found_by_recipes("RESULTS", f"{name}={value}") == "embedded-custom"


MAKEFILE = (PROJECT / "Makefile").read_text()
MAKES_OWN = {"SHELL", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEFILES", "GNUMAKEFLAGS"}  # they say how make itself runs
READ = {
    *re.findall(r"^(?:export +|override +)*([A-Z_]+) *[:?]?=", MAKEFILE, re.M),  # what it sets
    *re.findall(r"\$\$?[({]?([A-Z][A-Z_]*)", MAKEFILE),  # what it or its commands use
    *Options.variables(),
    *["PATH", "HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS", "HF_HOME", "XDG_CACHE_HOME", "SOMETHING_NEW"],
} - MAKES_OWN  # fmt: skip


@pytest.mark.parametrize("value", ["$(shell touch {made})", "$(eval $(shell touch {made}))", "${{shell touch {made}}}"])
@pytest.mark.parametrize("given", ["on the command line", "in the environment"])
def test_no_variable_of_the_makefile_runs_what_a_user_gives(given, value, tmp_path):
    """Every variable that the Makefile sets or uses, and others that it hands on, all at once."""
    assert len(READ) > 40
    values = {name: value.format(made=tmp_path / name) for name in sorted(READ)}
    if given == "in the environment":
        found_by_recipes("MODEL", **{name: text for name, text in values.items() if name != "PATH"})
    else:
        found_by_recipes("MODEL", *(f"{name}={text}" for name, text in values.items() if name != "PATH"))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "HOME"])
@pytest.mark.parametrize("value", ["$(touch {made})", "`touch {made}`", '"; touch {made}; "', "'; touch {made}; '"])
def test_no_folder_in_the_environment_is_run(name, value, tmp_path):
    given = f"/nowhere/{value.format(made=tmp_path / 'made')}"
    plain = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    for shown in (name, "RESULTS"):
        found_by_recipes(shown, **plain | {name: given})
        found_by_recipes(shown, f"{name}={given}", **plain)
    recipe = ["make", "--dry-run", "env", f"{name}={given}"]
    subprocess.run(recipe, cwd=PROJECT, env=os.environ | plain, capture_output=True, check=False)
    assert not (tmp_path / "made").exists()


def test_stale_runs_are_kept_on_demand_only():
    assert found_by_recipes("FRAGILITY_STALE", STALE="keep") == ""
    assert found_by_recipes("FRAGILITY_STALE", "STALE=keep") == "keep"


def test_allocation_is_set_unless_the_caller_has(monkeypatch):
    name = "MALLOC_TRIM_THRESHOLD_"
    monkeypatch.delenv(name, raising=False)  # set where `make test` runs this
    assert found_by_recipes(name) == str(2**30)
    assert found_by_recipes(name, **{name: "5"}) == "5"
