"""All policies by name."""

from fragility_core.bgss.policy import Policy, StaticGlobal, Uncontrolled
from fragility_core.bgss.printed import EpsilonBump, PrintedBGSS
from fragility_core.bgss.released import RandomSameBudget, ReleasedBGSS, RiskOnlySameBudget

_CLASSES = (Uncontrolled, StaticGlobal, RandomSameBudget, RiskOnlySameBudget, ReleasedBGSS, PrintedBGSS, EpsilonBump)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _CLASSES}


def policy_class(name: str) -> type[Policy]:
    """The class of policy ``name``. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"a policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]


def get_policy(name: str, **parameters) -> Policy:
    """Policy ``name`` with ``parameters``; those not given are the protocol's (section 6).

    Raises ValueError for an unknown name and for values out of range, TypeError for an unknown or missing parameter.
    """
    return policy_class(name)(**parameters)
