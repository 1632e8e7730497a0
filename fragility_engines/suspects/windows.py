"""Suspects of what attention sees: a sliding window, its own token, other sequences, and not the first tokens."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.padding import context_length
from fragility_core.models.paths import attention_modules, embedding_paths
from fragility_engines.suspects.suspect import Suspect, Window

CUTS = (4096, 2048, 1024, 512, 256, 128)  # tokens that engines keep of a longer prompt, and windows of attention
LOOK = "sliding_window and layer_types of the engine's configuration"
PACKED = 4096  # tokens of a row of sequences at most


def kinds(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The attention modules of ``model``, each with its type of layer as the configuration says it.

    In some models other layers lie between those with attention, so that a module's own number counts.
    """
    config, modules = model.config.get_text_config(), attention_modules(model)
    usual = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    types = dict(enumerate(getattr(config, "layer_types", None) or []))
    return [(module, types.get(getattr(module, "layer_idx", place), usual)) for place, module in enumerate(modules)]


def fully_attending(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of ``model`` that see all tokens before their own."""
    return [module for module, kind in kinds(model) if kind == "full_attention"]


def sliding(model: PreTrainedModel) -> tuple[int, list[nn.Module]]:
    """The size of the sliding window of ``model`` and the attention modules that have it; 0 and none without one."""
    own = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    return own, [module for module, kind in kinds(model) if own and kind == "sliding_attention"]


def windows(model: PreTrainedModel, longest: int) -> Iterator[Suspect]:
    """Suspects of a sliding window of attention, for models whose configuration knows one."""
    config = model.config.get_text_config()
    if not hasattr(config, "sliding_window"):
        return
    (own, having), full = sliding(model), fully_attending(model)
    if having and own < longest:
        yield Suspect(f"full attention in place of a window of {own}", LOOK, partial(seeing, having, 0))
    for size in [own] if own else CUTS:
        if full and size < longest:
            yield Suspect(f"a window of {size} in place of full attention", LOOK, partial(seeing, full, size))


@contextmanager
def seeing(modules: Sequence[nn.Module], size: int, model: nn.Module) -> Iterator[None]:
    """A context in which the attention ``modules`` see ``size`` tokens, themselves among them; 0 stands for all."""
    with hiding(modules, lambda module, places: beyond(size, places)):
        yield


def masks(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of a mask of attention that is off by one token."""
    look = "the mask of attention, and the positions from which the engine makes it"
    if attention_modules(model):
        yield Suspect("attention that sees the next token", look, partial(masked, ahead))
        yield Suspect("attention that does not see its own token", look, partial(masked, itself))


def ahead(hidden: Tensor, places: Tensor) -> Tensor:
    """``hidden`` (T, T) for ``places`` (T,) that also see the next place."""
    return hidden & (places - places[:, None] != 1)


def itself(hidden: Tensor, places: Tensor) -> Tensor:
    """``hidden`` (T, T) for ``places`` (T,) that do not see themselves, except the first, which sees no other."""
    return hidden | (places[:, None] == places) & (places > 0)


def packed(model: PreTrainedModel, lengths: Sequence[int], begin: Sequence[int]) -> list[Suspect]:
    """Suspects of packed rows: sequences of these ``lengths`` see the sequences before them in their row.

    The sequences with the numbers ``begin`` are the first of their rows. Empty if every sequence is first, if a row has
    more than PACKED tokens, or if it is longer than the context of a model without RoPE, which has no more positions.
    """
    before = tuple(number - max(first for first in begin if first <= number) for number in range(len(lengths)))
    longest = max(sum(lengths[number - count : number + 1]) for number, count in enumerate(before))
    ropes = any(n.endswith("inv_freq") for n, _ in model.named_buffers())
    behind = ropes and len(embedding_paths(model)) == 1
    if not any(before) or longest > PACKED or not (behind or longest <= context_length(model.config)):
        return []
    look = "how rows of several sequences are told apart (cu_seqlens, position_ids, the mask of attention)"
    name = "sequences that see those before them in a packed row"
    found = [Suspect(f"{name}, positions counted on", look, run=in_row, before=before)]
    if attention_modules(model) and "position_ids" in inspect.signature(model.forward).parameters:
        whole, run = partial(masked, lambda own, places: own), partial(in_row, restarts=True)
        found.append(Suspect(f"{name}, positions from 0", look, whole, run=run, before=before))
    return found


def in_row(model: PreTrainedModel, window: Window, restarts: bool = False) -> Tensor:
    """The logits (T, V) of a ``window`` behind those before it, whose positions go on unless each ``restarts``."""
    row, count, how = [*window.before, window.tokens], len(window.tokens), dict[str, Any]()
    if restarts:
        how["position_ids"] = torch.cat([torch.arange(len(each), device=each.device) for each in row])[None]
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # those of a whole row may take gigabytes
        how["logits_to_keep"] = count
    return model(torch.cat(row)[None], use_cache=False, **how).logits[0, -count:].float()


def without_first(count: int, model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which no token after the first ``count`` sees these."""
    return masked(lambda own, at: own | (at[:, None] >= count) & (at < count), model)


@contextmanager
def masked(more: Callable[[Tensor, Tensor], Tensor], model: PreTrainedModel) -> Iterator[None]:
    """A context in which attention does not see what ``more`` makes of what is hidden (T, T) from places (T,)."""
    own = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    sizes = {id(module): own * (kind == "sliding_attention") for module, kind in kinds(model)}
    modules = attention_modules(model)
    with hiding(modules, lambda module, places: more(beyond(sizes[id(module)], places), places)):
        yield


def beyond(size: int, places: Tensor) -> Tensor:
    """True where one of ``places`` (T,) is not among the last ``size`` up to another (T, T); 0 stands for all."""
    back = places[:, None] - places
    return (back < 0) | (back >= (size or len(places)))


@contextmanager
def hiding(modules: Sequence[nn.Module], unseen: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
    """A context in which attention ``modules`` see no token that ``unseen`` marks (T, T), a function of places (T,)."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if "attention_mask" not in kwargs:
            return None
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        hidden = unseen(module, torch.arange(x.shape[1], device=x.device))
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
        return args, kwargs | {"attention_mask": mask.masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]}

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
