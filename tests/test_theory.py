"""The paper's formulas against values worked out by hand, and their theorems as properties."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fragility_core import theory

positive = st.floats(1e-6, 1e6)
seeds = st.integers(0, 2**32 - 1)
without_deadline = settings(deadline=None)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal fp64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exactly(value):
    """Equal up to fp64 rounding."""
    return pytest.approx(value, rel=1e-13)


# --- Self-attention ------------------------------------------------------------------------------


def test_softmax_jacobian_by_hand():
    # p = (1/4, 3/4): Diag(p) - p p^T = [[1/4 - 1/16, -3/16], [-3/16, 3/4 - 9/16]] = 3/16 [[1, -1], [-1, 1]].
    p = torch.tensor([0.25, 0.75])
    assert theory.softmax_jacobian(p).tolist() == [[0.1875, -0.1875], [-0.1875, 0.1875]]
    assert theory.softmax_jacobian(p).dtype == torch.float64


@given(seed=seeds)
@without_deadline
def test_softmax_jacobian_is_the_derivative(seed):
    scores = normal(seed, 5)
    derivative = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    torch.testing.assert_close(theory.softmax_jacobian(scores.softmax(-1)), derivative, rtol=1e-12, atol=1e-15)


def test_softmax_sensitivity_by_hand():
    # ||3/16 [[1, -1], [-1, 1]]|| = 3/16 * 2; the uniform row of three has J = (I - 11^T/3) / 3, norm 1/3;
    # a one-hot row has J = 0; (1/2, 1/2, 0) attains the bound, 1/4 * 2.
    rows = torch.tensor([[0.25, 0.75, 0], [1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0.5, 0.5, 0]], dtype=torch.float64)
    each = [theory.softmax_sensitivity(row[None]).item() for row in rows]
    assert each == pytest.approx([0.375, 1 / 3, 0, 0.5], abs=1e-15)
    assert theory.softmax_sensitivity(rows).item() == exactly(0.5)  # the largest of the rows


@given(seed=seeds, scale=st.floats(0.01, 100), entries=st.integers(1, 12))
@without_deadline
def test_softmax_sensitivity_is_at_most_half(seed, scale, entries):
    """||J(p)|| <= 1/2 for every probability vector (subsec. attn)."""
    assert theory.softmax_sensitivity((scale * normal(seed, 3, entries)).softmax(-1)).item() <= 0.5 + 1e-15


@given(seed=seeds)
@without_deadline
def test_softmax_sensitivity_is_taken_per_leading_index(seed):
    p = normal(seed, 2, 3, 4, 5).softmax(-1)
    each = torch.stack([torch.stack([theory.softmax_sensitivity(head) for head in window]) for window in p])
    torch.testing.assert_close(theory.softmax_sensitivity(p), each)


def test_attention_condition_numbers_by_hand():
    assert theory.kappa_softmax(6.0, 1.5, 0.25) == 1.0  # 6 / 1.5 * 0.25
    assert theory.chi_score(8.0, 3.0, 2.0, 16, 0.25) == 0.75  # 8 * 3 * 0.25 / (2 * sqrt 16)
    assert theory.kappa_value(2.0, 3.0, 4.0) == 1.5  # 2 * 3 / 4


def test_attention_magnitude_by_hand():
    assert theory.attention_magnitude(1.0, 0.75, 2.0, 3.0) == 10.5  # (1 + 0.75) * 2 * 3
    # [c_smx + kappa + c_gemm chi + c'_gemm] = 0.5 + 1 + 2 * 0.75 + 4 = 7
    assert theory.attention_magnitude(1.0, 0.75, 2.0, 3.0, c_softmax=0.5, c_gemm=2.0, c_gemm_out=4.0) == 42.0


@given(seed=seeds, scale=st.floats(1e-7, 1e-5))
@without_deadline
def test_kappa_softmax_bounds_the_first_order_change_of_the_probabilities(seed, scale):
    """||dP|| / ||P|| <= kappa_softmax ||dS|| / ||S||, the definition that it condenses (subsec. attn)."""
    scores, direction = normal(seed, 4, 6), normal(seed + 1, 4, 6)
    change = scale * direction
    p = scores.softmax(-1)
    sensitivity = max(theory.softmax_sensitivity(p), theory.softmax_sensitivity((scores + change).softmax(-1)))
    kappa = theory.kappa_softmax(scores.norm(), p.norm(), sensitivity)
    moved = ((scores + change).softmax(-1) - p).norm() / p.norm()
    assert moved <= kappa * change.norm() / scores.norm() * (1 + 1e-3)


# --- Residual relaxation -------------------------------------------------------------------------


def test_residual_condition_bound_by_hand():
    assert theory.residual_condition_bound(0.0) == 1.0
    assert theory.residual_condition_bound(0.5) == 3.0  # 1.5 / 0.5


@given(seed=seeds, rho=st.floats(0, 0.99), width=st.integers(1, 8))
@without_deadline
def test_residual_condition_bound_holds(seed, rho, width):
    """kappa(I + J) <= (1 + rho) / (1 - rho) for every J with ||J|| = rho < 1 (Theorem residual)."""
    jacobian = normal(seed, width, width)
    jacobian *= rho / torch.linalg.matrix_norm(jacobian, 2)
    condition = torch.linalg.cond(torch.eye(width, dtype=torch.float64) + jacobian, 2).item()
    assert condition <= theory.residual_condition_bound(rho) * (1 + 1e-9)


@given(rho=st.floats(0, 0.99))
@without_deadline
def test_residual_condition_bound_is_attained(rho):
    """By J = diag(rho, -rho)."""
    condition = torch.linalg.cond(torch.diag(torch.tensor([1 + rho, 1 - rho], dtype=torch.float64)), 2).item()
    assert condition == pytest.approx(theory.residual_condition_bound(rho), rel=1e-9)


def test_downstream_transport_by_hand():
    # 1 + rho = (2, 3, 4): 3 * 4, 4, and the empty product behind the last layer.
    assert theory.downstream_transport(torch.tensor([1.0, 2.0, 3.0])).tolist() == [12.0, 4.0, 1.0]
    assert theory.downstream_transport(torch.tensor([7.0])).tolist() == [1.0]


@given(rho=st.lists(st.floats(0, 10), min_size=1, max_size=12))
@without_deadline
def test_downstream_transport_recursion(rho):
    """pi_L = 1 and pi_l = (1 + rho_{l+1}) pi_{l+1}; the first layer's own rho plays no part."""
    transport = theory.downstream_transport(torch.tensor(rho, dtype=torch.float64))
    assert transport[-1] == 1
    for layer in range(len(rho) - 1):
        assert transport[layer].item() == exactly((1 + rho[layer + 1]) * transport[layer + 1].item())


def test_downstream_transport_keeps_windows_apart():
    rho = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert theory.downstream_transport(rho).tolist() == [[3.0, 1.0], [5.0, 1.0]]


def test_downstream_transport_of_an_overflow_is_nonfinite_upstream_only():
    transport = theory.downstream_transport(torch.tensor([1.0, math.nan, 2.0]))
    assert transport[0].isnan() and transport[1:].tolist() == [3.0, 1.0]


# --- LayerNorm -----------------------------------------------------------------------------------


def test_layernorm_path_by_hand():
    # x = (1, 3): mean 2, variance 1; with epsilon 3 the scale is 1/2, with epsilon 0 it is 1.
    x, gamma = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    assert theory.layernorm_path(x, gamma, 3.0).tolist() == [-1.0, 2.0]
    assert theory.layernorm_path(x, gamma, 0.0).tolist() == [-2.0, 4.0]


@given(seed=seeds, epsilon=st.floats(1e-8, 1))
@without_deadline
def test_layernorm_path_is_layernorm_without_bias(seed, epsilon):
    x, gamma = normal(seed, 3, 4, 8), normal(seed + 1, 8)
    want = torch.nn.functional.layer_norm(x, (8,), gamma, None, epsilon)
    torch.testing.assert_close(theory.layernorm_path(x, gamma, epsilon), want, rtol=1e-10, atol=1e-12)


def test_layernorm_factor_by_hand():
    assert theory.layernorm_factor(1.0, 3.0) == 0.625  # (3 + 2) / 4^{3/2}
    assert theory.layernorm_factor(0.0, 0.25) == 2.0  # 0.25 / 0.25^{3/2} = 1 / sqrt(epsilon)
    assert theory.layernorm_factor(4.0, 0.0) == 1.0  # 8 / 4^{3/2} = 2 / sigma


@given(variance=st.floats(0, 1e3), epsilon=st.floats(1e-10, 1e2), factor=st.floats(1.001, 1e3))
@without_deadline
def test_layernorm_factor_decreases_in_epsilon(variance, epsilon, factor):
    """f'(epsilon) < 0 (Proposition ln): strictly, as far as fp64 can tell the two epsilons apart."""
    assume(epsilon * factor - epsilon > 1e-9 * variance)
    assert theory.layernorm_factor(variance, epsilon * factor) < theory.layernorm_factor(variance, epsilon)


@given(variance=st.floats(1e-6, 1e3), epsilon=st.floats(1e-6, 1e2))
@without_deadline
def test_layernorm_factor_has_the_derivative_of_the_proof(variance, epsilon):
    """f' = -(epsilon + 4 sigma^2) / (2 (sigma^2 + epsilon)^{5/2}), by the quotient rule."""
    e = torch.tensor(epsilon, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.layernorm_factor(variance, e), e)
    by_hand = -(epsilon + 4 * variance) / (2 * (variance + epsilon) ** 2.5)
    assert slope.item() == pytest.approx(by_hand, rel=1e-6)


def test_layernorm_magnitude_by_hand():
    assert theory.layernorm_magnitude(2.0, 1.0, 3.0, 8.0) == 10.0  # 2 * 0.625 * 8
    assert theory.layernorm_magnitude(2.0, 1.0, 3.0, 8.0, a_ln=0.5) == 5.0


@given(seed=seeds, epsilon=st.floats(1e-6, 1))
@without_deadline
def test_layernorm_magnitude_bounds_the_first_order_change(seed, epsilon):
    """||dZ|| <= M_LN ||dx|| / ||x|| with a_ln = 1: the sensitivity that M_LN stands for."""
    x, gamma = normal(seed, 8), normal(seed + 1, 8)
    derivative = torch.autograd.functional.jacobian(lambda x: theory.layernorm_path(x, gamma, epsilon), x)
    magnitude = theory.layernorm_magnitude(gamma.abs().max(), x.var(correction=0), epsilon, x.norm())
    assert torch.linalg.matrix_norm(derivative, 2) * x.norm() <= magnitude * (1 + 1e-12)


def test_layernorm_ratio_by_hand():
    assert theory.layernorm_ratio(0.5, 0.25, 64, 2.0**-8) == 0.5  # 2 * 64 / 256


# --- The score -----------------------------------------------------------------------------------


def test_score_by_hand():
    assert theory.local_magnitude(1.0, 2.0, 4.0) == 7.0
    assert theory.layer_risk(7.0, 12.0, 3.5) == 24.0  # 7 / 3.5 * 12


def test_layernorm_dominance_by_hand():
    layernorm, magnitude = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([4.0, 0.0, 2.0])
    assert theory.layernorm_dominance(layernorm, magnitude).tolist() == [0.25, 0.0, 1.0]


def test_layernorm_dominance_of_an_overflow_is_not_a_number():
    assert theory.layernorm_dominance(torch.tensor([math.inf]), torch.tensor([math.inf])).isnan().all()


@given(magnitude=positive, transport=positive, final=positive, factor=st.floats(0.01, 100))
@without_deadline
def test_risk_is_linear_in_the_magnitude_and_scale_free(magnitude, transport, final, factor):
    risk = theory.layer_risk(magnitude, transport, final)
    assert theory.layer_risk(factor * magnitude, transport, final) == pytest.approx(factor * risk, rel=1e-12)
    assert theory.layer_risk(factor * magnitude, transport, factor * final) == pytest.approx(risk, rel=1e-12)


def test_mismatch_by_hand():
    # ||(0, 0, 0, 1)|| / ||(1, 1, 1, 1)|| = 1/2 and ||(3, 4)|| / ||(6, 8)|| = 1/2, window by window.
    reference = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[6.0, 8.0], [0.0, 0.0]]])
    low = torch.tensor([[[1.0, 1.0], [1.0, 2.0]], [[3.0, 4.0], [0.0, 0.0]]])
    assert theory.mismatch(low, reference).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_mismatch_casts_before_it_subtracts(dtype):
    reference = torch.full((1, 1, 4), 1 + 2.0**-10)  # in any of these but fp16 its distance from 1 vanishes
    want = 2.0**-10 / (1 + 2.0**-10)
    assert theory.mismatch(torch.ones(1, 1, 4).to(dtype), reference).item() == pytest.approx(want, rel=1e-6)


@given(seed=seeds, scale=st.floats(1e-3, 1e3))
@without_deadline
def test_mismatch_does_not_depend_on_the_scale(seed, scale):
    low, reference = normal(seed, 2, 5, 4), normal(seed + 1, 2, 5, 4)
    torch.testing.assert_close(
        theory.mismatch(scale * low, scale * reference), theory.mismatch(low, reference), rtol=1e-12, atol=0
    )


def test_mismatch_of_an_overflow_is_nonfinite():
    low = torch.tensor([[[math.inf, 1.0]], [[math.nan, 1.0]]])
    assert not theory.mismatch(low, torch.ones(2, 1, 2)).isfinite().any()


# --- Experiment E1, against the release's table (tests/data/e1.json, fp64) -----------------------


def known(value: float):
    """Equal to a recorded value to 1e-9, as issue 2 asks."""
    return pytest.approx(value, rel=1e-9)


def test_e1_attention(reference_e1):
    assert len(reference_e1["attention"]) == 20
    for row in reference_e1["attention"]:
        margin, scale = row["margin"], row["value_scale"]
        scores = -margin * torch.tensor([[0, 1], [1, 0]], dtype=torch.float64)
        value = scale * torch.tensor([[1, -1], [-1, 1]], dtype=torch.float64)
        p = scores.softmax(-1)
        kappa = theory.kappa_softmax(scores.norm(), p.norm(), theory.softmax_sensitivity(p))
        proxy = theory.attention_magnitude(kappa, 0.0, p.norm(), torch.linalg.matrix_norm(value, 2))
        assert scores.norm().item() == known(row["score_norm"])
        assert theory.softmax_sensitivity(p).item() == known(row["softmax_jac_norm"])
        assert kappa.item() == known(row["kappa_softmax"])
        assert proxy.item() == known(row["theory_proxy"])


def test_e1_layernorm(reference_e1):
    assert len(reference_e1["layernorm"]) == 10
    x = torch.tensor([1, 1.001, 0.999, 1.002], dtype=torch.float64)
    dx = torch.tensor([1, -1, 1, -1], dtype=torch.float64) * 1e-4
    gamma = torch.tensor([1, 0.9, 1.1, 1], dtype=torch.float64)
    for row in reference_e1["layernorm"]:
        epsilon = row["epsilon"]
        change = theory.layernorm_path(x + dx, gamma, epsilon) - theory.layernorm_path(x, gamma, epsilon)
        magnitude = theory.layernorm_magnitude(gamma.max(), x.var(correction=0), epsilon, x.norm())
        assert change.norm().item() == known(row["measured_change"])
        assert magnitude.item() == known(row["theory_magnitude"])


def test_e1_residual(reference_e1):
    assert len(reference_e1["residual"]) == 8
    for row in reference_e1["residual"]:
        # Behind the first of seven layers lie six: (1 + rho)^6.
        bound = theory.downstream_transport(torch.full((7,), row["rho"], dtype=torch.float64))[0].item()
        assert bound == known(row["transport_bound"])
        assert row["measured_transport"] <= bound
