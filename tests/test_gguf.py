"""GGUF files: what they are converted to, against the model they were written from and the package's own numbers."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from ggufs import blocks_of, stored, write_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from fragility_lab.inputs.checkpoints import load_config, load_model, load_tokenizer
from fragility_lab.inputs.hollow import load_hollow

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 3, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0}
GEMMA = WIDE | {"vocab_size": 512, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA |= {"bos_token_id": 2, "eos_token_id": 1}
TEXT = "Rounding, 2024: the\n\nfirst token's stream  is 160 times the median's."
FAMILIES = {
    "llama": LlamaConfig(**WIDE, vocab_size=4096, rope_theta=50000.0, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**WIDE, vocab_size=4096, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**WIDE, vocab_size=4096, rope_theta=1e6),
    "qwen3": Qwen3Config(**WIDE, vocab_size=4096, head_dim=32, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7}, rope_theta=1e6),
    "gpt2": GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=96, vocab_size=4096, bos_token_id=0, eos_token_id=0),
}


def drawn(config) -> torch.nn.Module:
    """A model of ``config`` with random biases and norms, whose queries and keys differ from head to head."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for x in model.parameters():
        x.add_(0.2 * torch.randn_like(x))
    return model


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def written(request, tmp_path_factory):
    model = drawn(FAMILIES[request.param])
    return model, write_gguf(tmp_path_factory.mktemp(request.param) / "model.gguf", model)


def test_a_converted_file_is_the_model_it_was_written_from(written):
    """All parameters, logits in both forms, and every field of the configuration that has a say in them."""
    model, file = written
    loaded = load_model(str(file), "cpu", AutoModelForCausalLM)
    for (name, x), (_, y) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-7), name  # Gemma's norms are stored with 1 added
    tokens = torch.arange(40)[None] % 500
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(load_hollow(str(file), "cpu")(tokens).logits, loaded(tokens).logits)
    given, found = model.config.to_dict(), load_config(str(file)).to_dict()
    aside = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "n_inner", "unk_token_id"}
    aside |= {"layer_norm_epsilon"} if model.config.model_type == "gpt2" else set()
    differing = {name for name in given.keys() | found.keys() if given.get(name) != found.get(name)} - aside
    assert not {name for name in differing if "dropout" not in name and "pdrop" not in name}


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_what_is_stored_in_few_bits_is_what_the_package_reads(kind, family, tmp_path):
    """Queries and keys of Llama lie in another order; norms of Gemma are stored in fp32 with 1 added."""
    config = FAMILIES[family]
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "layer_types": None}
    model = drawn(type(config)(**config.to_dict() | wide))
    loaded = load_model(str(write_gguf(tmp_path / "model.gguf", model, kind)), "cpu", AutoModelForCausalLM)
    state = loaded.state_dict()
    for name, x in model.state_dict().items():
        if x.ndim == 2 and (name != "lm_head.weight" or not config.tie_word_embeddings):
            written = stored(model, name, x).contiguous().numpy()
            wanted = torch.from_numpy(np.array(gguf.quants.dequantize(blocks_of(written, kind), kind)))
            assert torch.equal(stored(loaded, name, state[name]), wanted), name


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_file_has_the_tokens_of_its_model(family, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", drawn(FAMILIES[family]))
    assert load_tokenizer(str(file))(TEXT).input_ids == load_tokenizer("embedded")(TEXT).input_ids
