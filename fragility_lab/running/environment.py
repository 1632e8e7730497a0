"""What runs here: package versions, device, and whether the declared dependencies are met.

``python -m fragility_lab.running.environment`` exits 0 where this interpreter satisfies pyproject.toml
and otherwise names what is missing; the Makefile asks it before it makes an environment.
"""

import hashlib
import importlib.metadata
import platform
import sys
import tomllib
from functools import cache

from fragility_lab.paths import PACKAGE, PROJECT

RECORDED = ("torch", "transformers", "datasets", "tokenizers", "numpy", "scipy", "pandas")


def versions() -> dict[str, str]:
    """Versions that can change a number: Python, the packages behind it, the operating system."""
    import torch

    packages = {name: importlib.metadata.version(name) for name in RECORDED}
    packages["torch"] = torch.__version__  # names the build, too ("+cpu", "+cu130")
    return {"python": platform.python_version(), **packages, "platform": platform.platform()}


@cache
def code_digest() -> str:
    """Twelve hexadecimal digits that identify the source of this package."""
    sha = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sha.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()[:12]


def device_name(device: str) -> str:
    """Human-readable name of a torch device."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"


def unmet() -> list[str]:
    """Requirements of pyproject.toml that this interpreter's packages do not satisfy."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # asked in a bare environment
        return ["packaging (not installed)"]

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    missing = []
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["lab"], *extras["test"]]:
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
    missing = unmet()
    if missing:
        sys.exit("packages missing here: " + ", ".join(missing))


if __name__ == "__main__":
    main()
