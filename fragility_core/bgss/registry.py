"""All policies by name."""

from fragility_core.bgss.policy import Policy, StaticGlobal, Uncontrolled
from fragility_core.bgss.printed import EpsilonBump, PrintedBGSS
from fragility_core.bgss.released import RandomSameBudget, ReleasedBGSS, RiskOnlySameBudget

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Uncontrolled,
        StaticGlobal,
        RandomSameBudget,
        RiskOnlySameBudget,
        ReleasedBGSS,
        PrintedBGSS,
        EpsilonBump,
    )
}


def policy_class(name: str) -> type[Policy]:
    """The class of policy ``name``; raises ValueError naming the known ones."""
    if name not in POLICIES:
        raise ValueError(f"a policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]


def get_policy(name: str, **parameters) -> Policy:
    """Policy ``name`` with ``parameters``, the protocol's where not given; ValueError for unknown names and values."""
    return policy_class(name)(**parameters)
