"""The model and the text of an experiment, loaded and checked before any work."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from fragility_core.models.padding import context_length
from fragility_lab.inputs import checkpoints
from fragility_lab.inputs.names import embedded_checkpoints
from fragility_lab.inputs.offloaded import load_offloaded, require_fitting
from fragility_lab.inputs.stored import weight_files
from fragility_lab.inputs.text import PLAIN, Opening, load_rows, opening, select_windows, tokenize
from fragility_numerics.formats import NumberFormat, has_native_kernels
from fragility_numerics.lowering import as_format

ASIDE = ("architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id")  # change no number


@dataclass(frozen=True)
class Inputs:
    """A loaded model, its token stream, and the digest that identifies both.

    Windows of the stream begin with the ``opening``, the tokens with which the ``tokenizer`` begins a text. ``rounded``
    is the same model with weights that somebody else has rounded, if there is one. An offloaded model's
    weights take ``files`` bytes on the disk. They have no digest, since no run on them is kept. ``dtypes`` has the
    dtypes of the stored weights of each model, by its name.
    """

    model: PreTrainedModel
    stream: Tensor
    digest: str
    rounded: PreTrainedModel | None = None
    files: int = 0
    tokenizer: Tokenizer | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    opening: Opening = PLAIN

    def windows(self, length: int, count: int, seed: int, disjoint: bool = False) -> tuple[list[int], Tensor]:
        """Starts and tokens (count, length) of windows as ``select_windows`` chooses them."""
        return select_windows(self.stream, length, count, seed, disjoint, self.opening)

    def window(self, start: int, length: int) -> Tensor:
        """The window (length,) whose text begins at token ``start`` of the stream."""
        return self.opening.window(self.stream, start, length)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def attention(self) -> dict[str, str]:
        """The attention implementations of the low-precision and the reference passes, to be recorded."""
        return {"monitored": "eager", "reference": self.model.config._attn_implementation}

    def execution(self, format: str | NumberFormat) -> str:
        """The execution of ``format`` on the device: "native" or "emulated"."""
        return "native" if has_native_kernels(as_format(format), self.device) else "emulated"


def load(
    model: str,
    data: str,
    lengths: Sequence[int],
    windows: int,
    device: str | None = None,
    auto_class: type = AutoModel,
    offloaded: bool = False,
) -> Inputs:
    """Load model and text of an experiment, and check that it can run. ``offloaded`` models read weights as they run.

    Raises OSError if the model or text is not found. Raises ValueError for windows longer than the model's context,
    a text with fewer windows than asked for, or a tokenizer of another vocabulary.
    """
    config = checkpoints.load_config(model).get_text_config()
    require_at_least(1, windows=windows)
    if min(lengths) < 1:
        raise ValueError(f"windows must have at least 1 token, got lengths {list(lengths)}")
    if max(lengths) > (context := context_length(config)):
        raise ValueError(f"windows must fit the context of {model!r}, {context} tokens, got lengths {list(lengths)}")
    tokenizer = checkpoints.load_tokenizer(model)
    begins, stream = opening(tokenizer), tokenize(load_rows(data), tokenizer)
    largest = max([*begins.ids, *([int(stream.max())] if len(stream) else [])], default=0)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer of {model!r} must give tokens below the model's vocabulary of {config.vocab_size}, "
            f"got {largest}: is it that of another model?"
        )
    for length in lengths:
        select_windows(stream, length, windows, seed=0, opening=begins)
    found: dict[str, Any] = {
        "tokenizer": tokenizer, "opening": begins, "dtypes": {model: checkpoints.stored_dtypes(model)},
    }  # fmt: skip
    if offloaded:
        folder = Path(checkpoints.located(model, weights=True))
        size = sum(file.stat().st_size for file in weight_files(folder, model))
        return Inputs(load_offloaded(model, device, auto_class), stream, "", files=size, **found)
    require_fitting(model, auto_class)  # before memory is taken for the sizes that the configuration says
    loaded = checkpoints.load_model(model, device, auto_class)
    # An embedded checkpoint has one configuration, and runs of it are committed that have no digest of one.
    settings = "" if model in embedded_checkpoints() else settings_of(loaded.config)
    return Inputs(loaded, stream, digest(loaded, stream, begins, settings), **found)


def settings_of(config: PreTrainedConfig) -> str:
    """The settings of ``config`` in words, except settings of files, versions and this process."""
    known = {name: value for name, value in config.to_dict().items() if name not in ASIDE and not name.startswith("_")}
    return json.dumps(known, sort_keys=True, default=str)


def digest(model: PreTrainedModel, stream: Tensor, opening: Opening = PLAIN, settings: str = "") -> str:
    """Sixteen hexadecimal digits that identify weights, ``settings``, token stream and opening, not their source.

    Buffers count as weights if files have them, as the biases of experts in DeepSeek-V3 are.
    """
    sha = hashlib.sha256(stream.numpy().tobytes() + settings.encode())
    sha.update(torch.tensor(opening.ids, dtype=stream.dtype).numpy().tobytes())
    stored = model.state_dict(keep_vars=True)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    for name, values in (*model.named_parameters(), *buffers):
        sha.update(name.encode())
        sha.update(values.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def require_at_least(least: int, **values: int) -> None:
    """Raises ValueError for a value below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def require_values(**axes: Sequence) -> None:
    """Raises ValueError for an axis of a grid without a value, or with a value twice."""
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name} must name at least one value, got none")
        if len({*values}) < len(values):
            raise ValueError(f"{name} must name each value once, got {[*values]}")
