"""Policies: parameters that start a state and decide on actions, and the two that never look."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from fragility_core.bgss.ledger import Action, Limits, State, advance, raising


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """When and where LayerNorm's epsilon is raised: here, never. Raises ValueError for values out of range."""

    name: ClassVar[str]

    base_epsilon: float = 1e-5

    def __post_init__(self):
        self._require("base_epsilon", 0 < self.base_epsilon < math.inf, "be positive and finite")

    def _require(self, parameter: str, holds: bool, invariant: str) -> None:
        if not holds:
            raise ValueError(f"{parameter} of policy {self.name!r} must {invariant}, got {getattr(self, parameter)!r}")

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """The budget and the bounds of a run."""

    def initial_actions(self, state: State) -> tuple[Action, ...]:
        """The actions taken before the first step, in the state before it."""
        return ()

    def start(self, layers: int, seed: int = 0) -> State:
        """The state at step 0 of a model of ``layers`` blocks; raises ValueError for a model without any."""
        if layers < 1:
            raise ValueError(f"a model must have at least 1 block, got {layers}: give the number of its blocks")
        before = State(layers, self.base_epsilon, self.limits, seed)
        return advance(before, math.nan, self.initial_actions(before))

    def decide(self, state: State, rows: pd.DataFrame, signal: float) -> tuple[Action, ...]:
        """The actions of a monitored step, in force from the next step on; nothing is changed.

        ``rows`` are the block rows of one window as ``surrogates.score`` gives them, ``signal`` is
        that window's ``combined``. A value that is not finite is never acted on. Raises ValueError for
        rows that are not those of one window.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class Uncontrolled(Policy):
    """No action at all."""

    name = "none"

    @property
    def limits(self) -> Limits:
        return Limits(actions=0)


@dataclass(frozen=True, kw_only=True)
class StaticGlobal(Policy):
    """One larger epsilon in every block from the start."""

    name = "static_global"

    static_epsilon: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        self._require(
            "static_epsilon", self.base_epsilon < self.static_epsilon < math.inf, "be above base_epsilon and finite"
        )

    @property
    def limits(self) -> Limits:
        return Limits(epsilon_max=self.static_epsilon)

    def initial_actions(self, state: State) -> tuple[Action, ...]:
        blocks = range(state.layers)
        return raising(state, blocks, np.full(state.layers, self.static_epsilon), np.zeros(state.layers), state.layers)


def columns(rows: pd.DataFrame, layers: int, *names: str) -> np.ndarray:
    """The columns ``names`` of the rows of any number of windows, in block order: (names, windows, layers).

    Raises ValueError for missing columns or rows in another order.
    """
    missing = {"layer", *names} - set(rows)
    if missing:
        raise ValueError(f"rows must have the columns of surrogates.score, {sorted(missing)} are missing: score them")
    order = rows["layer"].tolist()
    if not order or order != [*range(layers)] * (len(order) // layers):
        raise ValueError(f"rows must hold layers 0 to {layers - 1} of each window in order, got layers {order}")
    return np.stack([rows[name].to_numpy(dtype="float64") for name in names]).reshape(len(names), -1, layers)


def window_columns(rows: pd.DataFrame, layers: int, *names: str) -> np.ndarray:
    """The columns ``names`` of the rows of one window: (names, layers). Raises ValueError for other rows."""
    values = columns(rows, layers, *names)
    if values.shape[1] != 1:
        raise ValueError(f"rows must be those of one window, got {values.shape[1]} windows: give one at a time")
    return values[:, 0]
