"""The best decisions under a budget: a mixed-integer linear program, solved exactly."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

LIMITS = {"mip_rel_gap": 0.0, "time_limit": 60.0}
SCALE = 1e6  # of the largest coefficient: the solver takes differences below about 1e-6 for none


@dataclass(frozen=True)
class Knapsack:
    """D decisions, each taken or not, with the error that they leave and the size that they take.

    - ``errors`` and ``sizes`` (D,): what each decision adds if it is taken.
    - ``weights`` (P,) and ``covers`` (D, P): a weight is an error, too, unless a decision that covers it is taken.
    - ``shared``: pairs of an amount and decisions. The amount adds to the size once if any of them is taken.
    - ``saved``: pairs of an amount and sets of decisions. It leaves the size if one of each set is taken.
    - ``alternatives``: sets of decisions, of each of which exactly one is taken.
    - ``needs``: pairs (i, j). Decision i is only taken together with j.
    """

    errors: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray
    covers: np.ndarray
    shared: Sequence[tuple[float, Sequence[int]]] = ()
    saved: Sequence[tuple[float, Sequence[Sequence[int]]]] = ()
    alternatives: Sequence[Sequence[int]] = ()
    needs: Sequence[tuple[int, int]] = ()

    def error(self, taken: np.ndarray) -> float:
        """The error that the decisions ``taken`` (D,), booleans, leave."""
        return float(self.errors[taken].sum() + self.weights[~self.covers[taken].any(0)].sum())

    def size(self, taken: np.ndarray) -> float:
        """The size that the decisions ``taken`` take."""
        once = sum(amount for amount, members in self.shared if taken[list(members)].any())
        less = sum(amount for amount, sets in self.saved if all(taken[list(members)].any() for members in sets))
        return float(self.sizes[taken].sum() + once - less)

    def least_error(self, size: float = np.inf) -> np.ndarray:
        """The decisions with the least error whose size is at most ``size``.

        A decision that gains nothing is not taken. Raises ValueError if no choice is so small.
        """
        taken = self._solve(self._error_terms, self._size_terms, size, size)
        return self._needed(taken, lambda left: self.error(left) <= self.error(taken) and self.size(left) <= size)

    def least_size(self, error: float = np.inf) -> np.ndarray:
        """The smallest decisions whose error is at most ``error``. Raises ValueError if none leave so little."""
        budget = error - self.weights.sum()
        taken = self._solve(self._size_terms, self._error_terms, budget, error)
        return self._needed(taken, lambda left: self.error(left) <= error and self.size(left) <= self.size(taken))

    def _needed(self, taken: np.ndarray, suffices: Callable[[np.ndarray], bool]) -> np.ndarray:
        """The decisions of ``taken`` that are needed: one by one, others go as long as what is left ``suffices``."""
        one_each = {decision for members in self.alternatives for decision in members}
        for decision in reversed(np.flatnonzero(taken)):
            left = taken & (np.arange(len(taken)) != decision)
            holds_others = any(taken[i] and j == decision for i, j in self.needs)
            if decision not in one_each and not holds_others and suffices(left):
                taken = left
        return taken

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct columns of ``covers`` (D, S) that cover anything, and the sum of their weights (S,)."""
        columns, number = np.unique(self.covers, axis=1, return_inverse=True)
        weights = np.bincount(number.ravel(), self.weights, minlength=columns.shape[1])
        used = columns.any(0) & (weights > 0)
        return columns[:, used], weights[used]

    @property
    def _error_terms(self) -> np.ndarray:
        """The error without the sum of ``weights``, as coefficients of the variables."""
        _, weights = self._columns
        return np.concatenate([self.errors, -weights, np.zeros(len(self.shared) + len(self.saved))])

    @property
    def _size_terms(self) -> np.ndarray:
        _, weights = self._columns
        amounts = [amount for amount, _ in self.shared] + [-amount for amount, _ in self.saved]
        return np.concatenate([self.sizes, np.zeros(len(weights)), amounts])

    @cached_property
    def _rules(self) -> list[LinearConstraint]:
        """The constraints of decisions d and of the variables in [0, 1] of columns, shared and saved amounts.

        A column is covered, y <= sum of d; a shared amount is taken, d <= a; a saved one, c <= sum of d of each set.
        """
        columns, _ = self._columns
        first_shared = len(self.errors) + columns.shape[1]
        first_saved = first_shared + len(self.shared)
        rows: list[dict[int, float]] = []  # each at most 0
        for y, covering in enumerate(columns.T, start=len(self.errors)):
            rows.append({y: 1.0} | dict.fromkeys(np.flatnonzero(covering), -1.0))
        for a, (_, members) in enumerate(self.shared, start=first_shared):
            rows += [{d: 1.0, a: -1.0} for d in members]
        for c, (_, sets) in enumerate(self.saved, start=first_saved):
            rows += [{c: 1.0} | dict.fromkeys(members, -1.0) for members in sets]
        rows += [{i: 1.0, j: -1.0} for i, j in self.needs]
        single = [dict.fromkeys(members, 1.0) for members in self.alternatives]
        width = first_saved + len(self.saved)
        found = [LinearConstraint(matrix(rows, width), ub=0)] if rows else []
        return found + ([LinearConstraint(matrix(single, width), 1, 1)] if single else [])

    def _solve(self, costs: np.ndarray, amounts: np.ndarray, budget: float, unit: float) -> np.ndarray:
        """The decisions of least cost whose amount is at most ``budget``; the best so far when time is up.

        The budget holds to about 1e-6 of ``unit``, by which it is given.
        """
        if not len(self.errors):
            return np.zeros(0, dtype=bool)
        limits = list(self._rules)
        if np.isfinite(budget):
            scale = max(unit, 1e-6 * np.abs(amounts).max(initial=0), 1e-300)
            limits.append(LinearConstraint(amounts[None] / scale, ub=budget / scale + 1e-12))
        whole = np.arange(len(costs)) < len(self.errors)
        costs = SCALE * costs / max(np.abs(costs).max(initial=0), 1e-300)
        with silenced():
            found = milp(costs, integrality=whole, bounds=Bounds(0, 1), constraints=limits, options=LIMITS)
        if found.x is None:
            raise ValueError(f"no choice keeps the budget of {unit:g}: {found.message}")
        return found.x[: len(self.errors)] > 0.5


@contextmanager
def silenced() -> Iterator[None]:
    """A context in which nothing reaches the process's stdout: HiGHS writes lines of its own there, unasked."""
    try:
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # it is closed
        yield
        return
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def matrix(rows: Sequence[dict[int, float]], width: int) -> coo_array:
    """The sparse matrix (rows, ``width``) with these entries by column."""
    entries = [(i, j, value) for i, row in enumerate(rows) for j, value in row.items()]
    row, column, values = zip(*entries)
    return coo_array((values, (row, column)), shape=(len(rows), width)).tocsr()
