"""Bound-guided selective stabilization: controllers of LayerNorm's epsilon (Section 5 (`sec:algorithm`)).

A policy decides on one monitored step at a time. ``advance`` returns the state after that step. Whoever trains
the model applies ``state.epsilon`` to it before the next step:

    policy = get_policy("bgss")
    state = policy.start(layers=12, seed=0)
    layers, windows = score(...)
    signal = windows.combined.item()
    state = advance(state, signal, policy.decide(state, layers, signal))

Protocol section 6 lists the policies. ``POLICIES`` has them by name.
"""

from dataclasses import MISSING, fields

from fragility_core.bgss.policy import Policy, StaticGlobal, Uncontrolled, replay, trajectory
from fragility_core.bgss.printed import EpsilonBump, PrintedBGSS, choose_thresholds
from fragility_core.bgss.released import RandomSameBudget, ReleasedBGSS, RiskOnlySameBudget
from fragility_core.bgss.state import Action, Limits, State, action_table, advance

__all__ = [
    "POLICIES", "Action", "Limits", "Policy", "State", "action_table", "advance", "choose_thresholds", "get_policy",
    "policy_class", "replay", "trajectory",
]  # fmt: skip

_CLASSES = (
    Uncontrolled, StaticGlobal,
    RandomSameBudget, RiskOnlySameBudget, ReleasedBGSS,
    PrintedBGSS, EpsilonBump,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _CLASSES}


def policy_class(name: str) -> type[Policy]:
    """The class of policy ``name``. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"a policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]


def get_policy(name: str, **parameters: float) -> Policy:
    """Policy ``name`` with ``parameters``; those not given are the protocol's (section 6).

    Raises ValueError for an unknown name and for values out of range, TypeError for an unknown or missing parameter.
    """
    chosen = policy_class(name)
    needed = [each.name for each in fields(chosen) if each.default is MISSING and each.default_factory is MISSING]
    if lacking := [each for each in needed if each not in parameters]:
        raise TypeError(f"the policy {name!r} needs a value for {', '.join(lacking)}: give it by name")
    if unknown := parameters.keys() - (known := [each.name for each in fields(chosen)]):
        raise TypeError(f"the policy {name!r} has the parameters {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return chosen(**parameters)
