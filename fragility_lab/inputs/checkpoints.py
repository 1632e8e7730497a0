"""Load models and tokenizers by hub name or local path, or an embedded checkpoint."""

import json
import os
import re
import reprlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import datasets
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from fragility_lab.inputs import hub
from fragility_lab.inputs.described import require_described_weights
from fragility_lab.inputs.gguf_folder import converted
from fragility_lab.paths import CHECKPOINTS

EMBEDDED = "embedded"  # the default; "embedded-llama" is another family, with the same tokenizer and text
SPREAD = "auto"  # the ``device_map`` of transformers that gives all GPUs about equal parts of a model
# How transformers gives the weights of a quantized checkpoint as numbers, by its ``quant_method``.
AS_NUMBERS = "from_pretrained(..., quantization_config={}(dequantize=True)) and save_pretrained"
DEQUANTIZED = {
    "compressed-tensors": AS_NUMBERS.format("CompressedTensorsConfig"),
    "fp8": AS_NUMBERS.format("FineGrainedFP8Config"),
    "mxfp4": AS_NUMBERS.format("Mxfp4Config"),
    "bitsandbytes": "from_pretrained(...).dequantize() and save_pretrained",
}
NEEDED = {
    "model": "a local copy of a decoder saved as safetensors (save_pretrained)",
    "tokenizer": "a folder that holds the model's tokenizer too (tokenizer.save_pretrained)",
    "text": "a local copy",
}


def shortened(text: str) -> str:
    """``text`` in quotes, without its middle where it is long."""
    brief = reprlib.Repr()
    brief.maxstring = 120
    return brief.repr(text)


def located(name: str, kind: str = "model", weights: bool = False) -> str:
    """The folder of the model ``name``: an embedded checkpoint's, ``name`` itself, or one in the cache of the hub.

    Without ``weights``, those of a hub's model need not be there. Raises OSError, which says how to go on, where there
    is no such model.
    """
    known = embedded_checkpoints()
    if name in known:
        return str(CHECKPOINTS / name)
    if os.path.isfile(name):
        return from_gguf(name, kind, weights)
    if os.path.exists(name):
        return name
    if name.startswith(EMBEDDED) or named_as_path(name) or named_as_file(name):
        cause = FileNotFoundError(
            f"there is no such folder or file, and the embedded checkpoints are {', '.join(known)}"
        )
        raise not_found(kind, name, "MODEL", cause)
    try:
        return hub.snapshot(name, weights)
    except hub.HubError as cause:
        raise not_found(kind, name, "MODEL", cause) from cause


def from_gguf(name: str, kind: str, weights: bool) -> str:
    """The folder to which the GGUF file ``name`` is converted. Raises ValueError or OSError for one that cannot be."""
    try:
        with quiet_loading():
            return converted(name, "tokenizer" if kind == "tokenizer" else "weights" if weights else "config")
    except (ValueError, OSError):
        raise
    except Exception as cause:  # as below
        raise not_found(kind, name, "MODEL", cause) from cause


def named_as_path(name: str) -> bool:
    """Whether ``name`` cannot be that of a hub's repository, "name" or "owner/name"."""
    return re.fullmatch(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?", name) is None or len(name) > 96


def named_as_file(name: str) -> bool:
    """Whether ``name`` is that of a GGUF file, which may not be there."""
    return name.lower().endswith(".gguf")


def embedded_checkpoints() -> list[str]:
    """The names of the checkpoints that ship with the project."""
    return sorted(folder.name for folder in CHECKPOINTS.iterdir())


def not_found(kind: str, name: str, variable: str, cause: Exception) -> OSError:
    """One message for all errors that the hub libraries raise when they cannot find or reach something."""
    local = os.path.exists(name) or name.startswith(EMBEDDED) or named_as_path(name) or named_as_file(name)
    where = "the folder" if local else "the model hub and this machine's cache"
    words = " ".join(str(cause).split()) or "no message"
    reason = words if isinstance(cause, hub.HubError) else f"{type(cause).__name__}: {words}"
    return OSError(
        f"cannot load the {kind} {shortened(name)} from {where} ({reason}). "
        f"Point {variable}= at {NEEDED[kind]} ({variable}=path/to/copy after `make reproduce` or `make diagnose`), "
        f"or leave {variable} unset: both then run on the embedded default, without a network."
    )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars while loading or saving takes its seconds: they would stay in the notebook.

    No reports of transformers either: what matters in them is raised as an error.
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
    """The name "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_config(name: str) -> PreTrainedConfig:
    """The model's configuration.

    Raises OSError, which says how to go on, where there is none, and ValueError where weights are quantized or a size
    is below 1.
    """
    folder = located(name)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as cause:  # a damaged file makes the library raise a dozen unrelated types
        raise not_found("model", name, "MODEL", cause) from cause
    if quantization := getattr(config, "quantization_config", None):
        method = dict(quantization).get("quant_method", "a library") if isinstance(quantization, dict) else "a library"
        how = DEQUANTIZED.get(str(method), "save them with the library that quantized them")
        raise ValueError(
            f"weights must be stored as numbers, but {name!r} is quantized by {method}: give a folder with its "
            f"dequantized weights ({how})"
        )
    for size in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        value = getattr(config.get_text_config(), size, None)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{size} must be at least 1, but the configuration of {name!r} says {value}: correct it")
    return config


def load_model(name: str, device: str | dict | None = None, auto_class: type = AutoModel) -> PreTrainedModel:
    """The fp32 model ``name`` in eval mode, from safetensors only and never with remote code.

    ``device`` is the default one unless given; SPREAD puts parts on all GPUs, as does a ``device_map`` of transformers.
    Raises OSError, which says how to go on, where the model is not found, or where its weights are not those that its
    configuration describes. Raises ValueError for weights that are not finite, and where torch may multiply fp32
    matrices in TF32 or bf16.
    """
    require_exact_products()
    folder, spread = located(name, weights=True), device == SPREAD or isinstance(device, dict)
    require_own_files(folder)
    try:
        with quiet_loading():
            model, info = auto_class.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                ignore_mismatched_sizes=True, output_loading_info=True, device_map=device if spread else None,
            )  # fmt: skip
    except Exception as cause:  # as above
        raise not_found("model", name, "MODEL", cause) from cause
    require_described_weights(model, name, info)
    if broken := [path for path, p in model.named_parameters() if not p.isfinite().all()]:
        raise ValueError(f"weights must be finite in fp32, but those of {name!r} are not in {', '.join(broken[:5])}")
    model.eval().requires_grad_(False)
    return model if spread else model.to(device or default_device())


def require_exact_products() -> None:
    """Raises ValueError where torch may multiply fp32 matrices in TF32 or bf16: the reference itself would drift."""
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        raise ValueError(
            f'fp32 matrix products must be exact to fp32, but torch is set to "{precision}" precision: call '
            'torch.set_float32_matmul_precision("highest"), or unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
        )


def require_own_files(folder: str) -> None:
    """Raises OSError for a ``folder`` whose index of weights names no files, or files outside of it."""
    for path in Path(folder).glob("*.index.json") if os.path.isdir(folder) else ():
        try:
            files = json.loads(path.read_text())["weight_map"].values()
            outside = [file for file in files if Path(file).name != file]
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise not_found("model", folder, "MODEL", ValueError(f"{path.name} has no map of weights")) from cause
        if outside:
            cause = ValueError(f"{path.name} must name files of the folder, got {shortened(outside[0])}")
            raise not_found("model", folder, "MODEL", cause)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that belongs to the model ``name``."""
    folder = located(name, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens} - tokenizer.get_added_vocab().keys():
            raise ValueError("it has no vocabulary")  # transformers makes an empty one where there is no file
        return tokenizer
    except Exception as cause:  # as above
        raise not_found("tokenizer", name, "MODEL", cause) from cause
