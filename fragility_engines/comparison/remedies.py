"""Remedies for rounding: the error that is left if some parts compute in fp32. Is an fp32 head worth it?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.predictor import Prediction
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.slopes import screened
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.rotary import cut
from fragility_engines.suspects.suspect import logprobs

PARTS = {
    "head": "the head (lm_head)", "residual": "the residual stream", "router": "the router of experts",
    "norms": "all norms", "scores": "scores and softmax of attention",
}  # fmt: skip
WORTH, LITTLE = 0.8, 0.95  # of the RMS: leaving less is worth it, and leaving more is not


@dataclass(frozen=True)
class Remedy:
    """A ``part`` to compute in fp32, and the share of the root mean square change that it leaves.

    ``predicted`` is by contributions, ``emulated`` by a pass over a few tokens; NaN where none was run.
    """

    part: str
    predicted: float
    emulated: float = np.nan

    @property
    def words(self) -> str:
        """The answer, in words: is it worth it?"""
        if self.predicted > LITTLE:
            return "not worth it"
        return "worth it" if self.predicted < WORTH else "helps a little"


def remedies(model: PreTrainedModel, sequences: Sequence[Scored], gap: Gap, verified: bool) -> list[Remedy]:
    """One remedy for each of PARTS that ``model`` has; the remedy that leaves the smallest error comes first.

    If ``verified``, each is emulated over the tokens of ``slopes.screened``. The list is empty for a gap between two
    engines, and for a recipe that rounds only weights: its kernels are in fp32.
    """
    if gap.two or not gap.predictions:
        return []
    contributions = Contributions(model, together(gap))
    if not contributions.kernels_round:
        return []
    total = float(contributions.relative.sum())
    found = []
    for part, plan in plans(contributions).items():
        left = (contributions.remaining(plan) / total) ** 0.5 if total else np.nan
        found.append(Remedy(PARTS[part], left, emulated(model, sequences, gap, plan) if verified else np.nan))
    return sorted(found, key=lambda each: each.predicted)


def together(gap: Gap) -> Prediction:
    """The predictions of all sequences of ``gap`` as one, whose windows they are."""
    first, count = gap.predictions[0], range(len(gap.predictions))
    rows, windows = (
        pd.concat([getattr(gap.predictions[i], name).assign(window=i) for i in count], ignore_index=True)
        for name in ("contributions", "windows")
    )
    ran = frozenset().union(*(each.ran for each in gap.predictions))
    return replace(first, contributions=rows, windows=windows, ran=ran)


def plans(contributions: Contributions) -> dict[str, Plan]:
    """The plan that keeps each of PARTS in fp32, of those that the model has."""
    sites, places = contributions.structure.sites, contributions.structure.places
    found = {part: contributions.unpriced(sites=[part]) for part in PARTS if part in sites}
    routers = [path for path in places.module[places.site == "router"].unique() if path]
    if routers:
        found["router"] = contributions.unpriced(modules=routers)
    return found


def emulated(model: PreTrainedModel, sequences: Sequence[Scored], gap: Gap, plan: Plan) -> float:
    """The RMS change under ``plan`` over that of the recipe, in emulated passes; NaN if the plan cannot be applied."""
    try:
        low = apply(model, plan)
    except ValueError:
        return np.nan
    device, changes, before = next(model.parameters()).device, [], []
    for number, own in screened(gap).tokens.groupby("sequence"):
        tokens = torch.from_numpy(cut(model, sequences[int(number)].tokens, int(own.position.max()) + 1)).to(device)
        with low.running():
            found = logprobs(low.model, tokens).cpu().numpy()
        changes.append(found[own.position.to_numpy() - 1] - own.fp32.to_numpy())
        before.append(own.rounding.to_numpy())
    squares = [np.mean(np.concatenate(each) ** 2) for each in (changes, before)]
    return float((squares[0] / squares[1]) ** 0.5) if squares[1] else np.nan
