"""The state of a controller: its actions, the signals that it has seen, and what it may still do.

Nothing here touches a model. A ``State`` never changes: ``advance`` returns the state of the next step.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Limits:
    """Limits on the actions of a run, and on epsilon. The defaults allow everything."""

    actions: float = math.inf
    per_step: float = math.inf
    per_layer: float = math.inf
    epsilon_min: float = 0.0
    epsilon_max: float = math.inf


@dataclass(frozen=True)
class Action:
    """A larger LayerNorm epsilon for one block. It is decided at ``step`` and applies from the next step on."""

    step: int  # -1 before the first step
    layer: int
    old_epsilon: float
    new_epsilon: float
    priority: float  # the value that ranked the layer
    candidates: int  # number of layers that the policy chose from
    cooldown_until: int  # first step at which the policy may act on the layer again


@dataclass(frozen=True)
class State:
    """A controller at monitored ``step``, counted from 0; -1 is before the first one.

    Epsilons, counts and cooldowns follow from ``actions``, so they cannot contradict it. A state holds plain numbers
    only. It can be pickled with the rest of a training run.
    """

    layers: int
    base_epsilon: float
    limits: Limits
    seed: int = 0
    step: int = -1
    actions: tuple[Action, ...] = ()
    signals: tuple[float, ...] = ()  # the finite signals of the earlier steps
    protected_layer_steps: int = 0  # number of layers above the base epsilon, summed over the earlier steps

    @property
    def epsilon(self) -> tuple[float, ...]:
        """LayerNorm's epsilon of every block at this step."""
        raised = {action.layer: action.new_epsilon for action in self.actions}
        return tuple(raised.get(layer, self.base_epsilon) for layer in range(self.layers))

    @property
    def action_counts(self) -> tuple[int, ...]:
        """The number of earlier actions on each block."""
        count = Counter(action.layer for action in self.actions)
        return tuple(count[layer] for layer in range(self.layers))

    @property
    def cooled_down(self) -> np.ndarray:
        """True where the cooldown of a block is over, (layers,)."""
        until = {action.layer: action.cooldown_until for action in self.actions}
        return np.array([until.get(layer, self.step) <= self.step for layer in range(self.layers)], dtype=bool)

    @property
    def available(self) -> np.ndarray:
        """True where cooldown, number of actions and largest epsilon allow an action on a block, (layers,)."""
        below_count = np.array(self.action_counts) < self.limits.per_layer
        return self.cooled_down & below_count & (np.array(self.epsilon) < self.limits.epsilon_max)

    @property
    def allowance(self) -> float:
        """The number of actions that this step may take."""
        return min(self.limits.per_step, self.limits.actions - len(self.actions))


def advance(state: State, signal: float, actions: Sequence[Action] = ()) -> State:
    """The state after a monitored step with ``signal`` and the ``actions`` decided at it.

    Protected layer-steps are counted before the actions. A nonfinite signal is not kept. Raises ValueError for
    actions that the limits forbid, that do not raise an epsilon, or that were decided in another state.
    """
    limits, layers = state.limits, [action.layer for action in actions]
    if len(actions) > state.allowance:
        raise ValueError(
            f"at step {state.step} the budget allows {state.allowance} more actions ({limits.per_step} a step, "
            f"{limits.actions} in all, {len(state.actions)} spent), got {len(actions)}: take fewer"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"a step may act once on a layer, got layers {layers}: merge their actions")
    for action in actions:
        _check(state, action)
    protected = sum(epsilon > state.base_epsilon for epsilon in state.epsilon)
    return replace(
        state,
        step=state.step + 1,
        actions=(*state.actions, *actions),
        signals=(*state.signals, float(signal)) if math.isfinite(signal) else state.signals,
        protected_layer_steps=state.protected_layer_steps + protected,
    )


def raise_epsilons(
    state: State, layers: Iterable[int], epsilon: np.ndarray, priority: np.ndarray, candidates: int, cooldown: int = 0
) -> tuple[Action, ...]:
    """Actions that raise ``layers``, in the order given, each with a ``cooldown`` in steps.

    ``epsilon`` (the new one) and ``priority`` hold a value for every block, (layers,).
    """
    step, old, until = state.step, state.epsilon, state.step + cooldown
    return tuple(
        Action(step, int(layer), old[layer], float(epsilon[layer]), float(priority[layer]), int(candidates), until)
        for layer in layers
    )


def _check(state: State, action: Action) -> None:
    if action.step != state.step or not 0 <= action.layer < state.layers:
        raise ValueError(
            f"an action must be of step {state.step} and layers 0 to {state.layers - 1}, got {action}: "
            "decide on the state that is advanced"
        )
    limits, epsilon = state.limits, state.epsilon[action.layer]
    if action.old_epsilon != epsilon or not action.new_epsilon > epsilon:
        raise ValueError(f"an action must raise its layer's epsilon from {epsilon}, got {action}: leave it out")
    if not limits.epsilon_min <= action.new_epsilon <= limits.epsilon_max:
        raise ValueError(
            f"epsilon must stay between {limits.epsilon_min} and {limits.epsilon_max}, got {action}: clip it"
        )
    if not state.available[action.layer]:
        raise ValueError(
            f"a layer may be acted on {limits.per_layer} times and not during its cooldown, got {action} after "
            f"{state.action_counts[action.layer]} actions: choose one of state.available"
        )


def action_table(state: State) -> pd.DataFrame:
    """One row per action, in order. ``earlier_actions`` is the number of earlier actions on its layer."""
    table = pd.DataFrame(state.actions, columns=[field.name for field in fields(Action)])
    return table.assign(earlier_actions=table.groupby("layer").cumcount())
