"""Statements of the paper that do not hold as printed, or need a reading: a counterexample for each.

The docstring of each test starts with the function whose docstring says what holds instead.
"""

import math
import re

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from fragility_core import theory
from fragility_lessons.constants import a_priori_constants
from fragility_lessons.kernel_samples import (
    arithmetic,
    observe_layernorm,
    run_attention,
    run_layernorm,
    run_stack,
)
from fragility_numerics.formats import get_format

ONES = {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}  # what rounding each result once costs at most


def in_bf16(*values: list) -> list[torch.Tensor]:
    tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
    assert all((x.bfloat16().double() == x).all() for x in tensors)  # inputs are given exactly
    return [x.bfloat16() for x in tensors]


def composed_layernorm(x: torch.Tensor, epsilon: float, format: str) -> torch.Tensor:
    """LayerNorm from elementary kernels, which round the mean and the variance to the format too."""
    with arithmetic(format, execution="emulated" if format != "fp32" else "auto").running():
        centred = x - x.mean(-1, keepdim=True)
        return (centred * ((centred * centred).mean(-1, keepdim=True) + epsilon).rsqrt()).double()


def test_the_theory_lists_these_functions():
    listed = re.findall(r"``(\w+)``", theory.__doc__.partition("has a counterexample for each")[2])
    tests = [thing for name, thing in globals().items() if name.startswith("test_") and thing.__doc__]
    assert listed and {test.__doc__.split(":")[0] for test in tests} == set(listed)


# --- Attention -----------------------------------------------------------------------------------


@pytest.fixture
def large_scores():
    """One query, two keys, scores 1035.875 and 1028.125: in bf16 both become 1032."""
    return in_bf16([[[32, 1, 0, 0]]], [[[64.5, 7.75, 0, 0], [64, 8.25, 0, 0]]], [[[1], [-1]]])


@pytest.mark.parametrize("execution", ["auto", "emulated"])
def test_first_order_of_theorem_attn_fails_for_large_scores(large_scores, execution):
    """attention_error_bound: u ||S|| is 5.7, the row is saturated, and the error is 40 times the bound."""
    low = arithmetic("bf16", execution=execution)
    norms, exact = theory.attention_norms(*large_scores), theory.exact_attention(*large_scores)
    scores, probabilities, context = run_attention(*large_scores, low)
    assert scores.tolist() == [[[1032, 1032]]] and probabilities.tolist() == [[[0.5, 0.5]]]
    error = (context.double() - exact[2]).norm()
    printed = theory.attention_error_bound(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm,
        low.format.unit_roundoff, **ONES,
    )  # fmt: skip
    assert error > 40 * printed
    # What holds: the same stages with the softmax's higher orders.
    change = scores.double() - exact[0]
    assert error <= theory.attention_error_bound_with_remainder(
        norms, change.max() - change.min(), low.format.unit_roundoff, **ONES
    )


def test_masked_scores_as_printed_are_infinite():
    """kappa_softmax: with -inf in S, ||S|| is infinite. A masked entry counts as 0 instead."""
    query, key, value = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    printed = (query @ key.T / 2**0.5).masked_fill(~mask, -math.inf)
    assert printed.norm() == math.inf
    assert theory.attention_norms(query, key, value, mask).kappa_softmax.isfinite()


def test_kappa_softmax_depends_on_a_shift_that_the_softmax_ignores():
    """kappa_softmax: 100 is added to every score of a row."""
    scores = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    kappas = []
    for shifted in (scores, scores + 100):
        p = shifted.softmax(-1)
        kappas.append(theory.kappa_softmax(shifted.norm(), p.norm(), theory.softmax_sensitivity(p)).item())
    assert kappas[1] > 100 * kappas[0]


def test_no_single_row_perturbation_explains_a_product():
    """gemm_error_bound: the printed proof needs a dm with (m + dm) V = fl(m V). This m (1 x 1) has none."""
    row, value = in_bf16([[1.0078125]], [[1.0078125, 1.015625]])
    computed = (row @ value).double()
    needed = computed / value.double() - row.double()  # the dm that would explain each entry
    assert needed[0, 0] != needed[0, 1]
    assert (computed - row.double() @ value.double()).norm() <= theory.gemm_error_bound(
        row.double().norm(), torch.linalg.matrix_norm(value.double(), 2), 2.0**-8, c_gemm_out=1.0
    )


@pytest.mark.parametrize("keys", [4, 64])
def test_the_gemm_constant_grows_with_the_dimensions(keys):
    """gemm_error_bound: an E with |E| = gamma |M| |V| entry by entry is sqrt(m) times gamma ||M|| ||V||_2."""
    left, right = torch.ones(1, keys, dtype=torch.float64), torch.from_numpy(hadamard(keys)).double()
    allowed = (left.abs() @ right.abs()).norm()
    without_root = theory.gemm_error_bound(left.norm(), torch.linalg.matrix_norm(right, 2), 1.0, c_gemm_out=1.0)
    assert (allowed / without_root).item() == pytest.approx(keys**0.5)


def test_an_even_row_underflows_in_fp8_e4m3():
    """softmax_error_bound: 1024 keys with p = 2^-10 each all round to 0. No constant below 1 / u = 16 covers that."""
    low = arithmetic("fp8_e4m3")
    scores = low.format.round(torch.zeros(1, 1024))
    with low.running():
        computed = scores.softmax(-1).double()
    exact = scores.double().softmax(-1)
    assert not computed.any()
    assert (computed - exact).norm() == theory.softmax_error_bound(exact.norm(), 2.0**-4, c_softmax=16.0)


# --- Residual blocks -----------------------------------------------------------------------------


def test_transport_is_no_condition_number():
    """downstream_transport: for J = diag(rho, -rho) the condition number exceeds prod (1 + rho_k)."""
    rho = torch.full((4,), 0.5, dtype=torch.float64)
    blocks = torch.diag(torch.tensor([1.5, 0.5], dtype=torch.float64))
    condition = torch.linalg.cond(torch.linalg.matrix_power(blocks, 3), 2)
    transport = theory.downstream_transport(rho)[0]
    assert condition == theory.depth_condition_bound(rho[1:]) == 27
    assert transport == 1.5**3 and condition == 8 * transport


def test_transport_shows_no_attenuation():
    """downstream_transport: for J = -I / 2 three blocks divide an error by 8, and the factor says that it grows."""
    blocks = 0.5 * torch.eye(2, dtype=torch.float64)
    growth = torch.linalg.matrix_norm(torch.linalg.matrix_power(blocks, 3), 2)
    assert growth == 1 / 8
    assert theory.downstream_transport(torch.full((4,), 0.5, dtype=torch.float64))[0] == 1.5**3


# --- LayerNorm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_layernorm_bound_with_the_mean_variance_fails_where_the_centring_is_rounded(format):
    """layernorm_error_bound: one row varies by two last places, the other by 10. Their mean hides the first."""
    chosen, epsilon = get_format(format), 1e-6
    u = chosen.unit_roundoff
    quiet = torch.ones(8) + 2 * u * (torch.arange(8) < 2)
    loud = 10.0 * (1 - 2 * (torch.arange(8) % 2))
    x = chosen.round(torch.stack([quiet, loud]))
    error = composed_layernorm(x, epsilon, format) - theory.layernorm_path(x, torch.ones(8), epsilon)
    norms = theory.layernorm_norms(x, torch.ones(8), epsilon)
    rows = theory.layernorm_error_bound(1.0, norms.variance, epsilon, norms.input_norm, u, a_ln=1.0)
    mean = theory.layernorm_error_bound(1.0, norms.variance.mean(), epsilon, x.double().norm(), u, a_ln=1.0)
    assert error.norm() > 40 * mean
    assert (error.norm(dim=-1) <= rows).all() and error.norm() <= rows.norm()


@pytest.mark.parametrize(
    ("sixteenths", "epsilon", "excess"), [((1, 2), 1e-12, 500), ((1, 2), 1e-8, 5), ((1, 0, 0), 1e-12, 350)]
)
def test_first_order_of_the_layernorm_bound_fails_in_fp32(sixteenths, epsilon, excess):
    """layernorm_error_bound: for x = 10^6 + sixteenths / 16 the variance that the library's kernel computes is 0."""
    x, low = 1e6 + torch.tensor([sixteenths]) / 16, arithmetic("fp32")
    features = len(sixteenths)
    (row,) = observe_layernorm(x, torch.ones(features), epsilon, low).itertuples()
    a_ln = a_priori_constants("fp32", keys=1, head_width=1, features=features)["a_ln"]
    u = low.format.unit_roundoff
    bound = theory.layernorm_error_bound(row.gamma_max, row.variance, epsilon, row.input_norm, u, a_ln=a_ln)
    assert row.layernorm_error > excess * bound
    # The condition of the docstring is not met: this must be small.
    assert u * row.input_norm / (features * (row.variance + epsilon)) ** 0.5 > 1


def test_constant_rows_have_no_relative_bound():
    """layernorm_relative_error_bound: Z is 0, and the rounding of the mean makes Z~ another."""
    x = torch.full((1, 12), 1000.7)
    norms = theory.layernorm_norms(x, torch.ones(12), 1e-5)
    computed = composed_layernorm(x, 1e-5, "fp32")
    assert norms.path_norm == 0 and computed.norm() > 0.1
    bound = theory.layernorm_error_bound(1.0, norms.variance, 1e-5, norms.input_norm, 2.0**-24, a_ln=3.0)
    assert computed.norm() <= bound, "a dozen terms summed in fp32"


@pytest.mark.parametrize(
    ("format", "d_model", "variance_over_epsilon"),
    [("fp16", 768, 2.5), ("fp16", 64, 30.0), ("fp32", 768, 20000.0)],
)
def test_layernorm_ratio_below_one_does_not_mean_that_epsilon_dominates(format, d_model, variance_over_epsilon):
    """layernorm_ratio: rho_LN < 1 although the variance is larger than epsilon."""
    u = get_format(format).unit_roundoff
    assert theory.layernorm_ratio(variance_over_epsilon, 1.0, d_model, u) < 1 < variance_over_epsilon


def test_layernorm_ratio_above_one_does_not_mean_that_the_variance_dominates():
    """layernorm_ratio: rho_LN > 1 although epsilon is twice the variance."""
    assert theory.layernorm_ratio(0.5, 1.0, 768, get_format("bf16").unit_roundoff) == 1.5


def test_layernorm_surrogate_is_not_the_magnitude_up_to_a_constant():
    """layernorm_surrogate: 100 x and 100^2 epsilon keep LayerNorm and M_LN, and divide the surrogate by 100."""
    x, gamma = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    surrogates, magnitudes, paths = [], [], []
    for scale in (1.0, 100.0):
        norms, epsilon = theory.layernorm_norms(scale * x, gamma, scale**2 * 1e-3), scale**2 * 1e-3
        surrogates.append(theory.layernorm_surrogate(norms.path_norm, norms.variance, epsilon).item())
        magnitudes.append(theory.layernorm_magnitude(norms.gamma_max, norms.variance, epsilon, norms.input_norm).item())
        paths.append(theory.layernorm_path(scale * x, gamma, epsilon))
    torch.testing.assert_close(*paths)
    assert magnitudes[1] == pytest.approx(magnitudes[0])
    assert surrogates[1] == pytest.approx(surrogates[0] / 100)


# --- The unified bound ---------------------------------------------------------------------------


def test_unified_bound_as_printed_forgets_the_rest_of_the_branch():
    """mismatch_bound: x + 1024 attention(q, k, v). Two scores round to the same number, and V is (1, -1)."""
    low, gain = arithmetic("bf16"), 1024.0
    query, key, value = in_bf16([[[32, 1, 0, 0]]], [[[4, 0.375, 0, 0], [4, 0, 0, 0]]], [[[1], [-1]]])
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    context = run_attention(query, key, value, low)[2]
    with low.running():
        computed = x + gain * context
    exact = x.double() + gain * theory.exact_attention(query, key, value)[2]
    norms = theory.attention_norms(query, key, value)
    magnitude = theory.attention_magnitude(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm, **ONES
    )
    addition, rho, final = exact.norm().view(1), torch.zeros(1, 1), exact.norm().view(1)
    bounds = [
        theory.mismatch_bound(theory.local_magnitude(addition, attention, 0.0)[None], rho, final, 2.0**-8).item()
        for attention in (magnitude, gain * magnitude)
    ]
    assert 50 * bounds[0] < theory.mismatch(computed, exact).item() < bounds[1]


def test_final_layernorm_is_not_covered():
    """mismatch_bound: a LayerNorm after the last block can raise the relative error above the bound of the stack."""
    x = in_bf16([[[100, 100.5, 99.5, 100]]])[0]
    low, weights = arithmetic("bf16"), torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)
    weights[..., 0, 0] = 2.0**-8  # X_1 = X_0 + (0.39, 0, 0, 0): the addition rounds
    computed = run_stack(x, weights, low)[-1]
    exact = x.double() + x.double() @ weights[0].double()
    magnitude = exact.norm() + theory.gemm_error_bound(x.double().norm(), 2.0**-8, 1.0, c_gemm_out=1.0)
    bound = theory.mismatch_bound(magnitude.view(1, 1), torch.full((1, 1), 2.0**-8), exact.norm().view(1), 2.0**-8)
    assert theory.mismatch(computed, exact) <= bound
    after = run_layernorm(computed, torch.ones(4, dtype=torch.bfloat16), 1e-5, low)
    assert theory.mismatch(after, theory.layernorm_path(exact, torch.ones(4), 1e-5)) > 10 * bound


# --- Stabilization -------------------------------------------------------------------------------


def test_the_ratio_is_guaranteed_for_the_variance_of_the_candidate_only():
    """post_update_ratio_bound: Algorithm 2 (`alg:eps-bump`) takes the median, so the mean's ratio stays above rho_*."""
    variances = np.array([1e-3, 1e-3, 1.0])
    candidate = theory.epsilon_candidate(
        np.median(variances), 64, 2.0**-8, target=0.5, epsilon_min=1e-6, epsilon_max=1.0
    )
    assert theory.layernorm_ratio(np.median(variances), candidate, 64, 2.0**-8) == pytest.approx(0.5)
    assert theory.layernorm_ratio(variances.mean(), candidate, 64, 2.0**-8) > 100 * 0.5


def test_an_epsilon_above_the_cap_stays_there():
    """epsilon_update: from epsilon = 1 with epsilon_max = 0.01."""
    candidate = theory.epsilon_candidate(1.0, 64, 2.0**-8, target=0.5, epsilon_min=1e-6, epsilon_max=1e-2)
    assert theory.epsilon_update(1.0, candidate) == 1.0 > 1e-2


# --- Dropout -------------------------------------------------------------------------------------


def test_dropout_can_raise_the_condition_factor_by_more_than_one_over_p():
    """dropout_gain_bound: for rho = 1/2 and p = 0.6 the factor 3 becomes 11, not 5. For rho = p there is no bound."""
    rho, keep = 0.5, 0.6
    before = theory.residual_condition_bound(rho)
    after = theory.residual_condition_bound(theory.dropout_gain_bound(rho, keep))
    assert before / keep == pytest.approx(5) and after == pytest.approx(11)
    with pytest.raises(ValueError, match="0 <= rho < 1"):
        theory.residual_condition_bound(theory.dropout_gain_bound(0.6, keep))


def test_dropout_worsens_kappa_softmax_without_limit():
    """dropout_kappa_softmax: a row (1 - t, t) whose first entry is dropped."""
    score_norm, mask = 1.0, torch.tensor([[False, True]])
    for t in (1e-2, 1e-4, 1e-6):
        p = torch.tensor([[1 - t, t]], dtype=torch.float64)
        kappa = theory.kappa_softmax(score_norm, p.norm(), theory.softmax_sensitivity(p)).item()
        dropped = theory.dropout_kappa_softmax(score_norm, p, mask, 0.9).item()
        assert dropped == pytest.approx(2**0.5 * (1 - t)) and kappa < 2 * t * (1 + 2 * t)


def test_share_of_random_masks_that_worsen_kappa_softmax():
    """dropout_kappa_softmax: how often the claim fails among random rows.

    20,000 rows: 5,000 each of 2, 3, 4 and 5 entries, from standard normal scores. Every entry is kept with
    probability 0.8. The 240 masks that keep nothing are left out.
    """
    generator = torch.Generator().manual_seed(0)
    worse, kept = 0, 0
    for entries in (2, 3, 4, 5):
        p = torch.randn(5000, 1, entries, generator=generator, dtype=torch.float64).softmax(-1)
        mask = torch.rand(5000, 1, entries, generator=generator) < 0.8
        p, mask = p[mask.any(-1).squeeze(-1)], mask[mask.any(-1).squeeze(-1)]
        kappa = theory.kappa_softmax(1.0, torch.linalg.matrix_norm(p), theory.softmax_sensitivity(p))
        dropped = theory.dropout_kappa_softmax(1.0, p, mask, 0.8)
        worse += (dropped > kappa * (1 + 1e-9)).sum().item()
        kept += len(p)
    assert kept == 19760 and worse == 7384
