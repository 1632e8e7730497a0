"""Schemes: numbers of a format, stored under scales that groups of them share.

A tensor x is stored as numbers q of the format and scales s, and read as q s. The scale of a group comes from its
largest magnitude, so that no number leaves the range of the format.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fragility_numerics.formats import FORMATS, Format, integers

GRANULARITIES = ("tensor", "row", "group", "block")
SCALES = {"fp32": 32, "bf16": 16, "e8m0": 8, "e4m3": 8}  # the kinds of scales, with their bits
RULES = ("largest", "range", "signed", "floor", "ceil", "mse")
SMALLEST = 2.0**-100  # groups of zeros have a scale, too
SHRINKS = torch.linspace(1.0, 0.4, 61).tolist()  # of the largest value, tried by the rule "mse"


@dataclass(frozen=True)
class Scheme:
    """A way to store a tensor in numbers of ``format`` and scales.

    ``granularity`` says which entries share a scale: the whole "tensor"; a "row", along the dimension over which a
    product sums (a channel of weights, a token of activations); a "group" of ``size`` neighbours in a row; a "block" of
    ``size`` x ``size`` entries. The last group of a row may be shorter.

    ``scale`` is the kind of the scales: "fp32"; "bf16"; "e8m0", a power of two; "e4m3", relative to an fp32 scale of
    the whole tensor, as in NVFP4. ``rule`` says how a scale comes from the largest magnitude m of its group:

    - "largest": m becomes the largest number of the format.
    - "range" (integers): m becomes half the distance of the lowest and the largest number, 7.5 in int4. The lowest one
      is then in use, and m itself saturates. compressed-tensors does so.
    - "floor" (powers of two; OCP Microscaling Formats 1.0, 2023, section 6.3): m gets the largest exponent of the
      format, and what is then out of range saturates.
    - "ceil" (powers of two; torchao calls it RCEIL): the smallest scale under which m is in range.
    - "mse": m times the factor, of SHRINKS, with the least squared error of the group.

    With ``symmetric`` False, integers run from the smallest to the largest entry of the group, 0 included. ``static``
    schemes have one scale for all inputs, from their ``largest_input`` (``static_scales.calibrated``). Raises
    ValueError for other values.
    """

    format: Format
    granularity: str = "tensor"
    size: int = 0
    scale: str = "fp32"
    rule: str = "largest"
    symmetric: bool = True
    static: bool = False
    largest_input: float | None = None
    named: str = ""

    def __post_init__(self):
        for name, known in (("granularity", GRANULARITIES), ("scale", SCALES), ("rule", RULES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if (self.granularity in ("group", "block")) != (self.size > 0):
            raise ValueError(f"size must be above 0 for a group or block, else 0: got {self.granularity}, {self.size}")
        if (self.rule in ("floor", "ceil")) != (self.scale == "e8m0"):
            raise ValueError(f'the rule of e8m0 scales is "floor" or "ceil", got {self.rule!r} for {self.scale}')
        if self.rule in ("range", "signed") and self.format.lowest is None:
            raise ValueError(f'only integers have the rule "{self.rule}", got {self.format.name}')
        if not self.symmetric and (self.format.lowest is None or self.scale in ("e8m0", "e4m3") or self.rule == "mse"):
            raise ValueError(f"only integers in fp32 or bf16 scales, not by mse, may be asymmetric, got {self.name}")
        if self.static and (self.granularity, self.symmetric, self.rule == "mse") != ("tensor", True, False):
            given = f"one for a {self.granularity}, symmetric={self.symmetric}, rule={self.rule!r}"
            raise ValueError(f"a static scheme has one scale for the whole tensor by its largest input, got {given}")

    @property
    def name(self) -> str:
        """The name of the scheme, such as "int4_group128"."""
        size = str(self.size or "")
        kind = "" if self.scale == "fp32" else f"_{self.scale}"
        return self.named or f"{self.format.name}_{self.granularity}{size}{kind}{'' if self.symmetric else '_zero'}"

    # What a kernel's arithmetic asks of its format:

    elementwise = False  # the rounding of an entry depends on others
    is_storage_only = True
    storage = None
    largest = torch.inf  # scales make every number fit

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of the format."""
        return self.format.unit_roundoff

    @property
    def spacing(self) -> float:
        """The spacing of the format, twice its unit roundoff."""
        return self.format.spacing

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which kernels compute whose results are stored by this scheme."""
        return self.format.compute_dtype

    @property
    def scale_bits(self) -> int:
        """Bits of a scale as engines store it: 16 for groups whose scales are computed in fp32 here.

        compressed-tensors stores group scales in the dtype of the weights, GPTQ and AWQ in fp16. Scales of blocks stay
        in fp32, as in DeepSeek-V3's checkpoints. ``round`` does not round an "fp32" scale. Engines round scales first
        (in bf16 by a relative error up to 2^-9), then the numbers under them: the steps move, the error hardly.
        """
        return 16 if self.granularity == "group" and self.scale == "fp32" else SCALES[self.scale]

    @property
    def bits(self) -> float:
        """Bits of an entry with its share of the stored scale and, if asymmetric, zero; a row's scale counts as 0."""
        shared = {"group": self.size, "block": self.size**2}.get(self.granularity)
        zero = 0 if self.symmetric else self.format.bits
        return self.format.bits + ((self.scale_bits + zero) / shared if shared else 0)

    def bits_of_width(self, width: int) -> float:
        """The ``bits`` of an entry in rows of ``width`` entries, whose last group may be short; blocks count whole."""
        if self.granularity != "group":
            return self.bits
        return self.format.bits + (self.bits - self.format.bits) * self.size * -(-width // self.size) / width

    def exact_in(self, dtype: torch.dtype) -> bool:
        """True if ``dtype`` holds every number that the scheme may give."""
        return dtype == torch.float32 or (self.scale == "e8m0" and dtype == torch.bfloat16)

    def round(self, x: Tensor, generator: torch.Generator | None = None, copies: int = 1) -> Tensor:
        """``x`` rounded under the scheme, in the dtype of ``x``: each row along the last dimension.

        ``generator`` and ``copies`` are those of ``Format.round``. ±inf and the lowest numbers, by which models mask,
        stay as they are. Raises ValueError for a static scheme without its largest input.
        """
        exact = x.float()
        groups = self._grouped(exact)
        if not self.symmetric:
            read = self._round_asymmetric(groups, generator, copies)
        else:
            scale = self._scale(groups)
            read = self._numbers(groups / scale, generator, copies) * scale
        read = self._ungrouped(read, x.shape)
        return torch.where(is_measured(exact), read, exact).to(x.dtype)

    def _numbers(self, x: Tensor, *how) -> Tensor:
        """fp32 ``x`` rounded to the numbers of the format, of which the largest stand for those out of range."""
        lowest = self.format.lowest if self.rule in ("range", "signed") else -self.format.largest
        return self.format.round(x.clamp(lowest, self.format.largest), *how).float()

    def ulp(self, x: Tensor) -> Tensor:
        """The distance between the numbers around fp32 ``x``, which may have been rounded before."""
        groups = self._grouped(x)
        if self.symmetric:
            scale = self._scale(groups)
            numbers = (groups / scale).clamp(-self.format.largest, self.format.largest)  # the lowest of int4 is -8
            spacing = self.format.ulp(numbers) * scale.abs()
        else:
            spacing = self._range(groups)[0].expand_as(groups)
        return self._ungrouped(spacing, x.shape)

    def scales(self, x: Tensor) -> Tensor:
        """The scale of every group of ``x``, in the order of the groups."""
        return self._scale(self._grouped(x.float())).flatten()

    def _grouped(self, x: Tensor) -> Tensor:
        """``x`` with the entries that share a scale along the last dimension."""
        if self.granularity == "tensor":
            return x.reshape(1, -1)
        if self.granularity == "row":
            return x
        short = -x.shape[-1] % self.size
        if self.granularity == "group":
            return functional.pad(x, (0, short)).unflatten(-1, (-1, self.size))
        tiles = functional.pad(x, (0, short, 0, -x.shape[-2] % self.size))
        return tiles.unflatten(-1, (-1, self.size)).unflatten(-3, (-1, self.size)).transpose(-2, -3).flatten(-2)

    def _ungrouped(self, groups: Tensor, shape: torch.Size) -> Tensor:
        if self.granularity in ("tensor", "row"):
            return groups.reshape(shape)
        if self.granularity == "group":
            return groups.flatten(-2)[..., : shape[-1]]
        tiles = groups.unflatten(-1, (self.size, self.size)).transpose(-2, -3).flatten(-4, -3).flatten(-2)
        return tiles[..., : shape[-2], : shape[-1]]

    def _largest(self, groups: Tensor) -> Tensor:
        if self.static:
            if self.largest_input is None:
                raise ValueError(f"{self.name} needs its layer's largest input, got none: calibrate it over windows")
            return groups.new_tensor(self.largest_input).clamp_min(SMALLEST)
        measured = torch.where(is_measured(groups), groups, 0.0).abs()
        return measured.amax(-1, keepdim=True).clamp_min(SMALLEST) if groups.numel() else groups

    def _scale(self, groups: Tensor) -> Tensor:
        """The scale of every group."""
        largest, top = self._largest(groups), self.format.largest
        if not groups.numel():
            return groups
        if self.rule == "mse":
            plain = replace(self, rule="largest")
            scales = torch.stack([plain._stored(largest * shrink, top) for shrink in SHRINKS])
            errors = torch.stack([(groups - self._numbers(groups / s) * s).square().sum(-1) for s in scales])
            return scales.gather(0, errors.argmin(0)[None, ..., None])[0]
        if self.rule == "floor":  # frexp counts from 0.5
            _, exponent = torch.frexp(largest)
            _, highest = torch.frexp(torch.tensor(top))
            return torch.exp2((exponent - highest).float())
        if self.rule == "ceil":
            _, exponent = torch.frexp(top / largest)
            return torch.exp2(1.0 - exponent)
        lowest = self.format.lowest
        if self.rule == "signed" and lowest is not None:
            at = groups.abs().argmax(-1, keepdim=True)
            return torch.copysign(self._stored(largest, -lowest), -groups.gather(-1, at))
        return self._stored(largest, (top - lowest) / 2 if self.rule == "range" and lowest is not None else top)

    def _stored(self, largest: Tensor, top: float) -> Tensor:
        """The scale under which ``top`` stands for ``largest``, as its kind stores it."""
        scale = largest / top
        if self.scale == "bf16":
            return scale.bfloat16().float()
        if self.scale == "e4m3":
            kind = FORMATS["fp8_e4m3"]
            whole = largest.amax() / (top * kind.largest)
            return kind.round(scale / whole).float().clamp_min(kind.smallest_normal * kind.spacing) * whole
        return scale

    def _range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero, which is a number of levels above the lowest, of every group."""
        known = torch.where(is_measured(groups), groups, 0.0)
        low, high = known.amin(-1, keepdim=True).clamp_max(0), known.amax(-1, keepdim=True).clamp_min(0)
        scale = self._stored((high - low).clamp_min(SMALLEST), 2.0**self.format.bits - 1)
        return scale, (-low / scale).round()

    def _round_asymmetric(self, groups: Tensor, *how: Any) -> Tensor:
        if not groups.numel():
            return groups
        scale, zero = self._range(groups)
        levels = (integers(24).round(groups / scale, *how) + zero).clamp(0, 2.0**self.format.bits - 1)
        return (levels - zero) * scale


def is_measured(x: Tensor) -> Tensor:
    """False for ±inf, for NaN, and for the lowest numbers of bf16 and fp32, by which models mask scores."""
    return x.abs() < torch.finfo(torch.bfloat16).max
