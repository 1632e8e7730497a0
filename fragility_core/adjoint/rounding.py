"""Local errors: by how much rounding to a format changes a value."""

import torch
from torch import Tensor

from fragility_core.arithmetic.formats import Format

EXPONENT_BITS = 0x7F800000  # of fp32


def ulp(x: Tensor, format: Format) -> Tensor:
    """The distance between the numbers of ``format`` around fp32 ``x``; below the smallest normal it is constant."""
    power_of_two = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # the one at or below |x|
    return power_of_two.clamp_min(format.smallest_normal / format.scale(x)) * format.spacing


def local_error(exact: Tensor, rounded: Tensor) -> Tensor:
    """``exact`` - ``rounded``, and 0 where that is not finite.

    An overflow is no small error; ``Tape.overflows`` reports it. Where it does no harm (masked scores, a saturated
    tanh) the gradient is 0, and 0 times infinity would be NaN.
    """
    return finite_error(exact - rounded)


def finite_error(error: Tensor) -> Tensor:
    """``error`` with 0 where it is not finite, in place."""
    return error.nan_to_num_(0.0, 0.0, 0.0)


def has_short_range(format: Format) -> bool:
    """Whether a result in fp32 may lie outside of the range of ``format``; bf16 has the range of fp32."""
    return format.largest < 1e38


def expected_error(x: Tensor, format: Format) -> Tensor:
    """ulp / sqrt(12), the standard deviation of the error of an unknown number that was rounded to nearest to ``x``."""
    return ulp(x, format) / 12**0.5


def stochastic_error(error: Tensor, exact: Tensor, format: Format) -> Tensor:
    """The standard deviation of stochastic rounding where rounding to nearest has the error ``error``.

    The neighbours of ``exact`` are at distances d and ulp - d. Their probabilities make the mean exact, so that the
    variance is d (ulp - d).
    """
    distance = error.abs()
    return (distance * (ulp(exact, format) - distance)).clamp_min_(0).sqrt_()
