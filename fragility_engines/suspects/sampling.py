"""Suspects of log-probabilities from other logits than those of the model: made ready to draw a token, or changed."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fragility_engines.suspects.suspect import Suspect

MEND = "log-probabilities before sampling, not after (logprobs_mode, post_sampling_probs)"
NUCLEUS = 1024  # most probable tokens among which the nucleus is looked for


def sampling() -> Iterator[Suspect]:
    """Suspects of tokens that are left out before a token is drawn, and of penalties on those that were there."""
    for count in (20, 40, 50):
        yield Suspect(
            f"log-probabilities among the {count} most probable tokens (top-k)", MEND, processed=partial(best, count)
        )
    for share in (0.8, 0.9, 0.95):
        yield Suspect(
            f"log-probabilities among the tokens of {share:.0%} (top-p)", MEND, processed=partial(nucleus, share)
        )
    for name, change in (("a repetition penalty", repeated), ("a presence penalty", present)):
        yield Suspect(f"{name} in log-probabilities", MEND, processed=change, slope=True)

    for cap in (20.0, 30.0, 50.0):
        yield Suspect(f"a softcap of logits, {cap:g}", "final_logit_softcapping", processed=partial(capped, cap))


def capped(cap: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) under a softcap."""
    return cap * (z / cap).tanh()


def heated(temperature: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) divided by a ``temperature``."""
    return z / temperature


def best(count: int, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) of the ``count`` most probable tokens at each place, and -inf of others."""
    return z.masked_fill(z < z.topk(min(count, z.shape[-1])).values[:, -1:], -torch.inf)


def nucleus(share: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) of the fewest tokens that have this ``share`` of the probability, and -inf of others."""
    top = z.topk(min(NUCLEUS, z.shape[-1])).values
    p = (top - z.logsumexp(-1, keepdim=True)).exp()
    least = top.masked_fill(p.cumsum(-1) - p >= share, torch.inf).amin(-1, keepdim=True)
    return z.masked_fill(z < least, -torch.inf)


def seen(z: Tensor, tokens: Tensor) -> Tensor:
    """True for the tokens of the vocabulary that a text of ``tokens`` (T,) has up to each place (T, V)."""
    places = torch.arange(len(z), device=z.device)
    first = places.new_full((z.shape[-1],), len(z)).scatter_reduce(0, tokens.to(z.device), places, "amin")
    return places[:, None] >= first


def repeated(z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) with a repetition penalty of 1.01 on tokens that were there."""
    return torch.where(seen(z, tokens), torch.where(z > 0, z / 1.01, z * 1.01), z)


def present(z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) with a presence penalty of 0.01 on tokens that were there."""
    return z - 0.01 * seen(z, tokens)
