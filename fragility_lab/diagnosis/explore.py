"""The explorer of plans for the model of a diagnosis."""

from fragility_adjoint.mixed_precision.bits import Choice
from fragility_lab.diagnosis.found import Diagnosis, made
from fragility_lab.explorer import terms
from fragility_lab.explorer.component import Component


def explorer(diagnosis: Diagnosis) -> str:
    """The explorer as HTML; empty if every window overflows, since there is then no plan."""
    known, choices, plan = diagnosis.contributions, diagnosis.choices, diagnosis.plan
    if known is None:
        return ""
    without = [] if diagnosis.measured is None else [terms.measured_means(diagnosis.measured)]
    with_plan = [] if diagnosis.protected is None else [terms.measured_means(diagnosis.protected)]
    nothing = [(known.keep(), each) for each in without]
    if choices is None:
        return Component(terms.keeping([known], nothing + [(made(plan), each) for each in with_plan])).html
    if choices.parts:  # the view of schemes has no parts in fp32
        return Component(terms.keeping([known], nothing)).html
    own = made(diagnosis.prediction).recipe.name  # a mix of GGUF is none of the choices
    alike = [Choice((choices.names.index(own),) * len(choices.groups))] if own in choices.names else []
    measured = [(choice, each) for choice in alike for each in without]
    measured += [(made(diagnosis.choice), each) for each in with_plan]
    return Component(terms.choosing(choices, measured), terms.keeping([known], nothing)).html
