"""Thirteen packages and one direction: arithmetic, the paper, what goes beyond it, and what needs all of these."""

import ast
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest

from fragility_lab.paths import CHECKPOINTS, PROJECT

BUDGETS = {  # lines
    "fragility_numerics": 1465,
    "fragility_core": 3529,
    "fragility_quantization": 1754,
    "fragility_exports": 413,
    "fragility_offload": 526,
    "fragility_adjoint": 5000,
    "fragility_gguf": 500,
    "fragility_lab": 12000,
    "fragility_explorer": 1768,
    "fragility_lessons": 3660,
    "fragility_engines": 6575,
    "fragility_peers": 870,
    "fragility_pretraining": 400,
}
PACKAGES = tuple(BUDGETS)
FOLDERS = {"fragility_core": 4, "fragility_adjoint": 3, "fragility_lab": 7}
NEED_LAB = ("fragility_lab", "fragility_explorer", "fragility_lessons", "fragility_engines")
NEED_LAB += ("fragility_peers", "fragility_pretraining")
SOURCES = {
    ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((PROJECT / package).rglob("*.py"))
}
LAB_ONLY = (*NEED_LAB, "IPython", "datasets", "ipywidgets", "jupyter_client", "jupyter_core", "jupyterlab")
LAB_ONLY += ("matplotlib", "nbclient", "nbformat", "papermill", "seaborn")
DECLARED = {
    "numpy",
    "pandas",
    "safetensors",
    "scipy",
    "torch",
    "transformers",
    *sys.stdlib_module_names,
}
OPTIONAL = {"fragility_gguf": {"gguf", "tokenizers", "tqdm"}}  # an extra, and what transformers needs itself


def imported(name: str) -> set[str]:
    """The dotted names that module ``name`` imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: write the module's full name"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            # A name that is a module of its own is what is imported; any other is looked up in its module.
            found |= {member if member in SOURCES else node.module for member in members}
    return found


GRAPH = {name: imported(name) for name in SOURCES}


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.startswith(NEED_LAB)])
def test_a_package_imports_what_it_declares_and_none_above_it(name):
    package = name.split(".")[0]
    allowed = DECLARED | OPTIONAL.get(package, set()) | {*PACKAGES[: PACKAGES.index(package) + 1]}
    others = {target for target in GRAPH[name] if target.split(".")[0] not in allowed}
    assert not others, f"{name} imports {sorted(others)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_keeps_to_its_budget(package):
    lines = sum(len(path.read_text().splitlines()) for path in (PROJECT / package).rglob("*.py"))
    assert lines <= BUDGETS[package], f"{package} has {lines} lines: take some away before you add others"


def test_no_import_goes_in_a_circle():
    left = {name: {target for target in GRAPH[name] if target in SOURCES and target != name} for name in SOURCES}
    assert sum(map(len, left.values())) > 100
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these modules import one another, or a module that does: {sorted(left)}"


@pytest.mark.parametrize("package", FOLDERS)
def test_no_import_goes_in_a_circle_among_folders(package):
    def folder(name: str) -> str:
        return ".".join(name.split(".")[:2])

    names = [name for name in SOURCES if name.startswith(f"{package}.") and name.count(".") > 1]
    left = {folder(name): set() for name in names}
    for name in names:
        left[folder(name)] |= {folder(target) for target in GRAPH[name]} & left.keys() - {folder(name)}
    assert len(left) == FOLDERS[package]
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these folders import one another: {left}"


@pytest.mark.parametrize("name", SOURCES)
def test_no_file_is_longer_than_350_lines(name):
    assert len(SOURCES[name].read_text().splitlines()) <= 350


def test_no_module_lies_loose_at_the_top():
    loose = {package: {path.name for path in (PROJECT / package).glob("*.py")} for package in FOLDERS}
    assert loose == {
        "fragility_core": {"__init__.py"},
        "fragility_adjoint": {"__init__.py", "internals.py"},
        "fragility_lab": {"__init__.py", "paths.py"},
    }


def run_code(code: str) -> str:
    """What ``code`` prints in a Python of its own; its error fails the test."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKED = f"""
import sys

class Blocked:
    '''Finds no module that the bare package does not need.'''
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {LAB_ONLY}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_prediction_and_plan_run_on_the_bare_package():
    """Importing the package loads nothing heavy, and every name that it offers is found."""
    plan = f"""
    import fragility_adjoint, fragility_core
    assert fragility_core.__version__ and not {{"torch", "numpy", "pandas"}} & sys.modules.keys()
    for package in (fragility_core, fragility_adjoint):
        assert all(hasattr(package, name) and name in dir(package) for name in package.__all__)
        assert not hasattr(package, "nothing")
    import torch
    from transformers import AutoModelForCausalLM
    from fragility_adjoint import Adjoint, Contributions, apply
    from fragility_core import Monitor, final_hidden, get_policy, lower, mismatch, score

    model = AutoModelForCausalLM.from_pretrained({str(CHECKPOINTS / "embedded")!r}).eval()
    tokens = torch.arange(64).view(2, 32)
    low = lower(model, "bf16")
    known = Contributions(model, Adjoint(low, model)(tokens))
    plan = known.plan(2, "blocks")
    protected = apply(model, plan)
    with torch.no_grad(), protected.running():
        rounded = final_hidden(protected.model, tokens)
        measured = mismatch(rounded, final_hidden(model, tokens)).mean().item()
    assert abs(measured / plan.predicted - 1) < 0.2
    observed = Monitor(low)(tokens)
    layers, windows = score(observed.layers, observed.windows, low.format.unit_roundoff)
    assert windows.combined.gt(0).all()
    get_policy("bgss").start(layers=12)
    print(len(plan.modules), [name for name in sys.modules if name.split(".")[0] in {LAB_ONLY}])
    """
    assert run_code(BLOCKED + textwrap.dedent(plan)).split(maxsplit=1) == ["2", "[]\n"]


def test_wheel_holds_the_packages_and_the_assets(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path for package in PACKAGES for path in (source / package).rglob("*") if path.is_file()}
    assert len(wanted) > 100 and {path.relative_to(source).as_posix() for path in wanted} <= held


def test_make_learns_what_is_missing_without_waiting_for_torch():
    loaded = (
        "import sys, fragility_lab.running.environment; print('torch' in sys.modules, 'fragility_core' in sys.modules)"
    )
    assert run_code(loaded) == "False False\n"


MODULES = [name for name, path in SOURCES.items() if path.name != "__init__.py"]


def test_importing_changes_nothing_elsewhere():
    """No theme, no attention function and no option is set by an import: only by a call."""
    run_code(
        f"""
        import importlib
        import matplotlib, matplotlib.pyplot, pandas, seaborn, torch
        from transformers import AttentionInterface, AttentionMaskInterface

        def state():
            return {{
                "theme": dict(matplotlib.rcParams),
                "attention": sorted(AttentionInterface().valid_keys()),
                "masks": sorted(AttentionMaskInterface().valid_keys()),
                "pandas": pandas.describe_option(_print_desc=False),
                "dtype": torch.get_default_dtype(),
                "gradient": torch.is_grad_enabled(),
            }}

        matplotlib.pyplot.gcf()  # chooses a backend
        before = state()
        for name in {MODULES}:
            importlib.import_module(name)
        after = state()
        changed = [key for key in before if before[key] != after[key]]
        assert not changed, f"importing the packages changes {{changed}}"
        """
    )
