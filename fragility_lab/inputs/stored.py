"""The files of a model, checked without an import of PyTorch: settings, and the tensors in safetensors files."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fragility_gguf.header import read_header
from fragility_lab.inputs.names import Wanted, local, shortened

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
NUMBERS = ("F64", "F32", "F16", "BF16")  # the dtypes that need no scale
# Buffers beside the weights: those of older versions of transformers, and the experts by token of DeepSeek V4.
BUFFERS = re.compile(
    r"(.*\.)?((attn|attention|self_attn)\.(masked_)?bias|.*inv_freq|position_ids|causal_mask|num_batches_tracked|tid2eid)"
)
# Tensors by which a library says what stored numbers mean.
SCALES = re.compile(
    r".*[._](scales?_inv|scale_2|zero_points?|qweight|qzeros|g_idx|packed|weight_shape|SCB|absmax|quant_map|quant_state.*)"
    r"|.*\.((weight|w|input|output|activation|act|k|v|q|kv)_scales?|scales|zeros)"
)
# How transformers gives the weights of a quantized checkpoint as numbers, by its ``quant_method``.
AS_NUMBERS = "from_pretrained(..., quantization_config={}(dequantize=True)) and save_pretrained"
DEQUANTIZED = {
    "compressed-tensors": AS_NUMBERS.format("CompressedTensorsConfig"),
    "fp8": AS_NUMBERS.format("FineGrainedFP8Config"),
    "mxfp4": AS_NUMBERS.format("Mxfp4Config"),
    "bitsandbytes": "from_pretrained(...).dequantize() and save_pretrained",
}
ADAPTER = "adapter_model.*"  # of the library peft
MERGED = "merge it into its model first (peft: PeftModel.from_pretrained(...).merge_and_unload() and save_pretrained)"
BLOCKS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
POSITIVE = (*BLOCKS, "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "vocab_size")
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "n_inner", "d_ff", "ffn_dim")
SIZE = re.compile(r"(num|n)_\w+|\w+_(size|dim|heads|layers|experts)")
MOST_BLOCKS, MOST = 2**14, 2**28  # more than any model has; far less than makes numbers overflow


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a safetensors file, the dtype by the file's own name: "BF16", "F8_E4M3"."""

    shape: tuple[int, ...]
    dtype: str


def require_readable(name: str) -> None:
    """Check everything about the model ``name`` that can be known without a heavy import.

    Raises OSError and ValueError, which say how to go on. Files of a hub are checked once they are here.
    """
    place = local(name)
    if place and place.is_file():
        read_header(place)
    elif place:
        require_numbers(place, name)


def sha256(file: Path) -> str:
    """The SHA-256 of ``file`` in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def require_described(folder: Path, name: str) -> dict[str, Any]:
    """The entries of config.json in ``folder``, if its sizes exist, and if it describes weights that are numbers.

    Raises ValueError otherwise, and OSError if it cannot be read.
    """
    file = folder / "config.json"
    with Wanted("model", name, OSError, ValueError, RecursionError):
        if not file.is_file():
            named = [f", but {path.name}: name that file itself" for path in sorted(folder.glob("*.gguf"))]
            named += [f", but {path.name}: {MERGED}" for path in sorted(folder.glob(ADAPTER))]
            raise FileNotFoundError(f"there is no config.json{(named or [''])[0]}")
        if adapters := sorted(folder.glob(ADAPTER)):
            raise ValueError(
                f"nothing reads the adapter {adapters[0].name} beside the model: {MERGED}, or take it away"
            )
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"config.json must hold entries, got a {type(settings).__name__}")
    for key in ("quantization_config", "compression_config"):
        inner = settings.get("text_config")
        if not (found := settings.get(key) or (inner.get(key) if isinstance(inner, dict) else None)):
            continue
        method = str(found.get("quant_method", "a library")) if isinstance(found, dict) else "a library"
        how = DEQUANTIZED.get(method, "save them with the library that quantized them")
        raise ValueError(
            f"weights must be stored as numbers, but {name!r} is quantized by {method}: give a folder with its "
            f"dequantized weights ({how})"
        )
    for key, value in entries(settings):
        if wrong := wrong_value(key, value):
            raise ValueError(f"{key} must be {wrong}, but the configuration of {name!r} says {value}: correct it")
    return settings


def entries(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All numbers among ``settings``, and in dictionaries inside, by their names."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from entries(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def wrong_value(key: str, value: float) -> str | None:
    """The rule for the setting ``key`` that its ``value`` breaks, in words; empty if a model can have the value."""
    if key.endswith(("eps", "epsilon")):
        return None if math.isfinite(value) and value >= 0 else "a finite number, at least 0"
    if key == "rope_theta":
        return None if math.isfinite(value) and value > 0 else "a finite number above 0"
    if not math.isfinite(value):
        return "finite"
    if isinstance(value, float):
        return None  # the library refuses numbers that are not whole
    least = 1 if key in (*POSITIVE, *LENGTHS) else 0 if SIZE.fullmatch(key) else None
    if least is not None and value < least:
        return f"at least {least}"
    most = MOST_BLOCKS if key in BLOCKS else MOST if key in (*POSITIVE, *LENGTHS) or SIZE.fullmatch(key) else None
    return f"at most {most}" if most is not None and value > most and "step" not in key else None


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of the model ``name`` in ``folder``, as transformers chooses them.

    Raises OSError if there are none, and for an index of files that are not in the folder.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    with Wanted("model", name, OSError, ValueError):
        if not (folder / INDEX).is_file():
            pickles = sorted(path.name for path in folder.glob("*.bin"))
            beside = f" beside {pickles[0]}, a pickle, which may run code" if pickles else ""
            raise FileNotFoundError(f"there is no {WHOLE} and no {INDEX}{beside}")
        try:
            files = {*json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
            outside = [file for file in files if Path(file).name != file]
        except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as cause:
            raise ValueError(f"{INDEX} has no map of weights") from cause
        if outside:
            raise ValueError(f"{INDEX} must name files of the folder, got {shortened(outside[0])}")
        if absent := [file for file in sorted(files) if not (folder / file).is_file()]:
            raise FileNotFoundError(f"{INDEX} names {absent[0]}, which is not there")
        return [folder / file for file in sorted(files)]


def tensors(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors ``file``, from its header. Raises ValueError unless the file is whole."""
    size, again = file.stat().st_size, "copy or download it again"
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{file.name} must begin with its header, but its {size} bytes do not: {again}")
        try:
            header = json.loads(opened.read(length))
            found = {key: x for key, x in header.items() if key != "__metadata__"}
            ends = max((x["data_offsets"][1] for x in found.values()), default=0)
            stored = {key: Stored(tuple(map(int, x["shape"])), str(x["dtype"])) for key, x in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as cause:
            raise ValueError(f"{file.name} must begin with its header, but that is damaged: {again}") from cause
    if 8 + length + ends != size:
        raise ValueError(f"{file.name} must have {8 + length + ends} bytes, as its header says, got {size}: {again}")
    return stored


def stored_tensors(folder: Path, name: str) -> dict[str, Stored]:
    """All tensors in the files of the model ``name`` in ``folder``; raises OSError if a file is not whole."""
    with Wanted("model", name, ValueError):
        return {key: x for file in weight_files(folder, name) for key, x in tensors(file).items()}


def require_numbers(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of the model ``name`` in ``folder``, if their numbers are its weights.

    Raises the errors of ``require_described``, and OSError if files are not whole. Raises ValueError for numbers that a
    scale would have to multiply, for such scales, and for a configuration with more blocks than there are tensors.
    """
    settings, found = require_described(folder, name), stored_tensors(folder, name)
    packed = {key: x.dtype for key, x in found.items() if x.dtype not in NUMBERS and not BUFFERS.fullmatch(key)}
    if packed:
        key, dtype = next(iter(packed.items()))
        raise ValueError(
            f"weights must be stored in {', '.join(NUMBERS)}, but {name!r} has {key} in {dtype}{others(packed)}, and "
            "no quantization_config that says by which scales: give a folder with the dequantized weights"
        )
    if scales := [key for key in found if SCALES.fullmatch(key)]:
        raise ValueError(
            f"all tensors of a model must be read, but nothing reads {scales[0]} of {name!r}{others(scales)}, which "
            "scales or packs weights: give a folder with the dequantized weights"
        )
    blocks = [(key, x) for key, x in entries(settings) if key in BLOCKS and x > len(found)]
    if blocks:
        raise ValueError(
            f"{blocks[0][0]} must be at most the number of tensors, but the configuration of {name!r} says "
            f"{blocks[0][1]} and its files hold {len(found)}: take the configuration that was saved with them"
        )
    return found


def others(more: dict | list) -> str:
    return f" and {len(more) - 1} others" if len(more) > 1 else ""


def require_described_weights(model: Any, name: str, info: dict) -> None:
    """Raises OSError if the checkpoint's weights are not those of ``model``; ``info`` is the report of loading it."""

    def some(entries: list[str]) -> str:
        return f"{', '.join(entries[:5])}{' and others' if len(entries) > 5 else ''}"

    if shapes := [
        f"{key} {tuple(given)} for {tuple(wanted)}" for key, given, wanted in sorted(info["mismatched_keys"])
    ]:
        raise OSError(
            f"weights must have the shapes that the configuration says, but {name!r} has {some(shapes)}: take the "
            "configuration that was saved with them"
        )
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"a checkpoint must hold all weights of its model, but {name!r} lacks {some(missing)}, which would be "
            "drawn at random: save the whole model"
        )
    if extra := unread(model, info["unexpected_keys"]):
        raise OSError(
            f"all weights of a checkpoint must be read, but the model that the configuration of {name!r} describes "
            f"leaves out {some(extra)}: take the configuration that was saved with them"
        )


def unread(model: Any, names: Iterable[str]) -> list[str]:
    """The tensors among ``names`` that lie within a part of ``model``, such as a block, but do not belong to the model.

    Tensors beside these parts, such as the head of a model that is loaded without one, do not count.
    """
    modules, prefix = {path for path, _ in model.named_modules()}, model.base_model_prefix
    outer = {"", prefix}

    def inside(name: str) -> bool:
        paths = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        around = (".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 1))
        return any(module in modules - outer for module in around)

    return sorted(name for name in names if inside(name) and not BUFFERS.fullmatch(name))


def stored_as(place: Path, name: str) -> str:
    """The dtypes of the model ``name`` at ``place``, those of most numbers first: "BF16", "Q4_K, Q6_K and F32"."""
    count: Counter[str] = Counter()
    if place.is_file():
        for shape, dtype, _ in read_header(place).tensors.values():
            count[dtype] += prod(shape)
    else:
        for key, x in stored_tensors(place, name).items():
            count[x.dtype] += 0 if BUFFERS.fullmatch(key) else prod(x.shape)
    *most, last = [dtype for dtype, numbers in count.most_common() if numbers] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last
