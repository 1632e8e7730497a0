"""K quants: blocks of 256 numbers in groups of 16 or 32, whose scales are small integers under scales of the block.

The conventions are those of ``ggml_blocks``. A group whose scale rounds to zero reads as one number, so its integers
do not matter: they are 0 here, and whatever the search left in ggml.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fragility_quantization.ggml_blocks import NOTHING, Grid, farthest, half, over, total


def steps(first: float, by: float, count: int, top: int) -> list[float]:
    """``top`` + ``first`` + ``by`` i for i from 0 to ``count``, computed in fp32 as C does."""
    one = np.float32
    return [float(one(first) + one(by) * one(i) + one(top)) for i in range(count + 1)]


def nearest_int(x: Tensor) -> Tensor:
    """fp32 ``x`` rounded as ggml does it: to nearest even within 2^22, and what the low bits say beyond."""
    return ((x + 12582912.0).view(torch.int32).bitwise_and(0x7FFFFF) - 0x400000).float()


def ranges(x: Tensor, weights: Tensor, top: int, tries: list[float], absolute: bool) -> tuple[Tensor, Tensor]:
    """Scales (G,) of integers 0 to ``top`` for groups (m, G), and the lowest values (G,), at most 0.

    First comes the range of the entries. Each of ``tries`` then says how many steps the range has; with the integers
    that follow, scale and lowest value are those of weighted least squares. The one of least error is taken, of squares
    or ``absolute``.
    """
    low, high = x.amin(0).clamp_max(0), x.amax(0)
    flat = high == low
    sum_w, sum_x = total(weights), total(weights * x)

    def error(scale: Tensor, low: Tensor, integers: Tensor) -> Tensor:
        apart = scale * integers
        apart += low
        apart -= x
        apart = apart.abs_() if absolute else apart.square_()
        return total(apart.mul_(weights))

    def integers(steps: float) -> Tensor:
        return (x - low).mul_(over(steps, high - low)).round_().clamp_(0, top)

    scale = over(1.0, over(float(top), high - low))
    best = error(scale, low, integers(float(top)))
    for count in tries:
        q = integers(count)
        wq = weights * q
        sum_l, sum_l2, sum_xl = total(wq), total(wq * q), total(wq * x)
        D = sum_w * sum_l2 - sum_l * sum_l
        this_scale = (sum_w * sum_xl - sum_x * sum_l) / D
        this_low = (sum_l2 * sum_x - sum_l * sum_xl) / D
        positive = this_low > 0
        this_scale = torch.where(positive, sum_xl / sum_l2, this_scale)
        this_low = torch.where(positive, 0.0, this_low)
        this_error = error(this_scale, this_low, q)
        better = (D > 0) & (this_error < best)
        best, scale = torch.where(better, this_error, best), torch.where(better, this_scale, scale)
        low = torch.where(better, this_low, low)
    return torch.where(flat, 0.0, scale), torch.where(flat, x.amin(0).clamp_max(0), low)


def asymmetric(
    x: Tensor, top: int, tries: list[float], weights: Tensor, absolute: bool, most: int, stored: Callable
) -> Grid:  # fmt: skip
    """Integers 0 to ``top``, with a scale and a lowest value a group that are integers up to ``most`` themselves.

    ``stored`` makes those of their quotients.
    """
    groups = x.shape[1:]
    scales, lows = (v.view(groups) for v in ranges(x.flatten(1), weights.flatten(1), top, tries, absolute))
    mins = -lows
    largest, largest_min = scales.amax(0).clamp_min(0), mins.amax(0).clamp_min(0) + 0.0  # never -0
    sc = stored(torch.where(largest > 0, over(float(most), largest), 0.0) * scales)
    m = stored(torch.where(largest_min > 0, over(float(most), largest_min), 0.0) * mins)
    d, dmin = half(largest / x.new_tensor(float(most))), half(largest_min / x.new_tensor(float(most)))
    step, below = d * sc, dmin * m

    def numbers(v: Tensor) -> Tensor:
        return torch.where(step == 0, 0.0, ((v + below) / step).round().clamp(0, top))

    return Grid(step, numbers, -below, parts={"d": d, "dmin": dmin, "scales": sc, "mins": m})


def as_byte(x: Tensor) -> Tensor:
    """``x`` rounded to an integer of 6 bits as ggml does it: negative ones wrap around in a byte, and then saturate."""
    return x.round().remainder(256).clamp_max(63)


def q2_k(x: Tensor) -> Grid:
    """Groups of 16, with scales and lowest values of 4 bits."""
    return asymmetric(x, 3, steps(-0.5, 0.1, 15, 3), x.abs(), True, 15, lambda v: v.round().clamp(0, 15))


def by_size(x: Tensor) -> Tensor:
    """Weights of errors: the root mean square of the group plus the magnitude of the entry."""
    squares = total(x * x) / x.new_tensor(float(len(x)))
    return squares.double().sqrt().float() + x.abs()  # torch's root in fp32 is off by its last bit at times


def q4_k(x: Tensor) -> Grid:
    """Groups of 32, with scales and lowest values of 6 bits."""
    return asymmetric(x, 15, steps(-1.0, 0.1, 20, 15), by_size(x), False, 63, as_byte)


def q5_k(x: Tensor) -> Grid:
    """Groups of 32, as in ``q4_k``, with one bit more an entry."""
    return asymmetric(x, 31, steps(-0.5, 0.1, 15, 31), by_size(x), False, 63, as_byte)


def q6_scales(x: Tensor) -> Tensor:
    """Scales (S, n) of 6-bit integers, those of least weighted squares of 19 that are tried."""
    largest, weight = farthest(x), x * x
    wx = weight * x

    def fitted(count: np.float32) -> tuple[Tensor, Tensor]:
        q = (x * over(float(-count), largest)).round_().clamp_(-32, 31)
        return total(wx * q), total((weight * q).mul_(q))

    sum_lx, sum_l2 = fitted(np.float32(32))
    scale = torch.where(sum_l2 == 0, 0.0, sum_lx / sum_l2)
    best = scale * sum_lx
    for tried in (i for i in range(-9, 10) if i):
        sum_lx, sum_l2 = fitted(np.float32(32) + np.float32(0.1) * np.float32(tried))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        scale = torch.where(better, sum_lx / sum_l2, scale)
        best = torch.where(better, scale * sum_lx, best)
    return torch.where(largest.abs() < NOTHING, 0.0, scale)


def q3_scales(x: Tensor) -> Tensor:
    """Scales (S, n) of 3-bit integers, which change one at a time as long as the fit gets better, five times over."""
    largest, weight = farthest(x), x * x
    wx = weight * x
    q = nearest_int(x * over(-4.0, largest)).clamp(-4, 3)
    sum_lx, sum_l2 = total(wx * q), total(weight * q * q)
    for _ in range(5):
        for i, old in enumerate(q):
            lx, l2 = sum_lx - wx[i] * old, sum_l2 - weight[i] * old * old
            new = nearest_int(x[i] * l2 / lx).clamp(-4, 3)
            asked = (lx > 0) & (new != old)
            lx, l2 = lx + wx[i] * new, l2 + weight[i] * new * new
            better = asked & (l2 > 0) & (lx * lx * sum_l2 > sum_lx * sum_lx * l2)
            sum_lx, sum_l2 = torch.where(better, lx, sum_lx), torch.where(better, l2, sum_l2)
            q[i] = torch.where(better, new, old)
    fit = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    return torch.where(largest.abs() < NOTHING, 0.0, fit)


def signed(scales: Tensor, top: int, most: int) -> Grid:
    """Integers -``top`` to ``top`` - 1 under ``scales`` (S, n), integers themselves; the farthest is -``most``."""
    largest = farthest(scales)
    by = torch.where(largest.abs() < NOTHING if most == 128 else largest == 0, 0.0, over(-float(most), largest))
    sc = (by * scales).round().clamp(-most, most - 1)
    d = half(torch.where(by == 0, 0.0, over(1.0, by)))
    step = d * sc

    def numbers(v: Tensor) -> Tensor:
        return torch.where(step == 0, 0.0, (v / step).round().clamp(-top, top - 1))

    return Grid(step, numbers, parts={"d": d, "scales": sc})


def q3_k(x: Tensor) -> Grid:
    """Groups of 16, with scales of 6 bits."""
    return signed(q3_scales(x), 4, 32)


def q6_k(x: Tensor) -> Grid:
    """Groups of 16, with scales of 8 bits."""
    return signed(q6_scales(x), 32, 128)
