"""Where the sites of the paper's decomposition lie in a Hugging Face model."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Block:
    """One pre-norm residual block h -> r = h + attention(norm_1(h)) -> r + mlp(norm_2(r))."""

    module: nn.Module
    norm_1: nn.Module
    attention: nn.Module
    attention_out: nn.Module
    norm_2: nn.Module
    mlp_in: nn.Module
    activation: nn.Module
    mlp_out: nn.Module


def blocks(model: PreTrainedModel) -> list[Block]:
    """The residual blocks of a GPT-2 model, with or without a head.

    Raises TypeError for another architecture, cross-attention included.
    """
    base = model.base_model
    if getattr(base.config, "add_cross_attention", False):
        raise TypeError("the monitor knows decoder blocks of one attention, got a model with add_cross_attention=True")
    if base.config.model_type != "gpt2":
        raise TypeError(f"the monitor knows the blocks of gpt2 models, got model_type {base.config.model_type!r}")
    return [Block(b, b.ln_1, b.attn, b.attn.c_proj, b.ln_2, b.mlp.c_fc, b.mlp.act, b.mlp.c_proj) for b in base.h]
