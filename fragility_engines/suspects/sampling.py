"""Suspects of log-probabilities from other logits than those of the model: made ready to draw a token, or changed."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fragility_engines.suspects.numbers import Number
from fragility_engines.suspects.suspect import Suspect

MEND = "log-probabilities before sampling, not after (logprobs_mode, post_sampling_probs)"
Processed = Callable[[Tensor, Tensor], Tensor]  # makes other logits (T, V) of those after tokens (T,)
PADDED = (16, 64, 128, 256, 512, 1024, 4096)
NONE = 1e-3  # a penalty that changes next to nothing
LIKELY = 0.05, 0.1  # shares of the largest probability
SHARDS = 2, 4, 8  # ranks among which a head is split
NUCLEUS = 1024  # most probable tokens among which the nucleus is looked for


def temperature() -> Number:
    """The temperature of an engine whose log-probabilities are those of drawing tokens."""
    values = 0.3, 0.5, 0.7, 0.85, 1.15, 1.4, 1.8, 2.5
    return Number("a temperature of {}", MEND, 1.0, values, lambda value: partial(heated, value), processes=True)


def penalties() -> list[Number]:
    """The penalties on tokens that occurred before, and rows of padding in the softmax.

    No penalty is written as NONE, a small number, since numbers are fitted by their logarithms.
    """
    few, many = (1.02, 1.05, 1.1, 1.2, 1.5), (0.02, 0.1, 0.5, 1.0, 2.0)
    kinds = (("repetition", 1.0, few, repeated), ("presence", NONE, many, present), ("frequency", NONE, many, frequent))
    rows = "the rows of the head beyond the vocabulary: they must be masked"
    return [
        *(
            Number(f"a {name} penalty of {{}}", MEND, own, values, partial(partial, change), processes=True)
            for name, own, values, change in kinds
        ),
        Number("{} rows of padding with logits 0 in the softmax", rows, 1.0, PADDED, padded, True, True),
    ]


def padded(count: float) -> Processed:
    """The change of logits (T, V) that adds ``count`` tokens whose logits are 0: one with the probability of all."""
    return lambda z, tokens: torch.cat([z, torch.full_like(z[:, :1], math.log(count))], 1)


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
    for share in LIKELY:
        yield Suspect(
            f"log-probabilities among tokens of {share:.0%} of the best one (min-p)",
            MEND,
            processed=partial(likely, share),
        )
    for name, change in (("repetition", partial(repeated, 1.01)), ("presence", partial(present, 0.01))):
        yield Suspect(f"a {name} penalty in log-probabilities", MEND, processed=change, slope=True)

    for cap in (20.0, 30.0, 50.0):
        yield Suspect(f"a softcap of logits, {cap:g}", "final_logit_softcapping", processed=partial(capped, cap))


def shards() -> Iterator[Suspect]:
    """Suspects of a head that several ranks share, one of which gives no logits, or those of another one."""
    mend = "which rank has which rows of the head, and how their logits are put together"
    for count in SHARDS:
        for part in range(count):
            name = f"logits of 0 in part {part + 1} of {count} of the vocabulary"
            yield Suspect(name, mend, processed=partial(silent, part, count))
    yield Suspect("logits of both halves of the vocabulary in each other's place", mend, processed=halves_exchanged)


def silent(part: int, count: int, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V), 0 in this ``part`` of ``count`` equal ones."""
    width = -(-z.shape[-1] // count)
    z = z.clone()
    z[:, part * width : (part + 1) * width] = 0
    return z


def halves_exchanged(z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) with the second half of the vocabulary first."""
    return z.roll(z.shape[-1] // 2, -1)


def drawn(temperature: float) -> Iterator[Suspect]:
    """Suspects of a ``temperature`` together with tokens that are left out before a token is drawn."""
    left_out: dict[str, Processed] = {f"top-k {count}": partial(best, count) for count in (20, 40, 50)}
    left_out |= {f"top-p {share:g}": partial(nucleus, share) for share in (0.8, 0.9, 0.95)}
    left_out |= {f"min-p {share:g}": partial(likely, share) for share in LIKELY}
    for name, leave in left_out.items():
        both = partial(after, partial(heated, temperature), leave)
        yield Suspect(f"a temperature of {temperature:g} and {name}", MEND, processed=both)


def after(first: Processed, then: Processed, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) as ``then`` makes them of those that ``first`` makes."""
    return then(first(z, tokens), tokens)


def likely(share: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) of tokens with this ``share`` of the largest probability (min-p), and -inf of others."""
    return z.masked_fill(z < z.amax(-1, keepdim=True) + math.log(share), -torch.inf)


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


def repeated(by: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) with a repetition penalty, the factor ``by``, on tokens that occurred before."""
    return torch.where(seen(z, tokens), torch.where(z > 0, z / by, z * by), z)


def frequent(by: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) less the frequency penalty ``by`` for each time that a token occurred before."""
    counts = torch.zeros_like(z)
    counts.scatter_(1, tokens[: len(z), None].to(z.device), 1.0)
    return z - by * counts.cumsum(0)


def present(by: float, z: Tensor, tokens: Tensor) -> Tensor:
    """Logits ``z`` (T, V) less the presence penalty ``by`` for each token that occurred before."""
    return z - by * seen(z, tokens)
