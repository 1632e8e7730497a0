"""Models small enough for every test and not degenerate, what they read, and how they run."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from fragility_core.models.paths import final_hidden
from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.inputs.loading import Inputs, digest
from fragility_lab.inputs.text import load_rows, select_windows, tokenize
from fragility_numerics.lowering import LowPrecision

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


def fresh_model(
    config: PreTrainedConfig,
    spread: float = 0.0,
    change: Callable[[str, nn.Parameter], object] | None = None,
    auto_class: type = AutoModelForCausalLM,
    **options,
) -> PreTrainedModel:
    """A model as it is initialised, except for noise on its vectors and a change of its matrices.

    ``spread`` is the standard deviation of the noise: norms of ones are exact in every format. ``change(name, matrix)``
    alters a matrix in place. The ``options`` are those of ``from_config``.
    """
    torch.manual_seed(0)
    model = auto_class.from_config(config, **options).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and change:
            change(name, parameter)
        elif parameter.ndim == 1 and spread:
            parameter.add_(spread * torch.randn_like(parameter))
    return model


def keep_norms(name: str, matrix: nn.Parameter) -> None:
    """Draw a matrix that keeps the norm of vectors; embeddings are standard normal."""
    embedding = "emb" in name or "wte" in name or "wpe" in name
    matrix.normal_(0, 1.0 if embedding else matrix.shape[-1] ** -0.5)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with eager attention, matrices that keep norms, and vectors away from 0 and 1."""
    return fresh_model(config, 0.3, keep_norms, attn_implementation="eager")


def random_tokens(*shape: int, seed: int = 1, vocabulary: int = TINY.vocab_size, smallest: int = 0) -> Tensor:
    """Tokens from ``smallest`` to ``vocabulary`` - 1."""
    return torch.randint(smallest, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def tiny_inputs(model: PreTrainedModel, tokens: int = 400) -> Inputs:
    """What an experiment loads: ``model`` and a stream of random ``tokens``."""
    stream = random_tokens(tokens, seed=3)
    return Inputs(model, stream, digest(model, stream))


def embedded_windows(length: int, count: int) -> Tensor:
    """Windows (count, length) of the embedded text."""
    return select_windows(tokenize(load_rows("embedded"), load_tokenizer("embedded")), length, count, seed=0)[1]


@torch.no_grad()
def low_hidden(low: LowPrecision, tokens: Tensor) -> Tensor:
    """The fp32 values of the final hidden states of a low-precision pass."""
    with low.running():
        return final_hidden(low.model, tokens).float()
