"""Bound-guided selective stabilization: controllers of LayerNorm's epsilon (Section 5 (`sec:algorithm`)).

A policy decides on one monitored step at a time. ``advance`` returns the state after that step. Whoever trains
the model applies ``state.epsilon`` to it before the next step:

    policy = get_policy("bgss")
    state = policy.start(layers=12, seed=0)
    layers, windows = score(...)
    signal = windows.combined.item()
    state = advance(state, signal, policy.decide(state, layers, signal))

Protocol section 6 lists the policies. ``registry.POLICIES`` has them by name.
"""

from fragility_core.bgss.policy import Policy, replay, trajectory
from fragility_core.bgss.printed import choose_thresholds
from fragility_core.bgss.registry import POLICIES, get_policy
from fragility_core.bgss.state import Action, Limits, State, action_table, advance

__all__ = [
    "POLICIES", "Action", "Limits", "Policy", "State", "action_table", "advance", "choose_thresholds", "get_policy",
    "replay", "trajectory",
]  # fmt: skip
