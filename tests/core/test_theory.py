"""The package of the theory, residual blocks, the score, and the numbers of experiment E1."""

import inspect
import math
import re

import pytest
import torch
from drawn import exactly, normal64, seeds
from hypothesis import given
from hypothesis import strategies as st

from fragility_core import theory

positive = st.floats(1e-6, 1e6)


# --- The package ---------------------------------------------------------------------------------


MODULES = [module for _, module in inspect.getmembers(theory, inspect.ismodule)]


@pytest.mark.parametrize("name", [name for module in MODULES for name in module.__all__])
def test_every_statement_cites_the_paper_or_says_that_it_is_not_in_it(name):
    text = inspect.getdoc(getattr(theory, name))
    assert name.endswith("Norms") or re.search(r"\(`\w+:[\w-]+`\)|not in\s+the paper", text), text


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_public_function_is_exported(module):
    """``__all__`` of a module lists exactly its public functions, and the package has all of them."""
    public = {
        name
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    assert public == set(module.__all__) <= set(vars(theory))


# --- Residual relaxation -------------------------------------------------------------------------


def test_residual_condition_bound_by_hand():
    assert theory.residual_condition_bound(0.0) == 1.0
    assert theory.residual_condition_bound(0.5) == 3.0  # 1.5 / 0.5


def test_bounds_of_rho_with_a_gradient():
    rho = torch.tensor([0.5, 0.25], requires_grad=True)
    theory.depth_condition_bound(rho).backward()
    torch.testing.assert_close(rho.grad, torch.tensor([2 / 0.5**2 * 5 / 3, 2 / 0.75**2 * 3]))
    with pytest.raises(ValueError, match="bounded for 0 <= rho < 1"):
        theory.residual_condition_bound(torch.tensor([0.5, 1.0], requires_grad=True))


@given(seed=seeds, rho=st.floats(0, 0.99), width=st.integers(1, 8))
def test_residual_condition_bound_holds(seed, rho, width):
    """kappa(I + J) <= (1 + rho) / (1 - rho) for every J with ||J|| = rho < 1 (Theorem 2 (`thm:residual`))."""
    jacobian = normal64(width, width, seed=seed)
    jacobian *= rho / torch.linalg.matrix_norm(jacobian, 2)
    condition = torch.linalg.cond(torch.eye(width, dtype=torch.float64) + jacobian, 2).item()
    assert condition <= theory.residual_condition_bound(rho) * (1 + 1e-9)


@given(rho=st.floats(0, 0.99))
def test_residual_condition_bound_is_attained(rho):
    """J = diag(rho, -rho) attains the bound."""
    condition = torch.linalg.cond(torch.diag(torch.tensor([1 + rho, 1 - rho], dtype=torch.float64)), 2).item()
    assert condition == pytest.approx(theory.residual_condition_bound(rho), rel=1e-9)


@pytest.mark.parametrize("rho", [1.0, 1.5, -0.1, math.nan, torch.tensor([0.5, 1.0])])
def test_condition_bounds_need_a_small_gain(rho):
    with pytest.raises(ValueError, match=r"bounded for 0 <= rho < 1 in every block, got rho = .*downstream_transport"):
        theory.residual_condition_bound(rho)


@given(seed=seeds, rho=st.floats(0, 3), width=st.integers(1, 8))
def test_residual_singular_value_bounds_hold(seed, rho, width):
    jacobian = normal64(width, width, seed=seed)
    jacobian *= rho / torch.linalg.matrix_norm(jacobian, 2)
    values = torch.linalg.svdvals(torch.eye(width, dtype=torch.float64) + jacobian)
    lower, upper = theory.residual_singular_value_bounds(rho)
    assert lower - 1e-12 <= values.min() and values.max() <= upper + 1e-12


def test_residual_singular_value_bounds_are_attained():
    assert theory.residual_singular_value_bounds(0.5) == (0.5, 1.5)  # the singular values of I + diag(0.5, -0.5)


def stack_of_blocks(seed: int, rho: list[float], width: int = 4) -> torch.Tensor:
    """I + J_l with ||J_l||_2 = rho_l, (L, width, width)."""
    jacobians = normal64(len(rho), width, width, seed=seed)
    jacobians *= (torch.tensor(rho, dtype=torch.float64) / torch.linalg.matrix_norm(jacobians, 2))[:, None, None]
    return torch.eye(width, dtype=torch.float64) + jacobians


def product_of(blocks: torch.Tensor) -> torch.Tensor:
    """The blocks composed, the last one outermost."""
    return torch.linalg.multi_dot([*blocks.flip(0), torch.eye(blocks.shape[-1], dtype=blocks.dtype)])


@given(seed=seeds, rho=st.lists(st.floats(0, 0.8), min_size=1, max_size=6))
def test_depth_condition_bound_holds(seed, rho):
    """kappa(prod (I + J_l)) <= prod (1 + rho_l) / (1 - rho_l) (Corollary 1 (`cor:depth`))."""
    condition = torch.linalg.cond(product_of(stack_of_blocks(seed, rho)), 2)
    assert condition <= theory.depth_condition_bound(torch.tensor(rho, dtype=torch.float64)) * (1 + 1e-9)


def test_depth_condition_bound_by_hand():
    # (1.5 / 0.5) (1.25 / 0.75), window by window; attained by diag(rho, -rho) in every block.
    rho = torch.tensor([[0.5, 0.25], [0.0, 0.5]], dtype=torch.float64)
    assert theory.depth_condition_bound(rho).tolist() == exactly([5.0, 3.0])
    blocks = torch.stack([torch.diag(torch.stack([1 + gain, 1 - gain])) for gain in rho[0]])
    assert torch.linalg.cond(product_of(blocks), 2).item() == exactly(5.0)


@given(seed=seeds, rho=st.lists(st.floats(0, 3), min_size=2, max_size=6))
def test_downstream_transport_bounds_the_growth_of_an_error(seed, rho):
    """||prod_{k > l} (I + J_k)||_2 <= prod_{k > l} (1 + rho_k), for gains above 1 too."""
    blocks, transport = stack_of_blocks(seed, rho), theory.downstream_transport(torch.tensor(rho, dtype=torch.float64))
    for layer in range(len(rho) - 1):
        growth = torch.linalg.matrix_norm(product_of(blocks[layer + 1 :]), 2)
        assert growth <= transport[layer] * (1 + 1e-12)


def test_downstream_transport_by_hand():
    # 1 + rho = (2, 3, 4): 3 * 4, 4, and the empty product behind the last layer.
    assert theory.downstream_transport(torch.tensor([1.0, 2.0, 3.0])).tolist() == [12.0, 4.0, 1.0]
    assert theory.downstream_transport(torch.tensor([7.0])).tolist() == [1.0]


@given(rho=st.lists(st.floats(0, 10), min_size=1, max_size=12))
def test_downstream_transport_recursion(rho):
    """pi_L = 1 and pi_l = (1 + rho_{l+1}) pi_{l+1}; the first layer's own rho has no effect."""
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


# --- The score -----------------------------------------------------------------------------------


def test_score_by_hand():
    assert theory.local_magnitude(1.0, 2.0, 4.0) == 7.0
    assert theory.layer_risk(7.0, 12.0, 3.5) == 24.0  # 7 / 3.5 * 12


@given(risks=st.lists(st.floats(0, 1e6), min_size=1, max_size=12), u=st.floats(1e-8, 0.1))
def test_total_risk_is_the_sum_over_the_blocks(risks, u):
    """R = sum_l G_l (Section 3 (`sec:problem_formulation`)); u R predicts m (Eq. (14) (`eq:bgss-predictor`))."""
    rows = torch.tensor([risks, risks[::-1]], dtype=torch.float64)
    assert theory.total_risk(rows).tolist() == exactly([math.fsum(risks)] * 2)
    assert theory.predicted_mismatch(rows, u).tolist() == exactly([u * math.fsum(risks)] * 2)


def test_remainder_magnitude_by_hand():
    assert theory.remainder_magnitude(1.0, 2.0, 4.0) == 7.0
    assert theory.remainder_magnitude(torch.tensor([1.0, 2.0]), 3.0).tolist() == [4.0, 5.0]


@given(seed=seeds, count=st.integers(1, 6), u=st.floats(1e-6, 0.1))
def test_remainder_magnitude_bounds_a_sum_of_errors(seed, count, u):
    """u M_eff bounds the sum of errors that u b_r bound one by one (Lemma 5 (`lem:eff-closure`))."""
    errors = normal64(count, 3, 4, seed=seed)
    bounds = torch.linalg.matrix_norm(errors) / u
    assert torch.linalg.matrix_norm(errors.sum(0)) <= u * theory.remainder_magnitude(*bounds) * (1 + 1e-12)


def test_mismatch_bound_by_hand():
    # sum_l M_l / ||X_L|| prod_{k > l} (1 + rho_k) = (6 * 3 * 4 + 2 * 4 + 4) / 2 = 42, times u = 1/4.
    magnitude, rho = torch.tensor([6.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    assert theory.mismatch_bound(magnitude, rho, torch.tensor(2.0), 0.25) == 10.5
    both = theory.mismatch_bound(magnitude.expand(2, 3), rho.expand(2, 3), torch.tensor([2.0, 4.0]), 0.25)
    assert both.tolist() == [10.5, 5.25]
    assert theory.predicted_mismatch(torch.tensor([1.0, 2.0]), 0.5) == 1.5


@given(seed=seeds, rho=st.lists(st.floats(0, 3), min_size=1, max_size=6), u=st.floats(1e-6, 0.1))
def test_mismatch_bound_holds_for_local_errors_within_their_magnitudes(seed, rho, u):
    """Linear blocks obey the recursion of Appendix A.6 (`app:unified-proof`): E_l = (I + J_l) E_{l-1} + Delta_l."""
    blocks, local = stack_of_blocks(seed, rho), normal64(len(rho), 4, 1, seed=seed + 1)
    exact, low = normal64(4, 1, seed=seed + 2), normal64(4, 1, seed=seed + 2)
    for block, error in zip(blocks, local):
        exact, low = block @ exact, block @ low + error
    magnitude = torch.linalg.matrix_norm(local) / u
    bound = theory.mismatch_bound(magnitude, torch.tensor(rho, dtype=torch.float64), exact.norm(), u)
    assert theory.mismatch(low, exact) <= bound * (1 + 1e-9)


def test_mismatch_bound_is_attained():
    """Blocks that stretch one direction, with errors along it, attain the bound."""
    rho, u = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64), 2.0**-8
    exact, low = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for gain in rho:
        exact, low = (1 + gain) * exact, (1 + gain) * low + u * 3
    bound = theory.mismatch_bound(torch.full((3,), 3.0, dtype=torch.float64), rho, exact.norm(), u)
    assert theory.mismatch(low, exact).item() == exactly(bound.item())


def test_layernorm_dominance_by_hand():
    layernorm, magnitude = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([4.0, 0.0, 2.0])
    assert theory.layernorm_dominance(layernorm, magnitude).tolist() == [0.25, 0.0, 1.0]


def test_layernorm_dominance_of_an_overflow_is_not_a_number():
    assert theory.layernorm_dominance(torch.tensor([math.inf]), torch.tensor([math.inf])).isnan().all()


@given(magnitude=positive, transport=positive, final=positive, factor=st.floats(0.01, 100))
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
def test_mismatch_does_not_depend_on_the_scale(seed, scale):
    low, reference = normal64(2, 5, 4, seed=seed), normal64(2, 5, 4, seed=seed + 1)
    torch.testing.assert_close(
        theory.mismatch(scale * low, scale * reference), theory.mismatch(low, reference), rtol=1e-12, atol=0
    )


def test_mismatch_of_an_overflow_is_nonfinite():
    low = torch.tensor([[[math.inf, 1.0]], [[math.nan, 1.0]]])
    assert not theory.mismatch(low, torch.ones(2, 1, 2)).isfinite().any()


# --- Experiment E1, against the release's table (tests/data/e1.json, fp64) -----------------------


def as_recorded(value: float):
    """Equal to a recorded value up to 1e-9."""
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
        assert scores.norm().item() == as_recorded(row["score_norm"])
        assert theory.softmax_sensitivity(p).item() == as_recorded(row["softmax_jac_norm"])
        assert kappa.item() == as_recorded(row["kappa_softmax"])
        assert proxy.item() == as_recorded(row["theory_proxy"])


def test_e1_layernorm(reference_e1):
    assert len(reference_e1["layernorm"]) == 10
    x = torch.tensor([1, 1.001, 0.999, 1.002], dtype=torch.float64)
    dx = torch.tensor([1, -1, 1, -1], dtype=torch.float64) * 1e-4
    gamma = torch.tensor([1, 0.9, 1.1, 1], dtype=torch.float64)
    for row in reference_e1["layernorm"]:
        epsilon = row["epsilon"]
        change = theory.layernorm_path(x + dx, gamma, epsilon) - theory.layernorm_path(x, gamma, epsilon)
        magnitude = theory.layernorm_magnitude(gamma.max(), x.var(correction=0), epsilon, x.norm())
        assert change.norm().item() == as_recorded(row["measured_change"])
        assert magnitude.item() == as_recorded(row["theory_magnitude"])


def test_e1_residual(reference_e1):
    assert len(reference_e1["residual"]) == 8
    for row in reference_e1["residual"]:
        # Behind the first of seven layers lie six: (1 + rho)^6.
        bound = theory.downstream_transport(torch.full((7,), row["rho"], dtype=torch.float64))[0].item()
        assert bound == as_recorded(row["transport_bound"])
        assert row["measured_transport"] <= bound
