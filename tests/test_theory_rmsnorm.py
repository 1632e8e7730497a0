"""RMSNorm: the statements by hand and by autograd, and the bounds against the kernels of the real classes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fragility_core import theory
from fragility_core.arithmetic.formats import FORMATS
from fragility_lab.experiments.calibration import gamma_n
from fragility_lab.experiments.kernel_samples import arithmetic, draw_rows, underflow

FP32 = 2.0**-24
seeds = st.integers(0, 2**32 - 1)
many = settings(deadline=None, max_examples=25)
# The class, what its weight is less than gamma, and how often it rounds an entry to the format.
CLASSES = {"llama": (LlamaRMSNorm, 0.0, 2), "gemma": (GemmaRMSNorm, 1.0, 1)}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def a_priori(format: str, features: int, roundings: int) -> float:
    """a_rms of fp32 moments and products and so many roundings to the format, O(u^2) included."""
    u = FORMATS[format].unit_roundoff
    return ((1 + u) ** roundings * (1 + gamma_n(features + 16, FP32)) - 1) / u


# --- By hand and by autograd ---------------------------------------------------------------------


def test_rmsnorm_by_hand():
    # s^2 = (3^2 + 4^2 + 0 + 0) / 4 = 6.25, with epsilon 2.75 r = 3: Z = gamma x / 3.
    x, gamma = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([1.0, -2.0, 1.0, 1.0])
    assert theory.rmsnorm_path(x, gamma, 2.75).tolist() == pytest.approx([1.0, -8 / 3, 0.0, 0.0], rel=1e-14)
    norms = theory.rmsnorm_norms(x, gamma, 2.75)
    assert [float(n) for n in norms] == pytest.approx([2.0, 6.25, 5.0, 73**0.5 / 3], rel=1e-14)
    # f = (2.75 + 12.5) / 27; M_RMS = 2 f 3 * 5 for a_rms = 3.
    magnitude = theory.rmsnorm_magnitude(2.0, 6.25, 2.75, 5.0, a_rms=3.0)
    assert magnitude == pytest.approx(30 * 15.25 / 27, rel=1e-14)
    assert theory.rmsnorm_coefficient(magnitude, 2.0) == magnitude / 2
    assert theory.rmsnorm_error_bound(2.0, 6.25, 2.75, 5.0, 0.5, a_rms=3.0) == magnitude / 2
    assert theory.rmsnorm_relative_error_bound(magnitude, 2.0, 0.5) == magnitude / 4
    assert theory.rmsnorm_ratio(6.25, 2.5, 8, 2.0**-4) == 1.25


@given(features=st.integers(2, 12), exponent=st.floats(-6, 2), seed=seeds)
@many
def test_factor_is_once_to_twice_the_jacobians_norm(features, exponent, seed):
    """||DZ||_2 = 1 / r exactly for even gamma, and max|gamma| f bounds it for any."""
    x, epsilon = normal(seed, features), 10**exponent
    gamma = normal(seed + 1, features)
    s2 = x.square().mean()
    factor = theory.layernorm_factor(s2, epsilon)
    even, uneven = (
        torch.linalg.matrix_norm(jacobian(lambda x, g=g: theory.rmsnorm_path(x, g, epsilon), x), 2)
        for g in (torch.ones(features), gamma)
    )
    torch.testing.assert_close(even, (s2 + epsilon) ** -0.5, rtol=1e-10, atol=0)
    assert even <= factor <= 2 * even * (1 + 1e-12)
    assert uneven <= gamma.abs().max() * factor


@given(features=st.integers(1, 40), exponent=st.floats(-6, 2), shift=st.floats(0, 1e6), seed=seeds)
@many
def test_rmsnorm_coefficient_does_not_grow_with_a_shift(features, exponent, shift, seed):
    x, epsilon = normal(seed, features) + shift, 10**exponent
    gamma = 0.1 + normal(seed + 1, features).abs()

    def coefficient(gamma: torch.Tensor) -> float:
        norms = theory.rmsnorm_norms(x, gamma, epsilon)
        return theory.rmsnorm_coefficient(theory.rmsnorm_magnitude(*norms[:2], epsilon, norms[2]), norms[3]).item()

    s2 = x.square().mean().item()
    even = 1 + s2 / (s2 + epsilon)
    assert coefficient(torch.ones(features)) == pytest.approx(even, rel=1e-12)
    assert coefficient(gamma) <= even * (gamma.max() / gamma.min()).item() * (1 + 1e-12)


def test_layernorm_coefficient_does_grow_with_a_shift():
    """What RMSNorm is spared: the same rows 1000 standard deviations away from 0."""
    x, gamma = normal(0, 64), torch.ones(64)

    def coefficient(shift: float) -> float:
        norms = theory.layernorm_norms(x + shift, gamma, 1e-6)
        return theory.layernorm_coefficient(theory.layernorm_magnitude(*norms[:2], 1e-6, norms[2]), norms[3]).item()

    assert coefficient(1e3) > 500 * coefficient(0.0)


# --- Kernels -------------------------------------------------------------------------------------


def computed(name: str, x: torch.Tensor, weight: torch.Tensor, epsilon: float, low) -> torch.Tensor:
    """Z~ of rows ``x`` by the named class in the format of ``low``."""
    norm = CLASSES[name][0](len(weight), eps=epsilon)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    with low.running():
        return norm(x).double()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("format", FORMATS)
@given(features=st.integers(1, 300), exponent=st.floats(-12, 1), even=st.booleans(), seed=seeds)
@many
def test_bounds_hold(format, name, features, exponent, even, seed):
    """Row by row, absolute and, where Z is not 0, relative; no order in u left out."""
    low, epsilon, generator = arithmetic(format), 10**exponent, seeded(seed)
    _, offset, roundings = CLASSES[name]
    weight = torch.full((features,), 1 - offset) if even else torch.randn(features, generator=generator)
    weight = low.format.round(weight)
    gamma, a_rms, u = weight.double() + offset, a_priori(format, features, roundings), low.format.unit_roundoff
    for x in draw_rows(features, 4, low.format, generator).values():
        norms = theory.rmsnorm_norms(x, gamma, epsilon)
        result = computed(name, x, weight, epsilon, low)
        error = (result - theory.rmsnorm_path(x, gamma, epsilon)).norm(dim=-1)
        error = error - (1 + norms.gamma_max) * underflow(low.format, features)
        scaled = (norms.gamma_max, norms.mean_square, epsilon, norms.input_norm)
        assert (error <= theory.rmsnorm_error_bound(*scaled, u, a_rms=a_rms) * (1 + 1e-12)).all()
        magnitude = theory.rmsnorm_magnitude(*scaled, a_rms=a_rms)
        relative = theory.rmsnorm_relative_error_bound(magnitude, norms.path_norm, u)
        inside = norms.path_norm > 0
        assert (error <= relative * norms.path_norm * (1 + 1e-12))[inside].all()


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_the_kernel_constant_is_the_number_of_roundings(format):
    """Single features and a large epsilon, where the bound is attained: Llama's needs a_rms > 1, Gemma's does not."""
    low, generator = arithmetic(format), seeded(0)
    x = low.format.round(torch.rand(4096, 1, generator=generator) + 1)
    gamma, u, excess = torch.tensor([1.0 + 2 * low.format.unit_roundoff * 37]), low.format.unit_roundoff, {}
    for name, (_, offset, _) in CLASSES.items():
        norms = theory.rmsnorm_norms(x, gamma, 1e4)
        error = (
            computed(name, x, low.format.round(gamma - offset), 1e4, low) - theory.rmsnorm_path(x, gamma, 1e4)
        ).norm(dim=-1)
        bound = theory.rmsnorm_error_bound(norms.gamma_max, norms.mean_square, 1e4, norms.input_norm, u, a_rms=1.0)
        excess[name] = (error / bound).max()
    assert excess["llama"] > 1.2 and 0.8 < excess["gemma"] <= 1 + 1e-3


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@given(features=st.integers(1, 64), exponent=st.floats(-4, 0), shift=st.floats(0, 30), seed=seeds)
@many
def test_bound_holds_for_an_rmsnorm_of_elementary_kernels(format, features, exponent, shift, seed):
    """Square, mean and sum err by 3u, halved under the root, which adds u; two products: a_rms = 4.5 to first order."""
    low, epsilon = arithmetic(format, execution="emulated"), 10**exponent
    u, generator = low.format.unit_roundoff, seeded(seed)
    x = low.format.round(torch.randn(16, features, generator=generator) + shift)
    gamma = low.format.round(torch.randn(features, generator=generator))
    with low.running():
        scale = ((x * x).mean(-1, keepdim=True) + epsilon).rsqrt()
        result = (gamma * (x * scale)).double()
    norms = theory.rmsnorm_norms(x, gamma, epsilon)
    bound = theory.rmsnorm_error_bound(norms.gamma_max, norms.mean_square, epsilon, norms.input_norm, u, a_rms=4.7)
    error = (result - theory.rmsnorm_path(x, gamma, epsilon)).norm(dim=-1)
    assert (error <= bound + (1 + norms.gamma_max) * underflow(low.format, features)).all()
