"""Compute what is missing of a set of runs, in parallel where that helps.

On a CPU, many processes with few threads each are faster than one process with all threads: most kernels of a small
model are too short to be split. A GPU has one process.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ProcessPoolExecutor, wait
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait as wait_for_connection
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fragility_lab.experiments.runs import RunStore, Specification
from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.environment import device_name, keeps_stale, progress

Advance = Callable[[int], None]
FINISHED = -1  # reported in place of units of progress: a run is finished


class Worker(ABC):
    """Computes the runs of one experiment and keeps what they have in common; each process has one."""

    def __init__(self, inputs: Inputs, store: RunStore):
        """``store`` holds the finished runs."""
        self.inputs, self.store = inputs, store

    @abstractmethod
    def run(self, spec: Specification, advance: Advance) -> pd.DataFrame:
        """The rows of ``spec``; calls ``advance(n)`` after every n units of progress."""


def complete(
    worker: type[Worker], specs: Sequence[Specification], inputs: Inputs, folder: Path, workers: int = 1, **options
) -> pd.DataFrame:
    """The rows of all runs ``specs``, in their order. Those that ``folder`` lacks are computed and kept there.

    Stale runs are computed again unless they are kept (``RunStore.load``). ``workers`` processes share the runs out;
    0 means one per core. Each makes its ``worker(inputs, store, **options)``, which is pickled where there are
    several. An interrupt keeps every finished run. Raises ValueError, before any work, where ``paired`` runs would
    have another number of CPU threads than the finished ones: other threads add up in another order.
    """
    store = RunStore(folder)
    by_group: dict[Hashable, list[Specification]] = {}
    for spec in specs:
        by_group.setdefault(spec.group, []).append(spec)
    groups = [*by_group.values()]
    count = worker_count(workers, len(groups), inputs.device)
    unfinished = {spec for spec in specs if store.load(spec) is None}
    finished = [spec for spec in specs if spec not in unfinished]
    if unfinished and specs[0].paired and inputs.device.type == "cpu":
        _require_threads(store, finished, thread_count(count))
    _warn_of_stale(store, specs)
    missing = [[spec for spec in group if spec in unfinished] for group in groups]
    missing = sorted(filter(None, missing), key=lambda group: -sum(spec.size for spec in group))
    total, done = sum(spec.size for spec in specs), len(finished)
    left = sum(spec.size for spec in unfinished)
    bar_options = {"desc": specs[0].experiment, "unit": specs[0].unit, "unit_scale": True}
    with progress(total=total, initial=total - left, **bar_options) as bar:

        def report(units: int) -> None:
            nonlocal done
            if units != FINISHED:
                bar.update(units)
            else:
                done += 1
                bar.set_postfix_str(f"{done}/{len(specs)} runs")

        bar.set_postfix_str(f"{done}/{len(specs)} runs")
        prepare = partial(worker, inputs, store, **options)
        if missing and count > 1:
            _in_processes(missing, prepare, count, report)
        elif missing:
            alone = prepare()
            for group in missing:
                _compute(group, alone, report)
    return store.rows(specs)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int, groups: int, device: torch.device) -> int:
    """Processes for ``groups`` groups of runs; ``asked`` = 0 means one per core, and a GPU has one process.

    The count depends on all groups, not only on unfinished ones. A resumed experiment therefore computes with as many
    threads as an uninterrupted one, and gets the same values.
    """
    if asked < 0:
        raise ValueError(f"workers must be 0 (one per core) or a number of processes, got {asked}")
    return 1 if device.type != "cpu" else max(1, min(asked or cores(), groups))


def thread_count(processes: int) -> int:
    """Threads of each of ``processes`` processes; a single process has as many as PyTorch takes."""
    return max(1, cores() // processes) if processes > 1 else torch.get_num_threads()


def _warn_of_stale(store: RunStore, specs: Sequence[Specification]) -> None:
    count = sum(store.is_stale(spec) for spec in specs)
    if count:
        what = "taken as they are, as STALE=keep asks" if keeps_stale() else "computed again (STALE=keep takes them)"
        warnings.warn(
            f"{count} finished runs in {store.folder} were computed by other code or other versions of packages and "
            f"are {what}",
            stacklevel=3,
        )


def _require_threads(store: RunStore, finished: Sequence[Specification], threads: int) -> None:
    others = sorted({then for spec in finished if (then := store.metadata(spec)["threads"]) != threads})
    if others:
        raise ValueError(
            "runs that are compared step by step must have equal numbers of threads: those still to come would "
            f"have {threads}, finished ones had {', '.join(map(str, others))}: set workers as it was for them, or "
            f"remove {store.folder} to compute all of them again"
        )


def _compute(group: Sequence[Specification], worker: Worker, report: Advance) -> None:
    for spec in group:
        record = {"device_name": device_name(spec.device), "threads": torch.get_num_threads()}
        left = spec.size

        def advance_within(units: int) -> None:
            nonlocal left
            left -= (step := min(units, left))
            report(step)

        spec.provenance()  # read before the run: files may change meanwhile
        begin = time.perf_counter()
        frame = worker.run(spec, advance_within)
        report(left)  # what needed no work, such as windows that overflowed
        record |= {"seconds": round(time.perf_counter() - begin, 3), "attention": worker.inputs.attention}
        worker.store.save(spec, frame, record)
        report(FINISHED)


# --- Several processes ------------------------------------------------------------------------

_process: dict[str, Any] = {}  # of a worker process: its worker, the queue of its reports, the signal to stop


def _in_processes(missing, prepare, count, report) -> None:
    """Spread ``missing`` over ``count`` processes and forward their reports until all are done."""
    context = multiprocessing.get_context("spawn")
    prepare = pickle.dumps(prepare)  # as bytes: torch would share tensors through /dev/shm, which may be small
    reports, stop = context.Queue(), context.Event()
    arguments = (prepare, reports, stop, thread_count(count))
    executor = ProcessPoolExecutor(min(count, len(missing)), context, _start_process, arguments)
    try:
        futures = {executor.submit(_compute_in_process, group) for group in missing}
        while futures:
            ended, futures = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
            _forward(reports, report, patience=0)
            for future in ended:
                future.result()
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)
        _forward(reports, report, patience=0.05)


def _forward(reports, report: Advance, patience: float) -> None:
    """Pass reports on until none has come for ``patience`` seconds."""
    with suppress(queue.Empty):
        while True:
            report(reports.get(timeout=patience))


def _start_process(prepare: bytes, reports, stop, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the interrupt too, and says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _process.update(worker=pickle.loads(prepare)(), reports=reports, stop=stop)


def _end_with_parent() -> None:
    """A killed parent can no longer tell its workers to stop, so they watch it."""
    wait_for_connection([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _compute_in_process(group: Sequence[Specification]) -> None:
    def report(units: int) -> None:
        if _process["stop"].is_set() and units != FINISHED:
            raise CancelledError
        _process["reports"].put(units)

    _compute(group, _process["worker"], report)
