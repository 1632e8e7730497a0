"""Spread the runs of an experiment over the workers of a Dask cluster.

Each worker has one task at a time, a group of runs that share work. PyTorch's threads and random state belong to a
process, so that two runs in one process would disturb each other. One task at a time also says which run a lost
worker was computing.
"""

import pickle
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from distributed import Future, KilledWorker

from fragility_lab.inputs.loading import Inputs
from fragility_lab.running.cluster import connected
from fragility_lab.running.environment import named_scheduler
from fragility_lab.running.remote import Order, carry_out, held
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Report

INTERVAL = 0.5  # seconds between two looks at the workers
PATIENCE = 20  # looks without any worker, or without a task that a worker has, until something is done
ATTEMPTS = 3  # workers that one run may cost


class LostWorkersError(RuntimeError):
    """Runs whose workers ended again and again."""


@dataclass
class _Flight:
    """A task at a worker."""

    future: Future
    worker: str
    specs: Sequence[Specification]
    unseen: int = 0  # looks in a row at which the worker did not have the task


def spread(
    order: Order, groups: Sequence[Sequence[Specification]], inputs: Inputs, workers: int, tell: Report,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Have all ``groups`` computed, by ``workers`` processes or by the cluster that is named.

    ``tell`` is called with the progress of each run, ``say`` with lines for the user. Raises the errors of runs.
    Raises LostWorkersError, after all other runs are finished, if a run has ended its worker three times.
    """
    with connected(workers, order.threads) as (client, mend):
        if client.dashboard_link:
            say(f"dashboard: {client.dashboard_link}")
        _Spread(client, mend, order, groups, tell, say).carry_out(pickle.dumps(inputs))


class _Spread:
    def __init__(self, client, mend, order: Order, groups, tell: Report, say):
        self.client, self.mend, self.order, self.tell, self.say = client, mend, order, tell, say
        self.store = RunStore(order.folder)
        self.waiting = deque(groups)
        self.flights: dict[str, _Flight] = {}
        self.heard: queue.SimpleQueue = queue.SimpleQueue()  # of ended futures and of messages from workers
        self.losses: Counter[Specification] = Counter()
        self.given_up: list[Specification] = []
        self.alone = self.tasks = 0  # looks without any worker, tasks so far

    def carry_out(self, inputs: bytes) -> None:
        self.client.subscribe_topic(self.order.token, lambda event: self.heard.put(event[1]))
        # A task of its own: each worker fetches the bytes once, and should their holders be lost, Dask runs it again.
        self.inputs = self.client.submit(held, inputs, key=f"inputs-{self.order.token}", priority=1)
        self.inputs.add_done_callback(self.heard.put)
        try:
            while self.waiting or self.flights:
                self._look()
                self._listen()
        except OSError as error:
            if self.client.status == "running":
                raise
            raise OSError("the scheduler was lost: start it again, then the same command goes on") from error
        finally:
            self.client.unsubscribe_topic(self.order.token)
            self.client.cancel([flight.future for flight in self.flights.values()])
        if self.given_up:
            raise LostWorkersError(
                f"workers must live through a run, but {ATTEMPTS} ended in each of these of "
                f"{self.given_up[0].experiment}, probably out of memory: "
                f"{', '.join(spec.label for spec in self.given_up)}. All others are finished: give workers more memory "
                "or take fewer at once (workers=1), then the same command goes on"
            )

    def _look(self) -> None:
        """Take back the tasks of lost workers, and give idle workers something to do."""
        self.mend()
        tasks = self.client.processing()
        for key, flight in [*self.flights.items()]:
            flight.unseen = 0 if key in tasks.get(flight.worker, ()) else flight.unseen + 1
            # A worker that came back under its address lacks the task, and for a while one that waits for the inputs.
            gone = flight.worker not in tasks or flight.unseen > PATIENCE
            if gone and not flight.future.done():
                self._lost(self.flights.pop(key))
        self.alone = 0 if tasks else self.alone + 1
        if self.alone == PATIENCE and named_scheduler():
            self.say("waiting: no worker yet (`dask worker` starts one; without this project it ends at once)")
        for worker, theirs in tasks.items():
            if not theirs:
                self._give(worker)

    def _give(self, worker: str) -> None:
        if self.inputs.status != "finished" or not self.waiting:
            return
        if self.order.threads is None:
            self.order = replace(self.order, threads=self.client.nthreads().get(worker))
        specs = self.waiting.popleft()
        self.tasks += 1
        key = f"{specs[0].experiment}-{specs[0].label}-{self.order.token}-{self.tasks}"
        task = pickle.dumps((self.order, specs))
        future = self.client.submit(carry_out, task, self.inputs, key=key, workers=[worker], pure=False)
        self.flights[key] = _Flight(future, worker, specs)
        future.add_done_callback(self.heard.put)

    def _listen(self) -> None:
        """Take in messages until the next look is due."""
        until = time.monotonic() + INTERVAL
        with suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                match self.heard.get(timeout=left):
                    case Future() as future if future.key == self.inputs.key:
                        future.result()
                        return  # workers that wait for the inputs can start
                    case Future() as future if future.key in self.flights:
                        self._ended(self.flights.pop(future.key))
                    case {"task": key, "run": run, "done": done, "kept": kept} if key in self.flights:
                        self.tell(self.flights[key].specs[run], done, kept)
                if not self.waiting and not self.flights:
                    return

    def _ended(self, flight: _Flight) -> None:
        if flight.future.cancelled() or isinstance(flight.future.exception(), KilledWorker):
            return self._lost(flight)
        flight.future.result()
        for spec in flight.specs:
            self.tell(spec, spec.size, True)
        return self._give(flight.worker)

    def _lost(self, flight: _Flight) -> None:
        """Put back the missing runs of a lost worker's task, except a run that has cost too many workers."""
        flight.future.cancel()
        left = [spec for spec in flight.specs if self.store.load(spec) is None]
        if left:
            self.losses[left[0]] += 1  # it was being computed: runs of a task follow one another
            if self.losses[left[0]] == ATTEMPTS:
                self.given_up.append(left.pop(0))
        if left:
            self.waiting.appendleft(left)
