"""The experiments on a tiny model, for processes that tests can kill.

With SLOW_WRITES=seconds in the environment every file takes that long to appear, so that a random moment often falls
into a write. With WRITES_AFTER=path none appears before that file does, for a minute at most.
"""

import os
import time
from pathlib import Path

import pandas as pd
import psutil
from tiny import TINY, random_gpt2, tiny_inputs

from fragility_core.bgss import get_policy
from fragility_lab.experiments import e2, e3, e5, x1
from fragility_lab.running import engine

GRID = e2.Grid("tiny", "tiny", ("bf16", "fp16"), (16, 32), (0, 1), windows=16, batch_tokens=128)
SETTING = e5.TrainingSetting("tiny", "tiny", length=16, windows=12, steps=24, learning_rate=2e-3, warmup_steps=4)
POLICIES = ("none", "static_global", "random_same_budget", "bgss")


# Classes of this module, so that each process that computes imports it.
MonitoredPasses, Patches, Mitigation, Estimates = (
    type(name, (kind,), {"__module__": __name__})
    for name, kind in {
        "MonitoredPasses": e2.MonitoredPasses,
        "Patches": e3.Patches,
        "Mitigation": e5.Mitigation,
        "Estimates": x1.Estimates,
    }.items()
)

replace = os.replace
if seconds := float(os.environ.get("SLOW_WRITES", 0)):

    def replace_slowly(*paths: Path) -> None:
        time.sleep(seconds)
        replace(*paths)

    os.replace = replace_slowly
if awaited := os.environ.get("WRITES_AFTER"):

    def replace_afterwards(*paths: Path) -> None:
        last = time.monotonic() + 60
        while not Path(awaited).exists() and time.monotonic() < last:
            time.sleep(0.01)
        replace(*paths)

    os.replace = replace_afterwards


def sweep(name: str, folder: Path, workers: int) -> pd.DataFrame:
    """The rows of one experiment, computed in ``folder`` as far as they are missing."""
    inputs = tiny_inputs(random_gpt2(TINY), 2000)
    if name == "E5":
        policies = [get_policy(name) for name in POLICIES]
        specs = e5.specifications(SETTING, policies, (0, 1), inputs)
        return engine.complete(Mitigation, specs, inputs, folder / "e5", workers, checkpoint_interval=3)
    sources = e2.specifications(GRID, inputs)
    rows = engine.complete(MonitoredPasses, sources, inputs, folder / "e2", workers)
    if name == "E2":
        return rows
    kind, specs = {
        "E3": (Patches, e3.PatchSpec.of(sources, windows=6)),
        "X1": (Estimates, x1.EstimateSpec.of(sources, probes=2)),
    }[name]
    return engine.complete(kind, specs, inputs, folder / name.lower(), workers, source=folder / "e2")


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Processes that compute for ``process``: the forks of a server, which Python keeps for all clusters."""
    try:
        children = process.children(recursive=True)
        served = {child.pid for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline())}
        return [child for child in children if child.pid in served and child.ppid() in served]
    except psutil.NoSuchProcess:
        return []
