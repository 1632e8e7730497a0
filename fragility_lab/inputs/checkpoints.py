"""Load models and tokenizers by hub name or local path, or an embedded checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from fragility_gguf.folder import converted
from fragility_lab.inputs import hub
from fragility_lab.inputs.names import EMBEDDED as EMBEDDED  # beside the functions that load it
from fragility_lab.inputs.names import HubError, Wanted, local, not_found
from fragility_lab.inputs.stored import require_described, require_described_weights, require_numbers, stored_as
from fragility_offload.memory import require_room

SPREAD = "auto"  # the ``device_map`` of transformers that gives all GPUs about equal parts of a model


def located(name: str, kind: str = "model", weights: bool = False) -> str:
    """The folder of the model ``name``: an embedded checkpoint's, ``name`` itself, or one in the cache of the hub.

    A GGUF file is converted to a folder. Without ``weights``, those of a GGUF file or of a hub's model need not be
    there. Raises OSError, which says how to go on, if there is no such model, and ValueError for a GGUF file that
    cannot be converted.
    """
    if (place := local(name, kind)) is None:
        with Wanted(kind, name, HubError):
            return hub.snapshot(name, weights)
    if not place.is_file():
        return str(place)
    try:
        with quiet_loading():
            part = "tokenizer" if kind == "tokenizer" else "weights" if weights else "config"
            return converted(place, part, require_described_weights)
    except (ValueError, OSError):
        raise
    except Exception as cause:  # transformers may fail in any way on a file that is damaged inside
        raise not_found(kind, name, cause) from cause


@contextmanager
def quiet_loading() -> Iterator[None]:
    """A context without progress bars of loading and saving, which would stay in the notebook.

    It also silences reports of transformers; whatever matters in them is raised as an error.
    """
    with ExitStack() as stack:
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        if not datasets.are_progress_bars_disabled():
            stack.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield


def default_device() -> str:
    """The name "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_config(name: str) -> PreTrainedConfig:
    """The model's configuration.

    Raises OSError, which says how to go on, if there is none, and ValueError for quantized weights or an impossible
    size.
    """
    folder = located(name)
    require_described(Path(folder), name)
    with Wanted("model", name):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_model(
    name: str, device: str | dict | None = None, auto_class: Any = AutoModel, config: PreTrainedConfig | None = None
) -> PreTrainedModel:  # fmt: skip
    """The fp32 model ``name`` in eval mode, from safetensors only and never with remote code.

    ``config`` is the model's own unless given.
    ``device`` is the default one unless given; SPREAD puts parts on all GPUs, as does a ``device_map`` of transformers.
    Raises OSError, which says how to go on, if the model is not found, or if its weights are not those that its
    configuration describes. Raises ValueError for weights that do not fit into memory or are not finite, and if torch
    may multiply fp32 matrices in TF32 or bf16.
    """
    require_exact_products()
    folder, spread = located(name, weights=True), device == SPREAD or isinstance(device, dict)
    stored = require_numbers(Path(folder), name)
    if not spread:  # else parts go to their GPUs
        require_room(f"the model {name!r}", 4 * sum(prod(x.shape) for x in stored.values()))
    with Wanted("model", name), quiet_loading():
        model, info = auto_class.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
            ignore_mismatched_sizes=True, output_loading_info=True, device_map=device if spread else None,
        )  # fmt: skip
    require_described_weights(model, name, info)
    if broken := [path for path, p in model.named_parameters() if not p.isfinite().all()]:
        raise ValueError(f"weights must be finite in fp32, but those of {name!r} are not in {', '.join(broken[:5])}")
    model.eval().requires_grad_(False)
    return model if spread else model.to(device or default_device())


def require_exact_products() -> None:
    """Raises ValueError if torch may multiply fp32 matrices in TF32 or bf16: the reference itself would drift."""
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        raise ValueError(
            f'fp32 matrix products must be exact to fp32, but torch is set to "{precision}" precision: call '
            'torch.set_float32_matmul_precision("highest"), or unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
        )


def stored_dtypes(name: str) -> str:
    """The dtypes in which the weights of the model ``name`` are stored, in words; of a GGUF file its own types."""
    return stored_as(local(name) or Path(located(name, weights=True)), name)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that belongs to the model ``name``."""
    folder = located(name, "tokenizer")
    with Wanted("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens} - tokenizer.get_added_vocab().keys():
            raise ValueError("it has no vocabulary")  # transformers makes an empty one where there is no file
        return tokenizer
