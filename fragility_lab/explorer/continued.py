"""One text, continued in fp32 and in low precision: which words change, by what errors, and what would keep them."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_adjoint.mixed_precision import Contributions, Plan
from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_lab.explorer.component import SITES
from fragility_lab.measurement.decoding import greedy
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision

KINDS = {"embedding": "embedding", "head": "head"} | SITES
KEPT = {
    "norms": "all norms", "residual": "the residual stream", "mlp": "all MLPs", "attention": "all attentions",
    "scores": "all attention scores", "head": "the head",
}  # fmt: skip
OVERFLOW = " [not a number]"  # in place of a word where logits are not finite

Words = list[int | None]  # tokens; None where logits are not finite


@dataclass(frozen=True)
class Version:
    """The model in low precision, ``low``, with the ``name`` that is shown; ``kept`` applies a plan to it.

    Causes are found for the first ``most`` words that it changes; ``tried`` parts are kept in fp32, one at a time. A
    pass that ends at a word orders its sums in another way than a pass over the whole text, so that it rounds
    differently. If the places are ``apart``, each has its own pass, as in generation; else all share one.
    """

    name: str
    low: LowPrecision
    kept: Callable[[Plan], LowPrecision]
    most: int
    tried: int
    apart: bool = False

    def said(self, text: Tensor, start: int) -> Words:
        """The model's most probable word in each place of ``text`` (1, T) from ``start`` on."""
        if not self.apart:
            return next_tokens(self.low.model, text[:, :-1], start, self.low)
        ends = range(start, text.shape[1])
        return [next_tokens(self.low.model, text[:, :end], end, self.low)[0] for end in ends]


@torch.no_grad()
def next_tokens(model: PreTrainedModel, text: Tensor, start: int, low: LowPrecision | None = None) -> Words:
    """The most probable tokens after the first ``start`` tokens of ``text`` (1, T), and after each further token.

    The whole text is computed. With a cache, sums would have another order, and so other roundings.
    """
    with nullcontext() if low is None else low.running():
        logits = (model if low is None else low.model)(text, use_cache=False).logits[0, start - 1 :]
    largest, tokens = logits.float().max(-1)
    return [int(token) if top.isfinite() else None for top, token in zip(largest, tokens)]


def written(model: PreTrainedModel, text: Tensor, count: int, low: LowPrecision | None = None) -> Words:
    """The ``count`` tokens after ``text`` (1, T), each the most probable one; up to the first None.

    In fp32 a cache is read: it changes the sums by fp32's own rounding alone.
    """
    if low is None:
        return greedy(model, text, count)[0].tolist()
    words: Words = []
    while len(words) < count and None not in words:
        own = torch.cat([text, text.new_tensor([words], dtype=text.dtype)], 1) if words else text
        words += next_tokens(model, own, own.shape[1], low)
    return words


class Lead:
    """The lead of token ``first`` over token ``second`` in a ``place``: the difference of their logits before it."""

    def __init__(self, first: int, second: int, place: int):
        self.pair, self.place = [first, second], place

    def __call__(self, model: nn.Module, text: Tensor) -> Tensor:
        """The lead (1, 1, 1)."""
        logits = model(text, use_cache=False).logits[:, self.place - 1 : self.place, :].float()
        first, second = (logits[..., token] for token in self.pair)
        return (first - second)[..., None]


def shares(prediction: Prediction, error: float) -> dict[str, list[dict[str, Any]]]:
    """The signed contributions of blocks and of kinds of kernels to the ``error`` of a lead, in logits.

    With secant slopes the contributions add up to the error, up to the sign of the one probe.
    """
    rows = prediction.contributions
    sign = 1.0 if rows.signed.sum() * error >= 0 else -1.0
    row = rows.layer.astype("string").fillna(rows.site.where(rows.site.isin(["embedding", "norm"]), "head"))
    parts = {"blocks": rows.assign(part=row.replace("norm", "head")), "kinds": rows.assign(part=rows.site.map(KINDS))}
    return {
        name: [
            {"name": str(part), "adds": round(sign * float(value), 5)}
            for part, value in table.groupby("part", sort=False).signed.sum().items()
        ]
        for name, table in parts.items()
    }


def savers(
    version: Version, known: Contributions, prediction: Prediction, error: float, text: Tensor, place: int, wanted: int
) -> list[str]:  # fmt: skip
    """The parts of which one alone in fp32 keeps the token ``wanted`` in a ``place`` of ``text`` (1, T).

    Tried are the ``version.tried`` parts whose errors push most against that token.
    """
    signed = prediction.contributions.groupby("place").signed.sum().to_numpy()
    signed = signed if signed.sum() * error >= 0 else -signed
    sites = [site for site in known.structure.sites if site not in ("embedding", "router")]
    plans = {f"block {number}": known.unpriced(blocks=[number]) for number in range(len(known.structure.blocks))}
    plans |= {KEPT.get(site, site): known.unpriced(sites=[site]) for site in sites}
    gains = {name: signed[known.vanishing(plan)].sum() for name, plan in plans.items()}
    best = sorted(gains, key=lambda name: -gains[name])[: version.tried]
    kept = {name: version.kept(plans[name]) for name in best}
    return [name for name, low in kept.items() if next_tokens(low.model, text, place, low)[0] == wanted]


def explained(model: PreTrainedModel, version: Version, text: Tensor, place: int, other: int) -> dict[str, Any]:
    """The causes for the token ``other`` of ``version`` in a ``place`` of ``text`` (1, T), where fp32 says the text's.

    They are found in the pass that said ``other``. Empty if only the order of sums in fp32 sets the two tokens apart.
    """
    wanted, before = int(text[0, place]), text[:, : place if version.apart else -1]
    lead = Lead(wanted, other, place)
    with torch.no_grad():
        exact = float(lead(model, before))
        with version.low.running():
            left = float(lead(version.low.model, before))
    if not exact >= 0 >= left:
        return {}
    prediction = Adjoint(version.low, model, target=lead, gradients="secant")(before)
    found = shares(prediction, exact - left)
    saved = savers(version, Contributions(model, prediction), prediction, exact - left, before, place, wanted)
    return {"fp32": round(exact, 4), "low": round(left, 4), **found, "saved": saved, "tried": version.tried}


def continued(
    model: PreTrainedModel, spell: Callable[[int], str], prompt: Tensor, count: int, versions: Iterable[Version]
) -> dict[str, Any]:  # fmt: skip
    """The ``count`` tokens that ``model`` writes after ``prompt`` (1, T) in fp32 and as ``versions``, as plain data.

    ``spell`` gives the text of a token. ``changed`` lists the places of the fp32 text in which a version would have
    said another word, the first few with their causes.
    """
    start = prompt.shape[1]

    def spelled(words: Iterable[int | None]) -> list[str]:
        return [OVERFLOW if token is None else spell(token) for token in words]

    exact = written(model, prompt, count)
    text, told = torch.cat([prompt, prompt.new_tensor([exact])], 1), []
    for version in versions:
        words = version.said(text, start)
        changed = [place for place, word in enumerate(words) if word != exact[place]]
        rows: list[dict[str, Any]] = [{"word": place, "said": spelled([words[place]])[0]} for place in changed]
        told_of = rows[: version.most]
        for row in progress(told_of, desc=f"changed words in {version.name}", disable=not told_of):
            if (word := words[row["word"]]) is not None:
                row |= explained(model, version, text, start + row["word"], word)
        own = words[: changed[0] + 1] if changed else words
        if None not in own:
            said = torch.cat([prompt, prompt.new_tensor([own])], 1)
            own += written(version.low.model, said, count - len(own), version.low)
        told.append({"name": version.name, "words": spelled(own), "changed": rows})
    return {"words": spelled(exact), "recipes": told}
