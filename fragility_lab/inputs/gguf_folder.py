"""A GGUF file as a Hugging Face folder in fp32, made once and kept in a cache."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from fragility_lab.inputs.gguf_config import ROPE_FACTORS, configuration
from fragility_lab.inputs.gguf_header import Header, read_header

SOURCES = [Path(__file__).with_name(name) for name in ("gguf_folder.py", "gguf_config.py", "gguf_header.py")]


def cache() -> Path:
    """The folder that keeps what GGUF files were converted to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fragility" / "gguf"


def converted(name: str, part: str) -> str:
    """The folder with a ``part`` of the model in the GGUF file ``name``: its "config", "weights" or "tokenizer".

    It is made if it is not there yet for this file, this code and these versions; other ones of the file are removed.
    Raises the errors of ``gguf_header.read_header`` and ``gguf_config.configuration``.
    """
    header = read_header(name)
    place = str(header.file.resolve())
    state = (
        place,
        header.file.stat().st_size,
        header.file.stat().st_mtime_ns,
        version("gguf"),
        version("transformers"),
    )
    sha = hashlib.sha256(repr(state).encode())
    for source in SOURCES:
        sha.update(source.read_bytes())
    family = f"{header.file.stem}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    folder = cache() / f"{family}-{sha.hexdigest()[:8]}"
    if not (folder / part).is_dir():
        for other in cache().glob(f"{family}-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        appear(
            folder / part, {"config": write_config, "weights": write_model, "tokenizer": write_tokenizer}[part], header
        )
    return str(folder / part)


def appear(folder: Path, write: Callable[[Header, Path], None], header: Header) -> None:
    """Have ``write`` fill ``folder``, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as made:
        inner = Path(made) / folder.name
        inner.mkdir()
        write(header, inner)
        try:
            inner.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise


def write_config(header: Header, folder: Path) -> None:
    configuration(header, lambda: rope_factors(header)).save_pretrained(folder)


def rope_factors(header: Header) -> np.ndarray:
    """The factors of frequencies in the file of ``header``, which are stored in fp32."""
    from gguf import GGUFReader

    return next(np.array(x.data) for x in GGUFReader(header.file).tensors if x.name == ROPE_FACTORS)


def write_model(header: Header, folder: Path) -> None:
    """Write the model that transformers reads from the file of ``header``, dequantized to fp32.

    Raises ValueError for tensors that it does not read.
    """
    config = configuration(header, lambda: rope_factors(header))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    require_all_read(header, model)
    print(f"converting {header.file} to fp32, once, in {cache()}", file=sys.stderr, flush=True)
    file = header.file.resolve()
    with patch("transformers.modeling_gguf_pytorch_utils.tqdm", partial(tqdm, disable=True)):
        loaded = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, config=config, dtype=torch.float32
        )
    state = {name: x.contiguous() for name, x in loaded.state_dict().items()}
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def require_all_read(header: Header, model: torch.nn.Module) -> None:
    """Raises ValueError for tensors in the file of ``header`` that are none of ``model``."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    known = {*get_gguf_hf_weights_map(model, processor), ROPE_FACTORS}
    if extra := sorted(header.tensors.keys() - known):
        raise ValueError(
            f"all tensors of a GGUF file must be read, but nothing reads {', '.join(extra[:5])} of {header.file} "
            f"({header.architecture}): give a folder with the original model in safetensors"
        )


def write_tokenizer(header: Header, folder: Path) -> None:
    place = header.file.resolve()
    AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name).save_pretrained(folder)
