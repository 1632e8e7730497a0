"""Caches that round what comes in; tests/adjoint/test_targets.py decodes with them, test_plans.py keeps some."""

import pytest
import torch
from tiny import random_gpt2, random_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GPT2Config, LlamaConfig, StaticCache

from fragility_numerics.formats import get_format
from fragility_quantization.cache import cached_layers, rounded, unrounded
from fragility_quantization.quantized import lower

KEYS, VALUES = (torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def test_keys_and_values_are_stored_rounded_but_for_those_of_kept_layers():
    stored = get_format("fp8_e4m3")
    cache = rounded(DynamicCache(config=GPT2Config()), stored, kept={1})
    for layer, change in enumerate((lambda x: stored.round(x).float(), lambda x: x)):
        found = cache.update(KEYS, VALUES, layer)
        assert all(torch.equal(got, change(x)) for got, x in zip(found, (KEYS, VALUES), strict=True))
    copied = unrounded(cache)
    keys, _ = copied.update(KEYS, VALUES, 0)
    assert torch.equal(keys, torch.cat([stored.round(KEYS).float(), KEYS], 2))
    assert cache.stored is stored and cache.get_seq_length() == 3
    assert isinstance(unrounded(DynamicCache()), DynamicCache)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["kv-int8", "kv-int8@fp32"])
def test_counters_of_others_may_run_inside(recipe, tiny_gpt2, tiny_tokens):
    """A dispatch mode of somebody else is no emulation."""
    low = lower(tiny_gpt2, recipe)
    with low.running():
        alone = low.model(tiny_tokens).logits
        with FlopCounterMode(display=False):
            assert torch.equal(low.model(tiny_tokens).logits, alone)


@torch.no_grad()
def test_an_empty_cache_is_filled_with_rounded_numbers_and_a_filled_one_refused(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "kv-fp8@fp32")
    filled = tiny_gpt2(tiny_tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be filled from the start, got one that holds tokens: give a new one"):
        low(tiny_tokens, past_key_values=filled)
    given = DynamicCache()
    whole = low(tiny_tokens, past_key_values=given, use_cache=False)
    assert whole.past_key_values is given and given.get_seq_length() == tiny_tokens.shape[1]
    keys = given.layers[0].keys
    assert torch.equal(keys, get_format("fp8_e4m3").round(keys).float())


@torch.no_grad()
def test_weights_alone_leave_the_cache(tiny_gpt2, tiny_tokens):
    low, plain = (lower(tiny_gpt2, name, "weights") for name in ("kv-fp8", "bf16"))
    assert low(tiny_tokens).logits.equal(plain(tiny_tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_callers_cache_goes_on_step_by_step(kind, attention):
    """As in the documentation of transformers: one cache, made before the first pass, and a pass for each part."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=101,
        max_position_embeddings=32,
    )  # fmt: skip
    model = random_model(config)
    model.set_attn_implementation(attention)
    tokens = torch.arange(2, 14)[None]
    low = lower(model, "kv-fp8@fp32")
    want = low(tokens).logits[:, -1]
    made = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)
    with low.running():
        low.model(tokens[:, :11], past_key_values=made, use_cache=True)
        assert made.get_seq_length() == 11
        step = low.model(tokens[:, 11:], past_key_values=made, use_cache=True).logits[:, -1]
    assert step.numpy() == pytest.approx(want.numpy(), rel=1e-4, abs=1e-5)
    assert not torch.allclose(step, model(tokens).logits[:, -1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_generation_with_every_kind_of_cache_is_the_same(kind, tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "kv-int8@fp32")
    with low.running():
        found = low.model.generate(
            tiny_tokens[:1, :5], max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=kind
        )
        text = tiny_tokens[:1, :5]
        for _ in range(6):
            text = torch.cat([text, low.model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, text)


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
    with pytest.raises(ValueError, match=f"q8_0 caches whole blocks of 32, got heads of {width}: take kv-fp8"):
        lower(random_gpt2(config), "kv-q8_0")
    lower(random_gpt2(GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=16, vocab_size=11)), "kv-q8_0")


@pytest.mark.parametrize("name", ["w4a16-g128+kv-fp8+kv-int8", "kv-fp8+kv-int8", "w4a16-g128+w8a16-g128"])
def test_a_recipe_has_one_cache(name):
    with pytest.raises(ValueError, match="a recipe must be known, got"):
        lower(random_gpt2(GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=16, vocab_size=11)), name)
