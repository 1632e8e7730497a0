"""Greedy decoding, token by token, in fp32 and in low precision, and the token at which the two texts part."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.explain.changed_choices import expected_length, next_tokens
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_numerics.lowering import LowPrecision


def decoded(model: PreTrainedModel, prompts: Tensor) -> Iterator[Tensor]:
    """The most probable tokens (B,) after ``prompts`` (B, T), one position after the other, without end.

    Keys and values are read from the model's cache. A model that returns no such cache, or cannot go on from it in its
    own code, reads the whole text each time.
    """
    text, cache, caches = prompts, None, True
    while True:
        kept: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        try:
            output = model(text if cache is None else text[:, -1:], use_cache=caches, **kept)
        except Exception:  # of any kind: families keep, and lose, their state each in its own way
            if not caches:
                raise
            cache, caches = None, False
            continue
        cache = getattr(output, "past_key_values", None) if caches else None
        tokens = output.logits[:, -1].argmax(-1)
        text = torch.cat([text, tokens[:, None]], 1)
        yield tokens


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Tensor, count: int, low: LowPrecision | None = None) -> Tensor:
    """The ``count`` tokens (B, count) of ``decoded``; in ``low``, if given."""
    with nullcontext() if low is None else low.running():
        return torch.stack([*islice(decoded(model, prompts), count)], 1)


@torch.no_grad()
def kept_length(low: LowPrecision, prompts: Tensor, reference: Tensor) -> Tensor:
    """The number of tokens (B,) for which greedy decoding in ``low`` keeps to the ``reference`` (B, T).

    It decodes after ``prompts`` until every text has left its reference.
    """
    keeps = torch.ones(len(prompts), dtype=torch.bool, device=reference.device)
    length = torch.zeros(len(prompts), dtype=torch.long, device=reference.device)
    with low.running():
        for wanted, tokens in zip(reference.T, decoded(low.model, prompts)):
            keeps &= tokens.to(wanted.device) == wanted
            if not keeps.any():
                break
            length += keeps
    return length


def predicted_length(realisations: ErrorSamples, prompts: Tensor, reference: Tensor, draws: int) -> Tensor:
    """The expected number of tokens (B,) for which greedy decoding keeps to the ``reference`` (B, T) after ``prompts``.

    The reference is the greedy text in fp32. The count is T at most.
    """
    text = torch.cat([prompts, reference], 1)[:, :-1]
    changes = next_tokens(realisations, text, draws).probabilities()
    return expected_length(changes[:, prompts.shape[1] - 1 :])
