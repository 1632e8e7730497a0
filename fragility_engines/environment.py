"""The environment in which engines are installed, apart from that of the project."""

import sys
from pathlib import Path

from fragility_lab.paths import PROJECT

ENVIRONMENT = PROJECT / ".engines/bin/python"


def environment() -> Path:
    """The Python of the engines (``make referees`` installs it); this one, which has torch, where there is none."""
    return ENVIRONMENT if ENVIRONMENT.exists() else Path(sys.executable)
