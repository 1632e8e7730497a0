"""A model small enough for every test, and not degenerate."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TINY = GPT2Config(
    n_layer=3, n_embd=32, n_head=2, n_positions=64, vocab_size=101, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def random_gpt2(config: GPT2Config, weight_scale: float = 8.0) -> GPT2LMHeadModel:
    """A GPT-2 whose statistics are far from degenerate.

    Freshly initialised weights give uniform probabilities and LayerNorms with gamma = 1, beta = 0,
    on which several wrong definitions would agree with the right one.
    """
    torch.manual_seed(0)
    model = GPT2LMHeadModel(copy.deepcopy(config)).eval().requires_grad_(False)  # attention is set on configurations
    for name, parameter in model.named_parameters():
        if "ln_" in name:
            parameter.copy_(name.endswith("weight") + 0.4 * torch.randn_like(parameter))
        elif "h." in name:
            parameter.copy_(weight_scale * 0.02 * torch.randn_like(parameter))
        else:
            parameter.mul_(10)
    return model
