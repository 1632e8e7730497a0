"""The number formats, in one table, and rounding to them.

Two constants are easily confused. The *unit roundoff* u is the largest relative error of rounding to nearest (the
paper's epsilon_mach). The *spacing* of the numbers above one is 2u; ``torch.finfo(...).eps`` is the spacing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fragility_core.arithmetic.internals import cpu_multiplies

CHUNK_ELEMENTS = 2**17  # elements computed at once on a CPU: 512 KiB in fp32 fit a second-level cache


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    ``significand`` counts the bits of the significand, the implicit one included. ``storage`` is the torch dtype of the
    format's width. Kernels compute in ``compute_dtype``, which holds every number of the format. The two differ for
    fp8, in which torch stores but does not compute. A ``scaled`` format stores every tensor times a power of two of
    the tensor's own (``scale``; Micikevicius et al. 2022, arXiv:2209.05433). ``operands`` is the format in which linear
    layers of blocks read weights and activations, if it is another one (``operands.RoundedOperands``).
    """

    name: str
    significand: int
    smallest_normal: float
    largest: float
    storage: torch.dtype
    compute_dtype: torch.dtype
    saturates: bool = False
    scaled: bool = False
    operands: "Format | None" = None

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-significand."""
        return 2.0**-self.significand

    @property
    def spacing(self) -> float:
        """Distance from 1 to the next larger value, 2u."""
        return 2 * self.unit_roundoff

    @cached_property
    def is_storage_only(self) -> bool:
        """Whether the compute dtype holds more numbers than the format, so that results must be rounded (fp8)."""
        return self.storage != self.compute_dtype

    def round(self, x: Tensor, generator: torch.Generator | None = None, copies: int = 1) -> Tensor:
        """``x`` rounded to nearest even, in the compute dtype.

        With a ``generator``, on the device of ``x``, rounding is stochastic; ``copies`` along the first dimension get
        the same random bits (``round_stochastically``). Numbers out of range become ±inf; in fp8_e4m3, which has no
        infinities, they saturate at ±448, as in the saturating conversion of accelerators. NaN stays NaN. A scaled
        format leaves ±inf and the lowest numbers, by which models mask, as they are.
        """
        if self.scaled:
            factor = self.scale(x)
            fitted = replace(self, scaled=False).round(x * factor, generator, copies) / factor
            return torch.where(is_measured(x), fitted, x.to(self.compute_dtype))
        if generator is not None:
            x = round_stochastically(x.float(), self, generator, copies)  # the rest is then exact
        if self.name == "tf32":
            return round_to_tf32(x.float())
        if self.saturates:
            x = x.clamp(-self.largest, self.largest)
        return x.to(self.storage).to(self.compute_dtype)

    def scale(self, x: Tensor) -> Tensor | float:
        """The power of two by which the largest entry of ``x`` just fits into the range; 1 unless scaled."""
        if not self.scaled or not x.numel():
            return 1.0
        largest = torch.where(is_measured(x), x, 0.0).abs().amax().float()
        _, exponent = torch.frexp(self.largest / largest.clamp_min(2.0**-100))  # tensors of zeros have a scale, too
        return torch.exp2(exponent - 1.0)


def chunks(*tensors: Tensor, length: int = CHUNK_ELEMENTS) -> Iterable[tuple[Tensor, ...]]:
    """``tensors`` of one shape, flat: on a CPU in chunks of ``length``, else whole. Contiguous ones give views."""
    flat = [x.reshape(-1) for x in tensors]
    return zip(*(x.split(length) for x in flat)) if flat[0].device.type == "cpu" else [tuple(flat)]


def is_measured(x: Tensor) -> Tensor:
    """False for ±inf, for NaN, and for the lowest numbers of bf16 and fp32, by which models mask scores."""
    return x.abs() < torch.finfo(torch.bfloat16).max


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 ``x`` rounded to nearest even on 10 fraction bits; inf and NaN stay."""
    bits = x.view(torch.int32)
    dropped = 13  # fraction bits of fp32 beyond those of tf32
    tie_to_even = (bits >> dropped) & 1
    rounded = ((bits + (1 << (dropped - 1)) - 1 + tie_to_even) >> dropped) << dropped
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


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
    parts = [(source, target)]
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
    """``count`` random bits an entry, int32 of the shape of ``like``; a draw of 64 bits gives two or four entries."""
    lane = torch.int16 if count <= 16 else torch.int32
    draws = torch.empty(-(-like.numel() * lane.itemsize // 8), dtype=torch.int64, device=like.device)
    lanes = draws.random_(-(2**63), None, generator=generator).view(lane)[: like.numel()]
    return lanes.view(like.shape).to(torch.int32).bitwise_and_((1 << count) - 1)


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 24, 2.0**-126, (2 - 2.0**-23) * 2.0**127, _F32, _F32),
        Format("tf32", 11, 2.0**-126, (2 - 2.0**-10) * 2.0**127, _F32, _F32),
        Format("bf16", 8, 2.0**-126, (2 - 2.0**-7) * 2.0**127, _BF16, _BF16),
        Format("fp16", 11, 2.0**-14, 65504.0, _F16, _F16),
        Format("fp8_e4m3", 4, 2.0**-6, 448.0, _E4M3, _BF16, saturates=True),
        Format("fp8_e5m2", 3, 2.0**-14, 57344.0, _E5M2, _BF16),
    )
}
SCALED: dict[str, Format] = {
    f"{f.name}_scaled": replace(f, name=f"{f.name}_scaled", scaled=True) for f in FORMATS.values() if f.is_storage_only
}
LINEAR: dict[str, Format] = {
    (name := f.name.replace("scaled", "linear")): replace(FORMATS["bf16"], name=name, operands=f)
    for f in SCALED.values()
}
KNOWN = FORMATS | SCALED | LINEAR


def get_format(name: str | Format) -> Format:
    """The format called ``name``, one of KNOWN, or the format itself; raises ValueError naming those."""
    if isinstance(name, Format):
        return name
    if name not in KNOWN:
        raise ValueError(f"a format must be one of {', '.join(KNOWN)}, got {name!r}")
    return KNOWN[name]


def has_native_kernels(format: Format, device: torch.device | str) -> bool:
    """Whether ``device`` computes in ``format`` itself, with sums in fp32.

    fp8 never counts: devices multiply in it, but add, normalise and exponentiate in other formats. If fp8 is the
    format of ``operands`` alone, the other format decides, since a product of fp8 numbers is the same in it.
    """
    device = torch.device(device)
    if format.name == "fp32":
        return True
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return {_F16: capability >= (5, 3), _BF16: capability >= (8, 0)}.get(format.storage, False)
    return device.type == "cpu" and cpu_multiplies(format.storage)
