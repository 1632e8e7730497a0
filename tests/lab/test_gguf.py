"""GGUF files: what they are converted to, against the model they were written from and the package's own numbers."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from ggufs import blocks_of, stored, write_gguf
from tiny import fresh_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from fragility_gguf.folder import converted
from fragility_gguf.header import read_header
from fragility_lab.inputs.checkpoints import load_config, load_model, load_tokenizer
from fragility_lab.inputs.loading import load
from fragility_lab.inputs.offloaded import load_offloaded
from fragility_lab.inputs.stored import require_described_weights

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 3, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0}
GEMMA = WIDE | {"vocab_size": 512, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA |= {"bos_token_id": 2, "eos_token_id": 1}
TEXT = "Rounding, 2024: the\n\nfirst token's stream  is 160 times the median's."
BASE = {"rope_theta": 500000.0}
THETA = {"rope_type": "default"} | BASE
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | BASE
LLAMA3 |= {"original_max_position_embeddings": 8192}
OF_GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
FAMILIES = {
    "llama": LlamaConfig(**WIDE, vocab_size=4096, rope_theta=50000.0, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**WIDE, vocab_size=4096, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**WIDE, vocab_size=4096, rope_theta=1e6),
    "qwen3": Qwen3Config(**WIDE, vocab_size=4096, head_dim=32, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7}, rope_theta=1e6),
    "gemma3-linear": Gemma3TextConfig(**GEMMA, rope_parameters=OF_GEMMA),
    "phi3": Phi3Config(
        **WIDE,
        vocab_size=4096,
        pad_token_id=0,
        sliding_window=8,
        original_max_position_embeddings=128,
        rms_norm_eps=1e-4,
    ),
    "starcoder2": Starcoder2Config(**WIDE, vocab_size=4096, norm_epsilon=1e-4, rope_parameters=THETA),
    "qwen2moe": Qwen2MoeConfig(
        **WIDE,
        vocab_size=4096,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
    ),
    "qwen3moe": Qwen3MoeConfig(
        **WIDE,
        vocab_size=4096,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "llama-linear": LlamaConfig(**WIDE, vocab_size=4096, rope_parameters={"rope_type": "linear", "factor": 4.0} | BASE),
    "llama3": LlamaConfig(**WIDE | {"max_position_embeddings": 131072}, vocab_size=4096, rope_parameters=LLAMA3),
    "gpt2": GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=96, vocab_size=4096, bos_token_id=0, eos_token_id=0),
}


def drawn(config) -> torch.nn.Module:
    """A model of ``config`` with random biases and norms, whose queries and keys differ from head to head."""
    model = fresh_model(config)
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
    assert torch.equal(load_offloaded(str(file), "cpu")(tokens).logits, loaded(tokens).logits)
    given, found = model.config.to_dict(), load_config(str(file)).to_dict()
    aside = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "n_inner", "unk_token_id"}
    aside |= {"pad_token_id"}
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


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),  # llama.cpp takes a factor without a type for a linear one
        ({"rope.scaling.type": "linear"}, 1.0), ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
    ],
)  # fmt: skip
def test_a_scaling_of_positions_is_read_as_llama_cpp_reads_it(settings, factor, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", drawn(FAMILIES["llama"]), settings=settings)
    parameters = load_config(str(file)).rope_parameters
    assert parameters.get("factor", 1.0) == factor
    assert parameters.get("rope_type", "default") == ("linear" if factor != 1 else "default")


def test_experiments_load_a_file_as_the_folder_it_was_written_from(tmp_path):
    """Weights and token stream have the same digest; the link to a file in a hub's cache has no suffix behind it."""
    model = drawn(FAMILIES["llama"])
    model.save_pretrained(tmp_path / "folder")
    load_tokenizer("embedded").save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "blob", model)
    (tmp_path / "link.gguf").symlink_to(tmp_path / "blob")
    found = [load(str(tmp_path / name), "embedded", [32], 2, "cpu") for name in ("folder", "link.gguf")]
    assert found[0].digest == found[1].digest


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_file_has_the_tokens_of_its_model(family, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", drawn(FAMILIES[family]))
    assert load_tokenizer(str(file))(TEXT).input_ids == load_tokenizer("embedded")(TEXT).input_ids


def _of_type(content: bytes, kind: int) -> bytes:
    """``content`` with another type of the tensor output_norm.weight, whose shape is one number long."""
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    return content[:at] + kind.to_bytes(4, "little") + content[at + 4 :]


def test_pieces_with_scores_are_joined_as_their_order_says(tmp_path):
    """Gemma's file has no merges; a text begins with its token for that."""
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "model.gguf", drawn(FAMILIES["gemma3"]))))
    numbers = tokenizer("Rad ab, 24").input_ids
    pieces = ["<bos>", "R", "ad", "▁a", "b", ",", "▁", "2", "4"]  # of "▁a" and "ab" the first one in the file is joined
    assert tokenizer.convert_ids_to_tokens(numbers) == pieces
    assert tokenizer.decode(numbers[1:]) == "Rad ab, 24"


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no GGUF": (lambda x: b"GGML" + x[4:], "take a folder or a GGUF file, .* but .* begins with b'GGML"),
    "no bytes": (lambda x: b"", "begins with b''"),
    "big-endian": (lambda x: x[:4] + x[7:3:-1] + x[8:], "is big-endian: gguf-convert-endian"),
    "version 1": (lambda x: x[:4] + b"\1" + x[5:], "has version 1: convert the model again"),
    "half of the weights": (lambda x: x[: len(x) // 2], r"cut off or damaged \(.* ends behind its \d+ bytes"),
    "half of the header": (lambda x: x[:20000], r"cut off or damaged \(its header does not end\): copy"),
    "a billion settings": (lambda x: x[:16] + b"\0\0\0\x40" + x[20:], "its header does not end"),
    "a long string": (lambda x: x[:24] + b"\xff" * 8 + x[32:], "its header does not end"),
    "an unknown type": (lambda x: _of_type(x, 99), "have the type number 99: pip install gguf --upgrade"),
    "a type without a reader": (lambda x: _of_type(x, 15), "output_norm.weight of .* have the type Q8_K: pip install"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("small") / "model.gguf", drawn(FAMILIES["llama"])).read_bytes()


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_named_before_anything_is_read(how, small, tmp_path):
    damage, said = DAMAGED[how]
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damage(small))
    for loads in (load_config, load_tokenizer, load_model):
        with pytest.raises(ValueError, match=said) as refused:
            loads(str(file))
        assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_every_cut_of_the_header_is_found(small, tmp_path):
    end = small.index(b"output_norm.weight") + 40
    for cut in np.linspace(0, end, 60, dtype=int):
        (tmp_path / "cut.gguf").write_bytes(small[:cut])
        with pytest.raises(ValueError, match=r"cut off or damaged|begins with"):
            read_header(tmp_path / "cut.gguf")


ONES = np.ones(8, np.float32)
OTHERS = {
    "another architecture": ({"arch": "mpt"}, "one of the architectures gemma2, .*, got 'mpt' in .*: give a folder"),
    "a piece": ({"name": "m-00001-of-00003.gguf"}, "of one piece, but .* is one of 3: join them with `llama-gguf"),
    "a piece by its settings": ({"general": {"split.count": 2}}, "must be of one piece, but .* is one of 2"),
    "an adapter": ({"general": {"general.type": "adapter"}}, "must hold a model, but .* holds what it calls 'adapter'"),
    "a vocabulary": ({"leave_out": "all"}, "must hold weights, but .* holds a vocabulary alone: give the model's file"),
    "no heads": ({"settings": {"attention.head_count": 0}}, "whole number for each of .* attention.head_count is 0 in"),
    "heads by layer": ({"settings": {"attention.head_count": [4, 4, 4]}}, r"attention.head_count is \[4, 4, 4\] in"),
    "no embedding": ({"leave_out": ("token_embd.weight",)}, "must hold token_embd.weight, but"),
    "another shape": ({"settings": {"feed_forward_length": 95}}, r"mlp.down_proj.weight \(64, 96\) for \(64, 95\)"),
    "no window": ({"family": "gemma3", "settings": {"attention.sliding_window": None}}, "window .* does not say"),
    "experts": ({"settings": {"expert_count": 4}}, "nothing reads expert_count = 4 of .* \\(llama\\): give a folder"),
    "a number for each block": ({"settings": {"feed_forward_length": [96, 96]}}, "nothing reads feed_forward_length ="),
    "no epsilon": ({"settings": {"attention.layer_norm_rms_epsilon": None}}, "must say its model's attention.layer_n"),
    "no context": ({"settings": {"context_length": None}}, "must say its model's context_length, but"),
    "a rotary scaling": ({"settings": {"rope.scaling.type": "yarn"}}, "nothing reads rope.scaling.type = yarn"),
    "an unknown setting": ({"settings": {"attention.new_flag": True}}, "nothing reads attention.new_flag = True"),
    "other factors": ({"tensors": {"rope_freqs.weight": ONES + 1}}, "nothing reads rope_freqs.weight = factors from 2"),
    "an unknown tensor": ({"tensors": {"blk.0.attn_q.scale": ONES}}, "but nothing reads blk.0.attn_q.scale of"),
    "a missing tensor": ({"leave_out": ("blk.0.attn_q.weight",)}, "must hold all weights .* lacks model.layers.0"),
    "another split": ({"split": "new-bpe"}, "does not know how, got 'gpt2' with 'new-bpe': give a folder, or the orig"),
}  # fmt: skip


@pytest.mark.parametrize("which", OTHERS)
def test_what_a_file_holds_otherwise_is_refused_by_name(which, tmp_path):
    how, said = OTHERS[which]
    how = dict(how)
    model = drawn(FAMILIES[how.pop("family", "llama")])
    file = write_gguf(tmp_path / how.pop("name", "model.gguf"), model, **how)
    with pytest.raises((ValueError, OSError), match=said):
        load_config(str(file)), load_model(str(file), "cpu", AutoModelForCausalLM), load_tokenizer(str(file))


def test_without_the_package_a_file_says_what_to_install(monkeypatch, small, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(small)
    with pytest.raises(ValueError, match=r"needs the package gguf, which is not installed: pip install gguf"):
        load_config(str(tmp_path / "model.gguf"))


def test_a_file_is_converted_once_and_again_when_it_changes(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(small)
    first = converted(str(file), "weights", require_described_weights)
    before = {path: path.stat().st_mtime_ns for path in Path(first).iterdir()}
    assert converted(str(file), "weights", require_described_weights) == first
    assert {path: path.stat().st_mtime_ns for path in Path(first).iterdir()} == before
    os.utime(file, ns=(0, 0))
    second = converted(str(file), "weights", require_described_weights)
    assert second != first and Path(first).is_dir()  # another process may read it
    os.utime(Path(first).parent, (0, 0))
    os.utime(file, ns=(10**9, 10**9))
    third = converted(str(file), "weights", require_described_weights)
    assert not Path(first).exists() and Path(second).is_dir() and Path(third).is_dir()


def test_a_full_disk_is_named_before_the_conversion(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(small)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(OSError, match=r"takes 0.0 GB in fp32, but .* has 0.0 GB left: free some, or set"):
        load_model(str(tmp_path / "model.gguf"), "cpu")
