"""Compute the missing ones of a set of runs, in parallel if that helps.

On a CPU, many processes with few threads each are faster than one process with all threads: most kernels of a small
model are too short to be split. A GPU has one process. Several processes are workers of a Dask cluster.
"""

import os
import uuid
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd
import torch

from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.environment import keeps_stale, named_scheduler, progress
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Worker, compute


def complete(
    worker: type[Worker], specs: Sequence[Specification], inputs: Inputs, folder: Path, workers: int = 1, **options
) -> pd.DataFrame:
    """The rows of all runs ``specs``, in their order. Runs that ``folder`` lacks are computed and kept there.

    Stale runs are computed again unless they are kept (``RunStore.load``). The runs are divided among ``workers``
    processes (0: one per core), or among the workers of the cluster that ``SCHEDULER=`` names. Each process makes its
    ``worker(inputs, store, **options)``, which is pickled if there are several. An interrupt keeps every finished run.
    Raises ValueError if ``paired`` runs would have another number of CPU threads than the finished ones: with other
    threads sums have another order. Raises LostWorkersError as ``spread`` does.
    """
    store = RunStore(folder)
    by_group: dict[Hashable, list[Specification]] = {}
    for spec in specs:
        by_group.setdefault(spec.group, []).append(spec)
    count = worker_count(workers, len(by_group), inputs.device)
    unfinished = {spec for spec in specs if store.load(spec) is None}
    finished = {spec for spec in specs if spec not in unfinished}
    paired = specs[0].paired and inputs.device.type == "cpu"
    # Paired runs of another call, with other groups, must have as many threads.
    processes = (workers or cores()) if paired else count
    threads = _threads(store, finished if paired and unfinished else set(), processes)
    if stale := sum(store.is_stale(spec) for spec in specs):
        what = "taken as they are, as STALE=keep asks" if keeps_stale() else "computed again (STALE=keep takes them)"
        warnings.warn(
            f"{stale} finished runs in {folder} were computed by other code or other versions of packages and are "
            f"{what}",
            stacklevel=2,
        )
    missing = [[spec for spec in group if spec in unfinished] for group in by_group.values()]
    missing = sorted(filter(None, missing), key=lambda group: -sum(spec.size for spec in group))
    total, left = (sum(spec.size for spec in some) for some in (specs, unfinished))
    bar_options = {"desc": specs[0].experiment, "unit": specs[0].unit, "unit_scale": True}
    with progress(total=total, initial=total - left, **bar_options) as bar:
        most: Counter[Specification] = Counter()

        def told(spec: Specification, done: int, kept: bool) -> None:
            """Show the progress of a run. Work that is repeated, since its worker was lost, counts once."""
            if done > most[spec]:
                bar.update(done - most[spec])
                most[spec] = done
            if kept and spec not in finished:
                finished.add(spec)
                bar.set_postfix_str(f"{len(finished)}/{len(specs)} runs")

        bar.set_postfix_str(f"{len(finished)}/{len(specs)} runs")
        if missing and (count > 1 or named_scheduler() or threads != torch.get_num_threads()):
            # Imported where it is needed: most calls compute in this process, or nothing at all.
            from fragility_lab.running.spread import Order, spread

            order = Order(uuid.uuid4().hex[:8], worker, folder, options, specs[0].provenance(), paired, threads)
            spread(order, missing, inputs, count, told, bar.write)
        elif missing:
            alone = worker(inputs, store, **options)
            for spec in chain.from_iterable(missing):
                compute(spec, alone, told)
    rows = store.rows(specs)
    for path in folder.glob(worker.shared_files) if worker.shared_files else ():
        path.unlink(missing_ok=True)
    return rows


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(asked: int, groups: int, device: torch.device) -> int:
    """The number of processes here for ``groups`` groups of runs; ``asked`` = 0 means one per core. A GPU has one.

    The count depends on all groups, not only on unfinished ones. A resumed experiment therefore computes with as many
    threads as an uninterrupted one, and gets the same values.
    """
    if asked < 0:
        raise ValueError(f"workers must be 0 (one per core) or a number of processes, got {asked}")
    return 1 if device.type != "cpu" else max(1, min(asked or cores(), groups))


def thread_count(processes: int) -> int:
    """The number of threads of each of ``processes`` processes; a single process has as many as PyTorch takes."""
    return max(1, cores() // processes) if processes > 1 else torch.get_num_threads()


def _threads(store: RunStore, finished: Collection[Specification], count: int) -> int | None:
    """The number of threads of each process; None stands for the number of a named cluster's workers.

    Paired runs need the number of those that are ``finished``.
    """
    then = {store.metadata(spec)["threads"] for spec in finished}
    if named_scheduler():
        return min(then, default=None)
    threads = thread_count(count)
    if others := sorted(then - {threads}):
        raise ValueError(
            "runs that are compared step by step must have equal numbers of threads: those still to come would "
            f"have {threads}, finished ones had {', '.join(map(str, others))}: set workers as it was for them, or "
            f"remove {store.folder} to compute all of them again"
        )
    return threads
