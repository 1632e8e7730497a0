"""Padded windows. Each is computed without its padding, so that padding counts nowhere, whatever a model does with it.

Positions count from a window's first token, as transformers' ``generate`` counts them in a batch with padding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

AFTER_PADDING = {  # types whose first position is behind the padding token's number
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Group:
    """The numbers of ``windows`` whose tokens stand at the same positions, from ``first`` to before ``end``."""

    windows: list[int]
    first: int
    end: int

    def of(self, x: Tensor) -> Tensor:
        """Entries of ``x`` (B, T, ...) for the tokens of these windows."""
        return x[self.windows, self.first : self.end]


def require_positions(tokens: Tensor, **masks: Tensor | None) -> None:
    """Raises ValueError unless each of the ``masks`` has a 0 or a 1 for every one of ``tokens`` (B, T, ...)."""
    for name, mask in masks.items():
        if mask is None:
            continue
        if mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} must have the shape (B, T) of the tokens, {tuple(tokens.shape[:2])}, got {tuple(mask.shape)}: "
                "give every token of every window a value"
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"{name} must hold 0 and 1 alone, got {mask[(mask != 0) & (mask != 1)][0].item()}")


def spans(tokens: Tensor, attention_mask: Tensor) -> list[tuple[int, int]]:
    """For each window the position of its first token, and the position after its last; tokens have 1 in the mask.

    Raises ValueError for a mask of another shape than ``tokens`` (B, T, ...) or with other values, for a window of
    padding alone, and for padding between tokens.
    """
    require_positions(tokens, attention_mask=attention_mask)
    found = []
    for window, mask in enumerate(attention_mask.cpu() != 0):
        places = mask.nonzero().flatten().tolist()
        if not places:
            raise ValueError(f"every window must have a token, but window {window} is all padding: leave it out")
        if len(places) != places[-1] - places[0] + 1:
            raise ValueError(
                f"padding must stand before or after a window's tokens, but window {window} has "
                f"{places[-1] - places[0] + 1 - len(places)} padded positions between them: close the gap"
            )
        found.append((places[0], places[-1] + 1))
    return found


def as_windows(tokens: Any, model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Windows (B, T) of token ids on the device of ``model``, and their mask (B, T) if there is one.

    ``tokens`` are a tensor (B, T) or (T,), lists of ids, or what a tokenizer returns, with its mask. Raises the errors
    of ``require_loaded`` and ``require_tokens``, TypeError for text and for what holds no ids, and ValueError for
    several lengths without a mask, and for positions of several texts in one window.
    """
    require_loaded(model)
    device, mask, positions = next(model.parameters()).device, None, None
    if hasattr(tokens, "keys"):
        if "input_ids" not in tokens:
            raise TypeError(f"windows must be token ids, input_ids of a tokenizer, got {', '.join(map(str, tokens))}")
        mask, positions, tokens = tokens.get("attention_mask"), tokens.get("position_ids"), tokens["input_ids"]
    if isinstance(tokens, str) or (isinstance(tokens, Sequence) and any(isinstance(each, str) for each in tokens)):
        raise TypeError(f"windows must be token ids, got text, {tokens!r:.60}: give what its tokenizer returns")
    try:
        found = torch.as_tensor(tokens, device=device)
    except ValueError as cause:
        if "Overflow" in str(cause):
            raise ValueError(f"tokens must fit 64 bits, got {tokens!r:.60}") from None
        raise ValueError(f"windows must have one length, or a mask for their padding ({cause})") from None
    except (TypeError, RuntimeError):
        if isinstance(tokens, Tensor):
            raise
        how = "give a tensor (B, T), lists of ids, or what a tokenizer returns; torch.stack joins several tensors"
        raise TypeError(f"windows must be token ids, got a {type(tokens).__name__}: {how}") from None
    mask = None if mask is None else torch.as_tensor(mask, device=device)
    if found.dtype not in INTEGERS:
        raise TypeError(f"windows must be token ids, got numbers of {found.dtype}: take its integers, tokens.long()")
    found = found.long()
    found, mask = (found[None], None if mask is None else mask[None]) if found.ndim == 1 else (found, mask)
    require_tokens(found, model)
    if positions is not None:
        require_positions(found, attention_mask=mask)
        counted = torch.ones_like(found) if mask is None else (mask != 0).long()
        if bool(((torch.as_tensor(positions, device=device) != counted.cumsum(1) - 1) & (counted == 1)).any()):
            raise ValueError(
                "the tokens of a window stand at the positions 0, 1, 2 and so on, got other position_ids: give each "
                "text that was packed into a window one of its own, with padding and a mask"
            )
    return found, mask


def require_tensor(tokens: object) -> None:
    """Raises TypeError unless ``tokens`` are a tensor."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"windows must be a tensor (B, T) of token ids, got a {type(tokens).__name__}: see as_windows")


def require_model(model: object) -> None:
    """Raises TypeError unless ``model`` is one of transformers, and ValueError if it has an encoder and a decoder."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"a model of transformers is needed, got a {type(model).__name__}, {' '.join(repr(model).split()):.60}: "
            "give what from_pretrained returned (._orig_mod if compiled, .module of DDP, merge_and_unload() of LoRA)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"a decoder alone is needed, got {type(model).__name__}, which has an encoder, too")


def require_loaded(model: Any) -> None:
    """Raises TypeError unless ``model`` is one of transformers, and ValueError if its weights are not loaded."""
    require_model(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("weights must be loaded, got a model on the meta device: load it with from_pretrained")


def context_length(config: PreTrainedConfig) -> float:
    """The most tokens of a window that a model of ``config`` takes: infinite where positions are relative."""
    text = config.get_text_config()
    if (getattr(text, "rope_parameters", None) or {}).get("rope_type") == "dynamic":  # which stretches as it must
        return math.inf
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    sizes = [size for size in known if size and size > 0]  # XLNet has -1
    return min(sizes, default=math.inf) - (text.pad_token_id + 1 if text.model_type in AFTER_PADDING else 0)


def require_tokens(windows: Tensor, model: PreTrainedModel) -> None:
    """Raises ValueError unless ``windows`` (B, T) have tokens of the vocabulary of ``model`` and fit its context."""
    known, context = model.config.get_text_config(), context_length(model.config)
    if windows.ndim != 2 or not windows.numel():
        raise ValueError(f"windows must be (B, T) and not empty, got shape {tuple(windows.shape)}: give ids")
    if windows.shape[1] > context:
        raise ValueError(f"windows must fit the model's context, {context} tokens, got {windows.shape[1]}")
    for token in (int(windows.min()), int(windows.max())):
        if not 0 <= token < known.vocab_size:
            raise ValueError(f"tokens must be in the model's vocabulary, 0 to {known.vocab_size - 1}, got {token}")


def groups(tokens: Tensor, attention_mask: Tensor) -> list[Group]:
    """The windows of ``tokens`` (B, T, ...) in groups that share a pass; raises the errors of ``spans``."""
    found: dict[tuple[int, int], list[int]] = {}
    for window, span in enumerate(spans(tokens, attention_mask)):
        found.setdefault(span, []).append(window)
    return [Group(windows, *span) for span, windows in found.items()]


def padded(groups: Sequence[Group], parts: Sequence[Tensor], length: int) -> Tensor:
    """The tensor (B, T, ...), T = ``length``, of ``parts``, one for each of ``groups``; 0 at padding."""
    whole = [
        functional.pad(part, (0, 0) * (part.ndim - 2) + (group.first, length - group.end))
        for group, part in zip(groups, parts, strict=True)
    ]
    order = torch.tensor([window for group in groups for window in group.windows]).argsort()
    return torch.cat(whole).index_select(0, order.to(whole[0].device))


def without_padding(run: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``run(model, tokens)``, which gives a tensor (B, T, ...), with a third argument ``attention_mask`` (B, T).

    The mask is 1 for tokens and 0 for padding, before or after them. The result is 0 at padding.
    """

    @wraps(run)
    def with_mask(model: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            return run(model, tokens)
        alike = groups(tokens, attention_mask)
        return padded(alike, [run(model, group.of(tokens)) for group in alike], tokens.shape[1])

    return with_mask
