"""JupyterLab, opened on the page that lists the notebooks: ``make lab``."""

import argparse
import os
from pathlib import Path

from jupyterlab.labapp import LabApp

from fragility_lab.paths import NOTEBOOKS

START = "start.ipynb"


def options(folder: Path = NOTEBOOKS) -> list[str]:
    """What ``jupyter lab`` is told: the folder to show, the page to open, and that root may run it."""
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # root is the only user of most containers
    return [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{START}", *as_root]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.running.lab", description=__doc__)
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS, help="a copy of the folder of notebooks")
    given, further = parser.parse_known_args()  # those of "jupyter lab", such as --no-browser or --port
    LabApp.launch_instance([*options(given.folder.resolve()), *further])


if __name__ == "__main__":
    main()
