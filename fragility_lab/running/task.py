"""The work of a process on runs, alone or as a worker of a cluster."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import pandas as pd
import torch

from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.environment import device_name
from fragility_lab.running.runs import RunStore, Specification

Advance = Callable[[int], None]
Report = Callable[[Specification, int, bool], None]  # a run, its units of work done, and True if its rows are kept
Run = TypeVar("Run", bound=Specification)


class Worker(ABC, Generic[Run]):
    """Computes the runs of one experiment, and keeps the objects that they share; each process has one worker.

    ``shared_files`` is a pattern of the files that runs leave for one another beside the finished runs.
    """

    shared_files: ClassVar[str] = ""

    def __init__(self, inputs: Inputs, store: RunStore):
        """``store`` holds the finished runs."""
        self.inputs, self.store = inputs, store

    @abstractmethod
    def run(self, spec: Run, advance: Advance) -> pd.DataFrame:
        """The rows of ``spec``; calls ``advance(n)`` after every n units of progress."""


def compute(spec: Specification, worker: Worker, report: Report) -> None:
    """Compute the run ``spec`` and keep it; ``report`` is called with its progress."""
    record = {"device_name": device_name(spec.device), "threads": torch.get_num_threads()}
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        done += units
        report(spec, min(done, spec.size), False)

    advance(0)
    spec.provenance()  # read before the run: files may change meanwhile
    begin = time.perf_counter()
    frame = worker.run(spec, advance)
    record |= {"seconds": round(time.perf_counter() - begin, 3), "attention": worker.inputs.attention}
    worker.store.save(spec, frame, record)
    report(spec, spec.size, True)  # also what needed no work, such as windows that overflowed
