"""Greedy decoding, token by token, in fp32 and in low precision, and the token at which the two texts part."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.explain.changed_choices import expected_length, next_tokens
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_numerics.lowering import LowPrecision


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Tensor, count: int, low: LowPrecision | None = None) -> Tensor:
    """The most probable ``count`` tokens (B, count) after ``prompts`` (B, T), one at a time; in ``low``, if given.

    Keys and values are read from the model's cache. A model that returns no such cache reads the whole text each time.
    """
    text, cache = prompts, None
    with nullcontext() if low is None else low.running():
        for _ in range(count):
            kept: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
            output = model(text if cache is None else text[:, -1:], use_cache=True, **kept)
            cache = getattr(output, "past_key_values", None)
            text = torch.cat([text, output.logits[:, -1:].argmax(-1)], 1)
    return text[:, prompts.shape[1] :]


def agreed(first: Tensor, second: Tensor) -> Tensor:
    """The number of tokens (B,) in which two texts (B, T) agree before the first that differs."""
    return (first == second).cumprod(1).sum(1)


def predicted_length(realisations: ErrorSamples, prompts: Tensor, reference: Tensor, draws: int) -> Tensor:
    """The expected number of tokens (B,) for which greedy decoding keeps to the ``reference`` (B, T) after ``prompts``.

    The reference is the greedy text in fp32. The count is T at most.
    """
    text = torch.cat([prompts, reference], 1)[:, :-1]
    changes = next_tokens(realisations, text, draws).probabilities()
    return expected_length(changes[:, prompts.shape[1] - 1 :])
