"""The configuration that the settings of a GGUF file describe, and nothing that they leave open in silence."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING, PreTrainedConfig

from fragility_lab.inputs.gguf_header import Header

# The model types of transformers, by the architectures of GGUF files whose conversion the tests compare.
MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# The fields of configurations, by the settings that give them; GPT-2's configuration has names of its own.
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size n_inner",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Settings that say again what others say, or that are read below.
IMPLIED = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
)
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
ROPE_FACTORS = "rope_freqs.weight"
UNUSED = ("none", 0, False, None)  # values by which a setting says that it does nothing


def require_supported(header: Header) -> None:
    """Raises ValueError for a GGUF file of an architecture whose conversion no test has compared."""
    if header.architecture not in MODEL_TYPES:
        raise ValueError(
            f"a GGUF file must be of one of the architectures {', '.join(MODEL_TYPES)}, got {header.architecture!r} in "
            f"{header.file}: give a folder with the original model in safetensors"
        )


def shortest(value: Any) -> Any:
    """The decimal number that a setting in fp32 stands for: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) and math.isfinite(value) else value


def configuration(header: Header, rope_factors: Callable[[], np.ndarray]) -> PreTrainedConfig:
    """The configuration that the GGUF file of ``header`` describes.

    ``rope_factors`` gives its tensor ROPE_FACTORS, if it has one. Raises ValueError for an architecture that is not
    supported, and for a setting that no field of the configuration takes.
    """
    require_supported(header)
    settings = {name: shortest(value) for name, value in header.own().items()}
    kind = CONFIG_MAPPING[MODEL_TYPES[header.architecture]]
    known = kind().to_dict()
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        names = [kind.attribute_map.get(field, field) for field in FIELDS.get(name, "").split()]
        if field := next((field for field in names if field in known), None):
            fields[field] = value
        elif name not in IMPLIED and value not in UNUSED:
            raise unread(header, name, value)
    fields |= {field: header.settings.get(f"tokenizer.ggml.{name}") for name, field in TOKENS.items()}
    fields["vocab_size"] = header.tensors["token_embd.weight"][0][0]
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    width = settings.get("attention.key_length") or settings.get("rope.dimension_count")
    width = width or settings["embedding_length"] // settings["attention.head_count"]
    if "head_dim" in known:
        fields["head_dim"] = width
    for name in ("attention.value_length", "rope.dimension_count"):
        if settings.get(name, width) != width:
            raise unread(header, name, settings[name])
    if "query_pre_attn_scalar" in known:
        fields["query_pre_attn_scalar"] = query_scale(header, settings, width)
    config = kind(**fields)
    if "rope_parameters" in known:
        rope(config, header, settings, rope_factors)
    return config


def query_scale(header: Header, settings: dict[str, Any], width: int) -> int:
    """The number under the root by which Gemma 2 and 3 divide scores: no file says it, and their 27B have another."""
    largest = {"gemma2": 46, "gemma3": 62}[header.architecture]
    return (
        settings["embedding_length"] // settings["attention.head_count"]
        if settings["block_count"] == largest
        else width
    )


def rope(config: PreTrainedConfig, header: Header, settings: dict[str, Any], factors: Callable[[], np.ndarray]) -> None:
    """Set the rotary embedding of ``config``. Raises ValueError for a scaling other than linear or Llama 3's."""
    scaling: dict[str, Any] = {}
    if (how := settings.get("rope.scaling.type", "none")) == "linear":
        scaling = {"rope_type": "linear", "factor": settings["rope.scaling.factor"]}
    elif how not in UNUSED:
        raise unread(header, "rope.scaling.type", how)
    if ROPE_FACTORS in header.tensors:
        scaling = llama3_scaling(header, settings, factors())
    parameters = config.rope_parameters
    whole = parameters.get("full_attention", parameters)  # windows of Gemma 3 have a base of their own, and no scaling
    whole |= {"rope_theta": settings.get("rope.freq_base", 10000.0), **scaling}


def llama3_scaling(header: Header, settings: dict[str, Any], stored: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling with the ``stored`` factors of its frequencies. Raises ValueError for other factors."""
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
