"""The configuration that the settings of a GGUF file describe. No setting is left out in silence."""

import math
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, PreTrainedConfig

from fragility_gguf.header import MODEL_TYPES, Header

# The fields of configurations, by the settings that give them; some configurations have names of their own.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size n_inner",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_epsilon": "layer_norm_epsilon norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Settings that a configuration has values of its own for, which are those of another model.
NEEDED = ("context_length", "feed_forward_length", "attention.layer_norm_rms_epsilon or attention.layer_norm_epsilon")
# Settings of the width of a head, which must agree, and those of the rotary embedding.
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
ROPE = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor")
ROPE_OF_WINDOWS, LENGTH_BEFORE = "rope.freq_base_swa", "rope.scaling.original_context_length"
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
ROPE_FACTORS = "rope_freqs.weight"
UNUSED = ("none", 0, False, None)  # values by which a setting says that it does nothing
LARGEST = {"gemma2": 46, "gemma3": 62}  # blocks of Gemma's 27B, whose scores have a scale that no file says


def shortest(value: Any) -> Any:
    """The decimal number that a setting in fp32 stands for: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) and math.isfinite(value) else value


def configuration(header: Header) -> PreTrainedConfig:
    """The configuration that the GGUF file of ``header`` describes.

    Raises ValueError for a setting that no field takes.
    """
    settings = {name: shortest(value) for name, value in header.own().items()}
    for name, value in settings.items():
        if isinstance(value, list):  # a number for each block: configurations have one for all
            raise unread(header, name, value)
    if lacks := [name for name in NEEDED if not {*name.split(" or ")} & settings.keys()]:
        raise ValueError(f"a GGUF file must say its model's {lacks[0]}, but {header.file} does not: convert it again")
    kind = CONFIG_MAPPING[MODEL_TYPES[header.architecture]]
    known, heads = kind().to_dict(), settings["attention.head_count"]
    equal = settings["embedding_length"] // heads
    width = settings.get("attention.key_length") or settings.get("rope.dimension_count") or equal
    values = {field: header.settings.get(f"tokenizer.ggml.{name}") for name, field in TOKENS.items()}
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    values["vocab_size"] = header.tensors["token_embd.weight"][0][0]
    if "num_key_value_heads" in known:
        values["num_key_value_heads"] = heads
    if "head_dim" in known or width != equal:
        values["head_dim"] = width
    if header.architecture in LARGEST:
        values["query_pre_attn_scalar"] = equal if settings["block_count"] == LARGEST[header.architecture] else width
    if header.architecture == "qwen3moe":
        values["norm_topk_prob"] = True  # as llama.cpp computes; no file says it
    fields = {
        name: field for name in settings for alias in reversed(FIELDS.get(name, "").split())
        if (field := kind.attribute_map.get(alias, alias)) in known
    }  # fmt: skip
    everything: dict[str, Any] = values | {field: settings[name] for name, field in fields.items()}
    config = kind(**everything)
    taken = {name for name, field in fields.items() if getattr(config, field) == settings[name]}
    taken |= {name for name in WIDTHS if settings.get(name) == width}
    if "rope_parameters" in known:
        taken |= rope(config, header, settings)
    for name, value in settings.items():
        if name not in taken and value not in UNUSED:
            raise unread(header, name, value)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and "sliding_window" not in fields.values():
        raise ValueError(
            f"blocks of {header.architecture} have windows, whose attention.sliding_window {header.file} does not say: "
            "convert the model again"
        )
    return config


def rope(config: PreTrainedConfig, header: Header, settings: dict[str, Any]) -> set[str]:
    """Set the rotary embedding of ``config``; returns the names of the settings that describe it.

    Raises ValueError for a scaling other than linear or Llama 3's.
    """
    scaling: dict[str, Any] = {}
    # As llama.cpp reads them, which takes a factor without a type for a linear one.
    how, factor = settings.get("rope.scaling.type", "linear"), settings.get("rope.scaling.factor") or 1.0
    if how == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif how not in (*UNUSED, "linear"):
        raise unread(header, "rope.scaling.type", how)
    if ROPE_FACTORS in header.tensors:
        scaling = llama3_scaling(header, settings)
    parameters, taken = config.rope_parameters, {*ROPE}
    whole = parameters.get("full_attention", parameters)  # windows of Gemma 3 have a base of their own, and no scaling
    whole |= {"rope_theta": settings.get("rope.freq_base", 10000.0), **scaling}
    if settings.get(LENGTH_BEFORE) == settings.get("context_length"):
        taken.add(LENGTH_BEFORE)
    if "sliding_attention" in parameters and ROPE_OF_WINDOWS in settings:
        parameters["sliding_attention"]["rope_theta"] = settings[ROPE_OF_WINDOWS]
        taken.add(ROPE_OF_WINDOWS)
    return taken


def llama3_scaling(header: Header, settings: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling with the factors of frequencies that the file stores. Raises ValueError for other factors."""
    (count,), dtype, offset = header.tensors[ROPE_FACTORS]
    if dtype != "F32":
        raise unread(header, ROPE_FACTORS, dtype)
    stored = np.fromfile(header.file, np.float32, count, offset=offset)
    width, base = 2 * len(stored), settings.get("rope.freq_base", 10000.0)
    low, high, before = 1.0, 4.0, 8192
    factor = float(stored.max())
    wavelengths = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    smooth = np.clip((before / wavelengths - low) / (high - low), 0, 1)
    made = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(made, stored, rtol=1e-4):
        raise unread(header, ROPE_FACTORS, f"factors from {stored.min()} to {stored.max()}")
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": before,
    }  # fmt: skip


def unread(header: Header, name: str, value: Any) -> ValueError:
    return ValueError(
        f"all that a GGUF file says of its model must be read, but nothing reads {name} = {value} of {header.file} "
        f"({header.architecture}): give a folder with the original model in safetensors"
    )
