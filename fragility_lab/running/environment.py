"""The environment: package versions, the code, the device, and declared dependencies that are not met.

``python -m fragility_lab.running.environment`` exits 0 if this interpreter satisfies pyproject.toml. Otherwise it
names what is missing. The Makefile asks before it makes an environment.
"""

import ast
import hashlib
import importlib.metadata
import inspect
import os
import platform
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fragility_lab.paths import PROJECT

RECORDED = ("torch", "transformers", "datasets", "tokenizers", "numpy", "scipy", "pandas")
NUMERICAL = ("torch", "transformers", "numpy", "scipy", "pandas")  # a run's inputs have a digest of their own
# Imports that the numbers of a run depend on, but for those of modules that check inputs or read models in parts.
FOLLOWED = (
    "fragility_adjoint.", "fragility_quantization.", "fragility_exports.", "fragility_offload.", "fragility_gguf.",
    "fragility_engines.referees.", "fragility_lab.experiments.", "fragility_lab.inputs.", "fragility_lab.measurement.",
)  # fmt: skip
ENDS = ("fragility_lab.inputs.offloaded",)
TERMINAL = "FRAGILITY_TERMINAL"  # in the environment of kernels whose stderr is a terminal's
SCHEDULER = "FRAGILITY_SCHEDULER"  # in the environment: tcp://... or file.json; `make` sets it from SCHEDULER=
STALE = "FRAGILITY_STALE"  # in the environment: "keep" takes stale runs as they are; `make` sets it from STALE=


@cache
def versions() -> dict[str, str]:
    """The versions of Python, of the packages behind a result, and of the operating system."""
    import torch

    packages = {name: importlib.metadata.version(name) for name in RECORDED}
    packages["torch"] = torch.__version__  # also names the build ("+cpu", "+cu130")
    return {"python": platform.python_version(), **packages, "platform": platform.platform()}


def keeps_stale() -> bool:
    """True if stale runs are taken as they are; raises ValueError for a setting that is not known."""
    if (asked := os.environ.get(STALE, "")) not in ("", "keep"):
        raise ValueError(f"STALE must be keep or unset, got {asked!r}: leave it out to compute stale runs again")
    return asked == "keep"


def named_scheduler() -> str:
    """The address or file of the Dask scheduler whose workers compute; "" if processes on this machine do."""
    return os.environ.get(SCHEDULER, "")


@cache
def code_digest(kind: type) -> str:
    """Twelve hexadecimal digits of the code that the numbers of a run depend on.

    ``kind`` is the class of the run's specification. Code that counts: its module, the modules of FOLLOWED that it
    imports directly or through others, and all of fragility_core and fragility_numerics. Comments, docstrings and
    layout do not count.
    """
    found = {"": Path(inspect.getfile(kind))}
    waiting = [""]
    while waiting:
        for name in _imported(found[waiting.pop()]):
            path = _module(name)
            if name.startswith(FOLLOWED) and name not in found and path is not None:
                found[name] = path
                waiting += [] if name in ENDS else [name]
    always = [path for name in ("fragility_core", "fragility_numerics") for path in (PROJECT / name).rglob("*.py")]
    sha = hashlib.sha256()
    for name, path in sorted((found | {path.relative_to(PROJECT).as_posix(): path for path in always}).items()):
        sha.update(f"{name}\n{_code(path)}\n".encode())
    return sha.hexdigest()[:12]


def _module(name: str) -> Path | None:
    """The file of the module or package with the dotted ``name``, if there is one."""
    path = PROJECT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _code(path: Path) -> str:
    """The code of the file without comments, docstrings and layout."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _imported(path: Path) -> Iterator[str]:
    """The dotted names that the file imports: modules and what is in them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""  # none of the project's imports is relative
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def device_name(device: str) -> str:
    """Human-readable name of a torch device."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"


def progress(*args, **kwargs):
    """A tqdm bar with the arguments of ``tqdm.tqdm``, for a notebook or a terminal."""
    if os.environ.get(TERMINAL):
        from tqdm import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm(*args, **kwargs)


def unmet() -> list[str]:
    """Requirements of pyproject.toml that this interpreter's packages do not satisfy."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # asked in a bare environment
        return ["packaging (not installed)"]

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["lab"], *extras["test"], *extras["gguf"]]:
        requirement = Requirement(line)
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{line} (not installed)")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            missing.append(f"{line} (found {found})")
    return missing


def main() -> None:
    if missing := unmet():
        sys.exit("packages missing here: " + ", ".join(missing))


if __name__ == "__main__":
    main()
