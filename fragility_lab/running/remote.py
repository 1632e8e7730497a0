"""The work of a cluster's worker on a task."""

import pickle
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed import Worker as DaskWorker
from distributed import get_worker

from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Report, Worker, compute

INTERVAL = 0.2  # seconds between two messages about one run

_alone = threading.Lock()  # PyTorch's threads and random state belong to the process: one run at a time
_prepared: dict[str, Worker] = {}  # of the last order


@dataclass(frozen=True)
class Order:
    """The settings that all tasks of one experiment share; ``token`` names the order."""

    token: str
    worker: type[Worker]
    folder: Path
    options: dict[str, Any]
    provenance: dict[str, Any]  # of the runs, where they were asked for
    paired: bool  # whether all runs must have equal numbers of threads
    threads: int | None  # of a process; None: the first worker's


def held(inputs: bytes) -> bytes:
    """The pickled inputs, kept by the cluster until the experiment ends."""
    return inputs


def carry_out(task: bytes, inputs: bytes) -> None:
    """Compute the runs of ``task``, a pickled order and its specifications, and keep them in the order's folder.

    The task is unpickled here, so that a failed import is an error of the task; in Dask it would end the worker.
    Raises OSError if this worker does not see the folder. Raises ValueError if the worker has other code, other
    versions of packages or, for runs that are compared step by step, another number of threads.
    """
    order, specs = pickle.loads(task)
    here = get_worker()
    report = _reporter(here, order.token, specs)
    with _alone:
        torch.set_num_threads(here.state.nthreads)
        _require_alike(order, specs[0])
        if order.token not in _prepared:
            _prepared.clear()
            _prepared[order.token] = order.worker(pickle.loads(inputs), RunStore(order.folder), **order.options)
        for spec in specs:
            compute(spec, _prepared[order.token], report)


def _require_alike(order: Order, spec: Specification) -> None:
    host, threads = socket.gethostname(), torch.get_num_threads()
    if not order.folder.is_dir():
        raise OSError(
            f"workers must see the folder of the runs, but {host} does not see {order.folder}: "
            "let the project lie on a file system that all machines share"
        )
    if not spec.is_current(order.provenance):
        raise ValueError(
            f"workers must have the code and the versions of packages that ask for the runs, but {host} has others, "
            f"{spec.provenance()} in place of {order.provenance}: start workers from the same folder and environment"
        )
    if order.paired and order.threads != threads:
        raise ValueError(
            "runs that are compared step by step must have equal numbers of threads: "
            f"a worker on {host} has {threads}, other runs had {order.threads}: start workers with "
            f"--nthreads {order.threads}, or remove {order.folder} to compute all of them again"
        )


def _reporter(here: DaskWorker, token: str, specs: Sequence[Specification]) -> Report:
    """A function that sends the task's progress to its owner, and raises CancelledError if nobody asks any more."""
    key, sent, then = str(here.get_current_task()), -1, 0.0

    def report(spec: Specification, done: int, kept: bool) -> None:
        nonlocal sent, then
        task, run, now = here.state.tasks.get(key), specs.index(spec), time.monotonic()
        if not kept and (task is None or task.state != "executing"):
            raise CancelledError
        if kept or run != sent or now > then + INTERVAL:
            sent, then = run, now
            here.log_event(token, {"task": key, "run": run, "done": done, "kept": kept})

    return report
