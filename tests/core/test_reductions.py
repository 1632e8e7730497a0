"""Estimators of norms and moments against fp64 oracles."""

import math

import pytest
import torch
from drawn import normal64, seeds, two_power_steps
from hypothesis import given
from hypothesis import strategies as st

from fragility_core import theory
from fragility_core.surrogates.reductions import (
    layernorm_with_moments,
    rmsnorm_with_moments,
    sampled_rows,
    segment_norms,
    softmax_sensitivity_estimate,
    spectral_norm,
    spectral_norm_from_gram,
    whole_norm,
    window_max,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = 2.0**-24
SEGMENTS_ROUNDED = 2.0**-8 + 1e-5  # what rounding the norms of segments to bf16 may change


def window_norm(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norms of windows, as the monitor measures them."""
    return whole_norm(segment_norms(x))


# --- Norms and moments ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrange", [
    lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[:, ::2, 1:], lambda x: x.mT,
    lambda x: x[:1].expand(4, -1, -1, -1),
], ids=["contiguous", "heads first", "strided", "transposed", "expanded"])  # fmt: skip
def test_window_norm(dtype, arrange):
    x = arrange(normal64(3, 17, 4, 256).to(dtype))
    norms = window_norm(x)
    oracle = torch.stack([torch.linalg.vector_norm(window.double()) for window in x])
    assert norms.dtype == torch.float32
    # Sums of n squares in fp32 err by at most about n u; these are far shorter than 1e-5 / u.
    torch.testing.assert_close(
        norms.double(), oracle, rtol=SEGMENTS_ROUNDED if dtype == torch.bfloat16 else 1e-5, atol=0
    )


@pytest.mark.parametrize(("shape", "spread", "off"), [
    ((64, 768), 0.0, 3e-4), ((12, 128, 64), 0.1, 1e-5), ((12, 64, 200), 0.0, 1e-5), ((64, 128), 0.0, 1e-5),
])  # fmt: skip
def test_errors_of_rounded_segments_average_out(shape, spread, off):
    """Rows behind a LayerNorm have one norm, their segments do not. The norms of short rows are not rounded at all."""
    x, spread = normal64(*shape, seed=1), spread * normal64(*shape[:-1], 1, seed=2)
    x = (27.7 * spread.exp() * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).bfloat16()
    assert window_norm(x[None]).item() == pytest.approx(torch.linalg.vector_norm(x.double()).item(), rel=off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_window_norm_accumulates_in_fp32(dtype):
    # 10^6 equal entries: a 16-bit sum of squares would stop growing at 256 or 2048 of them.
    assert window_norm(torch.ones(1, 1000, 1000, dtype=dtype)).item() == pytest.approx(1000, rel=SEGMENTS_ROUNDED)


def test_window_norm_beyond_the_largest_fp16():
    x = torch.full((2, 10, 10), 60000.0, dtype=torch.float16)
    x[1, 3, 3] = math.inf
    assert window_norm(x).tolist() == [pytest.approx(600000, rel=1e-3), math.inf]  # 60000 is 59968 in fp16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_layernorm_path(dtype, epsilon):
    # An offset of a few standard deviations, as a residual stream has.
    x, gamma = (2 + normal64(3, 20, 64)).to(dtype), normal64(64, seed=1).to(dtype)
    path, mean, scale = layernorm_with_moments(x, gamma, epsilon)
    exact = theory.layernorm_path(x.double(), gamma.double(), epsilon)
    assert path.dtype == dtype and mean.dtype == scale.dtype == torch.float32
    u = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(path.double(), exact, rtol=1.01 * u + 8 * U32, atol=32 * U32)
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=1e-5, atol=1e-6)
    variance = x.double().var(-1, correction=0)
    torch.testing.assert_close(scale.double(), (variance + epsilon).rsqrt(), rtol=1e-5, atol=0)
    assert mean.shape == scale.shape == (3, 20)


def test_layernorm_path_of_rows_without_variance():
    path, mean, scale = layernorm_with_moments(torch.full((1, 2, 8), 3.0), torch.ones(8), 1e-4)
    assert path.tolist() == torch.zeros(1, 2, 8).tolist()
    assert mean.tolist() == [[3.0, 3.0]]
    assert scale[0, 0].item() == pytest.approx(100, rel=1e-6)  # 1 / sqrt(1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_rmsnorm_path(dtype, epsilon):
    x, gamma = (2 + normal64(3, 20, 64)).to(dtype), normal64(64, seed=1).to(dtype)
    path, mean, scale = rmsnorm_with_moments(x, gamma, epsilon)
    assert path.dtype == mean.dtype == scale.dtype == torch.float32 and mean.shape == scale.shape == (3, 20)
    exact = (x.double().square().mean(-1) + epsilon).rsqrt()
    torch.testing.assert_close(path.double(), gamma.double() * x.double() * exact[..., None], rtol=32 * U32, atol=0)
    torch.testing.assert_close(scale.double(), exact, rtol=1e-5, atol=0)
    assert not mean.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_window_max(dtype):
    x = normal64(3, 5, 4).to(dtype)
    x[1, 2, 3] = -30.5
    assert window_max(x).dtype == torch.float32
    assert window_max(x).tolist() == [window.abs().max().item() for window in x] and window_max(x)[1] == 30.5
    x[2, 0, 0] = torch.nan
    assert window_max(x)[2].isnan()


# --- The softmax differential --------------------------------------------------------------------


@given(rows=st.integers(1, 2000))
def test_sampled_rows(rows):
    """16 rows evenly spaced from first to last (protocol section 3), or all of fewer."""
    chosen = list(sampled_rows(rows))
    assert len(chosen) == min(rows, 16)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0 and chosen[-1] == rows - 1
    if rows > 16:
        assert all(abs(row - i * (rows - 1) / 15) <= 0.5 + 1e-4 for i, row in enumerate(chosen))


def test_sampled_rows_by_hand():
    # 0, 4.2, 8.4, 12.6, 16.8, 21, ..., 63, each rounded.
    assert list(sampled_rows(64)) == [0, 4, 8, 13, 17, 21, 25, 29, 34, 38, 42, 46, 50, 55, 59, 63]


@given(seed=seeds, entries=st.integers(2, 40), sharpness=st.floats(0.1, 3))
def test_softmax_sensitivity_estimate(seed, entries, sharpness):
    p = (sharpness * normal64(3, entries, seed=seed)).softmax(-1).float()
    estimates = softmax_sensitivity_estimate(p)
    for row, estimate in zip(p.double(), estimates.tolist()):
        # J(p) v = p (v - p . v) subtracts numbers of at most 1, with an error of a few u in fp32.
        assert estimate == pytest.approx(two_power_steps(row).item(), rel=1e-4, abs=4 * U32)
        assert estimate <= theory.softmax_sensitivity(row[None]).item() * (1 + 1e-5) + 4 * U32


def test_softmax_sensitivity_estimate_is_exact_for_two_entries(reference_e1):
    """There J(p) has one nonzero eigenvalue; the known values are E1's (tests/data/e1.json)."""
    margins = torch.tensor([[0, -row["margin"]] for row in reference_e1["attention"]])
    known = torch.tensor([row["softmax_jac_norm"] for row in reference_e1["attention"]])
    torch.testing.assert_close(softmax_sensitivity_estimate(margins.softmax(-1)), known, rtol=1e-5, atol=0)


def test_softmax_sensitivity_estimate_of_rows_without_differential():
    one_hot = torch.eye(8, dtype=torch.bfloat16)  # J = 0: the power iteration must not divide by zero
    assert softmax_sensitivity_estimate(one_hot).tolist() == [0.0] * 8


def test_softmax_sensitivity_estimate_of_an_overflow_is_nonfinite():
    assert softmax_sensitivity_estimate(torch.full((4,), math.nan)).isnan()


# --- Operator norms ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (40, 3), (64, 256), (1, 7), (7, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spectral_norm(shape, dtype):
    weight = normal64(*shape).to(dtype)
    exact = torch.linalg.matrix_norm(weight.double(), 2).item()
    assert spectral_norm(weight).item() == pytest.approx(exact, rel=1e-5)


def test_spectral_norm_by_hand():
    assert spectral_norm(torch.diag(torch.tensor([3.0, -4.0]))).item() == pytest.approx(4, rel=1e-6)
    assert spectral_norm(torch.zeros(3, 5)).item() == 0
    assert spectral_norm(torch.ones(4, 9)).item() == pytest.approx(6, rel=1e-6)  # rank one, sqrt(4 * 9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_of_nonfinite_matrices_are_nonfinite(bad):
    weight = torch.eye(4)
    weight[1, 2] = bad
    assert spectral_norm(weight).isnan()
    assert spectral_norm_from_gram(weight.T @ weight).isnan()


def gram(spectrum: torch.Tensor, seed: int) -> torch.Tensor:
    """A symmetric fp32 matrix with the given eigenvalues and random eigenvectors."""
    basis, _ = torch.linalg.qr(normal64(len(spectrum), len(spectrum), seed=seed))
    return ((basis * spectrum) @ basis.T).float()


# Eigenvalues of G = V^T V relative to the largest. The Rayleigh quotient over the columns of G^256 weighs
# an eigenvalue 1 - g by (1 - g)^512: what it misses is largest where that is near 1/d, at most
# ln(d) / (2 * 512) or so for d - 1 equal ones, 0.4 % at d = 128.
SPECTRA = {
    "one": lambda d: torch.eye(d, dtype=torch.float64)[0],
    "equal": lambda d: torch.ones(d, dtype=torch.float64),
    "linear": lambda d: torch.linspace(0, 1, d, dtype=torch.float64),
    "wide": lambda d: torch.logspace(-12, 0, d, dtype=torch.float64),
    "tied in pairs": lambda d: torch.linspace(0, 1, d // 2, dtype=torch.float64).repeat_interleave(2),
} | {
    f"one above the rest by {gap}": lambda d, gap=gap: torch.cat(
        [torch.ones(1).double(), torch.full((d - 1,), 1.0 - gap).double()]
    )
    for gap in (1e-4, 1e-3, 3e-3, 6e-3, 1e-2, 3e-2, 0.1)
}  # fmt: skip


@pytest.mark.parametrize("width", [2, 16, 64, 128])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e-12, 1.0, 1e12, 1e21, 1e30])  # squares leave the range of fp32
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spectral_norm_from_gram(width, spectrum, scale, dtype):
    matrix = gram(scale * spectrum(width), seed=width).to(dtype)
    exact = torch.linalg.eigvalsh(matrix.double())[-1].sqrt().item()
    estimate = spectral_norm_from_gram(matrix).item()
    assert estimate <= exact * (1 + 1e-5)  # rounding
    assert estimate >= exact * (1 - 0.004)  # the docstring's 0.4 %


@given(seed=seeds, rows=st.integers(1, 30), width=st.integers(1, 24), decay=st.floats(0, 3))
def test_spectral_norm_from_gram_of_values(seed, rows, width, decay):
    """As the monitor uses it: the Gram matrices of low-precision values (B, H, T, d)."""
    value = normal64(2, 3, rows, width, seed=seed) * torch.logspace(0, -decay, width, dtype=torch.float64)
    wide = value.bfloat16().float()
    exact = torch.linalg.matrix_norm(wide.double(), 2)
    estimate = spectral_norm_from_gram(wide.mT @ wide).double()
    assert (estimate <= exact * (1 + 1e-5)).all() and (estimate >= exact * (1 - 0.004)).all()
    low = wide.bfloat16()
    rounded = spectral_norm_from_gram(low.mT @ low).double()
    allowed = 2.0**-9 * width**0.5  # each product errs by 2^-8 of itself at most
    assert (rounded <= exact * (1 + allowed)).all() and (rounded >= exact * (1 - 0.004 - allowed)).all()


@pytest.mark.parametrize("width", [320, 640, 1024])
def test_spectral_norm_from_gram_of_wide_heads(width):
    """Of a flat spectrum, whose powers are as small as they can be."""
    for matrix in (9 * torch.eye(width), torch.diag(torch.cat([torch.ones(width - 1), torch.full((1,), 1.125)]))):
        exact = torch.linalg.eigvalsh(matrix.double())[-1].sqrt().item()
        for dtype in (torch.float32, torch.bfloat16):
            assert spectral_norm_from_gram(matrix.to(dtype)).item() == pytest.approx(exact, rel=0.004)


def test_spectral_norm_from_gram_of_zero():
    assert spectral_norm_from_gram(torch.zeros(2, 3, 8, 8)).tolist() == torch.zeros(2, 3).tolist()


def test_spectral_norm_from_gram_keeps_heads_apart():
    grams = torch.stack([torch.eye(4), torch.full((4, 4), math.nan), 9 * torch.eye(4)])
    norms = spectral_norm_from_gram(grams)
    assert norms[0].item() == pytest.approx(1) and norms[1].isnan() and norms[2].item() == pytest.approx(3)
