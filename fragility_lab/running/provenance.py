"""The origin of a table: commit, notebook, parameters, versions and device, in ``provenance.json`` beside the tables.

A run may be older than the table with its numbers: ``e2_records.csv`` and the like say which code computed each run.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from fragility_lab.paths import PROJECT
from fragility_lab.running.environment import device_name, versions
from fragility_lab.running.files import write_whole

ASKED = "FRAGILITY_ASKED"  # in the environment of a notebook: its name, profile and parameters, as JSON
FILE = "provenance.json"
CODE = ("fragility_*", "notebooks", "pyproject.toml", "constraints.txt")


@cache
def commit() -> dict[str, str | bool]:
    """The ``commit`` of the project, and ``clean``, True if no code has changed since; empty without a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(PROJECT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain", "--", *CODE)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def asked() -> dict:
    """The notebook that runs, its profile and its parameters; nothing outside of ``running.execute``."""
    return json.loads(os.environ.get(ASKED, "{}"))


def provenance() -> dict:
    """The code, versions and device that compute here, with the notebook and its parameters."""
    # Takes seconds, for which ``running.execute`` need not wait.
    from fragility_lab.inputs.checkpoints import default_device

    return {**commit(), **asked(), "device": device_name(default_device()), "versions": versions()}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A context that processes enter one at a time for a ``folder``, where system and file system have locks."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl  # there is none on Windows

            stack.callback(os.close, descriptor := os.open(folder, os.O_RDONLY))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def record(folder: Path, table: str) -> None:
    """Note the origin of ``table`` in ``folder``."""
    path, origin = folder / FILE, provenance()
    with alone(folder):
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or not ours
            known = {}
        known[table] = origin
        write_whole(path, json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n")
