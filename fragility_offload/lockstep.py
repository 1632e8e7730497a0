"""Passes that run side by side, so that each part of an offloaded model is read once for all of them.

Every pass has its own thread, and the threads take turns: a pass runs to the entrance of the next part, and waits there
until all others have come to it, too. So all numbers are those of passes that run one after the other.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")


class LastRead(ExitStack):
    """Holds what was read last until something else is asked for."""

    _key: Hashable = None

    def ask(self, key: Hashable, read: Callable[[], AbstractContextManager]) -> None:
        """Hold ``read()``, which is known by its ``key``."""
        if key != self._key:
            self.close()
            self.enter_context(read())
            self._key = key

    def close(self) -> None:
        """Hold nothing."""
        self._key = None
        super().close()


class Cancelled(BaseException):
    """Raised in a pass after an interrupt, or after another pass has failed."""


class Passes:
    """The turns of ``count`` passes, numbered from 0, and what they have read last."""

    def __init__(self, count: int):
        self.last = LastRead()
        self._left = list(range(count))  # those that have not ended
        self._turn = 0  # the number of the pass that runs
        self._changed = threading.Condition()
        self._failed = False

    def run(self, number: int, one: Callable[[], Result]) -> Result:
        """The result of pass ``number``; call it in a thread of its own."""
        _running.set((self, number))
        with self._changed:
            self._wait(number)
        try:
            return one()
        except BaseException:
            self.fail()
            raise
        finally:
            with self._changed:
                self._next(number)
                self._left.remove(number)

    def barrier(self, number: int) -> None:
        """Wait until every other pass has come to an entrance, or has ended."""
        with self._changed:
            self._next(number)
            self._wait(number)

    def fail(self) -> None:
        """End all passes at their next turn."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _next(self, number: int) -> None:
        self._turn = self._left[(self._left.index(number) + 1) % len(self._left)]
        self._changed.notify_all()

    def _wait(self, number: int) -> None:
        self._changed.wait_for(lambda: self._failed or self._turn == number)
        if self._failed:
            raise Cancelled


_running: ContextVar[tuple[Passes, int] | None] = ContextVar("running", default=None)


def barrier() -> LastRead | None:
    """Called at the entrance of a part: wait for the passes beside this one; None if there are none.

    Returns what they have read last.
    """
    running = _running.get()
    if running is None:
        return None
    passes, number = running
    passes.barrier(number)
    return passes.last


def side_by_side(passes: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of ``passes``; see the docstring of the module. A single one runs in the thread of the caller.

    Contexts that belong to a thread, such as ``torch.no_grad``, must be entered by each pass itself.
    """
    if len(passes) == 1:
        return [passes[0]()]
    turns = Passes(len(passes))
    with closing(turns.last), ThreadPoolExecutor(len(passes)) as pool:
        try:
            futures = [pool.submit(turns.run, number, one) for number, one in enumerate(passes)]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt, or a system that gives no more threads
            turns.fail()
            raise
    failures = [future.exception() for future in futures]
    if failure := next((each for each in failures if each is not None and not isinstance(each, Cancelled)), None):
        raise failure
    return [future.result() for future in futures]
