"""Passes with several choices of blocks in fp32 against one protected model for each choice."""

import pytest
import torch
from tiny import fresh_model
from transformers import LlamaConfig

from fragility_adjoint.mixed_precision import Contributions, apply
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.theory import mismatch
from fragility_lab.experiments.kept_blocks import KeptBlocks
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower

CHOICES = [(), (0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2), (0, 1)]


@pytest.fixture(params=["gpt2", "llama"])
def model(request, tiny_gpt2):
    if request.param == "gpt2":
        return tiny_gpt2.transformer
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return fresh_model(config).model


@torch.no_grad()
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3"])
def test_choices_at_once_are_protected_models_one_by_one(format, model, tiny_tokens):
    set_attention(model, OBSERVED_EAGER)
    contributions = Contributions(model, Adjoint(lower(model, format))(tiny_tokens[:1]))
    depth = len(contributions.structure.blocks)
    assert depth == 3
    kept = KeptBlocks(model, contributions.keep(), contributions.keep(blocks=range(depth)))
    for window in tiny_tokens[:2, None]:
        together = kept(window, CHOICES)
        for hidden, blocks in zip(together, CHOICES, strict=True):
            alone = apply(model, contributions.keep(blocks=blocks))
            with alone.running():
                expected = final_hidden(alone.model, window)[0]
            exact = final_hidden(model, window)[0]
            assert mismatch(hidden, exact).item() == pytest.approx(mismatch(expected, exact).item(), rel=1e-3)
            assert mismatch(hidden, expected) < 0.1 * mismatch(expected, exact)


@torch.no_grad()
def test_common_beginnings_are_computed_once(tiny_gpt2, tiny_tokens, monkeypatch):
    model = tiny_gpt2.transformer
    contributions = Contributions(model, Adjoint(lower(model, "bf16"))(tiny_tokens[:1]))
    kept = KeptBlocks(model, contributions.keep(), contributions.keep(blocks=range(3)))
    members = []
    for block, exact in kept.pairs:
        for module in (block, exact):
            module.register_forward_pre_hook(lambda module, args: members.append(len(args[0])))
    kept(tiny_tokens[:1], [(), (0,), (1,), (2,)])
    assert members == [1, 1, 2, 1, 3, 1], "in the format and in fp32, block after block"
