"""The header of a GGUF file: its settings and the shapes and types of its tensors, read without a heavy import.

Refusals take no time. The package's own reader needs ten seconds for Gemma's vocabulary, and transformers needs torch.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Numbers of a fixed size, by the type that stands before them; 8 is a string, 9 an array.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PIECE = re.compile(r"-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
READ_BY = "pip install gguf"

# The model types of transformers, by the architectures of GGUF files whose conversion the tests compare.
MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}
SIZES = ("block_count", "embedding_length", "attention.head_count")


@dataclass(frozen=True)
class Header:
    """The description of a model in a GGUF ``file``.

    ``settings`` has the metadata; of a list of strings, such as a vocabulary, only the number is kept. ``tensors`` has
    the shape of each tensor, in the order of torch, the name of its type, such as "Q4_K", and its offset in the file.
    """

    file: Path
    settings: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str, int]]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    def own(self) -> dict[str, Any]:
        """The settings of the architecture, without the prefix of its name."""
        start = f"{self.architecture}."
        return {name.removeprefix(start): x for name, x in self.settings.items() if name.startswith(start)}


class Reader:
    """Reads one value after the other from the bytes of a file; raises struct.error where they end."""

    def __init__(self, held: mmap.mmap):
        self.held, self.at = held, len(MAGIC) + 4  # the version is read

    def numbers(self, kinds: str) -> tuple:
        found = struct.unpack_from(f"<{kinds}", self.held, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def text(self) -> str:
        return self.numbers(f"{self.numbers('Q')[0]}s")[0].decode("utf-8", "replace")

    def shape(self) -> tuple[int, ...]:
        (axes,) = self.numbers("I")
        if axes > 8:
            raise struct.error(f"a tensor of {axes} axes")
        return self.numbers(f"{axes}Q")[::-1]

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind])[0]
        kind, count = self.numbers("IQ")
        if kind != STRING:
            return list(self.numbers(f"{count}{NUMBERS[kind]}"))
        for _ in range(count):
            self.text()
        return count


def read_header(file: str | Path) -> Header:
    """The header of a GGUF ``file``.

    Raises ValueError, with words on what to do, unless the file is whole, in one piece, and holds a model of one of
    MODEL_TYPES.
    """
    file = Path(file)
    size = file.stat().st_size
    with file.open("rb") as opened:
        require_readable(file, opened.read(8))
        reader = Reader(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            count, settings_count = reader.numbers("QQ")
            settings = {reader.text(): reader.value() for _ in range(settings_count)}
            entries = [(reader.text(), reader.shape(), *reader.numbers("IQ")) for _ in range(count)]
        except (struct.error, KeyError, OverflowError) as cause:
            raise cut_off(file, "its header does not end") from cause
    types = {kind: readable(file, kind, [name for name, _, k, _ in entries if k == kind]) for *_, kind, _ in entries}
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cut_off(file, f"general.alignment is {alignment}")
    data = -(-reader.at // alignment) * alignment
    placed = {name: (shape, types[kind][0], data + offset) for name, shape, kind, offset in entries}
    header = Header(file, settings, placed)
    if unfit := next(flaws(header), ""):
        raise ValueError(f"a GGUF file must {unfit}")
    for name, shape, kind, offset in entries:
        _, block, width = types[kind]
        if data + offset + prod(shape) // block * width > size:
            raise cut_off(file, f"{name} ends behind its {size} bytes")
    return header


def readable(file: Path, kind: int, names: list[str]) -> tuple[str, int, int]:
    """The name of the type ``kind``, which the tensors ``names`` have, and the entries and bytes of one of its blocks.

    Raises ValueError without the package gguf, and for a type that gguf cannot read.
    """
    try:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as cause:
        raise ValueError(f"reading {file} needs the package gguf, which is not installed: {READ_BY}") from cause
    try:
        known = GGMLQuantizationType(kind)
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except (ValueError, NotImplementedError) as cause:
        called = known.name if isinstance(cause, NotImplementedError) else f"number {kind}"
        raise ValueError(
            f"tensors must have a type that the package gguf can read, but {', '.join(names[:3])} of {file} have the "
            f"type {called}: {READ_BY} --upgrade, or quantize the model to another type"
        ) from cause
    return known.name, *GGML_QUANT_SIZES[known]


def cut_off(file: Path, how: str) -> ValueError:
    return ValueError(f"a GGUF file must be whole, but {file} is cut off or damaged ({how}): copy or download it again")


def require_readable(file: Path, start: bytes) -> None:
    """Raises ValueError unless the bytes at the ``start`` are those of a GGUF file in this machine's byte order."""
    if start[:4] != MAGIC:
        raise ValueError(
            f"MODEL= and REFERENCE_MODEL= take a folder or a GGUF file, which begins with {MAGIC.decode()}, but {file} "
            f"begins with {start[:4]!r}: give the folder that holds the model, or a whole .gguf file"
        )
    version = int.from_bytes(start[4:], "little")
    if version not in VERSIONS and int.from_bytes(start[4:], "big") in VERSIONS:
        raise ValueError(
            f"a GGUF file must be little-endian, but {file} is big-endian: gguf-convert-endian {file} little"
        )
    if version not in VERSIONS:
        raise ValueError(
            f"a GGUF file must have version {' or '.join(map(str, VERSIONS))}, but {file} has version {version}: "
            "convert the model again"
        )


def flaws(header: Header) -> Iterator[str]:
    """The reasons why the GGUF file of ``header`` cannot be read: what it must do, what it does, and the mend.

    It must be one piece and hold a model, not a vocabulary, an adapter or the like. The conversion of its architecture
    must have been compared by a test.
    """
    file, settings, piece = header.file, header.settings, PIECE.search(header.file.name)
    if (pieces := settings.get("split.count", 0) or (int(piece[1]) if piece else 1)) > 1:
        how = "join them with `llama-gguf-split --merge FIRST-PIECE.gguf WHOLE.gguf`"
        yield f"be of one piece, but {file} is one of {pieces}: {how}"
    if (kind := settings.get("general.type", "model")) != "model":
        yield f"hold a model, but {file} holds what it calls {kind!r}: give the model's file"
    if not header.architecture:
        yield f"name its general.architecture, but {file} does not: convert the model again"
    if not header.tensors:
        yield f"hold weights, but {file} holds a vocabulary alone: give the model's file"
    if header.architecture not in MODEL_TYPES:
        got = f"{header.architecture!r} in {file}: give a folder with the original model in safetensors"
        yield f"be of one of the architectures {', '.join(MODEL_TYPES)}, got {got}"
    sizes = {name: header.own().get(name) for name in SIZES}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            rule = f"give a whole number for each of {', '.join(SIZES)}"
            yield f"{rule}, but {name} is {value} in {file}: convert the model again"
    if "token_embd.weight" not in header.tensors:
        yield f"hold token_embd.weight, but {file} does not: convert the model again"
