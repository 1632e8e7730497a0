"""Train the embedded checkpoints: a byte-level BPE tokenizer, a small GPT-2 and a small Llama.

Sources: Sennrich et al. 2016 (BPE), Radford et al. 2019 (GPT-2), Touvron et al. 2023 (Llama), Loshchilov & Hutter 2019
(AdamW, cosine decay).
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fragility_lab.inputs.checkpoints import quiet_loading
from fragility_lab.inputs.loading import require_at_least
from fragility_lab.running.environment import progress
from fragility_lab.running.files import write_whole

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration and the corpus together determine a training run."""

    steps: int = 20
    batch_windows: int = 8  # windows per optimizer step
    micro_batch: int = 4  # windows per backward pass
    context: int = 1024
    peak_learning_rate: float = 2.5e-3
    warmup_fraction: float = 0.04
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluation_interval: int = 100
    evaluation_windows: int = 32
    seed: int = 0

    def __post_init__(self):
        require_at_least(0, seed=self.seed)
        counts = ("steps", "batch_windows", "micro_batch", "context", "evaluation_interval", "evaluation_windows")
        require_at_least(1, **{name: getattr(self, name) for name in counts})


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ``vocabulary`` tokens; token 0 is END_OF_TEXT."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=1024
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """All texts as one uint16 stream, each followed by the end-of-text token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return np.concatenate([np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings])


def new_model(checkpoint: str, vocabulary: int, context: int, seed: int) -> PreTrainedModel:
    """The model of the embedded ``checkpoint``: 12 blocks of width 128, with the library's random initial weights.

    "embedded" is a GPT-2 with 4 heads; "embedded-llama" a Llama with 4 query and 2 key-value heads and a head of its
    own. Raises ValueError for other names.
    """
    shared: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    torch.manual_seed(seed)
    if checkpoint == "embedded":
        # The fused tanh GELU is the function that GPT-2's configuration calls gelu_new.
        config = GPT2Config(
            n_layer=12, n_embd=128, n_head=4, n_positions=context, activation_function="gelu_pytorch_tanh",
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shared,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    if checkpoint == "embedded-llama":
        llama = LlamaConfig(
            num_hidden_layers=12, hidden_size=128, intermediate_size=352, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False, **shared,
        )  # fmt: skip
        return LlamaForCausalLM(llama)
    raise ValueError(f"the checkpoint must be embedded or embedded-llama, got {checkpoint!r}")


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine decay to a tenth of the peak."""
    warmup = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup:
        return config.peak_learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.peak_learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def batches(stream: np.ndarray, config: TrainingConfig) -> Iterator[torch.Tensor]:
    """Endless batches (batch_windows, context + 1); every epoch has its own offset and order."""
    generator = np.random.default_rng(config.seed)
    width = config.context
    if len(stream) <= 2 * width * config.batch_windows:
        raise ValueError(
            f"the corpus must hold more than two batches of {config.batch_windows} windows of "
            f"{width} tokens, but has {len(stream)} tokens: add packages"
        )
    while True:
        start = generator.integers(width)
        count = (len(stream) - start - 1) // width
        order = generator.permutation(count)
        for first in range(0, count - config.batch_windows + 1, config.batch_windows):
            starts = start + order[first : first + config.batch_windows] * width
            yield torch.from_numpy(sliding_window_view(stream, width + 1)[starts].astype(np.int64))


def language_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy in nats; ``tokens`` has shape (B, T + 1)."""
    device = next(model.parameters()).device
    tokens = tokens.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(tokens[:, :-1]).logits  # (B, T, vocabulary)
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: PreTrainedModel, stream: np.ndarray, config: TrainingConfig) -> float:
    """Mean loss, nats a token, over the first ``evaluation_windows`` windows of ``stream``; leaves training mode on."""
    windows = sliding_window_view(stream, config.context + 1)[:: config.context][: config.evaluation_windows]
    parts = torch.from_numpy(windows.astype(np.int64)).split(config.micro_batch)
    model.eval()
    losses = [len(part) * language_loss(model, part).item() for part in parts]
    model.train()
    return sum(losses) / len(windows)


def train(
    model: PreTrainedModel, stream: np.ndarray, monitored: dict[str, np.ndarray], config: TrainingConfig, folder: Path
) -> pd.DataFrame:
    """Train ``model`` and leave it with the weights of the best validation loss; returns the log.

    ``monitored`` maps names to token streams and must contain "validation". Their losses are logged every
    ``evaluation_interval`` steps, one row per evaluation. ``folder`` holds the log so far as ``log.csv``.
    """
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    log, recent, best, weights = [], [], math.inf, {}
    begin = time.perf_counter()
    source = batches(stream, config)
    for step in progress(range(config.steps), desc="training", unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        parts = next(source).split(config.micro_batch)
        for part in parts:
            loss = language_loss(model, part) / len(parts)
            loss.backward()
            recent.append(loss.detach() * len(parts))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % config.evaluation_interval == 0 or done == config.steps:
            losses = {f"{name}_loss": evaluate(model, tokens, config) for name, tokens in monitored.items()}
            log.append(
                {
                    "step": done,
                    "tokens": done * config.batch_windows * config.context,
                    "learning_rate": optimizer.param_groups[0]["lr"],
                    "training_loss": torch.stack(recent).mean().item(),
                    **losses,
                    "seconds": time.perf_counter() - begin,
                }
            )
            recent = []
            if losses["validation_loss"] < best:
                best = losses["validation_loss"]
                weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            write_whole(folder / "log.csv", pd.DataFrame(log).to_csv(index=False))
    model.load_state_dict(weights)
    return pd.DataFrame(log)


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    log: pd.DataFrame,
    config: TrainingConfig,
    provenance: dict,
) -> dict:
    """Write model, tokenizer, ``log.csv`` and ``record.json``; return the record."""
    if isinstance(model, GPT2LMHeadModel):
        model.config.activation_function = "gelu_new"
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_whole(folder / "log.csv", log.to_csv(index=False, float_format="%.6g"))
    best = log.loc[log.validation_loss.idxmin()]
    record = {
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "best": {name: float(best[name]) for name in log if name.endswith("_loss")},
        "tokens": int(best.tokens),
        "config": asdict(config),
        **provenance,
    }
    write_whole(folder / "record.json", json.dumps(record, indent=2) + "\n")
    return record
