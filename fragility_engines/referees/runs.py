"""X4 in runs, one for each engine and kind, so that it goes on where it stopped."""

import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from fragility_engines.environment import environment
from fragility_engines.referees.judged import Court
from fragility_engines.referees.known import PACKAGES, REFEREES, Referee
from fragility_engines.referees.worker import installed
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.paths import PROJECT
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Advance, Worker


def versions(python: Path) -> dict[str, str]:
    """The version of each package of PACKAGES that the environment of ``python`` has."""
    if python == Path(sys.executable):
        return installed(PACKAGES)
    code = f"import json; from {installed.__module__} import installed; print(json.dumps(installed({PACKAGES!r})))"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    return json.loads(ran.stdout.splitlines()[-1])


@dataclass(frozen=True)
class RefereeSpec(Specification):
    """One engine, as it computes, over windows of a model's text; ``version`` is that of the engine."""

    experiment, unit = "X4", "window"

    referee: str  # the name of one of REFEREES
    version: str
    model: str
    data: str
    inputs: str  # digest of the weights, the token stream and what begins a window
    device: str
    windows: int
    length: int  # tokens per window
    targets: tuple[str, ...]  # what is predicted
    seed: int = 0
    probes: int = 2

    def __post_init__(self):
        get_referee(self.referee)
        require_at_least(1, windows=self.windows, probes=self.probes)
        require_at_least(2, length=self.length)

    @property
    def label(self) -> str:
        return self.referee.replace(" ", "-")

    @property
    def size(self) -> int:
        return self.windows


def get_referee(name: str) -> Referee:
    """The referee called ``name``; raises ValueError naming those that are known."""
    for each in REFEREES:
        if each.name == name:
            return each
    raise ValueError(f"a referee must be one of {', '.join(each.name for each in REFEREES)}, got {name!r}")


class Referees(Worker):
    """Computes runs of X4. Runs over the same windows share the fp32 passes, and the files that engines make."""

    def __init__(self, inputs: Inputs, store: RunStore):
        super().__init__(inputs, store)
        self.work = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.work, ignore_errors=True)
        self.court = cache(self._court)

    def _court(self, length: int, windows: int, seed: int, probes: int) -> Court:
        tokens = self.inputs.windows(length, windows, seed)[1]
        folder = Path(tempfile.mkdtemp(dir=self.work))
        return Court(self.inputs.model, self.inputs.tokenizer, tokens, folder, environment(), probes)

    def run(self, spec: RefereeSpec, advance: Advance) -> pd.DataFrame:
        """The rows of the referee (``Court.rows``)."""
        court = self.court(spec.length, spec.windows, spec.seed, spec.probes)
        return pd.DataFrame(court.rows(get_referee(spec.referee), spec.targets))


def asked(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Versions, by name, of the referees ``names`` (all if empty), and the names of those that are not installed."""
    known, chosen = versions(environment()), [get_referee(name) for name in names] or list(REFEREES)
    there = {each.name: known[each.package] for each in chosen if each.package in known}
    return there, [each.name for each in chosen if each.name not in there]
