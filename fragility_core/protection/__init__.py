"""Which parts of a model to keep in fp32 under a budget, what that buys, and how to do it.

Contributions c^2 to the squared error of a low-precision pass are additive (``fragility_core.adjoint``),
so the roundings that a part makes may simply be left out of the sum: the mismatch of any plan is known
from one prediction, before the plan is applied.

A module is *kept* if it has its parameters unrounded, its inputs are cast to fp32, and its output is cast
back to the format. All its roundings vanish but that of its output, which the cast makes again.
"""

from fragility_core.protection import baselines
from fragility_core.protection.contributions import Contributions, plan
from fragility_core.protection.keep import apply
from fragility_core.protection.plans import KEEPABLE_SITES, Plan

__all__ = ["KEEPABLE_SITES", "Contributions", "Plan", "apply", "baselines", "plan"]
