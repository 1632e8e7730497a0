"""The error of a rounded number: as rounding made it, or as large as it is expected to be."""

from torch import Tensor

from fragility_numerics.formats import NumberFormat


def local_error(exact: Tensor, rounded: Tensor) -> Tensor:
    """``exact`` - ``rounded``, and 0 where that is not finite.

    An overflow is no small error, and is to be reported by itself. Where it does no harm (masked scores, a saturated
    tanh) the gradient is 0, and 0 times infinity would be NaN.
    """
    return (exact - rounded).nan_to_num_(0.0, 0.0, 0.0)


def has_short_range(format: NumberFormat) -> bool:
    """True if a result in fp32 may lie outside of the range of ``format``; bf16 has the range of fp32."""
    return format.largest < 1e38


def expected_error(x: Tensor, format: NumberFormat) -> Tensor:
    """ulp / sqrt(12), the standard deviation of the error of an unknown number that was rounded to nearest to ``x``."""
    return format.ulp(x) / 12**0.5


def stochastic_error(error: Tensor, exact: Tensor, format: NumberFormat) -> Tensor:
    """The standard deviation of stochastic rounding where rounding to nearest has the error ``error``.

    The neighbours of ``exact`` are at distances d and ulp - d. Their probabilities make the mean exact, so that the
    variance is d (ulp - d).
    """
    distance = error.abs()
    return (distance * (format.ulp(exact) - distance)).clamp_min_(0).sqrt_()
