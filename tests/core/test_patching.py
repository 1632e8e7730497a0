"""Patched passes: the release's effects, and the stacked pass against one plain pass per block."""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GPTBigCodeModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.patching import Patching, patch, patch_effects
from fragility_core.theory import mismatch
from fragility_numerics.attention import OBSERVED_EAGER, observing_attention, set_attention
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

RUNS = [("bf16", "native"), ("bf16", "emulated"), ("fp16", "emulated"), ("fp8_e4m3", "emulated"), ("tf32", "emulated")]


@pytest.fixture
def model(tiny_gpt2):
    return tiny_gpt2.transformer


@pytest.fixture
def reference(model, tiny_tokens) -> torch.Tensor:
    """fp32 hidden states of ``tiny_tokens``."""
    return model(tiny_tokens).last_hidden_state


def patched_alone(model, low: LowPrecision, tokens: torch.Tensor, layer: int | None) -> torch.Tensor:
    """The definition (protocol section 5): one low-precision pass with block ``layer`` in fp32."""
    base = low.model
    with observing_attention(base), low.running():
        hidden = base.wte(tokens) + base.wpe(torch.arange(tokens.shape[1]))
        for block in base.h[:layer]:
            hidden = block(hidden)
    if layer is not None:
        exact = model.h[layer](hidden.float())
        hidden = exact if low.format.name == "tf32" else low.format.round(exact)  # TF32 stores fp32
        with observing_attention(base), low.running():
            for block in base.h[layer + 1 :]:
                hidden = block(hidden)
    with low.running():
        return base.ln_f(hidden)


# --- Parity with the release ---------------------------------------------------------------------


def effects_of(record, model, low, windows):
    tokens = windows[record["length"]][record["window"]][None]
    with torch.no_grad():
        reference = model.base_model(tokens).last_hidden_state
    return patch_effects(Patching(model, low)(tokens), reference)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_effects_are_the_releases(precision, reference_model, reference_e3, reference_windows):
    """Native kernels agree within 3 % of the base mismatch in bf16 and 7 % in fp16 (measured: 0.4 and 3.2 %).

    On a CPU with other matrix instructions than the release's, the base mismatch differs by 0.01 % to 0.9 %; in fp16 by
    3.2 % on one with AMX-BF16 and AVX512-FP16, at a mismatch of 1e-3.
    """
    low, room = lower(reference_model, precision, "native"), {"bf16": 1.0, "fp16": 7 / 3}[precision]
    for record in (r for r in reference_e3 if r["precision"] == precision):
        effects = effects_of(record, reference_model, low, reference_windows)
        base = record["recomputed_base_mismatch"]
        known, near = record["layers"], 0.03 * room
        np.testing.assert_allclose(effects.base_mismatch, base, rtol=0.02 * room)
        np.testing.assert_allclose(effects.exact_reduction, known["exact_reduction"], atol=near * base)
        np.testing.assert_allclose(effects.patched_mismatch, known["patched_mismatch"], rtol=near)
        np.testing.assert_allclose(effects.reduction_fraction, known["reduction_fraction"], atol=near)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_emulated_effects_are_the_releases(precision, reference_model, reference_e3, reference_windows):
    """Emulation rounds otherwise. A single effect differs by up to 5 % of the base mismatch, on average by 2 %."""
    low, off = lower(reference_model, precision, "emulated"), []
    for record in (r for r in reference_e3 if r["precision"] == precision):
        effects = effects_of(record, reference_model, low, reference_windows)
        off.append((effects.exact_reduction - record["layers"]["exact_reduction"]) / record["source_mismatch"])
    assert np.abs(off).mean() < 0.03


# --- Against the definition ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("format", "execution"), RUNS)
def test_stacked_passes_equal_single_ones(format, execution, model, tiny_tokens, reference):
    """They are equal bit for bit unless kernels sum in another order for more rows, which changes roundings.

    On the embedded checkpoint (T = 256) 5 % of the entries differ in emulated fp16, and the mismatch by 7e-4 of
    itself. In bf16 none differ.
    """
    low = lower(model, format, execution)
    stacked = Patching(model, low)(tiny_tokens)
    single = torch.stack([patched_alone(model, low, tiny_tokens, layer) for layer in (None, 0, 1, 2)])
    assert stacked.shape == single.shape == (4, 3, 40, 32)
    assert stacked.dtype == single.dtype == low.format.compute_dtype
    assert (stacked != single).double().mean() < 0.1
    torch.testing.assert_close(mismatch(stacked, reference), mismatch(single, reference), rtol=5e-3, atol=0)


def test_windows_at_once_are_each_by_itself(model, tiny_tokens):
    patching = Patching(model, lower(model, "bf16", "native"))
    together = patching(tiny_tokens)
    alone = torch.cat([patching(window[None]) for window in tiny_tokens], 1)
    torch.testing.assert_close(together.float(), alone.float(), rtol=0, atol=0.05)
    assert (together != alone).double().mean() < 0.1


@torch.no_grad()
def test_patching_the_only_faulty_block_takes_all_of_the_mismatch(model, tiny_tokens, reference):
    low = lower(model, "fp32")
    low.model.h[1].mlp.c_proj.weight.mul_(1.01)
    effects = patch_effects(Patching(model, low)(tiny_tokens), reference)
    assert (effects.base_mismatch > 1e-4).all()
    faulty = effects.layer == 1
    assert (effects[faulty].reduction_fraction > 0.999).all()
    np.testing.assert_allclose(effects[~faulty].patched_mismatch, effects[~faulty].base_mismatch, rtol=1e-3)


def test_base_is_the_monitored_pass_and_leaves_it_as_it_was(model, tiny_tokens, reference):
    low = lower(model, "fp16", "emulated")
    monitor = Monitor(low)
    before = monitor(tiny_tokens, reference)
    base = Patching(model, low)(tiny_tokens)[0]
    after = monitor(tiny_tokens, reference)
    torch.testing.assert_close(mismatch(base, reference), mismatch(before.hidden, reference), rtol=5e-3, atol=0)
    assert torch.equal(before.hidden, after.hidden)
    assert not any(block._forward_hooks for block in low.model.h)


@pytest.mark.parametrize("execution", ["native", "emulated"])
def test_each_block_runs_once_over_what_has_entered(execution, model, tiny_tokens):
    low = lower(model, "bf16", execution)
    patching, seen = Patching(model, low), []
    for name, blocks in (("low", low.model.h), ("fp32", model.h)):
        for block in blocks:
            block.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, len(args[0]), args[0].dtype)))
    patching(tiny_tokens)
    low_block, fp32_block = torch.bfloat16, ("fp32", 3, torch.float32)
    assert seen == [
        ("low", 3, low_block), fp32_block, ("low", 6, low_block), fp32_block, ("low", 9, low_block), fp32_block,
    ]  # fmt: skip


@torch.no_grad()
def test_patched_hidden_states_lie_on_the_grid_before_the_next_block(model, tiny_tokens):
    """fp8 numbers are stored in bf16, so a plain cast to the stored dtype would leave fp8's grid."""
    low = lower(model, "fp8_e4m3")
    patching, inputs = Patching(model, low), []
    low.model.h[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    patching(tiny_tokens)
    assert torch.equal(low.format.round(inputs[0].float()), inputs[0])


def test_realisations_are_reproducible_and_differ(model, tiny_tokens, reference):
    low = lower(model, "bf16", "native")

    def effects(seed: int):
        return patch_effects(Patching(model, low.stochastic(seed))(tiny_tokens), reference).exact_reduction

    assert effects(1).equals(effects(1))
    assert not effects(1).equals(effects(2))
    again = patch_effects(Patching(model, low).stochastic(1)(tiny_tokens), reference).exact_reduction
    assert again.equals(effects(1))


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_e4m3", "w8a8-int8", "fp8-dynamic@fp32", "kv-int8"])
def test_variants_that_differ_by_nothing_stay_equal_under_one_realisation(precision, model, tiny_tokens):
    """All variants get the same random bits in every kernel after their block, for both windows."""
    realisation = lower(model, precision).stochastic(0)
    patching, outputs = Patching(model, realisation), {}

    def same_as_base(low_block):
        return lambda hidden, *_, **__: outputs[low_block].float()

    patching.pairs = [(block, same_as_base(block)) for block, _ in patching.pairs]
    for block, _ in patching.pairs:  # attached before the patches: sees the output without them
        block.register_forward_hook(lambda block, _, output: outputs.update({block: output[: len(tiny_tokens)]}))
    base, *variants = patching(tiny_tokens)
    assert len(variants) == 3 and all(torch.equal(variant, base) for variant in variants)
    assert not torch.equal(base[0], base[1])
    assert realisation.emulation.copies == 1


TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
INSIDE = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=Gemma3TextConfig(head_dim=16, layer_types=["sliding_attention", "full_attention"], **TEXT),
            vision_config=SiglipVisionConfig(num_hidden_layers=1, **VISION), mm_tokens_per_image=4,
        )
    ),
    "llava": lambda: LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(num_hidden_layers=3, **VISION))
    ),
    "llama4": lambda: Llama4ForCausalLM(
        Llama4TextConfig(head_dim=16, intermediate_size_mlp=96, num_local_experts=2, moe_layers=[], **TEXT)
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", INSIDE)
def test_positions_deeper_inside_a_model_are_those_of_the_fp32_block(family):
    """All blocks patched one at a time: each leaves less of the error, as rounding is in the other one alone."""
    torch.manual_seed(0)
    model = INSIDE[family]().eval()
    low, tokens = lower(model, "bf16", "emulated"), torch.arange(16)[None] + 3
    exact = model(tokens).logits

    def apart():
        return (low(tokens).logits.float() - exact).norm().item()

    whole, each = apart(), []
    for block in range(2):
        with patch(low, model, block):
            each.append(apart())
    assert max(each) < whole and min(each) > 0.05 * whole


@torch.no_grad()
@pytest.mark.parametrize("execution", ["native", "emulated", "stochastic"])
def test_a_result_in_the_shape_of_the_tokens_has_its_variants(execution):
    """GPTBigCode's; each variant is the pass with that block alone in fp32."""
    torch.manual_seed(0)
    config = GPTBigCodeConfig(n_layer=3, n_embd=32, n_head=4, n_positions=16, vocab_size=101)
    model, tokens = GPTBigCodeModel(config).eval(), torch.arange(24).view(2, 12)
    patching = Patching(model, lower(model, "bf16", "native" if execution == "native" else "emulated"))
    patching = patching.stochastic(0) if execution == "stochastic" else patching
    patched = patching(tokens)
    exact = model(tokens).last_hidden_state
    assert patched.shape == (4, 2, 12, 32) and (mismatch(patched, exact) > 0).all()
    if execution == "stochastic":
        return
    with observing_attention(patching.low.model), patching.low.running():
        alone = [patching.low.model(tokens).last_hidden_state]
        for block in range(3):
            with patching.only(block):
                alone.append(patching.low.model(tokens).last_hidden_state)
    torch.testing.assert_close(mismatch(patched, exact), mismatch(torch.stack(alone), exact), rtol=0.02, atol=0)


# --- Effects -------------------------------------------------------------------------------------


def test_effects_by_hand():
    reference = torch.tensor([3.0, 4.0]).view(1, 1, 2).repeat(2, 1, 1)  # norm 5
    off = torch.tensor([[1.0, 2.0], [0.5, 2.0], [1.5, 0.0]])  # base, two patches; two windows
    patched = reference + off.view(3, 2, 1, 1) * torch.tensor([0.0, 1.0])
    effects = patch_effects(patched, reference)
    assert effects.window.tolist() == [0, 0, 1, 1]
    assert effects.layer.tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(effects.base_mismatch, [0.2, 0.2, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(effects.exact_reduction, [0.1, -0.1, 0.0, 0.4], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(effects.reduction_fraction, [0.5, -0.5, 0.0, 1.0], rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_an_overflow_that_patching_cures_or_not_stays_visible(model, tiny_tokens, reference):
    low = lower(model, "fp16", "emulated")
    low.model.h[1].mlp.c_proj.weight.mul_(1e5)  # beyond 65504
    effects = patch_effects(Patching(model, low)(tiny_tokens), reference)
    assert not np.isfinite(effects.base_mismatch).any()
    cured = effects.layer == 1
    assert np.isfinite(effects.patched_mismatch[cured]).all()
    assert not np.isfinite(effects.exact_reduction).any()


# --- What is refused -----------------------------------------------------------------------------


def test_fp32_attention_with_other_masks_is_refused(model):
    low = lower(model, "bf16")
    model.set_attn_implementation("eager")  # without a mask it would look ahead
    with pytest.raises(ValueError, match=r'got a model with eager attention: call .*set_attn_implementation\("sdpa"\)'):
        Patching(model, low)


@pytest.mark.parametrize("implementation", ["sdpa", OBSERVED_EAGER])
def test_attention_of_both_models_during_a_pass_and_after(implementation, model, tiny_tokens):
    set_attention(model, implementation)
    low = lower(model, "bf16")
    patching, seen = Patching(model, low), []
    for name, blocks in (("low", low.model.h), ("fp32", model.h)):
        blocks[1].register_forward_pre_hook(
            lambda block, _, name=name: seen.append((name, block.attn.config._attn_implementation))
        )
    patching(tiny_tokens)
    assert seen == [("low", OBSERVED_EAGER), ("fp32", implementation)]
    assert model.config._attn_implementation == low.model.config._attn_implementation == implementation


@pytest.mark.parametrize("path", ["", "h.1.mlp.dropout"])
@pytest.mark.parametrize("which", ["model", "low"])
def test_training_mode_is_refused(which, path, model, tiny_tokens):
    low = lower(model, "bf16")
    patching = Patching(model, low)
    (model if which == "model" else low.model).get_submodule(path).train()
    with pytest.raises(ValueError, match=r"need both models in eval mode, got training mode: call model.eval\(\)"):
        patching(tiny_tokens)


def test_unknown_architectures_are_refused():
    config = BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
    model = BertModel(config).eval()
    with pytest.raises(TypeError, match="the score does not cover BertLayer: it needs"):
        Patching(model, lower(model, "bf16"))
