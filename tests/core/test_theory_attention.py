"""Self-attention and dropout: formulas against values worked out by hand, and theorems as properties."""

import math

import pytest
import torch
from drawn import exactly, normal64, seeds
from hypothesis import assume, given
from hypothesis import strategies as st

from fragility_core import theory

# --- Self-attention ------------------------------------------------------------------------------


def test_softmax_jacobian_by_hand():
    # p = (1/4, 3/4): Diag(p) - p p^T = [[1/4 - 1/16, -3/16], [-3/16, 3/4 - 9/16]] = 3/16 [[1, -1], [-1, 1]].
    p = torch.tensor([0.25, 0.75])
    assert theory.softmax_jacobian(p).tolist() == [[0.1875, -0.1875], [-0.1875, 0.1875]]
    assert theory.softmax_jacobian(p).dtype == torch.float64


@given(seed=seeds)
def test_softmax_jacobian_is_the_derivative(seed):
    scores = normal64(5, seed=seed)
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
def test_softmax_sensitivity_is_at_most_half(seed, scale, entries):
    """||J(p)|| <= 1/2 for every probability vector (Section 4.2 (`subsec:attn`))."""
    assert theory.softmax_sensitivity((scale * normal64(3, entries, seed=seed)).softmax(-1)).item() <= 0.5 + 1e-15


@given(seed=seeds, scale=st.floats(0.01, 100), entries=st.integers(2, 12))
def test_softmax_sensitivity_lies_between_the_two_largest_probabilities(seed, scale, entries):
    """J is Diag(p) less a matrix of rank one, so their eigenvalues interlace (Golub 1973). Only two halves give 1/2."""
    p = (scale * normal64(1, entries, seed=seed)).softmax(-1)
    largest, second = p.topk(2).values[0].tolist()
    sensitivity = theory.softmax_sensitivity(p).item()
    assert second - 1e-15 <= sensitivity <= largest + 1e-15
    assert sensitivity >= largest * (1 - largest) - 1e-15  # its first diagonal entry


@given(seed=seeds)
def test_softmax_sensitivity_is_taken_per_leading_index(seed):
    p = normal64(2, 3, 4, 5, seed=seed).softmax(-1)
    each = torch.stack([torch.stack([theory.softmax_sensitivity(head) for head in window]) for window in p])
    torch.testing.assert_close(theory.softmax_sensitivity(p), each)


def test_attention_condition_numbers_by_hand():
    assert theory.kappa_softmax(6.0, 1.5, 0.25) == 1.0  # 6 / 1.5 * 0.25
    assert theory.chi_score(8.0, 3.0, 2.0, 16, 0.25) == 0.75  # 8 * 3 * 0.25 / (2 * sqrt 16)
    assert theory.kappa_value(2.0, 3.0, 4.0) == 1.5  # 2 * 3 / 4


def test_kappa_score_by_hand():
    assert theory.kappa_score(8.0, 3.0, 2.0, 16) == 3.0  # 8 * 3 / (2 * sqrt 16)


heads = {"seed": seeds, "n": st.integers(1, 6), "m": st.integers(1, 6), "d": st.integers(1, 6)}


@given(**heads, scale=st.floats(0.01, 10))
def test_chi_score_is_kappa_softmax_times_kappa_score(seed, n, m, d, scale):
    """kappa_score >= 1, so chi_score is never below kappa_softmax (Appendix A.7 (`app:estimation`))."""
    norms = theory.attention_norms(
        scale * normal64(n, d, seed=seed), normal64(m, d, seed=seed + 1), normal64(m, d, seed=seed + 2)
    )
    by_definition = theory.kappa_score(norms.query_norm, norms.key_norm, norms.score_norm, d)
    assert norms.chi_score.item() == pytest.approx((norms.kappa_softmax * by_definition).item(), rel=1e-12, abs=1e-300)
    assert by_definition >= 1 - 1e-12


def test_exact_attention_is_the_librarys():
    query, key, value = normal64(3, 5, 4), normal64(3, 5, 4, seed=1), normal64(3, 5, 4, seed=2)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for masks in ({}, {"mask": mask}):
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value, masks.get("mask"))
        torch.testing.assert_close(theory.exact_attention(query, key, value, **masks)[2], want)


def test_a_row_that_is_masked_throughout_is_not_a_number():
    """A softmax over no keys is not defined. The row has no effect on the others."""
    query, key, value = normal64(2, 4), normal64(3, 4, seed=1), normal64(3, 4, seed=2)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    scores, probabilities, context = theory.exact_attention(query, key, value, mask)
    assert (scores[~mask] == 0).all() and probabilities[0, 2] == 0
    assert probabilities[1].isnan().all() and context[1].isnan().all()
    torch.testing.assert_close(context[0], theory.exact_attention(query[:1], key[:2], value[:2])[2][0])


def test_attention_norms_by_hand():
    # d = 4: S = [[12, 16]] / 2, P = (1, e^2) / (1 + e^2), A = 5 P_2 - 5 P_1.
    query, key = torch.tensor([[4.0, 0, 0, 0]]), torch.tensor([[3.0, 0, 0, 0], [4.0, 0, 0, 0]])
    value = torch.tensor([[-5.0], [5.0]])
    norms = theory.attention_norms(query, key, value)
    p = 1 / (1 + math.exp(2))
    assert norms.query_norm == 4 and norms.key_norm == 5 and norms.score_norm == 10 and norms.head_width == 4
    assert norms.probability_norm.item() == exactly(math.hypot(p, 1 - p))
    assert norms.value_spectral_norm.item() == exactly(math.sqrt(50))
    assert norms.context_norm.item() == exactly(5 * (1 - 2 * p))
    assert norms.sensitivity.item() == exactly(2 * p * (1 - p))
    assert norms.kappa_softmax.item() == exactly(10 / math.hypot(p, 1 - p) * 2 * p * (1 - p))
    assert norms.kappa_value.item() == exactly(math.hypot(p, 1 - p) * math.sqrt(50) / (5 - 10 * p))


def test_masked_entries_count_as_zero():
    """A masked entry of P is 0 whatever S is, so only changes of the other scores move the softmax."""
    query, key, value = normal64(5, 4), normal64(5, 4, seed=1), normal64(5, 4, seed=2)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    norms = theory.attention_norms(query, key, value, mask)
    scores = query @ key.T / 2
    assert norms.score_norm.item() == exactly(scores[mask].norm().item())
    change = 1e-6 * normal64(5, 5, seed=3)
    moved = [(scores + step).masked_fill(~mask, -math.inf).softmax(-1) for step in (change, 0 * change)]
    assert (moved[0] - moved[1]).norm() <= 1.0001 * norms.sensitivity * change[mask].norm()
    assert theory.attention_norms(query, key, value).score_norm > norms.score_norm


@given(seed=seeds, heads=st.integers(1, 4), scale=st.floats(0.1, 10))
def test_heads_taken_together_bound_the_heads_one_by_one(seed, heads, scale):
    """The bound from norms over all heads, the largest d_smx and ||V||_2 is at least the norm of the heads' bounds."""
    scales = scale ** normal64(heads, 1, 1, seed=seed + 3)
    query, key, value = (
        normal64(heads, 3, 2, seed=seed),
        normal64(heads, 4, 2, seed=seed + 1),
        normal64(heads, 4, 2, seed=seed + 2),
    )
    norms = theory.attention_norms(scales * query, key, scales * value)
    each = theory.attention_magnitude(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm, 0.5, 2.0, 3.0
    )
    together = theory.AttentionNorms(
        *(x.norm() for x in norms[:4]), norms.value_spectral_norm.max(), norms.context_norm.norm(),
        norms.sensitivity.max(), norms.head_width,
    )  # fmt: skip
    whole = theory.attention_magnitude(
        together.kappa_softmax, together.chi_score, together.probability_norm, together.value_spectral_norm,
        0.5, 2.0, 3.0,
    )  # fmt: skip
    assert each.norm() <= whole * (1 + 1e-12)


def test_kernel_bounds_by_hand():
    assert theory.score_error_bound(3.0, 8.0, 2.0, 16, 0.5, c_gemm=2.0) == 5.5  # (3 + 2 * 8 * 2 / 4) / 2
    assert theory.gemm_error_bound(3.0, 4.0, 0.5, c_gemm_out=2.0) == 12.0
    assert theory.softmax_error_bound(3.0, 0.5, c_softmax=2.0) == 3.0


def test_attention_error_bounds_by_hand():
    # [0.5 + 1 + 2 * 0.75 + 4] = 7, with u = 1/8: 7 * 2 * 3 / 8, and over ||A|| = 4.
    constants = {"c_softmax": 0.5, "c_gemm": 2.0, "c_gemm_out": 4.0}
    assert theory.attention_coefficient(1.0, 0.75, **constants) == 7.0
    assert theory.attention_error_bound(1.0, 0.75, 2.0, 3.0, 0.125, **constants) == 5.25
    kappa_val = theory.kappa_value(2.0, 3.0, 4.0)
    assert theory.attention_relative_error_bound(1.0, 0.75, kappa_val, 0.125, **constants) == 5.25 / 4


def test_softmax_growth_by_hand():
    growth = theory.softmax_growth(torch.tensor([0.0, 1.0, math.nan], dtype=torch.float64))
    assert growth[:2].tolist() == exactly([1.0, math.e - 1])
    assert growth[2].isnan()  # an unknown spread promises nothing


@given(seed=seeds, entries=st.integers(2, 8), scale=st.floats(0.01, 5), size=st.floats(1e-3, 20))
def test_softmax_growth_closes_the_first_order(seed, entries, scale, size):
    """||softmax(s + ds) - softmax(s)|| <= ||J|| ||ds|| (e^r - 1) / r however large ds is."""
    scores, change = scale * normal64(1, entries, seed=seed), size * normal64(1, entries, seed=seed + 1)
    bound = theory.softmax_sensitivity(scores.softmax(-1)) * change.norm()
    bound = bound * theory.softmax_growth(change.max() - change.min())
    assert ((scores + change).softmax(-1) - scores.softmax(-1)).norm() <= bound * (1 + 1e-9)


@given(**heads, exponent=st.floats(4, 12))
def test_attention_bound_with_remainder_is_theorem_attn_to_first_order(seed, n, m, d, exponent):
    """The bound with remainder is at least that of Theorem 1 (`thm:attn`), and at most 1 + O(u) times that."""
    constants = {"c_softmax": 0.7, "c_gemm": 1.3, "c_gemm_out": 0.9}
    norms = theory.attention_norms(
        normal64(n, d, seed=seed), normal64(m, d, seed=seed + 1), normal64(m, d, seed=seed + 2)
    )
    u = 10**-exponent
    error = theory.score_error_bound(norms.score_norm, norms.query_norm, norms.key_norm, d, u, constants["c_gemm"])
    complete = theory.attention_error_bound_with_remainder(norms, 2**0.5 * error, u, **constants)
    printed = theory.attention_error_bound(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm, u, **constants
    )
    coefficient = theory.attention_coefficient(norms.kappa_softmax, norms.chi_score, **constants)
    assert printed * (1 - 1e-12) <= complete <= printed * (1 + 2 * u * coefficient + 2 * error + 1e-12)


def test_attention_bound_with_remainder_adds_underflow():
    norms = theory.attention_norms(normal64(3, 2), normal64(4, 2, seed=1), normal64(4, 2, seed=2))
    # With u -> 0 only the underflow is left: d_smx ||V||_2, ||V||_2 and 1 times the three kernels'.
    zero, value_norm = torch.zeros(()), norms.value_spectral_norm.item()
    constants = {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}
    each = [
        theory.attention_error_bound_with_remainder(norms, zero, 0.0, **constants, underflow=one).item()
        for one in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    ]
    assert each == exactly([norms.sensitivity.item() * value_norm, value_norm, 1.0])


def test_attention_magnitude_by_hand():
    assert theory.attention_magnitude(1.0, 0.75, 2.0, 3.0) == 10.5  # (1 + 0.75) * 2 * 3
    # [c_smx + kappa + c_gemm chi + c'_gemm] = 0.5 + 1 + 2 * 0.75 + 4 = 7
    assert theory.attention_magnitude(1.0, 0.75, 2.0, 3.0, c_softmax=0.5, c_gemm=2.0, c_gemm_out=4.0) == 42.0


@given(seed=seeds, scale=st.floats(1e-7, 1e-5))
def test_kappa_softmax_bounds_the_first_order_change_of_the_probabilities(seed, scale):
    """||dP|| / ||P|| <= kappa_softmax ||dS|| / ||S||: what kappa_softmax stands for (Section 4.2 (`subsec:attn`))."""
    scores, direction = normal64(4, 6, seed=seed), normal64(4, 6, seed=seed + 1)
    change = scale * direction
    p = scores.softmax(-1)
    sensitivity = max(theory.softmax_sensitivity(p), theory.softmax_sensitivity((scores + change).softmax(-1)))
    kappa = theory.kappa_softmax(scores.norm(), p.norm(), sensitivity)
    moved = ((scores + change).softmax(-1) - p).norm() / p.norm()
    assert moved <= kappa * change.norm() / scores.norm() * (1 + 1e-3)


# --- Dropout -------------------------------------------------------------------------------------


masks = {"seed": seeds, "n": st.integers(1, 4), "m": st.integers(1, 6), "keep": st.floats(0.1, 1)}


def random_mask(seed: int, n: int, m: int) -> torch.Tensor:
    return torch.rand(n, m, generator=torch.Generator().manual_seed(seed)) < 0.5


@given(**masks)
def test_dropout_jacobian_is_the_derivative(seed, n, m, keep):
    scores, mask = normal64(m, seed=seed), random_mask(seed, 1, m)[0]
    derivative = torch.autograd.functional.jacobian(lambda s: mask.double() / keep * s.softmax(-1), scores)
    torch.testing.assert_close(theory.dropout_jacobian(scores.softmax(-1), mask, keep), derivative)


def test_every_head_of_a_batch_is_treated_as_if_alone():
    query, key, value = (normal64(3, 4, 2, seed=seed) for seed in range(3))
    mask, keep = random_mask(4, 4, 4), 0.5
    norms = theory.attention_norms(query, key, value)
    p = theory.exact_attention(query, key, value)[1]
    jacobian, kappa = (
        theory.dropout_jacobian(p, mask, keep),
        theory.dropout_kappa_softmax(norms.score_norm, p, mask, keep),
    )
    assert norms.head_width == 2 and jacobian.shape == (3, 4, 4, 4)
    for head in range(3):
        alone = theory.attention_norms(query[head], key[head], value[head])
        torch.testing.assert_close(torch.stack(norms[:7])[:, head], torch.stack(alone[:7]))
        rows = torch.stack([theory.dropout_jacobian(row, kept, keep) for row, kept in zip(p[head], mask)])
        torch.testing.assert_close(jacobian[head], rows)
        torch.testing.assert_close(kappa[head], theory.dropout_kappa_softmax(alone.score_norm, p[head], mask, keep))


@given(**masks)
def test_dropout_gain_bound_holds(seed, n, m, keep):
    """||Diag(M / p) J_f||_2 <= ||J_f||_2 / p, and so 1 + rho <= (1 + rho) / p for the transport factor."""
    jacobian, mask = normal64(n, m, seed=seed), random_mask(seed, n, 1)
    rho = torch.linalg.matrix_norm(jacobian, 2)
    bound = theory.dropout_gain_bound(rho, keep)
    assert torch.linalg.matrix_norm(mask.double() / keep * jacobian, 2) <= bound * (1 + 1e-12)
    assert 1 + bound <= (1 + rho) / keep * (1 + 1e-12)


@given(**masks, scale=st.floats(0.1, 5))
def test_dropout_kappa_bound_holds(seed, n, m, keep, scale):
    """kappa' <= kappa ||P|| / ||M P||, for every mask that keeps something."""
    scores, mask = scale * normal64(n, m, seed=seed), random_mask(seed, n, m)
    assume(mask.any())
    p = scores.softmax(-1)
    kappa = theory.kappa_softmax(scores.norm(), p.norm(), theory.softmax_sensitivity(p))
    dropped = theory.dropout_kappa_softmax(scores.norm(), p, mask, keep)
    assert dropped <= theory.dropout_kappa_bound(kappa, p.norm(), (mask * p).norm()) * (1 + 1e-9) + 1e-15
    kept = theory.dropout_kappa_softmax(scores.norm(), p, torch.ones(n, m), keep)
    assert kept.item() == pytest.approx(kappa.item(), rel=1e-9, abs=1e-15)
