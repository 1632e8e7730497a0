"""The number formats, in one table, and rounding to them.

Two constants are easily confused. The *unit roundoff* u is the largest relative error of rounding to nearest (the
paper's epsilon_mach). The *spacing* of the numbers above one is 2u; ``torch.finfo(...).eps`` is the spacing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fragility_numerics.internals import cpu_multiplies

EXPONENT_BITS = 0x7F800000  # of fp32
CHUNK_ELEMENTS = 2**17  # elements computed at once on a CPU: 512 KiB in fp32 fit a second-level cache


class NumberFormat(Protocol):
    """Numbers in which kernels store results: a ``Format``, or another rule of rounding.

    A rule that is not ``elementwise`` rounds an entry depending on other entries of its tensor, as under shared scales.
    A rule that ``is_storage_only`` gives fewer numbers than its ``compute_dtype`` holds.
    """

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> float: ...
    @property
    def unit_roundoff(self) -> float: ...
    @property
    def spacing(self) -> float: ...
    @property
    def largest(self) -> float: ...
    @property
    def storage(self) -> torch.dtype | None: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def elementwise(self) -> bool: ...
    @property
    def is_storage_only(self) -> bool: ...

    def round(self, x: Tensor, generator: torch.Generator | None = None, copies: int = 1) -> Tensor:
        """``x`` rounded to the format, as a kernel reads it; ``generator`` and ``copies`` as in ``Format.round``."""

    def ulp(self, x: Tensor) -> Tensor:
        """The distance between the numbers around fp32 ``x``."""


@dataclass(frozen=True)
class Format:
    """A binary number format of ``bits`` bits with a sign: floating-point, or integers.

    ``significand`` counts the bits of the significand, the implicit one included. Numbers below ``smallest_normal``
    have the spacing of those above it. An integer is such a number: int8 has a significand of 7 bits, the smallest
    normal 64 and the spacing 1 below 128. ``lowest`` is the lowest number, -``largest`` unless given. A format that
    ``saturates`` has no infinities: rounding gives the largest number instead.

    torch stores the format as ``storage``, None if it has no such dtype. Kernels compute in ``compute_dtype``, which
    holds every number of the format.
    """

    name: str
    bits: int
    significand: int
    smallest_normal: float
    largest: float
    saturates: bool = False
    lowest: float | None = None

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-significand."""
        return 2.0**-self.significand

    @property
    def spacing(self) -> float:
        """Distance from 1 to the next larger value, 2u."""
        return 2 * self.unit_roundoff

    @property
    def storage(self) -> torch.dtype | None:
        """The dtype of torch that holds the format's numbers and (except for TF32) no others."""
        return DTYPES.get(self.name)

    elementwise = True  # each entry is rounded by itself, unlike entries under a shared scale

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which kernels compute."""
        return torch.bfloat16 if self.bits <= 8 else DTYPES.get(self.name, torch.float32)

    @cached_property
    def is_storage_only(self) -> bool:
        """True if the compute dtype holds more numbers than the format, so that results must be rounded (fp8)."""
        return self.storage != self.compute_dtype

    def round(self, x: Tensor, generator: torch.Generator | None = None, copies: int = 1) -> Tensor:
        """``x`` rounded to nearest even, in the compute dtype.

        With a ``generator`` rounding is stochastic; ``copies`` along the first dimension get the same random bits
        (``round_stochastically``). Numbers out of range become ±inf; in formats without infinities, such as fp8_e4m3,
        they saturate, as in the saturating conversion of accelerators. NaN stays NaN.
        """
        if generator is not None:
            x = round_stochastically(x.float(), self, generator, copies)  # the rest is then exact
        if self.name == "tf32":
            return round_to_tf32(x.float())
        if self.saturates:
            x = x.clamp(-self.largest if self.lowest is None else self.lowest, self.largest)
        if self.storage is None:
            x = round_to_spacing(x.float(), self)
            x = x if self.saturates else torch.where(x.abs() > self.largest, x * torch.inf, x)
            return x.to(self.compute_dtype)
        return x.to(self.storage).to(self.compute_dtype)

    def ulp(self, x: Tensor) -> Tensor:
        """The distance between the numbers around fp32 ``x``; below the smallest normal it is constant."""
        power_of_two = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # the one at or below |x|
        return power_of_two.clamp_min(self.smallest_normal) * self.spacing


def chunks(*tensors: Tensor, length: int = CHUNK_ELEMENTS) -> Iterable[tuple[Tensor, ...]]:
    """``tensors`` of one shape, flat: on a CPU in chunks of ``length``, else whole. Contiguous ones give views."""
    flat = [x.reshape(-1) for x in tensors]
    return zip(*(x.split(length) for x in flat)) if flat[0].device.type == "cpu" else [tuple(flat)]


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 ``x`` rounded to nearest even on 10 fraction bits; inf and NaN stay."""
    bits = x.view(torch.int32)
    dropped = 13  # fraction bits of fp32 beyond those of tf32
    tie_to_even = (bits >> dropped) & 1
    rounded = ((bits + (1 << (dropped - 1)) - 1 + tie_to_even) >> dropped) << dropped
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def round_to_spacing(x: Tensor, format: Format) -> Tensor:
    """fp32 ``x``, within the range of ``format``, rounded to nearest even; inf and NaN stay."""
    spacing = format.ulp(x)  # a power of two, so that the quotient is exact
    return torch.where(x.isfinite(), (x / spacing).round() * spacing, x)


def round_stochastically(x: Tensor, format: Format, generator: torch.Generator, copies: int = 1) -> Tensor:
    """fp32 ``x`` rounded at random to one of its two neighbours in ``format``, without bias; inf and NaN stay.

    The probability of a neighbour is 1 minus its relative distance (Croci et al. 2022, doi:10.1098/rsos.211631). The
    format drops some of the fraction bits of fp32. Random bits are added to these. The sum may carry into the bits that
    stay. Then the dropped bits are set to 0. Before, ``x`` is scaled so that subnormals of the format are subnormals of
    fp32. That rounds bits below fp32's smallest number to nearest: an error of half a unit of the last random bit. The
    exponent has no upper bound.

    The first dimension may hold ``copies`` of one batch, one after another. They get the same random bits.
    """
    rounded = torch.empty_like(x)
    source, target = (t.unflatten(0, (copies, -1)) if copies > 1 else t[None] for t in (x, rounded))
    parts: Iterable[tuple[Tensor, Tensor]] = [(source, target)]
    if x.device.type == "cpu" and x.is_contiguous():
        width = max(1, CHUNK_ELEMENTS // copies // 8) * 8  # draws of 64 bits are then used up, whatever the chunks
        parts = zip(*(t.view(copies, -1).split(width, 1) for t in (x, rounded)))
    dropped = 24 - format.significand  # fraction bits of fp32 beyond those of the format
    scale = 2.0**-126 / format.smallest_normal
    for values, out in parts:
        bits = (values * scale).view(torch.int32)
        bits += random_bits(dropped, values[0], generator)
        torch.div(bits.bitwise_and_(-1 << dropped).view(torch.float32), scale, out=out)
        # The mask takes a CPU as long as all of the above. A GPU is not asked: the host would wait for its answer.
        if x.device.type != "cpu" or values.sum().isnan():
            out.copy_(torch.where(values.isnan(), values, out))
    return rounded


def random_bits(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """``count`` random bits an entry, int32 of the shape of ``like``; a draw of 64 bits gives two or four entries.

    They are drawn on the device of the ``generator``, so that they do not depend on how a model is spread over devices.
    """
    lane = torch.int16 if count <= 16 else torch.int32
    draws = torch.empty(-(-like.numel() * lane.itemsize // 8), dtype=torch.int64, device=generator.device)
    lanes = draws.random_(-(2**63), None, generator=generator).view(lane)[: like.numel()].to(like.device)
    return lanes.view(like.shape).to(torch.int32).bitwise_and_((1 << count) - 1)


DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


def integers(bits: int) -> Format:
    """The format of the integers of ``bits`` bits."""
    half = 2.0 ** (bits - 1)
    return Format(f"int{bits}", bits, bits - 1, half / 2, half - 1, saturates=True, lowest=-half)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 32, 24, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
        Format("tf32", 32, 11, 2.0**-126, (2 - 2.0**-10) * 2.0**127),
        Format("bf16", 16, 8, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
        Format("fp16", 16, 11, 2.0**-14, 65504.0),
        Format("fp8_e4m3", 8, 4, 2.0**-6, 448.0, saturates=True),
        Format("fp8_e5m2", 8, 3, 2.0**-14, 57344.0),
    )
}
# Formats of single numbers that are stored under scales of their own. OCP Microscaling Formats 1.0, 2023.
NARROW: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp6_e3m2", 6, 3, 2.0**-2, 28.0, saturates=True),
        Format("fp6_e2m3", 6, 4, 1.0, 7.5, saturates=True),
        Format("fp4_e2m1", 4, 2, 1.0, 6.0, saturates=True),
        *(integers(bits) for bits in (8, 7, 4, 3, 2)),
    )
}


def get_format(name: str | Format) -> Format:
    """The format called ``name``, of FORMATS or NARROW, or the format itself; raises ValueError naming those."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS | NARROW:
        meant = f" (do you mean {alike}?)" if (alike := called_by_torch(str(name).lower())) in FORMATS else ""
        raise ValueError(f"a format must be one of {', '.join(FORMATS | NARROW)}, got {name!r}{meant}")
    return (FORMATS | NARROW)[name]


def called_by_torch(name: str) -> str:
    """The name here of the format that torch calls ``name``, such as "float16"; other names as they are."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    known = {dtype: format for format, dtype in reversed(DTYPES.items())}
    return known.get(dtype, name) if isinstance(dtype, torch.dtype) else name


def of_dtype(dtype: torch.dtype) -> Format:
    """The format of the numbers of ``dtype``; raises ValueError for one that has no format here."""
    for name in FORMATS:
        if DTYPES.get(name) == dtype:
            return FORMATS[name]
    raise ValueError(
        f"a dtype must be that of a format, {', '.join(map(str, dict.fromkeys(DTYPES.values())))}, got {dtype}"
    )


def has_native_kernels(format: NumberFormat, device: torch.device | str) -> bool:
    """True if ``device`` computes in ``format`` itself, with sums in fp32.

    fp8 never counts: devices multiply in it, but add, normalise and exponentiate in other formats.
    """
    device = torch.device(device)
    if format.name == "fp32":
        return True
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return {"fp16": capability >= (5, 3), "bf16": capability >= (8, 0)}.get(format.name, False)
    return device.type == "cpu" and format.storage is not None and cpu_multiplies(format.storage)
