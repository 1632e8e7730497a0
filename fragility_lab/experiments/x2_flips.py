"""X2: next tokens and experts that quantization changes, and how long greedy decoding keeps to the text of fp32."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from fragility_adjoint.explain.changed_choices import next_tokens
from fragility_adjoint.predictor.targets import logits
from fragility_lab.experiments.x2 import Evaluator, realised, row
from fragility_lab.measurement.decoding import greedy, kept_length, predicted_length
from fragility_lab.measurement.routing import changed_choices, predicted_choices
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision

BATCH = 64  # prompts that are decoded at once
SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MIXTURES = (
    MixtralConfig(num_local_experts=8, **SIZES),
    Qwen3MoeConfig(num_experts=8, moe_intermediate_size=48, **SIZES | {"head_dim": 16}),
)


@torch.no_grad()
def changed_rows(evaluator: Evaluator, name: str, draws: int = 1) -> pd.DataFrame:
    """One row for the recipe ``name``: the share of next tokens that change, mean over windows."""
    (low, realisations), shares = realised(evaluator.model, name), []
    for window in evaluator.windows.split(1):
        exact = logits(evaluator.model, window)
        with low.running():
            found = low.model(window, use_cache=False).logits
        if not found.isfinite().all():  # an overflow chooses nothing
            shares.append([np.nan, np.nan])
            continue
        changed = found.argmax(-1) != exact.argmax(-1)
        known = next_tokens(realisations, window, draws, exact)
        shares.append([known.share(), float(changed.double().mean())])
    return pd.DataFrame([row(name, "changed", *np.transpose(shares))])


def length_rows(evaluator: Evaluator, name: str, count: int, draws: int = 1) -> pd.DataFrame:
    """One row for the recipe ``name``: the mean number of ``count`` tokens that greedy decoding shares with fp32.

    The windows are prompts. The measurement decodes token by token, with keys and values stored as the recipe says.
    """
    low, realisations = realised(evaluator.model, name)
    pairs = greedy_texts(evaluator, count)
    measured = torch.cat([kept_length(low, part, text) for part, text in pairs])
    predicted = torch.cat([predicted_length(realisations, *pair, draws) for pair in pairs])
    measured = measured.double().where(torch.cat([stays_finite(low, torch.cat(pair, 1)) for pair in pairs]), np.nan)
    return pd.DataFrame([row(name, "length", predicted.double().cpu().numpy(), measured.cpu().numpy())])


@torch.no_grad()
def stays_finite(low: LowPrecision, texts: Tensor) -> Tensor:
    """Booleans (B,): True if all logits of a text of ``texts`` (B, T) are finite in low precision."""
    with low.running():
        return low.model(texts, use_cache=False).logits.isfinite().flatten(1).all(1)


@lru_cache(1)  # for all recipes
def greedy_texts(evaluator: Evaluator, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of prompts (B, T), and the ``count`` tokens (B, count) that greedy decoding in fp32 gives after each."""
    return [(part, greedy(evaluator.model, part, count)) for part in evaluator.windows.split(BATCH)]


@torch.no_grad()
def random_mixture(config: PreTrainedConfig) -> PreTrainedModel:
    """A mixture of experts whose random matrices keep the norm of vectors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.0 if "emb" in name else parameter.shape[-1] ** -0.5)
    return model


def expert_table(recipes: Sequence[str], windows: int) -> pd.DataFrame:
    """One row per mixture of MIXTURES and recipe: the share of choices of experts that change, over random tokens."""
    generator, rows = torch.Generator().manual_seed(1), []
    tokens = torch.randint(1, SIZES["vocab_size"], (windows, 64), generator=generator)
    for config in MIXTURES:
        model = random_mixture(config)
        for name in progress(recipes, desc=f"experts of {config.model_type}"):
            low, realisations = realised(model, name)
            found = [changed_choices(low, model, window).double().mean() for window in tokens.split(1)]
            known = [predicted_choices(realisations, window, draws=1).mean() for window in tokens.split(1)]
            shares = (np.array([float(share) for share in each]) for each in (known, found))
            rows.append({"model": config.model_type} | row(name, "experts", *shares))
    return pd.DataFrame(rows)
