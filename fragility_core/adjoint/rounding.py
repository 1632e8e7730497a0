"""By how much storing a value in a format changes it: the local error of a kernel or weight."""

import torch
from torch import Tensor

from fragility_core.arithmetic.formats import Format

EXPONENT_BITS = 0x7F800000  # of fp32


def ulp(x: Tensor, format: Format) -> Tensor:
    """Distance between the numbers of ``format`` around fp32 ``x``; below the smallest normal it stays the same."""
    power_of_two = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # the one at or below |x|
    return power_of_two.clamp_min(format.smallest_normal / format.scale(x)) * format.spacing


def local_error(exact: Tensor, rounded: Tensor) -> Tensor:
    """``exact`` - ``rounded``, and 0 where that is not finite.

    An overflow is no small error. It is reported apart (``Tape.overflows``); where it does not matter (masked
    scores, a saturated tanh) it must not make 0 times infinity.
    """
    return finite_error(exact - rounded)


def finite_error(error: Tensor) -> Tensor:
    """``error`` with 0 where it is not finite, in place."""
    return error.nan_to_num_(0.0, 0.0, 0.0)


def has_short_range(format: Format) -> bool:
    """Whether results may leave the range of ``format``; bf16 has that of fp32."""
    return format.largest < 1e38


def expected_error(x: Tensor, format: Format) -> Tensor:
    """Standard deviation ulp / sqrt(12) of the error of a number that was rounded to nearest to ``x``."""
    return ulp(x, format) / 12**0.5


def stochastic_error(error: Tensor, exact: Tensor, format: Format) -> Tensor:
    """Standard deviation of stochastic rounding where rounding to nearest errs by ``error``.

    The two neighbours of ``exact`` lie at distances d and ulp - d, and are chosen with probabilities
    that make the mean exact, so the variance is d (ulp - d).
    """
    distance = error.abs()
    return (distance * (ulp(exact, format) - distance)).clamp_min_(0).sqrt_()
