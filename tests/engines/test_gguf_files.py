"""GGUF files of Llamas: what is written reads back, and a model with shuffled channels computes the same."""

import gguf
import numpy as np
import pytest
import torch
from tiny import random_model
from transformers import GPT2Config, LlamaConfig

from fragility_engines.llama_cpp.files import interleaved, shuffled, write_gguf
from fragility_engines.llama_cpp.plans import main

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_has_the_weights_and_settings(tied, tmp_path):
    model = random_model(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    write_gguf(model, tmp_path / "made.gguf")
    read = gguf.GGUFReader(tmp_path / "made.gguf")
    tensors = {t.name: t.data for t in read.tensors}
    assert len(tensors) == 2 * 9 + 3 - tied and {t.tensor_type.name for t in read.tensors} == {"F32"}
    block = model.model.layers[1]
    for name, weight in {
        "blk.1.ffn_down": block.mlp.down_proj.weight, "blk.1.attn_v": block.self_attn.v_proj.weight,
        "blk.1.attn_norm": block.input_layernorm.weight, "token_embd": model.model.embed_tokens.weight,
        "blk.1.attn_q": interleaved(block.self_attn.q_proj.weight, 4),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(tensors[f"{name}.weight"], weight.detach().numpy())
    assert read.get_field("llama.attention.head_count_kv").contents() == 2


def test_rows_that_rotate_together_become_neighbours():
    rows = torch.arange(16.0)[:, None].expand(16, 3)
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize("tied", [False, True])
def test_shuffled_channels_compute_the_same(tied):
    model = random_model(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    other = shuffled(model)
    with torch.no_grad():
        torch.testing.assert_close(other(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)
    changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()) if p.ndim > 1]
    assert all(changed) and (other.lm_head.weight is other.model.embed_tokens.weight) == tied


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a Llama without biases and scaled positions, got gpt2"):
        write_gguf(random_model(GPT2Config(n_layer=1, n_embd=32, n_head=2)), tmp_path / "made.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixes", "q9"], "make gguf: a mix must be one of q2_k, .*, got 'q9'"),
        (["--types", "int4"], "make gguf: a type must be one of q2_k, .*, got 'int4'"),
        (["--windows", "0"], "make gguf: windows must be at least 1, got 0"),
        (["--model", "embedded"], "make gguf: .* must be a Llama without biases .*, got gpt2"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["--windows", "1", "--calibration", "1", "--length", "8", *arguments])
