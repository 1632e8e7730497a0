"""Random inputs and tolerances that the tests of the theory share."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from fragility_core.numerics.formats import FORMATS

FP64 = 1e-12  # relative error of the reference, and far below any unit roundoff tested
seeds = st.integers(0, 2**32 - 1)
without_deadline = settings(deadline=None)
many = settings(deadline=None, max_examples=40)
every_format = pytest.mark.parametrize("format", FORMATS)


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for every draw."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal fp64 numbers."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def exactly(value):
    """Equal up to fp64 rounding."""
    return pytest.approx(value, rel=1e-13)


def assert_within(observed, bound):
    """No draw exceeds its bound by more than fp64's own error."""
    assert (observed <= bound * (1 + FP64)).all(), f"observed is {(observed / bound).max()} times the bound"
