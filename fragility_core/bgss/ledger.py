"""The ledger of a controller: what it has done, what it has seen, and the limits it cannot exceed.

Nothing here touches a model. A ``State`` never changes; ``advance`` gives the one of the next step.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Limits:
    """How many actions a run may take, and between which epsilons; no limit unless given.

    An epsilon never falls, so a layer once raised stays protected to the end: a limit on protected
    layer-steps needs the number of monitored ``steps`` of the run, and commits them with the action.
    """

    actions: float = math.inf
    per_step: float = math.inf
    per_layer: float = math.inf
    epsilon_min: float = 0.0
    epsilon_max: float = math.inf
    protected_layer_steps: float = math.inf
    steps: float = math.inf


@dataclass(frozen=True)
class Action:
    """LayerNorm's epsilon of one block raised: decided at ``step``, in force from the next step on."""

    step: int  # -1 before the first
    layer: int
    old_epsilon: float
    new_epsilon: float
    priority: float  # by which the layer was ranked
    candidates: int  # layers it was chosen from
    cooldown_until: int  # the first step at which the layer may be acted on again


@dataclass(frozen=True)
class State:
    """A controller at ``step``, which counts monitored steps from 0.

    Epsilons, counts and rests are read off the ``actions`` taken so far, so they cannot disagree with
    them. It holds plain numbers only: ``to_dict`` can be written as JSON, and ``from_dict`` gives an
    equal state back.
    """

    layers: int
    base_epsilon: float
    limits: Limits
    seed: int = 0
    step: int = -1
    actions: tuple[Action, ...] = ()
    signals: tuple[float, ...] = ()  # of the earlier steps, the finite ones
    protected_layer_steps: int = 0  # layers above the base epsilon, summed over the earlier steps

    @property
    def epsilon(self) -> tuple[float, ...]:
        """LayerNorm's epsilon of every block at this step."""
        raised = {action.layer: action.new_epsilon for action in self.actions}
        return tuple(raised.get(layer, self.base_epsilon) for layer in range(self.layers))

    @property
    def earlier(self) -> tuple[int, ...]:
        """The number of earlier actions on every block."""
        count = Counter(action.layer for action in self.actions)
        return tuple(count[layer] for layer in range(self.layers))

    @property
    def cooled_down(self) -> np.ndarray:
        """Whether each block's cooldown is over (layers,)."""
        until = {action.layer: action.cooldown_until for action in self.actions}
        return np.array([until.get(layer, self.step) <= self.step for layer in range(self.layers)], dtype=bool)

    @property
    def available(self) -> np.ndarray:
        """Whether each block is cooled_down, below its number of actions and below the largest epsilon (layers,)."""
        below_count = np.array(self.earlier) < self.limits.per_layer
        return self.cooled_down & below_count & (np.array(self.epsilon) < self.limits.epsilon_max)

    @property
    def allowance(self) -> float:
        """How many actions this step may still take."""
        return min(self.limits.per_step, self.limits.actions - len(self.actions))

    @property
    def protected(self) -> int:
        """The number of blocks above the base epsilon."""
        return sum(epsilon > self.base_epsilon for epsilon in self.epsilon)

    @property
    def protectable(self) -> float:
        """How many more blocks this step may raise above the base, within the limit of protected layer-steps."""
        if self.limits.protected_layer_steps == math.inf:
            return math.inf
        left = self.limits.steps - self.step  # this step and those after it
        free = self.limits.protected_layer_steps - self.protected_layer_steps - self.protected * left
        return free // (left - 1) if left > 1 else math.inf

    def to_dict(self) -> dict:
        """The state as nested dictionaries, tuples and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict) -> "State":
        """The state that ``to_dict`` gave, also after a way through JSON."""
        actions = tuple(Action(**action) for action in record["actions"])
        rest = {"limits": Limits(**record["limits"]), "actions": actions, "signals": tuple(record["signals"])}
        return cls(**record | rest)


def advance(state: State, signal: float, actions: Sequence[Action] = ()) -> State:
    """The state of the next step, after a monitored step with ``signal`` and the ``actions`` decided at it.

    Protected layer-steps are counted before the actions; a nonfinite signal is not remembered. Raises
    ValueError for actions that the limits do not allow, that do not raise an epsilon, or that were
    decided in another state.
    """
    _check_budget(state, actions)
    for action in actions:
        _check(state, action)
    return replace(
        state,
        step=state.step + 1,
        actions=(*state.actions, *actions),
        signals=(*state.signals, float(signal)) if math.isfinite(signal) else state.signals,
        protected_layer_steps=state.protected_layer_steps + state.protected,
    )


def raising(
    state: State, layers: Iterable[int], epsilon: np.ndarray, priority: np.ndarray, candidates: int, cooldown: int = 0
) -> tuple[Action, ...]:
    """Actions that raise ``layers``, in their order, and let them rest for ``rest`` steps.

    ``epsilon`` and ``priority`` are those of all blocks, (layers,).
    """
    old = state.epsilon
    return tuple(
        Action(
            step=state.step,
            layer=int(layer),
            old_epsilon=old[layer],
            new_epsilon=float(epsilon[layer]),
            priority=float(priority[layer]),
            candidates=int(candidates),
            cooldown_until=state.step + cooldown,
        )
        for layer in layers
    )


def _check_budget(state: State, actions: Sequence[Action]) -> None:
    """Refuse more actions than a step or the run may take, or two on one layer."""
    if len(actions) > state.allowance:
        raise ValueError(
            f"at step {state.step} the budget allows {state.allowance} more actions ({state.limits.per_step} a step, "
            f"{state.limits.actions} in all, {len(state.actions)} spent), got {len(actions)}: take fewer"
        )
    fresh = sum(action.old_epsilon == state.base_epsilon for action in actions)
    if fresh > state.protectable:
        raise ValueError(
            f"at step {state.step} the budget of {state.limits.protected_layer_steps} protected layer-steps allows "
            f"{state.protectable} more layers to the end of the run, got {fresh}: take fewer"
        )
    layers = [action.layer for action in actions]
    if len(set(layers)) < len(layers):
        raise ValueError(f"a step may act once on a layer, got layers {layers}: merge their actions")


def _check(state: State, action: Action) -> None:
    """Refuse an action that was decided in another state, or that the ledger does not allow."""
    if action.step != state.step or not 0 <= action.layer < state.layers:
        raise ValueError(
            f"an action must be of step {state.step} and layers 0 to {state.layers - 1}, got {action}: "
            "decide on the state that is advanced"
        )
    limits, epsilon, earlier = state.limits, state.epsilon[action.layer], state.earlier[action.layer]
    if action.old_epsilon != epsilon or not action.new_epsilon > epsilon:
        raise ValueError(f"an action must raise its layer's epsilon from {epsilon}, got {action}: leave it out")
    if not limits.epsilon_min <= action.new_epsilon <= limits.epsilon_max:
        raise ValueError(
            f"epsilon must stay between {limits.epsilon_min} and {limits.epsilon_max}, got {action}: clip it"
        )
    if earlier >= limits.per_layer:
        raise ValueError(f"a layer may be acted on {limits.per_layer} times, got {action}: choose another layer")
    if not state.cooled_down[action.layer]:
        raise ValueError(f"layer {action.layer} rests at step {state.step}, got {action}: choose another layer")


def action_table(state: State) -> pd.DataFrame:
    """One row per action taken so far, in order, with the number of ``earlier`` actions on its layer."""
    table = pd.DataFrame(state.actions, columns=[field.name for field in fields(Action)])
    return table.assign(earlier=table.groupby("layer").cumcount())
