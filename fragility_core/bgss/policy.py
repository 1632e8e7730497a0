"""The interface of all policies, a policy run again on recorded rows, and the two policies that measure nothing."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Integral
from typing import ClassVar

import numpy as np
import pandas as pd

from fragility_core.bgss.state import Action, Limits, State, action_table, advance, raise_epsilons


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A rule for when to raise LayerNorm's epsilon, and in which blocks. The base class takes no action.

    The fields are the policy's parameters. Raises ValueError for values out of range.
    """

    name: ClassVar[str]

    base_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                count = getattr(self, field.name)
                self._require(field.name, isinstance(count, Integral) and not isinstance(count, bool), "be an integer")
        self._require("base_epsilon", 0 < self.base_epsilon < math.inf, "be positive and finite")

    def _require(self, parameter: str, holds: bool, invariant: str) -> None:
        if not holds:
            raise ValueError(f"{parameter} of policy {self.name!r} must {invariant}, got {getattr(self, parameter)!r}")

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """The budget of a run, and the bounds of epsilon."""

    @property
    def first_step(self) -> float:
        """The first step at which the policy may act; -1 is before the run, infinity is never."""
        return 0

    def initial_actions(self, state: State) -> tuple[Action, ...]:
        """The actions before the first step. ``state`` is the state before that step."""
        return ()

    def start(self, layers: int, seed: int = 0) -> State:
        """The state at step 0 of a model with ``layers`` blocks. Raises ValueError for a model without blocks."""
        if layers < 1:
            raise ValueError(f"a model must have at least 1 block, got {layers}: give the number of its blocks")
        before = State(layers, self.base_epsilon, self.limits, seed)
        return advance(before, math.nan, self.initial_actions(before))

    def decide(self, state: State, rows: pd.DataFrame, signal: float) -> tuple[Action, ...]:
        """The actions of a monitored step. They apply from the next step on; this call changes nothing.

        ``rows`` are the block rows of one window as ``surrogates.score`` returns them. ``signal`` is the
        ``combined`` of that window. A nonfinite value leads to no action. Where a policy acts, it
        raises ValueError for rows of more than one window, or in another order.
        """
        return ()


def trajectory(policy: Policy, layers: pd.DataFrame, windows: pd.DataFrame, seed: int = 0) -> Iterator[State]:
    """The state at each recorded step, and the state after the last one.

    ``layers`` and ``windows`` are those of ``surrogates.score``: one window per step, in order. The rows stay as
    recorded, so the policy's own actions do not change them.
    """
    state = policy.start(layers["layer"].nunique(), seed)
    yield state
    signals = windows.set_index("window")["combined"]
    for window, rows in layers.groupby("window", sort=False):
        state = advance(state, signals[window], policy.decide(state, rows, signals[window]))
        yield state


def replay(policy: Policy, layers: pd.DataFrame, windows: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The actions of ``policy`` on recorded rows, as ``state.action_table`` lists them (see ``trajectory``)."""
    *_, last = trajectory(policy, layers, windows, seed)
    return action_table(last)


@dataclass(frozen=True, kw_only=True)
class Uncontrolled(Policy):
    """A policy that never acts."""

    name = "none"

    @property
    def limits(self) -> Limits:
        return Limits(actions=0)

    @property
    def first_step(self) -> float:
        return math.inf


@dataclass(frozen=True, kw_only=True)
class StaticGlobal(Policy):
    """One larger epsilon in every block from the start."""

    name = "static_global"

    static_epsilon: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range = self.base_epsilon < self.static_epsilon < math.inf
        self._require("static_epsilon", in_range, "be above base_epsilon and finite")

    @property
    def limits(self) -> Limits:
        return Limits(epsilon_max=self.static_epsilon)

    @property
    def first_step(self) -> float:
        return -1

    def initial_actions(self, state: State) -> tuple[Action, ...]:
        layers = state.layers
        return raise_epsilons(state, range(layers), np.full(layers, self.static_epsilon), np.zeros(layers), layers)


def columns(rows: pd.DataFrame, layers: int, *names: str) -> np.ndarray:
    """The columns ``names`` of the rows of any number of windows, in block order: (names, windows, layers).

    Raises ValueError for missing columns, and for rows in another order.
    """
    missing = {"layer", *names} - set(rows)
    if missing:
        raise ValueError(f"rows must have the columns of surrogates.score, {sorted(missing)} are missing: score them")
    order = rows["layer"].tolist()
    if not order or order != [*range(layers)] * (len(order) // layers):
        raise ValueError(f"rows must hold layers 0 to {layers - 1} of each window in order, got layers {order}")
    return rows[list(names)].to_numpy(dtype="float64").T.reshape(len(names), -1, layers)


def window_columns(rows: pd.DataFrame, layers: int, *names: str) -> np.ndarray:
    """The columns ``names`` of the rows of one window: (names, layers). Raises ValueError for other rows."""
    values = columns(rows, layers, *names)
    if values.shape[1] != 1:
        raise ValueError(f"rows must be those of one window, got {values.shape[1]} windows: give one at a time")
    return values[:, 0]
