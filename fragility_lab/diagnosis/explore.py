"""The explorer of plans for the model of a diagnosis."""

import numpy as np
import pandas as pd

from fragility_adjoint.mixed_precision.bits import Choice
from fragility_lab.diagnosis.found import Diagnosis
from fragility_lab.explorer import terms
from fragility_lab.explorer.component import Component

MEASURED = {"hidden": "mismatch", "kl": "kl", "logprob": "logprob"}  # columns of ``measure.compare`` by target


def found(table: pd.DataFrame) -> dict[str, float]:
    """Means over the windows of a table of ``measure.compare``, by target; infinities are left out."""
    finite = table.replace(np.inf, np.nan)
    return {target: float(finite[column].mean()) for target, column in MEASURED.items()}


def explorer(diagnosis: Diagnosis) -> str:
    """The explorer as HTML; empty if every window overflows, since there is then no plan."""
    known, choices, plan = diagnosis.contributions, diagnosis.choices, diagnosis.plan
    if known is None:
        return ""
    without = [] if diagnosis.measured is None else [found(diagnosis.measured)]
    with_plan = [] if diagnosis.protected is None else [found(diagnosis.protected)]
    nothing = [(known.keep(), each) for each in without]
    if choices is None:
        return Component(terms.keeping([known], nothing + [(plan, each) for each in with_plan])).html
    if choices.parts:  # the view of schemes has no parts in fp32
        return Component(terms.keeping([known], nothing)).html
    smallest = Choice(tuple(choices.bits.argmin(1).tolist()))
    measured = [(smallest, each) for each in without] + [(diagnosis.choice, each) for each in with_plan]
    return Component(terms.choosing(choices, measured), terms.keeping([known], nothing)).html
