"""The types of tensors in GGUF files as number formats, by the names that ggml gives them.

A weight of a type is multiplied by inputs that llama.cpp rounds as well: its CPU kernels store them in Q8_0, or in Q8_K
beside K quants (``inputs_beside``). Q8_1, which stands beside Q4_1 and Q5_1, has the numbers of Q8_0. Not emulated: the
sum of a block of Q8_1, which is stored in fp16 and multiplied by the block's lowest value; and the CPU's own way to
break ties in Q8_0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fragility_numerics.formats import FORMATS, NumberFormat
from fragility_quantization import ggml_blocks as blocks
from fragility_quantization import ggml_k as k_quants
from fragility_quantization.ggml_blocks import Grid
from fragility_quantization.schemes import is_measured

CHUNK = 2**18  # entries at once
LEAST = 1e-30  # far below what any fp16 scale makes of a block; a range below has no inverse in fp32


@dataclass(frozen=True)
class GgmlType:
    """A type of ggml: blocks of ``size`` neighbours in a row, in groups of ``group``, take ``bits`` an entry.

    ``significant`` counts the bits of an entry without its share of the scales. Rows whose length is no multiple of the
    block have the type ``of_width``, as llama.cpp falls back.
    """

    name: str
    bits: float
    size: int
    group: int
    significant: int

    # What a kernel's arithmetic asks of its format:

    elementwise = False  # the rounding of an entry depends on others
    is_storage_only = True
    storage = None
    largest = torch.inf  # scales make every number fit, up to fp16's largest as a scale
    compute_dtype = torch.float32

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of its integers, with a sign."""
        return 2.0 ** (1 - self.significant)

    @property
    def spacing(self) -> float:
        """Twice the unit roundoff."""
        return 2 * self.unit_roundoff

    @property
    def scale_bits(self) -> float:
        """Bits of the scales and lowest values of a block."""
        return (self.bits - self.significant) * self.size

    def exact_in(self, dtype: torch.dtype) -> bool:
        """True if ``dtype`` holds every number of the type."""
        return dtype == torch.float32

    def of_width(self, width: int) -> NumberFormat:
        """The type that llama.cpp gives rows of ``width`` entries instead, or this one."""
        if width % self.size == 0:
            return self
        other = TYPES.get(FALLBACK.get(self.name, ""))
        return FORMATS["fp16"] if other is None else other.of_width(width)

    def round(self, x: Tensor, generator: torch.Generator | None = None, copies: int = 1) -> Tensor:
        """``x`` rounded to the type, in the dtype of ``x``: each row along the last dimension.

        ``generator`` and ``copies`` are those of ``Format.round``: integers under the same scales are then drawn. ±inf,
        NaN and the lowest numbers, by which models mask, stay as they are, and have no part in scales.
        """
        other = self.of_width(x.shape[-1])
        if other is not self:
            return other.round(x, generator, copies).to(x.dtype)
        noise = None
        if generator is not None:
            shape = (x.shape[0] // copies, *x.shape[1:])
            drawn = torch.rand(shape, generator=generator, device=generator.device).to(x.device)
            noise = drawn.sub_(0.5).repeat(copies, *[1] * (x.ndim - 1))

        def read(grid: Grid, values: Tensor, noise: Tensor | None) -> Tensor:
            numbers = grid.numbers(values)
            if noise is not None:
                numbers = grid.numbers(values + noise * grid.spacing(numbers))
            return grid.read(numbers)

        exact = x.float()
        measured = is_measured(exact)
        found = self._by_blocks(read, torch.where(measured, exact, 0.0), noise)
        return torch.where(measured, found, exact).to(x.dtype)

    def ulp(self, x: Tensor) -> Tensor:
        """The distance between the numbers around fp32 ``x``, which may have been rounded before."""
        other = self.of_width(x.shape[-1])
        if other is not self:
            return other.ulp(x)
        return self._by_blocks(lambda grid, values, _: grid.spacing(grid.numbers(values)), x)

    def grid(self, x: Tensor) -> Grid:
        """The numbers that blocks of fp32 ``x`` (group, groups in a block, blocks) can store."""
        return GRIDS[self.name](x)

    def in_blocks(self, x: Tensor) -> Tensor:
        """``x``, whole blocks, as (group, groups in a block, blocks)."""
        return x.reshape(-1, self.size // self.group, self.group).permute(2, 1, 0).contiguous()

    def _by_blocks(self, make: Callable[..., Tensor], x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The results of ``make`` for the grid, the values and the ``noise`` of blocks, in the shape of ``x``."""
        found = []
        rows = x.reshape(-1, self.size)
        drawn = None if noise is None else noise.reshape(-1, self.size)
        for start in range(0, len(rows), CHUNK // self.size):
            part = slice(start, start + CHUNK // self.size)
            values = self.in_blocks(rows[part])
            values = torch.where(values.abs() < LEAST, 0.0, values)
            made = make(self.grid(values), values, None if drawn is None else self.in_blocks(drawn[part]))
            found.append(made.permute(2, 1, 0).reshape(-1, self.size))
        return torch.cat(found).reshape(x.shape) if found else torch.zeros_like(x)


TYPES: dict[str, GgmlType] = {
    t.name: t
    for t in (
        GgmlType("q2_k", 2.625, 256, 16, 2), GgmlType("q3_k", 3.4375, 256, 16, 3), GgmlType("q4_k", 4.5, 256, 32, 4),
        GgmlType("q5_k", 5.5, 256, 32, 5), GgmlType("q6_k", 6.5625, 256, 16, 6), GgmlType("q4_0", 4.5, 32, 32, 4),
        GgmlType("iq4_nl", 4.5, 32, 32, 4), GgmlType("q4_1", 5.0, 32, 32, 4), GgmlType("q5_0", 5.5, 32, 32, 5),
        GgmlType("q5_1", 6.0, 32, 32, 5), GgmlType("q8_0", 8.5, 32, 32, 8), GgmlType("q8_k", 9.125, 256, 256, 8),
    )
}  # fmt: skip
GRIDS: dict[str, Any] = {
    name: getattr(k_quants if name[0] == "q" and name.endswith("_k") and name != "q8_k" else blocks, name)
    for name in TYPES
}
# What llama.cpp takes for rows whose length is no multiple of 256; of 32: fp16.
FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q8_k": "q8_0"}
WEIGHTS = tuple(name for name in TYPES if name != "q8_k")  # the types that files have, by their bits


def inputs_beside(weights: NumberFormat) -> NumberFormat:
    """The type to which llama.cpp's CPU kernels round the inputs that they multiply by ``weights`` of a type."""
    if not isinstance(weights, GgmlType):
        return weights  # fp16 beside fp16
    return TYPES["q8_k" if weights.size == 256 else "q8_0"]


# The mixes of llama-quantize, by the type of all tensors for which ``gguf_mixes`` has no other.
MIXES = {
    "q2_k": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_0": "q4_0",
    "q4_1": "q4_1", "iq4_nl": "iq4_nl", "q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_0": "q5_0", "q5_1": "q5_1",
    "q5_k_s": "q5_k", "q5_k_m": "q5_k", "q6_k": "q6_k", "q8_0": "q8_0",
}  # fmt: skip
