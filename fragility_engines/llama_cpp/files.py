"""Models of Llama's family written as GGUF files in fp32, from which llama.cpp makes quantized ones."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fragility_core.models.paths import embedding_paths, head_paths
from fragility_quantization.gguf_mixes import tensor_names
from fragility_quantization.operands import linear_weights, owner

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def require_llama(model: Any) -> Any:
    """The configuration of ``model``; raises ValueError for another than a plain Llama."""
    config = model.config
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or scaling != "default":
        raise ValueError(
            "a model that is written here must be a Llama without biases and scaled positions, got "
            f"{config.model_type}: convert others with llama.cpp's convert_hf_to_gguf.py"
        )
    return config


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys (heads * d, n) in llama.cpp's order: pairs that rotate together are neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(model: Any, path: str | Path) -> None:
    """Write ``model`` in fp32, without a tokenizer: it is given tokens. Needs the package ``gguf``."""
    from gguf import GGUFWriter

    config = require_llama(model)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    paths = [*map(owner, linear_weights(model)), *embedding_paths(model), *head_paths(model)]
    tensors = {}
    for place, name in tensor_names(model, paths).items():
        weight = model.get_submodule(place).weight.detach()
        if ".attn_q." in name or ".attn_k." in name:
            weight = interleaved(weight, heads if ".attn_q." in name else kv_heads)
        tensors[name] = weight
    for number, block in enumerate(model.model.layers):
        for place, name in NORMS.items():
            tensors[f"blk.{number}.{name}.weight"] = block.get_submodule(place).weight.detach()
    tensors["output_norm.weight"] = model.model.norm.weight.detach()
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def shuffled(model: Any, seed: int = 0) -> Any:
    """A copy of ``model`` with the channels of its residual stream, MLPs and values in a random order.

    It computes the same function. Weights that were read from a quantized file lie on a grid in each block of
    neighbours, so that some GGUF types would store them without an error. Shuffled weights do not.
    """
    config, drawn = require_llama(model), torch.Generator().manual_seed(seed)
    made = copy.deepcopy(model)

    def order(count: int) -> Tensor:
        return torch.randperm(count, generator=drawn)

    def set_(module: nn.Module, weight: Tensor) -> None:
        parameter: Any = module.weight
        parameter.copy_(weight)

    stream = order(config.hidden_size)
    set_(made.model.embed_tokens, made.model.embed_tokens.weight[:, stream])
    if made.lm_head.weight is not made.model.embed_tokens.weight:
        set_(made.lm_head, made.lm_head.weight[:, stream])
    set_(made.model.norm, made.model.norm.weight[stream])
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for block in made.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            set_(norm, norm.weight[stream])
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            set_(layer, layer.weight[:, stream])
        for layer in (attention.o_proj, mlp.down_proj):
            set_(layer, layer.weight[stream])
        inner = order(config.intermediate_size)
        set_(mlp.gate_proj, mlp.gate_proj.weight[inner])
        set_(mlp.up_proj, mlp.up_proj.weight[inner])
        set_(mlp.down_proj, mlp.down_proj.weight[:, inner])
        width = attention.v_proj.weight.shape[0] // kv_heads
        values = torch.stack([width * head + order(width) for head in range(kv_heads)])
        set_(attention.v_proj, attention.v_proj.weight[values.flatten()])
        shared = heads // kv_heads
        within = (values - width * torch.arange(kv_heads)[:, None]).repeat_interleave(shared, 0)
        set_(attention.o_proj, attention.o_proj.weight[:, (within + width * torch.arange(heads)[:, None]).flatten()])
    return made
