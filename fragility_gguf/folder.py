"""A GGUF file as a Hugging Face folder in fp32, made once and kept in a cache."""

import glob
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from fragility_gguf.configuration import ROPE_FACTORS, configuration
from fragility_gguf.header import Header, read_header

# How tokenizers of bytes split text, by llama.cpp's names: into GPT-2's words, and those that split each digit as well.
# transformers knows others, and takes GPT-2's words for all that it does not know.
WORDS = ("gpt-2", "phi-2", "olmo", "mpt", "jais")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
DAY = 24 * 3600  # seconds
SOURCES = sorted(Path(__file__).parent.glob("*.py"))
Check = Callable[[Any, str, dict], object]  # of a model, the name of its file, and the report of loading it


def cache() -> Path:
    """The folder that keeps converted GGUF files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fragility" / "gguf"


def converted(file: str | Path, part: str, check: Check) -> str:
    """The folder with a ``part`` of the model in the GGUF ``file``: its "config", "weights" or "tokenizer".

    The folder is made if there is none for this file, this code and these versions; it appears whole or not at all.
    Older folders of the file are removed then, unless somebody has used them within a day. ``check`` raises for
    weights that are not those of the model. Raises its errors, and those of ``read_header``, ``configuration`` and
    ``write_model``.
    """
    header = read_header(file)
    place, stat = str(header.file.resolve()), header.file.stat()
    state = (place, stat.st_size, stat.st_mtime_ns, version("gguf"), version("transformers"))
    sha = hashlib.sha256(repr(state).encode())
    for source in SOURCES:
        sha.update(source.read_bytes())
    family = f"{header.file.stem}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    folder = cache() / f"{family}-{sha.hexdigest()[:8]}"
    if not (folder / part).is_dir():
        for other in cache().glob(f"{glob.escape(family)}-*"):
            with suppress(FileNotFoundError):  # another process has removed it
                if time.time() - other.stat().st_mtime > DAY:
                    shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as made:
            (inner := Path(made) / part).mkdir()
            written: dict[str, Callable[[Header, Path], None]] = {
                "config": write_config, "tokenizer": write_tokenizer, "weights": partial(write_model, check),
            }  # fmt: skip
            written[part](header, inner)
            try:
                inner.rename(folder / part)
            except OSError:
                if not (folder / part).is_dir():  # another process was faster
                    raise
    os.utime(folder)  # somebody uses it
    return str(folder / part)


def write_config(header: Header, folder: Path) -> None:
    """Write the configuration that the file of ``header`` describes."""
    configuration(header).save_pretrained(folder)


def write_model(check: Check, header: Header, folder: Path) -> None:
    """Write the model that transformers reads from the file of ``header``, dequantized to fp32.

    Raises ValueError for tensors that transformers does not read, OSError if the disk has no room, and what ``check``
    does.
    """
    config = configuration(header)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    require_all_read(header, model)
    needed, free = sum(p.nbytes for p in model.parameters()), shutil.disk_usage(cache()).free
    if free < needed:
        raise OSError(
            f"{header.file} takes {needed / 1e9:.1f} GB in fp32, but {cache()} has {free / 1e9:.1f} GB left: free "
            "some, or set XDG_CACHE_HOME to a folder on another disk"
        )
    print(f"converting {header.file} to fp32, once, in {cache()}", file=sys.stderr, flush=True)
    file = header.file.absolute()
    with patch("transformers.modeling_gguf_pytorch_utils.tqdm", partial(tqdm, disable=True)):
        both: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, config=config, dtype=torch.float32,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    loaded, info = both
    check(loaded, str(header.file), info)
    state = {name: x.contiguous() for name, x in loaded.state_dict().items()}
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def require_all_read(header: Header, model: Any) -> None:
    """Raises ValueError for tensors in the file of ``header`` that ``model`` does not have."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    known = {*get_gguf_hf_weights_map(model, processor), ROPE_FACTORS}
    if extra := [name for name in sorted(header.tensors) if not {name, name.removesuffix(".weight")} & known]:
        raise ValueError(
            f"all tensors of a GGUF file must be read, but nothing reads {', '.join(extra[:5])} of {header.file} "
            f"({header.architecture}): give a folder with the original model in safetensors"
        )


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write the tokenizer in the file of ``header``. Raises ValueError for a way to split text that is not known."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    place, settings = header.file.absolute(), header.settings
    kind, split = (settings.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    prefix = settings.get("tokenizer.ggml.add_space_prefix", True) or header.architecture.startswith("gemma")
    bytes_known = kind == "gpt2" and (split in GGUF_PRE_TOKENIZER_SPLITS or split in (*WORDS, *DIGITS))
    if not (bytes_known or (kind == "llama" and prefix)):
        raise ValueError(
            f"text must be split as the tokenizer of {header.file} does, but transformers does not know how, got "
            f"{kind!r} with {split!r}{'' if prefix else ' and no space in front'}: give a folder, or the original as "
            "REFERENCE_MODEL=, whose tokenizer is taken"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name)
    if split in DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each_digit, byte_level])
    tokenizer.save_pretrained(folder)
