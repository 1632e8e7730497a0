"""Eager attention that can be observed, registered with transformers as IMPLEMENTATION.

It forms and rounds scores and probabilities kernel by kernel, as the library's eager attention does,
but one block of query rows at a time: on a CPU what is observed is still in cache, causal blocks skip the
keys they may not see, and no T x T tensor exists. A GPU, which waits for the launch of small kernels, takes
larger blocks. FP32_SCORES is the same attention with scores and softmax in fp32.
"""

import weakref
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "observed_eager"
FP32_SCORES = "fp32_scores_eager"
BLOCK_ELEMENTS = 2**20  # scores formed at once: 2 MiB in 16 bits, about a second-level cache
GPU_BLOCK_ELEMENTS = 2**26


class AttentionObserver(Protocol):
    """Sees every block of query rows of one attention module, in order."""

    def begin(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """``query`` (B, H, T, d), ``key`` and ``value`` (B, H, T_kv, d), heads repeated for groups.

        The scores to come are ``scaling`` times query and key's products: some models scale queries before.
        """

    def scores(self, scores: Tensor) -> None:
        """Scaled scores (B, H, C, T_seen), masked entries 0; valid only during the call."""

    def probabilities(self, first_row: int, probabilities: Tensor) -> None:
        """Probabilities (B, H, C, T_seen); later keys have probability 0."""


observers: "weakref.WeakKeyDictionary[nn.Module, AttentionObserver]" = weakref.WeakKeyDictionary()


def row_blocks(rows: int, elements_per_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of rows, a power of two long, of at most about as many elements as the device's blocks."""
    fitting = max(1, (BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS) // elements_per_row)
    length = 1 << (fitting.bit_length() - 1)
    for start in range(0, rows, length):
        yield start, min(start + length, rows)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def future(rows: int, device: torch.device) -> Tensor:
    """True above the diagonal of a (rows, rows) matrix."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)


def observe_attention(model: PreTrainedModel) -> None:
    """Let observers see the attention of ``model`` from now on; scores that are kept in fp32 stay so."""
    if model.config._attn_implementation != FP32_SCORES:
        model.set_attn_implementation(IMPLEMENTATION)


def require_plain_softmax(dropout: float, mask: Tensor | None, options: dict) -> None:
    """Raises ValueError where a model asks for more than a softmax of scaled products, some of them masked."""
    if dropout:
        raise ValueError(f"observed attention needs a model in eval mode, got attention dropout {dropout}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"observed attention takes masks that are True where a key may be seen, got one of {mask.dtype}: "
            'use attn_implementation="eager", which cannot be observed'
        )
    for option in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(option) is not None:
            raise ValueError(
                f"observed attention is a softmax of scaled products, got a model that passes {option}: "
                'use attn_implementation="eager", which cannot be observed'
            )


def is_causal(module: nn.Module, options: dict) -> bool:
    """What transformers' own sdpa attention takes for it: the option, else the module's attribute, else True."""
    asked = options.get("is_causal")
    return getattr(module, "is_causal", True) if asked is None else asked


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    score_dtype: torch.dtype | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Attention of ``query`` (B, H, T, d) over ``key``, ``value`` (B, H_kv, T_kv, d) -> (B, T, H, d).

    ``attention_mask`` is boolean, True where a key may be seen, or None, which means causal for modules that
    are, or say so by the option ``is_causal``. Scores and softmax are computed in ``score_dtype`` (that of the
    query unless given), probabilities are cast to the dtype of the values. Raises ValueError for dropout, capped
    or biased scores, attention sinks and additive masks: what is observed must be the model itself.
    """
    require_plain_softmax(dropout, attention_mask, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    batch, heads, rows, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    observer = observers.get(module)
    if observer is not None:
        observer.begin(query, key, value, scaling)
    causal = attention_mask is None and rows > 1 and is_causal(module, options)
    cached = key.shape[2] - rows  # keys before the first query
    query, key = query.to(score_dtype or query.dtype), key.to(score_dtype or key.dtype)
    # Heads one after another in memory: 16-bit products of the projections' layout are several times slower.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    transposed = key.transpose(-1, -2)

    outputs = []
    for start, stop in row_blocks(rows, batch * heads * key.shape[2], query.device):
        seen = cached + stop if causal else key.shape[2]
        scores = torch.matmul(query[:, :, start:stop], transposed[..., :seen]) * scaling  # (B, H, C, seen)
        maskable = hidden = None
        if causal:
            maskable, hidden = scores[..., cached + start :], future(stop - start, scores.device)
        elif attention_mask is not None:
            maskable, hidden = scores, ~attention_mask[:, :, start:stop, :seen]
        if observer is not None:
            if causal:
                maskable.tril_()
            elif hidden is not None:
                maskable.masked_fill_(hidden, 0)
            observer.scores(scores)
        if hidden is not None:
            maskable.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        probabilities = torch.softmax(scores, -1).to(value.dtype)
        if observer is not None:
            observer.probabilities(start, probabilities)
        outputs.append(torch.matmul(probabilities, value[:, :, :seen]))  # (B, H, C, d)
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, observed_attention)
AttentionInterface.register(FP32_SCORES, partial(observed_attention, score_dtype=torch.float32))
for implementation in (IMPLEMENTATION, FP32_SCORES):
    AttentionMaskInterface.register(implementation, sdpa_mask)
