"""A KV cache that stores keys and values as a recipe says."""

from contextlib import nullcontext
from functools import partial
from inspect import signature

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from fragility_core.arithmetic.internals import current_dispatch_mode, current_function_mode
from fragility_core.arithmetic.recipes import Stored


class RoundedCache(DynamicCache):
    """A cache whose keys and values, (B, H, T, d), are rounded to ``stored`` as they come in."""

    def __init__(self, stored: Stored, config):
        super().__init__(config=config)
        self.stored = stored

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """As ``DynamicCache.update``: all keys and values that are stored now."""
        rounded = (round_stored(x, self.stored) for x in (key_states, value_states))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def round_stored(x: Tensor, stored: Stored) -> Tensor:
    """``x`` as it is read again, in its dtype; a differentiated pass records the error."""
    mode = current_function_mode()
    if hasattr(mode, "round_stored"):
        return mode.round_stored(x, "cache", stored)
    emulation = current_dispatch_mode()
    with nullcontext() if emulation is None else emulation.paused():
        return stored.round(x).to(x.dtype)


def store_cache(model: nn.Module, stored: Stored) -> None:
    """Let every pass of ``model``, with or without a cache of its own, read keys and values from a ``RoundedCache``.

    Raises ValueError for a model that takes no cache of keys and values.
    """
    base = model.base_model if isinstance(model, PreTrainedModel) else model
    if "past_key_values" not in signature(base.forward).parameters:
        raise ValueError(f"a KV cache needs a decoder with attention, got {type(model).__name__}, which takes no cache")
    base.register_forward_pre_hook(partial(give_cache, stored), with_kwargs=True)


def give_cache(stored: Stored, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A hook before the forward of ``model``: an empty cache, or none, becomes a ``RoundedCache``."""
    given = kwargs.get("past_key_values")
    if isinstance(given, RoundedCache):
        return args, kwargs
    if given is not None and given.get_seq_length():
        raise ValueError("a rounded KV cache must be filled from the start, got a cache that other passes have filled")
    cache = RoundedCache(stored, model.config.get_text_config(decoder=True))
    return args, kwargs | {"past_key_values": cache, "use_cache": True}
