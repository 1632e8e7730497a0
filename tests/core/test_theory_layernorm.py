"""LayerNorm and epsilon: formulas against values worked out by hand, and theorems as properties."""

import math

import numpy as np
import pytest
import torch
from drawn import exactly, normal64, seeds
from hypothesis import assume, given
from hypothesis import strategies as st

from fragility_core import theory

# --- LayerNorm -----------------------------------------------------------------------------------


def test_layernorm_path_by_hand():
    # x = (1, 3): mean 2, variance 1; with epsilon 3 the scale is 1/2, with epsilon 0 it is 1.
    x, gamma = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    assert theory.layernorm_path(x, gamma, 3.0).tolist() == [-1.0, 2.0]
    assert theory.layernorm_path(x, gamma, 0.0).tolist() == [-2.0, 4.0]


@given(seed=seeds, epsilon=st.floats(1e-8, 1))
def test_layernorm_path_is_layernorm_without_bias(seed, epsilon):
    x, gamma = normal64(3, 4, 8, seed=seed), normal64(8, seed=seed + 1)
    want = torch.nn.functional.layer_norm(x, (8,), gamma, None, epsilon)
    torch.testing.assert_close(theory.layernorm_path(x, gamma, epsilon), want, rtol=1e-10, atol=1e-12)


def test_layernorm_factor_by_hand():
    assert theory.layernorm_factor(1.0, 3.0) == 0.625  # (3 + 2) / 4^{3/2}
    assert theory.layernorm_factor(0.0, 0.25) == 2.0  # 0.25 / 0.25^{3/2} = 1 / sqrt(epsilon)
    assert theory.layernorm_factor(4.0, 0.0) == 1.0  # 8 / 4^{3/2} = 2 / sigma


@given(variance=st.floats(0, 1e3), epsilon=st.floats(1e-10, 1e2), factor=st.floats(1.001, 1e3))
def test_layernorm_factor_decreases_in_epsilon(variance, epsilon, factor):
    """Strictly (Proposition 1 (`prop:ln`)), as far as fp64 can tell the two epsilons apart."""
    assume(epsilon * factor - epsilon > 1e-9 * variance)
    assert theory.layernorm_factor(variance, epsilon * factor) < theory.layernorm_factor(variance, epsilon)


@given(variance=st.floats(1e-6, 1e3), epsilon=st.floats(1e-6, 1e2))
def test_layernorm_factor_slope_is_the_derivative(variance, epsilon):
    e = torch.tensor(epsilon, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.layernorm_factor(variance, e), e)
    assert theory.layernorm_factor_slope(variance, epsilon) == pytest.approx(slope.item(), rel=1e-6)


def test_layernorm_factor_slope_by_hand():
    assert theory.layernorm_factor_slope(1.0, 3.0) == -7 / 64  # (3 + 4) / (2 * 4^{5/2})


@given(epsilon=st.floats(1e-10, 1e2), factor=st.floats(1.01, 100))
def test_layernorm_factor_peaks_at_half_epsilon(epsilon, factor):
    """f is not monotone in the variance: a row of variance 0 is not the most fragile one."""
    peak = theory.layernorm_factor(epsilon / 2, epsilon)
    assert peak == pytest.approx(2 / 1.5**1.5 / epsilon**0.5)
    assert theory.layernorm_factor(epsilon / 2 * factor, epsilon) < peak
    assert theory.layernorm_factor(epsilon / 2 / factor, epsilon) < peak


@given(seed=seeds, features=st.integers(3, 12), epsilon=st.floats(1e-6, 10))
def test_layernorm_factor_is_within_twice_the_lipschitz_constant(seed, features, epsilon):
    """||J_Z||_2 = 1 / sqrt(sigma^2 + epsilon) for gamma = 1 and d_model > 2."""
    x = normal64(features, seed=seed)
    derivative = torch.autograd.functional.jacobian(lambda x: theory.layernorm_path(x, torch.ones(1), epsilon), x)
    exact, variance = torch.linalg.matrix_norm(derivative, 2).item(), x.var(correction=0).item()
    assert exact == pytest.approx((variance + epsilon) ** -0.5, rel=1e-9)
    assert exact * (1 - 1e-12) <= theory.layernorm_factor(variance, epsilon) <= 2 * exact


def test_layernorm_norms_by_hand():
    # Rows (1, 3) and (-3, 4): variances 1 and 12.25; the first becomes (-2, 4) with gamma = (2, 4), epsilon = 0.
    norms = theory.layernorm_norms(torch.tensor([[1.0, 3.0], [-3.0, 4.0]]), torch.tensor([2.0, -4.0]), 0.0)
    assert norms.gamma_max == 4.0 and norms.variance.tolist() == [1.0, 12.25]
    assert norms.input_norm.tolist() == exactly([math.sqrt(10), 5.0])
    assert norms.path_norm.tolist() == exactly([math.sqrt(20)] * 2)


def test_layernorm_error_bounds_by_hand():
    assert theory.layernorm_error_bound(2.0, 1.0, 3.0, 8.0, 0.5, a_ln=0.5) == 2.5  # 2 * 0.625 * 8 * 0.5 / 2
    assert theory.layernorm_coefficient(10.0, 4.0) == 2.5
    assert theory.layernorm_relative_error_bound(10.0, 4.0, 0.5) == 1.25


@given(seed=seeds, epsilon=st.floats(1e-8, 1e2), factor=st.floats(1.01, 1e6))
def test_layernorm_coefficient_falls_by_less_than_two(seed, epsilon, factor):
    """C_LN, the error relative to LayerNorm's own output, lies between once and twice a_ln ||x|| / ||x - mu||."""
    x, gamma = normal64(8, seed=seed) + 3, torch.ones(8)
    coefficients = []
    for value in (epsilon, factor * epsilon):
        norms = theory.layernorm_norms(x, gamma, value)
        magnitude = theory.layernorm_magnitude(norms.gamma_max, norms.variance, value, norms.input_norm)
        coefficients.append(theory.layernorm_coefficient(magnitude, norms.path_norm).item())
    lowest = (x.norm() / (x - x.mean()).norm()).item()
    assert 2 * lowest * (1 + 1e-9) >= coefficients[0] >= coefficients[1] * (1 - 1e-12) >= lowest * (1 - 1e-9)


def test_layernorm_magnitude_by_hand():
    assert theory.layernorm_magnitude(2.0, 1.0, 3.0, 8.0) == 10.0  # 2 * 0.625 * 8
    assert theory.layernorm_magnitude(2.0, 1.0, 3.0, 8.0, a_ln=0.5) == 5.0


@given(variance=st.floats(0, 1e3), epsilon=st.floats(1e-6, 1), scale=st.floats(1e-3, 1e3))
def test_layernorm_magnitude_does_not_depend_on_the_scale(variance, epsilon, scale):
    """x -> c x with epsilon -> c^2 epsilon changes neither LayerNorm nor M_LN."""
    scaled = theory.layernorm_magnitude(2.0, scale**2 * variance, scale**2 * epsilon, scale * 3.0)
    assert scaled == pytest.approx(theory.layernorm_magnitude(2.0, variance, epsilon, 3.0), rel=1e-9)


@given(features=st.integers(2, 12), exponent=st.floats(-6, 2), shift=st.floats(0, 100), seed=seeds)
def test_the_mean_square_takes_the_variances_place_in_an_rmsnorm(features, exponent, shift, seed):
    """||DZ||_2 = 1 / r for even gamma. f of the mean square is once to twice that, and max|gamma| f bounds ||DZ||_2."""
    x, epsilon, gamma = normal64(features, seed=seed) + shift, 10**exponent, normal64(features, seed=seed + 1)

    def gain(gamma: torch.Tensor) -> float:
        path = lambda x: gamma * x / (x.square().mean() + epsilon).sqrt()  # noqa: E731
        return torch.linalg.matrix_norm(torch.autograd.functional.jacobian(path, x), 2).item()

    mean_square = x.square().mean()
    factor = theory.layernorm_factor(mean_square, epsilon).item()
    assert gain(torch.ones(features)) == pytest.approx((mean_square.item() + epsilon) ** -0.5, rel=1e-9)
    assert gain(torch.ones(features)) * (1 - 1e-12) <= factor <= 2 * gain(torch.ones(features)) * (1 + 1e-12)
    magnitude = theory.layernorm_magnitude(gamma.abs().max(), mean_square, epsilon, x.norm())
    assert gain(gamma) * x.norm() <= magnitude * (1 + 1e-12)


@given(seed=seeds, epsilon=st.floats(1e-6, 1))
def test_layernorm_magnitude_bounds_the_first_order_change(seed, epsilon):
    """||dZ|| <= M_LN ||dx|| / ||x|| with a_ln = 1: the sensitivity that M_LN stands for."""
    x, gamma = normal64(8, seed=seed), normal64(8, seed=seed + 1)
    derivative = torch.autograd.functional.jacobian(lambda x: theory.layernorm_path(x, gamma, epsilon), x)
    magnitude = theory.layernorm_magnitude(gamma.abs().max(), x.var(correction=0), epsilon, x.norm())
    assert torch.linalg.matrix_norm(derivative, 2) * x.norm() <= magnitude * (1 + 1e-12)


def test_layernorm_ratio_by_hand():
    assert theory.layernorm_ratio(0.5, 0.25, 64, 2.0**-8) == 0.5  # 2 * 64 / 256


# --- Stabilization -------------------------------------------------------------------------------


sites = {"variance": st.floats(1e-6, 1e3), "epsilon": st.floats(1e-8, 1e-1), "norm": st.floats(1e-3, 1e3)}


def test_frozen_magnitude_slope_by_hand():
    assert theory.frozen_magnitude_slope(2.0, 1.0, 3.0, 8.0) == -1.75  # -2 * 8 * 7 / (2 * 32), with a_ln = 1


@given(**sites, gamma=st.floats(0.1, 10), a_ln=st.floats(0.1, 10))
def test_frozen_magnitude_slope_is_the_derivative(variance, epsilon, norm, gamma, a_ln):
    """By autograd and as printed in Eq. (17) (`eq:bgss-derivative`); it is negative."""
    e = torch.tensor(epsilon, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.frozen_magnitude(gamma, variance, e, norm, a_ln), e)
    by_formula = theory.frozen_magnitude_slope(gamma, variance, epsilon, norm, a_ln)
    printed = -gamma / 2 * (a_ln * norm) * (epsilon + 4 * variance) / (variance + epsilon) ** 2.5
    assert by_formula == pytest.approx(slope.item(), rel=1e-6) == pytest.approx(printed, rel=1e-9)
    assert by_formula < 0


@given(**sites, factor=st.floats(1, 1e3), other=st.floats(0, 1e3), transport=st.floats(1, 1e3))
def test_frozen_risk_reduction_is_the_difference_of_risks(variance, epsilon, norm, factor, other, transport):
    """Proposition 2 (`prop:bgss`): G^frz falls with epsilon by exactly Eq. (19) (`eq:bgss-reduction`)."""
    magnitudes = [theory.frozen_magnitude(2.0, variance, value, norm) for value in (epsilon, factor * epsilon)]
    risks = [theory.frozen_risk(other, magnitude, transport, 4.0) for magnitude in magnitudes]
    reduction = theory.frozen_risk_reduction(*magnitudes, transport, 4.0)
    assert reduction == pytest.approx(risks[0] - risks[1], rel=1e-9, abs=1e-12 * risks[0])
    assert reduction >= -1e-12 * risks[0]


steps = {"factor": st.floats(1, 1e6), "other": st.floats(0, 1e3), "transport": st.floats(1, 1e3)}


@given(**sites, **steps, gamma=st.floats(0, 10))
def test_frozen_magnitude_and_risk_do_not_increase_with_epsilon(
    variance, epsilon, norm, factor, other, transport, gamma
):
    """Proposition 2 (`prop:bgss`): strictly, where max|gamma| ||x|| > 0 and fp64 can tell the epsilons apart."""
    before, after = (theory.frozen_magnitude(gamma, variance, value, norm) for value in (epsilon, factor * epsilon))
    risks = [theory.frozen_risk(other, magnitude, transport, 4.0) for magnitude in (before, after)]
    assert after <= before * (1 + 1e-14) and risks[1] <= risks[0] * (1 + 1e-14)
    if gamma > 1e-3 and (factor - 1) * epsilon > 1e-9 * (variance + epsilon):
        assert after < before


@given(**sites, **steps)
def test_frozen_surrogate_and_its_score_do_not_increase_with_epsilon(variance, epsilon, norm, factor, other, transport):
    """The analogue of Proposition 2 (`prop:bgss`) in Section 5.1 (`subsec:bgss_estimation`), for a frozen ||Z||."""
    before, after = (theory.layernorm_surrogate(norm, variance, value) for value in (epsilon, factor * epsilon))
    scores = [theory.layer_risk(theory.local_magnitude(other, 1.0, part), transport, 4.0) for part in (before, after)]
    assert after <= before * (1 + 1e-14) and scores[1] <= scores[0] * (1 + 1e-14)
    if (factor - 1) * epsilon > 1e-9 * (variance + epsilon):
        assert after < before


def test_frozen_risk_by_hand():
    assert theory.frozen_magnitude(2.0, 1.0, 3.0, 8.0, a_ln=0.5) == 5.0
    assert theory.frozen_risk(2.0, 5.0, 12.0, 3.5) == 24.0  # (2 + 5) / 3.5 * 12
    assert theory.frozen_risk_reduction(5.0, 1.5, 12.0, 3.5) == 12.0


def test_layernorm_surrogate_by_hand():
    assert theory.layernorm_surrogate(8.0, 1.0, 3.0) == 5.0  # 8 * 0.625


def test_epsilon_update_by_hand():
    # sigma^2 d_model u / rho_* = (4, 64, 2000) * 64 / 256 / (1/2) = (2, 32, 1000), clipped to [8, 512].
    variance = np.array([4.0, 64.0, 2000.0])
    candidate = theory.epsilon_candidate(variance, 64, 2.0**-8, target=0.5, epsilon_min=8.0, epsilon_max=512.0)
    assert candidate.tolist() == [8.0, 32.0, 512.0]
    assert theory.epsilon_update(np.array([1.0, 100.0, 1.0]), candidate).tolist() == [8.0, 100.0, 512.0]
    bound = theory.post_update_ratio_bound(variance, 64, 2.0**-8, target=0.5, epsilon_max=512.0)
    assert bound.tolist() == [0.5, 0.5, 500 / 512]


@given(
    variance=st.floats(0, 1e6), epsilon=st.floats(1e-8, 1e-2), target=st.floats(0.01, 0.99),
    bounds=st.tuples(st.floats(1e-8, 1e-2), st.floats(1, 1e6)),
)  # fmt: skip
def test_post_update_ratio_is_guaranteed(variance, epsilon, target, bounds):
    """rho_LN <= rho_* after the update wherever epsilon_max does not bind, and no smaller candidate has that effect."""
    epsilon_min, epsilon_max = bounds[0], bounds[0] * bounds[1]
    candidate = theory.epsilon_candidate(
        variance, 768, 2.0**-11, target=target, epsilon_min=epsilon_min, epsilon_max=epsilon_max
    )
    after = theory.epsilon_update(epsilon, candidate)
    ratio = theory.layernorm_ratio(variance, after, 768, 2.0**-11)
    bound = theory.post_update_ratio_bound(variance, 768, 2.0**-11, target=target, epsilon_max=epsilon_max)
    assert after >= epsilon and epsilon_min <= candidate <= epsilon_max
    assert ratio <= bound * (1 + 1e-12)
    if variance * 768 * 2.0**-11 / target <= epsilon_max:
        assert bound == target
        if candidate > epsilon_min:
            assert theory.layernorm_ratio(variance, candidate * 0.999, 768, 2.0**-11) > target


def test_epsilon_candidate_refuses_what_it_cannot_mean():
    good = {"target": 0.5, "epsilon_min": 1e-6, "epsilon_max": 1e-2}
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=rf"rho_\* must lie in \(0, 1\), got {wrong}"):
            theory.epsilon_candidate(1.0, 64, 2.0**-8, **good | {"target": wrong})
    for low, high in ((0.0, 1e-2), (1e-2, 1e-3)):
        with pytest.raises(ValueError, match=r"0 < epsilon_min <= epsilon_max, got \["):
            theory.epsilon_candidate(1.0, 64, 2.0**-8, **good | {"epsilon_min": low, "epsilon_max": high})
