"""Eager attention that can be observed: OBSERVED_EAGER, and FP32_SCORES with scores and softmax in fp32.

It forms and rounds scores and probabilities kernel by kernel, as the library's eager attention does, but one block of
query rows at a time. On a CPU a block is still in cache when it is observed, causal blocks skip the keys that they may
not see, and no T x T tensor exists. A GPU, which waits for the launch of small kernels, takes larger blocks.

There are four implementations of attention, three of them in the predictor. Each of the first three does what the
others cannot do as fast:

* ``observed_attention`` here shows its scores to an observer and runs in any arithmetic: natively, emulated, in fp32.
* ``predictor.blockwise.BlockwiseAttention`` knows the local error of every rounding, and forms scores again in the
  backward pass. With autograd, ``observed_attention`` would keep all T x T tensors.
* ``predictor.recomputed.RecomputedAttention`` is either ``BlockwiseAttention``, or the library's fused kernel with
  gradients by ``BlockwiseAttention``.
* ``predictor.secant.attention`` writes the fused kernel as functions that have secant slopes.

transformers knows the attention by name once ``set_attention``, or a context that calls it, has registered it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fragility_numerics import internals
from fragility_numerics.modes import current_function_mode

OBSERVED_EAGER = "observed_eager"
FP32_SCORES = "fp32_scores_eager"
BLOCK_ELEMENTS = 2**20  # scores formed at once: 2 MiB in 16 bits, about a second-level cache
GPU_BLOCK_ELEMENTS = 2**26
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class AttentionObserver(Protocol):
    """Sees every block of query rows of one attention module, in order."""

    def begin(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """``query`` (B, H, T, d), ``key`` and ``value`` (B, H, T_kv, d), heads repeated for groups.

        Scores will be ``scaling`` times the products of query and key; some models scale the query before.
        """

    def scores(self, scores: Tensor) -> None:
        """Scaled scores (B, H, C, T_seen), masked entries 0; valid only during the call."""

    def probabilities(self, first_row: int, probabilities: Tensor) -> None:
        """Probabilities (B, H, C, T_seen); later keys have probability 0."""


observers: "weakref.WeakKeyDictionary[nn.Module, AttentionObserver]" = weakref.WeakKeyDictionary()


def row_blocks(rows: int, elements_per_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of rows, a power of two long, that hold at most as many elements as the device's blocks."""
    fitting = max(1, (BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS) // elements_per_row)
    length = 1 << (fitting.bit_length() - 1)
    for start in range(0, rows, length):
        yield start, min(start + length, rows)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def future(rows: int, device: torch.device) -> Tensor:
    """True above the diagonal of a (rows, rows) matrix."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)


class Hiding:
    """Fills ``hidden`` (boolean) scores of ``dtype`` in place, by their bits: many times as fast as ``masked_fill_``.

    Autograd cannot follow changes of bits. If derivatives are needed, or a mode ``follows_changes``, ``masked_fill_``
    is called.
    """

    @torch.inference_mode(False)
    def __init__(self, hidden: Tensor, dtype: torch.dtype):
        lowest = -1 - int(1 / torch.finfo(dtype).eps)  # all bits are 1, except the last one of the exponent
        with internals.without_function_modes():
            everything = -hidden.to(INTEGERS[dtype.itemsize])
            self._bits = (Tensor.bitwise_and_, ~everything), (Tensor.bitwise_or_, everything & lowest)
        self.hidden = hidden

    def fill(self, scores: Tensor, number: float) -> None:
        """Set the hidden ``scores`` to ``number``: to 0 in a first call, then to the lowest number of their dtype."""
        if internals.differentiated(scores) or getattr(current_function_mode(), "follows_changes", False):
            scores.masked_fill_(self.hidden, number)
            return
        with internals.without_function_modes():
            change, bits = self._bits[number != 0]
            change(scores.view(bits.dtype), bits)


@lru_cache(maxsize=32)
def hiding_future(rows: int, dtype: torch.dtype, device: torch.device) -> Hiding:
    """Hides the ``future``."""
    return Hiding(future(rows, device), dtype)


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Let models of transformers be set to the attention ``function``, with boolean masks, by ``name``."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set ``model`` to an attention by name: OBSERVED_EAGER, FP32_SCORES, or one that transformers knows."""
    if implementation == OBSERVED_EAGER:
        register_attention(OBSERVED_EAGER, observed_attention)
    elif implementation == FP32_SCORES:
        register_attention(FP32_SCORES, partial(observed_attention, score_dtype=torch.float32))
    model.set_attn_implementation(implementation)


@contextmanager
def observing_attention(model: PreTrainedModel) -> Iterator[None]:
    """A context in which observers see the attention of ``model``; scores that it keeps in fp32 stay so.

    Eager GPT-2 keeps them in fp32 where its configuration says ``reorder_and_upcast_attn``.
    """
    implementation = internals.attention_of(model)
    upcast = implementation == "eager" and getattr(model.config, "reorder_and_upcast_attn", False)
    with internals.restored_attention(model):
        set_attention(model, FP32_SCORES if upcast or implementation == FP32_SCORES else OBSERVED_EAGER)
        yield


def require_plain_softmax(dropout: float, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Raises ValueError where a model asks for more than a softmax of scaled products, some of them masked."""
    if dropout:
        raise ValueError(f"observed attention needs eval mode, got attention dropout {dropout}: call model.eval()")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"observed attention takes masks that are True where a key may be seen, got one of {mask.dtype}: this "
            "model runs in low precision, but cannot be observed"
        )
    for option in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(option) is not None:
            raise ValueError(
                f"observed attention is a softmax of scaled products, got a model that passes {option}: it runs in low "
                "precision, but cannot be observed"
            )


def is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """True if attention is causal, as transformers' sdpa decides: by the option, the module's attribute, or yes."""
    asked = options.get("is_causal")
    return getattr(module, "is_causal", True) if asked is None else asked


def prepared(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    dropout: float, options: dict[str, Any],
) -> tuple[Tensor, Tensor, float, bool]:  # fmt: skip
    """Key and value with their heads repeated for groups, the scaling, and True if attention is causal.

    Raises ValueError as ``observed_attention`` does.
    """
    require_plain_softmax(dropout, mask, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = mask is None and query.shape[2] > 1 and is_causal(module, options)
    return key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, causal


def observed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, score_dtype: torch.dtype | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of ``query`` (B, H, T, d) over ``key`` and ``value`` (B, H_kv, T_kv, d): (B, T, H, d).

    ``attention_mask`` is boolean, True where a key may be seen. None means causal, unless the module's attribute or the
    option ``is_causal`` says otherwise. Scores and softmax are computed in ``score_dtype``, that of the query unless
    given. Probabilities are cast to the dtype of the values. Raises ValueError for dropout, for capped or biased
    scores, for attention sinks and for additive masks: the model itself is to be observed.
    """
    key, value, scaling, causal = prepared(module, query, key, value, attention_mask, scaling, dropout, options)
    batch, heads, rows, _ = query.shape
    observer = observers.get(module)
    # With heads one after another in memory, 16-bit products are several times as fast as in the projections' layout.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if observer is not None:
        observer.begin(query, key, value, scaling)
    cached = key.shape[2] - rows  # keys before the first query
    query, key = query.to(score_dtype or query.dtype), key.to(score_dtype or key.dtype)
    transposed = key.transpose(-1, -2)

    outputs = []
    for start, stop in row_blocks(rows, batch * heads * key.shape[2], query.device):
        seen = cached + stop if causal else key.shape[2]
        scores = torch.matmul(query[:, :, start:stop], transposed[..., :seen]) * scaling  # (B, H, C, seen)
        with internals.without_function_modes():
            dtype = scores.dtype
        maskable, hiding = scores, None
        if causal:
            maskable, hiding = scores[..., cached + start :], hiding_future(stop - start, dtype, scores.device)
        elif attention_mask is not None:
            hiding = Hiding(~attention_mask[:, :, start:stop, :seen], dtype)
        if hiding is not None:
            hiding.fill(maskable, 0.0)
        if observer is not None:
            observer.scores(scores)
        if hiding is not None:
            hiding.fill(maskable, torch.finfo(scores.dtype).min)  # of the dtype that a mode pretends
        probabilities = torch.softmax(scores, -1).to(value.dtype)
        if observer is not None:
            observer.probabilities(start, probabilities)
        outputs.append(torch.matmul(probabilities, value[:, :, :seen]))  # (B, H, C, d)
    context = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
    return context.transpose(1, 2).contiguous(), None
