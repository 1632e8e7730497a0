"""Load models and tokenizers by hub name or local path, or an embedded checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import datasets
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from fragility_lab.paths import CHECKPOINTS

EMBEDDED = "embedded"  # the default; "embedded-llama" is another family, with the same tokenizer and text
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


def resolve(name: str) -> str:
    """The folder or hub name that ``name`` stands for: the folder of an embedded checkpoint, or ``name`` itself."""
    return str(CHECKPOINTS / name) if name in embedded_checkpoints() else name


def embedded_checkpoints() -> list[str]:
    """The names of the checkpoints that ship with the project."""
    return sorted(folder.name for folder in CHECKPOINTS.iterdir())


def not_found(kind: str, name: str, variable: str, cause: Exception) -> OSError:
    """One message for all errors that the hub libraries raise when they cannot find or reach something."""
    where = "the folder" if Path(name).exists() else "the model hub and this machine's cache"
    reason = (str(cause).splitlines() or ["no message"])[0]
    return OSError(
        f"cannot load the {kind} {name!r} from {where} ({type(cause).__name__}: {reason}). "
        f"Point {variable}= at {NEEDED[kind]} ({variable}=path/to/copy after `make reproduce` or `make diagnose`), "
        f"or leave {variable} unset: both then run on the embedded default, without a network."
    )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars while loading or saving takes its seconds: they would stay in the notebook."""
    with ExitStack() as stack:
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


def load_config(name: str):
    """The model's configuration.

    Raises OSError, which says how to go on, where there is none, and ValueError where weights are quantized.
    """
    try:
        config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
    except (OSError, ValueError) as cause:
        raise not_found("model", name, "MODEL", cause) from cause
    if quantization := getattr(config, "quantization_config", None):
        method = dict(quantization).get("quant_method", "a library") if isinstance(quantization, dict) else "a library"
        how = DEQUANTIZED.get(str(method), "save them with the library that quantized them")
        raise ValueError(
            f"weights must be stored as numbers, but {name!r} is quantized by {method}: give a folder with its "
            f"dequantized weights ({how})"
        )
    return config


def load_model(name: str, device: str | None = None, auto_class: type = AutoModel) -> PreTrainedModel:
    """The fp32 model ``name`` in eval mode, from safetensors only and never with remote code.

    Raises OSError, which says how to go on, where the model is not found or lacks weights. Raises ValueError for
    weights that are not finite, and where torch may multiply fp32 matrices in TF32 or bf16.
    """
    if (precision := torch.get_float32_matmul_precision()) != "highest":  # the reference itself would drift
        raise ValueError(
            f'fp32 matrix products must be exact to fp32, but torch is set to "{precision}" precision: call '
            'torch.set_float32_matmul_precision("highest"), or unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
        )
    try:
        with quiet_loading():
            model, info = auto_class.from_pretrained(
                resolve(name), dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as cause:  # weights of other shapes, among others
        raise not_found("model", name, "MODEL", cause) from cause
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"a checkpoint must hold all weights of its model, but {name!r} lacks {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''}, which would be drawn at random: save the whole model"
        )
    if broken := [path for path, p in model.named_parameters() if not p.isfinite().all()]:
        raise ValueError(f"weights must be finite in fp32, but those of {name!r} are not in {', '.join(broken[:5])}")
    return model.eval().requires_grad_(False).to(device or default_device())


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model ``name``."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=False)
        if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens} - tokenizer.get_added_vocab().keys():
            raise ValueError("it has no vocabulary")  # transformers makes an empty one where there is no file
        return tokenizer
    except (OSError, ValueError) as cause:
        raise not_found("tokenizer", name, "MODEL", cause) from cause
