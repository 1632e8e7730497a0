"""Random inputs and tolerances that the tests of the theory share."""

from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from fragility_numerics.formats import FORMATS

FP64 = 1e-12  # relative error of the reference, and far below any unit roundoff tested
seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=40)
every_format = pytest.mark.parametrize("format", FORMATS)


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own for every draw."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


normal64 = partial(normal, dtype=torch.float64)


def exactly(value):
    """Equal up to fp64 rounding."""
    return pytest.approx(value, rel=1e-13)


def assert_within(observed, bound):
    """No draw exceeds its bound by more than fp64's own error."""
    assert (observed <= bound * (1 + FP64)).all(), f"observed is {(observed / bound).max()} times the bound"


def two_power_steps(p: torch.Tensor) -> torch.Tensor:
    """The estimate of ||J(p)|| of one row (protocol section 3, d_smx)."""
    jacobian = torch.diag(p) - torch.outer(p, p)
    v = torch.linspace(-1, 1, len(p), dtype=p.dtype)
    v = v - v.mean()
    for _ in range(2):
        v = jacobian @ v
        v = v / v.norm().clamp_min(1e-300)
    return (jacobian @ v).norm()
