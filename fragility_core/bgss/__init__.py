"""Bound-guided selective stabilization: controllers of LayerNorm's epsilon (Section 5 (`sec:algorithm`), protocol section 6).

A controller is an immutable ``State``, a pure decision on one monitored step, and the state after it;
who trains the model applies ``state.epsilon`` to it before the next step:

    policy = get_policy("bgss")
    state = policy.start(layers=12, seed=0)
    layers, windows = score(...)
    signal = windows.combined.item()
    state = advance(state, signal, policy.decide(state, layers, signal))
"""

from fragility_core.bgss.ledger import Action, Limits, State, action_table, advance
from fragility_core.bgss.policy import Policy
from fragility_core.bgss.printed import choose_thresholds
from fragility_core.bgss.registry import POLICIES, get_policy
from fragility_core.bgss.replay import replay, trajectory

__all__ = [
    "POLICIES",
    "Action",
    "Limits",
    "Policy",
    "State",
    "action_table",
    "advance",
    "choose_thresholds",
    "get_policy",
    "replay",
    "trajectory",
]
