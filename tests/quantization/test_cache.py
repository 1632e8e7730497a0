"""Caches that round what comes in; tests/adjoint/test_targets.py decodes with them, test_plans.py keeps some."""

import pytest
import torch
from tiny import random_gpt2
from transformers import DynamicCache, GPT2Config

from fragility_numerics.formats import get_format
from fragility_quantization.cache import RoundedCache, cached_layers, unrounded
from fragility_quantization.quantized import lower

KEYS, VALUES = (torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def test_keys_and_values_are_stored_rounded_but_for_those_of_kept_layers():
    stored = get_format("fp8_e4m3")
    cache = RoundedCache(stored, GPT2Config(), kept={1})
    for layer, change in enumerate((lambda x: stored.round(x).float(), lambda x: x)):
        found = cache.update(KEYS, VALUES, layer)
        assert all(torch.equal(got, change(x)) for got, x in zip(found, (KEYS, VALUES), strict=True))
    copied = unrounded(cache)
    keys, _ = copied.update(KEYS, VALUES, 0)
    assert torch.equal(keys, torch.cat([stored.round(KEYS).float(), KEYS], 2))
    assert cache.stored is stored and cache.get_seq_length() == 3
    assert isinstance(unrounded(DynamicCache()), DynamicCache)


@torch.no_grad()
def test_an_empty_cache_is_replaced_and_a_filled_one_refused(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "kv-fp8@fp32")
    filled = tiny_gpt2(tiny_tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be filled from the start, got a cache that other passes have filled"):
        low(tiny_tokens, past_key_values=filled)
    given = low(tiny_tokens, past_key_values=DynamicCache(), use_cache=False).past_key_values
    assert isinstance(given, RoundedCache) and given.get_seq_length() == tiny_tokens.shape[1]


def test_kept_attention_is_found_by_its_number(tiny_gpt2):
    assert cached_layers(tiny_gpt2, ()) == set()
    assert cached_layers(tiny_gpt2, ("transformer.h.1", "transformer.h.2.mlp")) == {1}
    model = random_gpt2(tiny_gpt2.config)
    model.transformer.h[1].attn.layer_idx = None
    with pytest.raises(
        ValueError, match=r"must have its number as layer_idx or layer_id, got none in transformer\.h\.1\.attn"
    ):
        cached_layers(model, ("transformer.h",))


@pytest.mark.parametrize("width", [16, 48, 80])
def test_heads_of_no_whole_blocks_are_refused(width):
    """llama.cpp has no such cache either; the numbers would be stored in fp16."""
    config = GPT2Config(n_layer=1, n_embd=2 * width, n_head=2, n_positions=16, vocab_size=11)
    with pytest.raises(ValueError, match=f"heads must be whole blocks of 32 for a cache in q8_0, got {width}"):
        lower(random_gpt2(config), "kv-q8_0")
    lower(random_gpt2(GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=16, vocab_size=11)), "kv-q8_0")


@pytest.mark.parametrize("name", ["w4a16-g128+kv-fp8+kv-int8", "kv-fp8+kv-int8", "w4a16-g128+w8a16-g128"])
def test_a_recipe_has_one_cache(name):
    with pytest.raises(ValueError, match="a recipe must be known, got"):
        lower(random_gpt2(GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=16, vocab_size=11)), name)
