"""Blocks of GGUF's types as bytes: what our grids store, in the layout of ggml's structures (``ggml-common.h``)."""

import numpy as np
import torch

from fragility_quantization.ggml import GgmlType
from fragility_quantization.ggml_blocks import IQ4_VALUES

LOWEST = {"q4_0": -8, "q5_0": -16, "q3_k": -4, "q6_k": -32}  # the number that is stored as zero


def fp16(x: torch.Tensor) -> np.ndarray:
    """Scales (1, n) or (n,) as two bytes a block (n, 2)."""
    return x.reshape(-1).half().numpy()[:, None].view(np.uint8)


def levels(kind: GgmlType, x: torch.Tensor) -> tuple[np.ndarray, dict]:
    """The stored numbers (n, size) of ``x``, whole blocks, as integers from zero, and the parts of the grid."""
    values = kind.in_blocks(x)
    grid = kind.grid(values)
    numbers = grid.numbers(values).permute(2, 1, 0).reshape(-1, kind.size)
    if kind.name == "iq4_nl":
        return np.searchsorted(IQ4_VALUES, numbers.numpy()).astype(np.uint8), dict(grid.parts)
    return (numbers.numpy() - LOWEST.get(kind.name, 0)).astype(np.int16), dict(grid.parts)


def nibbles(q: np.ndarray, width: int) -> np.ndarray:
    """Low four bits of ``q`` (n, m): a byte has one number of each half of a run of 2 ``width`` numbers."""
    runs = (q & 15).reshape(len(q), -1, 2, width)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(len(q), -1).astype(np.uint8)


def pairs(q: np.ndarray) -> np.ndarray:
    """Two bits of each number of ``q`` (n, 256), four numbers at a distance of 32 in a byte."""
    runs = (q & 3).reshape(len(q), 2, 4, 32)
    return sum(runs[:, :, i] << 2 * i for i in range(4)).reshape(len(q), -1).astype(np.uint8)


def bits_of_blocks(q: np.ndarray) -> np.ndarray:
    """The fifth bit of 32 numbers a block, as four bytes."""
    return np.packbits((q >> 4 & 1).astype(np.uint8), axis=1, bitorder="little")


def six_bits(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight scales and eight lowest values of six bits (n, 8) in twelve bytes, as Q4_K and Q5_K have them."""
    first = [scales[:, :4] | scales[:, 4:] >> 4 << 6, mins[:, :4] | mins[:, 4:] >> 4 << 6]
    return np.concatenate([*first, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4], 1).astype(np.uint8)


def packed(kind: GgmlType, x: torch.Tensor) -> np.ndarray:
    """The bytes of each block of ``x`` (..., m blocks): (n, bytes)."""
    q, parts = levels(kind, x)
    d = fp16(parts["d"])
    small = {name: parts[name].T.numpy().astype(np.int16) for name in ("scales", "mins") if name in parts}
    match kind.name:
        case "q8_0":
            return np.concatenate([d, q.astype(np.int8).view(np.uint8)], 1)
        case "q4_0" | "iq4_nl":
            return np.concatenate([d, nibbles(q, 16)], 1)
        case "q4_1":
            return np.concatenate([d, fp16(parts["m"]), nibbles(q, 16)], 1)
        case "q5_0":
            return np.concatenate([d, bits_of_blocks(q), nibbles(q, 16)], 1)
        case "q5_1":
            return np.concatenate([d, fp16(parts["m"]), bits_of_blocks(q), nibbles(q, 16)], 1)
        case "q2_k":
            scales = (small["scales"] | small["mins"] << 4).astype(np.uint8)
            return np.concatenate([scales, pairs(q), d, fp16(parts["dmin"])], 1)
        case "q3_k":
            mask = np.packbits((q > 3).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
            s = small["scales"] + 32
            low = s[:, :8] & 15 | (s[:, 8:] & 15) << 4
            high = sum(s[:, 4 * i : 4 * i + 4] >> 4 << 2 * i for i in range(4))
            return np.concatenate([mask, pairs(q), low.astype(np.uint8), high.astype(np.uint8), d], 1)
        case "q4_k" | "q5_k":
            head = [d, fp16(parts["dmin"]), six_bits(small["scales"], small["mins"])]
            high = np.packbits((q >> 4 & 1).astype(np.uint8).reshape(-1, 8, 32), axis=1, bitorder="little")
            middle = [high.reshape(-1, 32)] if kind.name == "q5_k" else []
            return np.concatenate([*head, *middle, nibbles(q, 32)], 1)
        case "q6_k":
            scales = small["scales"].astype(np.int8).view(np.uint8)
            return np.concatenate([nibbles(q, 64), pairs(q >> 4), scales, d], 1)
    raise ValueError(f"no layout for {kind.name}")
