"""GGUF files of small models, written with the package gguf as llama.cpp's converter writes them."""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fragility_lab.paths import CHECKPOINTS

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
}  # of model types with another name
VOCABULARY = json.loads((CHECKPOINTS / "embedded" / "tokenizer.json").read_text(encoding="utf-8"))["model"]


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Llama's queries or keys in the order of llama.cpp, whose rotation turns neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stored(model: PreTrainedModel, name: str, x: torch.Tensor) -> torch.Tensor:
    """The parameter ``x`` called ``name`` as llama.cpp stores it."""
    config = model.config
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        return permuted(x, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if "gemma" in config.model_type and "norm" in name:
        return x + 1
    if name.endswith("shared_expert_gate.weight"):
        return x[0]
    if config.model_type == "gpt2" and x.ndim == 2 and ".h." in name:
        return x.T
    return x


def blocks_of(x: np.ndarray, kind: Type) -> np.ndarray:
    """``x`` in blocks of ``kind``; those that the package cannot quantize to are drawn, with scales of a usual size."""
    try:
        return gguf.quants.quantize(x, kind)
    except NotImplementedError:
        numbers, width = gguf.GGML_QUANT_SIZES[kind]
        drawn = np.random.default_rng(x.size).integers(0, 256, (*x.shape[:-1], x.shape[-1] // numbers, width), np.uint8)
        scale = np.float16(0.002).reshape(1).view(np.uint8)
        drawn[..., :2] = drawn[..., 2:4] = scale  # d and dmin of Q4_K, which stand first
        return drawn.reshape(*x.shape[:-1], -1)


def write_gguf(
    file: Path, model: PreTrainedModel, kind: Type = Type.F32, settings: dict | None = None,
    general: dict | None = None, tensors: dict | None = None, leave_out: tuple[str, ...] | str = (),
    split: str = "gpt-2", arch: str = "",
) -> Path:  # fmt: skip
    """Write ``model`` to the GGUF ``file``: matrices in ``kind``, vectors in fp32.

    ``settings``, ``general`` ones and ``tensors`` are added to those of the model, and some or "all" tensors left out.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, arch or name)
    own = {f"{arch or name}.{key}": value for key, value in (described(config) | (settings or {})).items()}
    for key, value in (own | (general or {})).items():
        if value is not None:
            add_setting(writer, key, value)
    add_vocabulary(writer, config, split)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for path, x in parameters_of(model) if leave_out != "all" else ():
        if path == "lm_head.weight" and config.tie_word_embeddings:
            continue
        wanted = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert wanted, path
        if wanted not in leave_out:
            add(writer, wanted, stored(model, path, x).float().contiguous().numpy(), kind)
    for wanted, x in (rope_factors(config) | (tensors or {})).items():
        add(writer, wanted, x, Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def parameters_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of ``model`` by path; those of experts, which transformers joins, apart."""
    for path, x in model.state_dict().items():
        if path.endswith("experts.gate_up_proj"):
            for name, half in zip(("gate_proj", "up_proj"), x.chunk(2, dim=1)):
                yield path.replace("gate_up_proj", f"{name}.weight"), half
        else:
            yield path + ".weight" * path.endswith("experts.down_proj"), x


def rope_factors(config) -> dict[str, np.ndarray]:
    """The tensor by which a file tells of Llama 3's scaling."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return {"rope_freqs.weight": (plain / scaled).numpy()}


def add(writer: gguf.GGUFWriter, name: str, x: np.ndarray, kind: Type) -> None:
    if x.ndim < 2 or kind == Type.F32:
        writer.add_tensor(name, x)
    else:
        writer.add_tensor(name, blocks_of(x, kind), raw_dtype=kind)


def described(config) -> dict:
    """The settings of the architecture that llama.cpp's converter writes for ``config``."""
    text = config.to_dict()
    rope = getattr(config, "rope_parameters", None) or {}
    windows, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": text.get("intermediate_size") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": text.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": text.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": text.get("layer_norm_epsilon") or text.get("norm_epsilon"),
        "rope.scaling.type": "linear" if rope.get("rope_type") == "linear" else None,
        "rope.scaling.factor": rope.get("factor") if rope.get("rope_type") == "linear" else None,
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": text.get("num_experts_per_tok"),
        "expert_feed_forward_length": text.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": text.get("shared_expert_intermediate_size"),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": windows.get("rope_theta"),
        "attn_logit_softcapping": text.get("attn_logit_softcapping"),
        "final_logit_softcapping": text.get("final_logit_softcapping"),
    }
    if config.model_type == "phi3":
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if "gemma" in config.model_type or config.model_type == "phi3":
        found["attention.sliding_window"] = config.sliding_window
    if "head_dim" in text and config.model_type != "qwen2":
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.model_type == "llama":
        found["rope.dimension_count"] = config.head_dim
    return found


def add_setting(writer: gguf.GGUFWriter, name: str, value) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
    add.get(type(value), writer.add_array)(name, value)


def add_vocabulary(writer: gguf.GGUFWriter, config, split: str) -> None:
    """The embedded tokenizer's vocabulary, in bytes; for Gemma pieces with scores."""
    tokens = sorted(VOCABULARY["vocab"], key=VOCABULARY["vocab"].get)
    if "gemma" in config.model_type:
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *pieces(config.vocab_size - 4)]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
        writer.add_add_bos_token(True)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges([" ".join(pair) for pair in VOCABULARY["merges"]])
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    writer.add_token_list(tokens)


def pieces(count: int) -> list[str]:
    """So many pieces of words, single letters first."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"-()\n"]
    pairs = [a + b for a in letters[:40] for b in letters[1:40]]
    return [*letters, *pairs][:count]
