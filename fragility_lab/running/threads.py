"""The number of threads that PyTorch computes with beside other programs.

The time for which a thread waits busily for others is set before PyTorch is loaded: GOMP_SPINCOUNT in the Makefile.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

WATCHED = 0.2  # seconds


def free_cores() -> int:
    """Count the cores that this process may use and that are free now, to the nearest one. Takes WATCHED seconds."""
    shares = psutil.cpu_percent(WATCHED, percpu=True)
    process = psutil.Process()
    ours = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(len(shares))
    busy = [shares[core] / 100 for core in ours if core < len(shares)]
    return len(busy) - round(sum(busy))


@contextmanager
def on_free_cores() -> Iterator[None]:
    """A context in which PyTorch has as many threads as cores are free, one at least and no more than before.

    Threads that share a core wait for one another most of the time (docs/performance.md). If OMP_NUM_THREADS is set, it
    decides.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and before > 1:
        torch.set_num_threads(max(1, min(before, free_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(before)
