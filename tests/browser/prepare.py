"""Install what the browser tests need, or say what is missing: ``make test-browser`` runs this first."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from fragility_lab.paths import PROJECT

NAMED = os.environ.get("CHROMIUM")
HERE = Path(__file__).parent
AXE = HERE / "node_modules" / "axe-core" / "axe.min.js"
BROWSERS = (NAMED,) if NAMED else ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The browser that Playwright drives: $CHROMIUM where it is set, or the first of the known ones on the path."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def as_root() -> list[str] | None:
    """What goes before a command that only root may run; None where it may not be run."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    allowed = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return [sudo, "-n"] if allowed else None


def is_met(requirement: Requirement) -> bool:
    """Whether this interpreter's packages satisfy ``requirement``."""
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def install_packages() -> None:
    """pyproject.toml's extra "browser" into this interpreter. Playwright brings no browser along."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    unmet = [line for line in project["optional-dependencies"]["browser"] if not is_met(Requirement(line))]
    if unmet and subprocess.call([sys.executable, "-m", "pip", "install", "-c", PROJECT / "constraints.txt", *unmet]):
        sys.exit(f"packages missing here: {', '.join(unmet)}; install them with pip into {sys.prefix}")


def install_axe() -> None:
    """axe-core, which finds what keeps people from using a page, as ``package-lock.json`` pins it."""
    if not AXE.is_file():
        npm = shutil.which("npm")
        if npm is None or subprocess.call([npm, "ci", "--no-audit", "--no-fund", "--prefix", HERE]):
            sys.exit(f"axe-core is missing: install Node.js with npm, and run `npm ci` in {HERE}")


def install_browser() -> None:
    """Debian's Chromium, where Debian packages can be installed."""
    prefix, apt = as_root(), shutil.which("apt-get")
    if chromium() is None and prefix is not None and apt:
        subprocess.call([*prefix, apt, "update"])
        subprocess.call([*prefix, apt, "install", "--yes", "--no-install-recommends", "chromium"])
    if chromium() is None:
        sys.exit(
            "a browser is missing: install Chromium (on Debian `apt-get install chromium`, as root), "
            f"or name one: CHROMIUM=path/to/chrome make test-browser (looked for {', '.join(BROWSERS)})"
        )


if __name__ == "__main__":
    install_packages()
    install_axe()
    install_browser()
