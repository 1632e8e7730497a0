"""GGML's formats for blocks of 32 numbers: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, and Q8_K, inputs in blocks of 256.

Each function takes fp32 values (m, S, n): n blocks of S groups of m neighbours, and gives the ``Grid`` to which they
are rounded. The operations and their order are those of the reference quantizers of llama.cpp (``ggml-quants.c``,
without an importance matrix), so that the numbers are the same bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

NOTHING = 1e-15  # groups whose largest magnitude is below count as zeros
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
HALVES = 256  # of numbers beyond the outermost of these; the nearest of them by the number of halves from -HALVES on
NEAREST = [min(reversed(IQ4_VALUES), key=lambda value: abs(value - n / 2)) for n in range(-HALVES, HALVES + 1)]


@dataclass(frozen=True)
class Grid:
    """The numbers that groups of a block can store: ``step`` (S, n) times an integer, plus ``shift`` (S, n) if any.

    ``numbers`` gives the integers for values (m, S, n). IQ4_NL has integers at unequal distances, its ``values``.
    ``parts`` are the scales as they are stored, by their names in ggml.
    """

    step: Tensor
    numbers: Callable[[Tensor], Tensor]
    shift: Tensor | None = None
    values: tuple[int, ...] = ()
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, numbers: Tensor) -> Tensor:
        """Values (m, S, n) of the stored ``numbers``."""
        found = self.step * numbers
        return found if self.shift is None else found + self.shift

    def spacing(self, numbers: Tensor) -> Tensor:
        """The distance (m, S, n) from each stored number to the next one."""
        if not self.values:
            return self.step.abs().expand_as(numbers)
        values = numbers.new_tensor(self.values)
        gaps = torch.cat([values.diff(), values.diff()[-1:]])
        return self.step.abs() * gaps[torch.bucketize(numbers, values)]


def half(x: Tensor) -> Tensor:
    """fp32 ``x`` as fp16 stores it."""
    return x.half().float()


def over(number: float, x: Tensor) -> Tensor:
    """``number`` / ``x``, rounded once; torch multiplies by the inverse where a Python number is divided."""
    return x.new_tensor(number) / x


def inverse(x: Tensor) -> Tensor:
    """1 / ``x``, and 0 where it is 0."""
    return torch.where(x == 0, 0.0, over(1.0, x))


def total(x: Tensor) -> Tensor:
    """The sum over the first dimension in fp32, one term after the other."""
    found = x[0].clone()
    for term in x[1:]:
        found += term
    return found


def farthest(x: Tensor) -> Tensor:
    """The entry of largest magnitude along the first dimension, the first of those that are alike."""
    largest = x.abs()
    order = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.ndim - 1))
    first = torch.where(largest == largest.amax(0), order, len(x)).amin(0).clamp_max(len(x) - 1)
    return x.gather(0, first[None])[0]


def away_from_zero(x: Tensor) -> Tensor:
    """``x`` rounded to the nearest integer, ties away from zero, as C's roundf."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


def q8_0(x: Tensor) -> Grid:
    """Integers from -127 to 127 under the scale of the largest magnitude."""
    d = x.abs().amax(0) / x.new_tensor(127.0)
    by = inverse(d)
    return Grid(half(d), lambda v: away_from_zero(v * by).clamp(-128, 127), parts={"d": half(d)})


def q8_k(x: Tensor) -> Grid:
    """Integers up to 127 under an fp32 scale, by which the entry of largest magnitude becomes -127."""
    largest = farthest(x)
    by = torch.where(largest == 0, 0.0, over(-127.0, largest))
    d = inverse(by)
    return Grid(d, lambda v: (v * by).round().clamp(-128, 127), parts={"d": d})


def symmetric(x: Tensor, top: int) -> Grid:
    """Integers from -``top`` to ``top`` - 1, the lowest of which stands for the entry of largest magnitude."""
    d = farthest(x) / x.new_tensor(-float(top))
    by = inverse(d)

    def numbers(v: Tensor) -> Tensor:
        return (v * by + (top + 0.5)).trunc().clamp(0, 2 * top - 1) - top

    return Grid(half(d), numbers, parts={"d": half(d)})


def q4_0(x: Tensor) -> Grid:
    """The grid of Q4_0: integers of 4 bits by ``symmetric``."""
    return symmetric(x, 8)


def q5_0(x: Tensor) -> Grid:
    """The grid of Q5_0: integers of 5 bits by ``symmetric``."""
    return symmetric(x, 16)


def from_lowest(x: Tensor, top: int) -> Grid:
    """Integers from 0 to ``top``, which run from the lowest to the largest entry."""
    low = x.amin(0)
    d = (x.amax(0) - low) / x.new_tensor(float(top))
    by = inverse(d)

    def numbers(v: Tensor) -> Tensor:
        return ((v - low) * by + 0.5).trunc().clamp(0, top)

    return Grid(half(d), numbers, half(low), parts={"d": half(d), "m": half(low)})


def q4_1(x: Tensor) -> Grid:
    """The grid of Q4_1: integers of 4 bits by ``from_lowest``."""
    return from_lowest(x, 15)


def q5_1(x: Tensor) -> Grid:
    """The grid of Q5_1: integers of 5 bits by ``from_lowest``."""
    return from_lowest(x, 31)


def nearest_value(x: Tensor) -> Tensor:
    """The number of IQ4_VALUES nearest to each entry; of two as near, and of NaN, the larger.

    Halves of integers lie between them, so that an entry's own number of halves tells which it is.
    """
    halves = (x * 2).floor_().nan_to_num_(HALVES).clamp_(-HALVES, HALVES)
    return x.new_tensor(NEAREST).index_select(0, halves.to(torch.int32).add_(HALVES).flatten()).view(x.shape)


def iq4_nl(x: Tensor) -> Grid:
    """The grid of IQ4_NL: 16 numbers, closer together near zero. Of 16 scales the one of least squared error is taken.

    The squared error of an entry is weighted by the entry's square.
    """
    largest, weight = farthest(x), x * x
    nothing = largest.abs() < NOTHING

    def fitted(by: Tensor) -> tuple[Tensor, Tensor]:
        q = nearest_value(by * x)
        wq = weight * q
        return total(wq * x), total(wq * q)

    sum_qx, sum_q2 = fitted(over(1.0, -largest / x.new_tensor(float(IQ4_VALUES[0]))))
    d = torch.where(sum_q2 > 0, sum_qx / sum_q2, 0.0)
    best = d * sum_qx
    for tried in range(-7, 8):
        sum_qx, sum_q2 = fitted(over(float(tried + IQ4_VALUES[0]), largest))
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        d = torch.where(better, sum_qx / sum_q2, d)
        best = torch.where(better, d * sum_qx, best)
    d = torch.where(nothing, 0.0, d)
    by = inverse(d)
    return Grid(half(d), lambda v: nearest_value(v * by), values=IQ4_VALUES, parts={"d": half(d)})
