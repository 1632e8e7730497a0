"""Compute what is missing of a set of runs, in parallel where that helps.

On a CPU one process with few threads a run beats one run on all threads, since most kernels of a small
model are too short to be split; a GPU is one worker. Progress is counted in units of the runs' choosing.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ProcessPoolExecutor, wait
from multiprocessing.connection import wait as wait_for_connection
from typing import Any, Protocol

import pandas as pd
import torch

from fragility_lab.experiments.runs import RunStore, Specification
from fragility_lab.running.environment import code_digest, device_name, versions
from fragility_lab.running.progress import progress

Advance = Callable[[int], None]


class Worker(Protocol):
    """What computes runs, once per process; keeps what they have in common."""

    record: dict  # what is stored with each run beside versions, device and time

    def run(self, spec: Specification, advance: Advance) -> pd.DataFrame:
        """The result of ``spec``; calls ``advance(n)`` after every n units of progress, whatever they sum up to."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int, groups: int, device: torch.device) -> int:
    """Processes for ``groups`` groups of runs; ``asked`` = 0 means one per core. A GPU has one.

    It depends on all groups, not on the unfinished ones, so that a resumed experiment computes with
    as many threads as an uninterrupted one and gets the same values.
    """
    if asked < 0:
        raise ValueError(f"workers must be 0 (one per core) or a number of processes, got {asked}")
    return 1 if device.type != "cpu" else max(1, min(asked or cores(), groups))


def thread_count(processes: int) -> int:
    """Threads of each of ``processes`` processes; one alone has as many as PyTorch would take."""
    return max(1, cores() // processes) if processes > 1 else torch.get_num_threads()


def complete(
    groups: Sequence[Sequence[Specification]],
    store: RunStore,
    prepare: Callable[[], Worker],
    device: torch.device,
    workers: int = 1,
    desc: str = "runs",
    paired: bool = False,
) -> pd.DataFrame:
    """All runs of ``groups``, in their order; those not in ``store`` are computed and kept there.

    The runs of a group share work and stay in one process. ``prepare`` makes the worker of a process
    and is pickled where there are several, as are the specifications. An interrupt keeps every
    finished run. ``paired`` runs are compared step by step, which only equal rounding allows: raises
    ValueError, before any work, where finished ones had other threads on the CPU.
    """
    specs = [spec for group in groups for spec in group]
    unfinished = {spec for spec in specs if store.load(spec) is None}
    known = [spec for spec in specs if spec not in unfinished]
    count = worker_count(workers, len(groups), device)
    if paired and unfinished and device.type == "cpu":
        _require_threads(store, known, thread_count(count))
    _warn_of_others(store, known)
    missing = [[spec for spec in group if spec in unfinished] for group in groups]
    missing = sorted(filter(None, missing), key=lambda group: -sum(spec.size for spec in group))
    done = len(specs) - sum(map(len, missing))
    total = sum(spec.size for spec in specs)
    left = sum(spec.size for group in missing for spec in group)
    with progress(total=total, initial=total - left, desc=desc, unit=specs[0].unit, unit_scale=True) as bar:
        bar.set_postfix_str(f"{done}/{len(specs)} runs")

        def finished() -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(f"{done}/{len(specs)} runs")

        if missing and count > 1:
            _in_processes(missing, store, prepare, count, bar.update, finished)
        elif missing:
            worker = prepare()
            for group in missing:
                _compute(group, store, worker, bar.update, finished)
    return store.rows(specs)


def computed_by() -> dict:
    """What a run's numbers may depend on beside its specification."""
    return {"versions": versions(), "code": code_digest()}


def _warn_of_others(store: RunStore, finished: Sequence[Specification]) -> None:
    """Finished runs belong to their specification alone: say so where they were computed by something else."""
    now, found = computed_by(), [store.metadata(spec) for spec in finished]
    for key, what in {"code": "another version of this code", "versions": "other versions of packages"}.items():
        others = sum(then.get(key) != now[key] for then in found)
        if others:
            warnings.warn(
                f"{others} finished runs were computed by {what} and are taken as they are: "
                f"remove {store.folder} to compute them again",
                stacklevel=3,
            )


def _require_threads(store: RunStore, finished: Sequence[Specification], threads: int) -> None:
    """Sums are in the order of the threads: other threads, other roundings from the first step on."""
    others = sorted({then for spec in finished if (then := store.metadata(spec)["threads"]) != threads})
    if others:
        raise ValueError(
            "runs that are compared step by step must be computed by as many threads each: those still to come would "
            f"have {threads}, finished ones had {', '.join(map(str, others))}: set workers as it was for them, or "
            f"remove {store.folder} to compute all of them again"
        )


def _compute(group, store: RunStore, worker: Worker, advance: Advance, finished: Callable[[], None]) -> None:
    for spec in group:
        record = computed_by() | {  # asked before the run: files may change meanwhile
            "device_name": device_name(spec.device),
            "threads": torch.get_num_threads(),
        }
        left = spec.size

        def advance_within(units: int) -> None:
            nonlocal left
            left -= (step := min(units, left))
            advance(step)

        begin = time.perf_counter()
        frame = worker.run(spec, advance_within)
        advance(left)  # what needed no work, such as windows that overflowed
        store.save(spec, frame, record | {"seconds": round(time.perf_counter() - begin, 3)} | worker.record)
        finished()


# --- Several processes ------------------------------------------------------------------------

_process: dict[str, Any] = {}  # of a worker process: its Worker, its way to report, the signal to stop


def _in_processes(missing, store, prepare, count, advance, finished) -> None:
    """Spread ``missing`` over ``count`` processes, forwarding their reports until all are done."""
    context = multiprocessing.get_context("spawn")
    prepare = pickle.dumps(prepare)  # as bytes: torch would share tensors through /dev/shm, which may be small
    reports, stop = context.Queue(), context.Event()
    arguments = (prepare, reports, stop, thread_count(count))
    executor = ProcessPoolExecutor(min(count, len(missing)), context, _start_process, arguments)
    try:
        futures = {executor.submit(_compute_in_process, group, store) for group in missing}
        while futures:
            ended, futures = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
            _forward(reports, advance, finished, patience=0)
            for future in ended:
                future.result()
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)
        _forward(reports, advance, finished, patience=0.05)


def _forward(reports, advance: Advance, finished: Callable[[], None], patience: float) -> None:
    """Pass reports on until none has come for ``patience`` seconds."""
    while True:
        try:
            units = reports.get(timeout=patience)
        except queue.Empty:
            return
        finished() if units is None else advance(units)


def _start_process(prepare: bytes, reports, stop, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _process.update(worker=pickle.loads(prepare)(), reports=reports, stop=stop)


def _end_with_parent() -> None:
    """A parent that was killed cannot say so; its workers would wait for it for ever."""
    wait_for_connection([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _compute_in_process(group, store: RunStore) -> None:
    def advance(units: int) -> None:
        if _process["stop"].is_set():
            raise CancelledError
        _process["reports"].put(units)

    _compute(group, store, _process["worker"], advance, lambda: _process["reports"].put(None))
