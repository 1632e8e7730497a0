"""A KV cache that stores keys and values as a recipe says."""

import copy
from collections import UserDict
from collections.abc import Collection
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache

from fragility_core.models.paths import attention_modules, within
from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import NumberFormat
from fragility_numerics.internals import current_dispatch_mode
from fragility_numerics.lowering import base_of
from fragility_numerics.modes import current_function_mode
from fragility_numerics.nested import map_tensors
from fragility_quantization.ggml import GgmlType

NUMBERS = ("layer_idx", "layer_id")  # attributes with the number under which attention stores keys and values
PAST = {"past_key_values", "layer_past"}  # arguments by which it gets the cache


class RoundedCache(Cache):
    """A cache whose keys and values, (B, H, T, d), are rounded to ``stored`` as they come in (``rounded``).

    Layers with a number in ``kept`` store keys and values unrounded, and so do all layers if ``stored`` is None.
    """

    stored: NumberFormat | None
    kept: Collection[int]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Store new keys and values, rounded unless the layer is in ``kept``. Returns all that are stored now."""
        if self.stored is not None and layer_idx not in self.kept:
            key_states = round_stored(key_states, "key cache", self.stored)
            value_states = round_stored(value_states, "value cache", self.stored)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def rounded(cache: Cache, stored: NumberFormat, kept: Collection[int] = ()) -> RoundedCache:
    """``cache`` itself, which is empty, as a ``RoundedCache`` of its kind: dynamic, static or another."""
    made: Any = cache
    made.__class__ = type(f"Rounded{type(cache).__name__}", (RoundedCache, type(cache)), {})
    made.stored, made.kept = stored, kept
    return made


def cast_shared(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A hook before attention that reads keys and values of another layer: casts them to the dtype of its weights."""
    dtype = next(module.parameters()).dtype
    shared = {name: x for name, x in kwargs.items() if isinstance(x, UserDict)}
    return args, kwargs | {name: UserDict(map_tensors(dict(x), lambda y: y.to(dtype))) for name, x in shared.items()}


def unrounded(cache: Cache) -> Cache:
    """A copy of ``cache`` that stores what comes in as it is."""
    copied = copy.deepcopy(cache)
    if isinstance(copied, RoundedCache):
        copied.stored = None
    return copied


def round_stored(x: Tensor, name: str, stored: NumberFormat) -> Tensor:
    """``x`` rounded to ``stored``, in its dtype; a differentiated pass records the error at the place ``name``."""
    mode = current_function_mode()
    if hasattr(mode, "round_stored"):
        return mode.round_stored(x, name, stored)
    emulation = current_dispatch_mode()
    if not isinstance(emulation, Emulation):  # none, or someone else's
        return stored.round(x).to(x.dtype)
    with emulation.paused():
        return stored.round(x, *emulation.drawing(x)).to(x.dtype)


def store_cache(model: nn.Module, stored: NumberFormat, kept: Collection[str] = ()) -> None:
    """Let every pass of ``model``, with or without a cache of its own, read keys and values from a ``RoundedCache``.

    Keys and values of attention modules within the paths ``kept`` stay as they are. Raises ValueError for a model that
    takes no cache or whose heads are no whole blocks, and for attention to keep that has no number in the cache.
    """
    base: Any = base_of(model)
    if "past_key_values" not in signature(base.forward).parameters:
        raise ValueError(f"a KV cache needs a decoder that takes one, got {type(model).__name__}: take another recipe")
    if isinstance(stored, GgmlType):
        config = base.config.get_text_config(decoder=True)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if width % stored.size:
            raise ValueError(f"{stored.name} caches whole blocks of {stored.size}, got heads of {width}: take kv-fp8")
    base.register_forward_pre_hook(partial(give_cache, stored, cached_layers(model, kept)), with_kwargs=True)


def cached_layers(model: nn.Module, kept: Collection[str]) -> frozenset[int]:
    """The numbers under which attention modules within the paths ``kept`` store keys and values."""
    attending, found = {*map(id, attention_modules(model))}, []
    for path, module in model.named_modules():
        if not any(within(path, each) for each in kept):
            continue
        numbers = [number for name in NUMBERS if (number := getattr(module, name, None)) is not None]
        if id(module) in attending and not numbers:
            raise ValueError(
                f"attention whose cache is kept must have its number as {' or '.join(NUMBERS)}, got none in {path}"
            )
        if id(module) in attending or PAST & signature(module.forward).parameters.keys():
            found += numbers[:1]
    return frozenset(found)


def give_cache(
    stored: NumberFormat, kept: Collection[int], model: Any, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:  # fmt: skip
    """A hook before the forward of ``model``: an empty cache, or a new one, becomes a ``RoundedCache``."""
    given = kwargs.get("past_key_values")
    if isinstance(given, RoundedCache):
        return args, kwargs
    if given is None:
        given = DynamicCache(config=model.config.get_text_config(decoder=True))
    elif given.get_seq_length():
        raise ValueError("a rounded KV cache must be filled from the start, got one that holds tokens: give a new one")
    return args, kwargs | {"past_key_values": rounded(given, stored, kept), "use_cache": True}
