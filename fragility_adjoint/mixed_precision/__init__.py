"""Plans: the parts of a model to keep in fp32 under a budget, their gain and price, and how to apply one.

Contributions c^2 to the squared error of a low-precision pass add up (``fragility_adjoint.predictor``). To predict the
mismatch under a plan, the roundings that vanish are left out of the sum. One prediction is enough for every plan, and
no plan needs to be applied first. ``bits`` chooses one of several schemes for each layer, and
``fragility_exports`` writes plans for other libraries.

A module that is *kept* has its fp32 parameters. Its inputs are cast to fp32, and its output is cast back to the format.
All its roundings vanish except that of the output, which the cast makes.
"""

from fragility_adjoint.mixed_precision.contributions import Contributions
from fragility_adjoint.mixed_precision.plans import apply
from fragility_adjoint.mixed_precision.structure import KEEPABLE_SITES
from fragility_exports.plan import Plan

__all__ = ["KEEPABLE_SITES", "Contributions", "Plan", "apply"]
