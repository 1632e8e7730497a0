"""The Dask cluster that computes: one on this machine for the time of an experiment, or another that is named.

A worker computes one run at a time, with as many threads as the worker has (``--nthreads``).
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dask
from distributed import Client, LocalCluster, Status
from distributed.utils import get_mp_context

from fragility_lab.running.environment import named_scheduler

LOOPBACK = "127.0.0.1"
SETTINGS = {
    "distributed.admin.large-graph-warning-threshold": "1 TB",  # the inputs travel once, and have to
    "distributed.nanny.pre-spawn-environ": {},  # glibc's thresholds, as `make` sets them, hold in workers too
    # On Linux one process imports the packages, and all workers, also later ones, are its forks.
    "distributed.worker.multiprocessing-method": "forkserver" if sys.platform == "linux" else "spawn",
}
IMPORTED = ["fragility_lab.running.preloaded"]


@contextmanager
def connected(workers: int, threads: int | None) -> Iterator[tuple[Client, Callable[[], None]]]:
    """A client of the cluster that ``SCHEDULER=`` names, or of a new cluster of ``workers`` processes here.

    It comes with a function that restarts workers that died while they started. Raises OSError if no scheduler answers
    at the given address.
    """
    with dask.config.set(SETTINGS):
        if address := named_scheduler():
            with _named(address) as client:
                yield client, lambda: None
        else:
            with _local(threads) as cluster:
                cluster.scale(workers)
                with Client(cluster.scheduler_address, set_as_default=False) as client:
                    yield client, lambda: _replace_failed(cluster, workers)


def _named(address: str) -> Client:
    try:
        how = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
        if "scheduler_file" in how and not os.path.isfile(address):
            raise OSError("there is no such file")
        return Client(**how, timeout=10, set_as_default=False)
    except (OSError, ValueError) as cause:
        raise OSError(
            f"SCHEDULER must lead to a running Dask scheduler, by tcp://host:port or its file.json, got {address!r} "
            f"({(str(cause).splitlines() or [type(cause).__name__])[0]}): start one with `dask scheduler "
            "--scheduler-file file.json`, or leave SCHEDULER out"
        ) from cause


def _local(threads: int | None) -> LocalCluster:
    # The cluster's threads and processes inherit the mask. An interrupt at the terminal goes to all processes of its
    # group; only this thread takes it, and ends the others.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        get_mp_context().set_forkserver_preload(IMPORTED)  # after Dask's own list, which it sets at the first call
    try:
        return LocalCluster(
            n_workers=0,
            threads_per_worker=threads,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            memory_limit=0,  # runs hold little that could be spilled; the system says when memory is out
            silence_logs=logging.CRITICAL,
            env=dict(os.environ),  # a fork has that of the first cluster's time
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _replace_failed(cluster: LocalCluster, workers: int) -> None:
    """Restart workers that died while starting; Dask itself restarts only workers that had started."""
    failed = sum(worker.status in (Status.failed, Status.closed) for worker in cluster.workers.values())
    if failed > 3 * workers:
        raise RuntimeError(
            f"worker processes must start, but {failed} died while they did (out of memory?): "
            "free memory, or take fewer at once (workers=1)"
        )
    cluster.scale(workers + failed)
