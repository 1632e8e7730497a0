"""Notebook 4: stacks of blocks in closed form, and the embedded checkpoint's transport against exact Jacobians."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from drawn import many
from hypothesis import given
from hypothesis import strategies as st
from tiny import embedded_windows

matplotlib.use("Agg")

from fragility_core import theory
from fragility_lab.inputs.checkpoints import EMBEDDED, load_model
from fragility_lessons import embedded, residual_depth, shipped

kinds = st.sampled_from(list(residual_depth.KINDS))


# --- Stacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", residual_depth.KINDS)
def test_every_jacobian_has_the_norm(kind):
    norms = torch.linalg.matrix_norm(residual_depth.jacobians(kind, 0.7, 5), 2)
    torch.testing.assert_close(norms, torch.full((5,), 0.7, dtype=torch.float64))


@given(rho=st.floats(0, 1.5), kind=kinds)
@many
def test_singular_values_lie_between_the_bounds(rho, kind):
    low, high = theory.residual_singular_value_bounds(rho)
    values = residual_depth.singular_values(residual_depth.jacobians(kind, rho, 1)[0])
    assert low - 1e-12 <= values.min() and values.max() <= high + 1e-12


@given(rho=st.floats(0.05, 0.95), kind=kinds)
@many
def test_a_stack_stays_below_its_bounds(rho, kind):
    table = residual_depth.course(kind, rho, 24)
    assert (table.typical <= table.worst * (1 + 1e-12)).all()
    assert (table.worst <= table.transport * (1 + 1e-12)).all()
    assert (table.condition <= table.condition_bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("rho", [0.2, 0.9])
def test_courses_in_closed_form(rho):
    blocks, width = np.arange(1, 49), residual_depth.WIDTH
    stretched, shrunk = (1 + rho) ** blocks, (1 - rho) ** blocks
    one, both, turn, shrink = (
        residual_depth.course(kind, rho, 48)
        for kind in ("one direction shared", "half stretch, half shrink", "rotation", "shrink")
    )
    np.testing.assert_allclose(one.transport, stretched)
    np.testing.assert_allclose(one.worst, stretched)
    np.testing.assert_allclose(one.typical, ((stretched**2 + width - 1) / width) ** 0.5)
    np.testing.assert_allclose(one.condition, stretched)
    np.testing.assert_allclose(both.worst, stretched)
    np.testing.assert_allclose(both.condition, stretched / shrunk)
    np.testing.assert_allclose(both.condition_bound, stretched / shrunk)
    np.testing.assert_allclose(turn.worst, (1 + rho**2) ** (blocks / 2))
    np.testing.assert_allclose(turn.condition, 1)
    np.testing.assert_allclose(shrink.worst, shrunk)
    np.testing.assert_allclose(shrink.condition, 1)


def test_random_course_is_that_of_the_product():
    factors = torch.eye(residual_depth.WIDTH) + residual_depth.jacobians("random", 0.5, 5)
    product = torch.linalg.multi_dot([*factors.flip(0)])
    last = residual_depth.course("random", 0.5, 5).iloc[-1]
    values = torch.linalg.svdvals(product)
    assert last.worst == pytest.approx(values[0].item())
    assert last.condition == pytest.approx((values[0] / values[-1]).item())
    assert last.typical == pytest.approx(values.square().mean().sqrt().item())


def test_condition_numbers_are_asked_for_small_gains_only():
    assert "condition" not in residual_depth.course("random", 1.0, 3)


def test_readout_of_a_block_that_loses_a_direction():
    assert residual_depth.one_block(0.5, "half stretch, half shrink")[1].endswith("κ = 3, bound 3")
    assert "κ = inf, without a bound" in residual_depth.one_block(1.0, "shrink")[1]


# --- Growth through a map -----------------------------------------------------------------------


def test_worst_growth_is_the_norm_of_the_jacobian():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 20, 20, generator=generator) / 20**0.5

    def branches(x):
        return x + torch.tanh(x @ first) @ second

    x = torch.randn(1, 3, 20, generator=generator)
    jacobian = torch.autograd.functional.jacobian(branches, x).view(60, 60)
    exact = torch.linalg.matrix_norm(jacobian, 2).item()
    assert embedded.worst_growth(branches, x) == pytest.approx(exact, rel=2e-3)
    assert embedded.rounding_growth(branches, x, "fp16") < exact


def test_rounding_growth_of_a_scaling_is_its_factor():
    x = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    assert embedded.rounding_growth(lambda x: 4 * x, x, "bf16") == 4


# --- The embedded checkpoint --------------------------------------------------------------------


def test_downstream_maps_lead_to_the_models_output():
    window = embedded_windows(embedded.LENGTH, 1)
    model = load_model(EMBEDDED, "cpu")
    with torch.no_grad():
        wanted = model(window).last_hidden_state
        for layer in (0, 5, 10):
            through, x = embedded.downstream(layer)
            torch.testing.assert_close(model.ln_f(through(x)), wanted, rtol=1e-3, atol=1e-3)


def test_no_direction_grows_more_than_the_worst():
    through, x = embedded.downstream(10)
    worst = embedded.growth().worst[10]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        direction = torch.randn(x.shape, generator=generator)
        _, image = torch.func.jvp(through, (x,), (direction,))
        assert image.norm() / direction.norm() < worst
    branches = torch.func.vjp(lambda x: through(x) - x, x)[1]  # of block 11, which alone is left
    for _ in range(30):
        (pulled,) = branches(direction / direction.norm())
        norm, direction = pulled.norm(), torch.func.jvp(lambda x: through(x) - x, (x,), (pulled,))[1]
    assert norm - 1 <= worst * 1.01 and worst <= (1 + norm) * 1.01
    assert residual_depth.estimates().power_iteration[11] <= norm * 1.01, "the estimate is from below"


def test_the_shipped_transport_is_that_of_the_checkpoint():
    known, found = shipped.transport(), embedded.transport()
    pd.testing.assert_frame_equal(known, found, rtol=0.05, atol=1e-5)  # the vanishing J x differ between machines
    other = known.assign(release=1.2 * known.release)
    with pytest.raises(AssertionError):
        pd.testing.assert_frame_equal(other, found, rtol=0.05, atol=1e-5)


def test_the_failure_is_that_of_the_table():
    shown, factors = residual_depth.failure(), residual_depth.factors()
    assert shown.measured.tolist() == [f"{factors.rounding[block]:.1f}" for block in shown.index]
    assert (shown.bounded.astype(float) > 1000 * shown.measured.astype(float)).all()


def test_what_the_estimators_say_and_what_happens():
    rho, factors = residual_depth.estimates(), residual_depth.factors()
    assert (rho.power_iteration > 1).all()  # no small gain: Theorem 2 (`thm:residual`) does not apply to a single block
    assert (rho.operator_norm > rho.power_iteration).all()
    assert factors.release[10] == pytest.approx(1 + rho.release[11])
    assert (factors.operator_norm > factors.worst).all()
    assert (factors.release < factors.worst).any()
    assert factors.rounding.between(1, 3.5).all()


def test_branches_change_while_their_jacobians_vanish_along_the_input():
    """The released transport takes ||branch(x)|| / ||x|| for a gain; LayerNorm makes J x vanish up to epsilon."""
    table, observed = embedded.along_input(), embedded.observed()
    np.testing.assert_allclose(table.attention, observed.attention_norm / observed.input_1_norm, rtol=1e-4)
    np.testing.assert_allclose(table.mlp, observed.mlp_norm / observed.input_2_norm, rtol=1e-4)
    assert (table[["attention", "mlp"]] > 0.05).all(axis=None)
    assert (table.loc[1:, ["J attention", "J mlp"]] < 1e-5).all(axis=None)
    assert (table["J attention"] < 1e-3 * table.attention).all() and (table["J mlp"] < 1e-2 * table.mlp).all()


def test_readout_of_the_checkpoint():
    table = residual_depth.factors()
    _, readout = residual_depth.checkpoint(3, "power_iteration")
    assert f"grows {table.power_iteration[3]:.3g}-fold by" in readout
    assert f"{table.worst[3]:.3g}-fold in the worst direction, {table.rounding[3]:.3g}-fold if bf16" in readout


def test_what_the_exercises_say():
    table = residual_depth.course("random", 0.3, 12).iloc[-1]
    assert table.transport == pytest.approx(23, rel=0.02) and table.worst == pytest.approx(2, rel=0.05)
    factors = residual_depth.factors()
    assert 1 < factors.rounding[0] < 2 and 20 < factors.worst.max() < 28
    assert factors.operator_norm[9] < 1e12 < factors.operator_norm[8]  # 1e12 is the top of the picture
    assert 5e7 < factors.power_iteration[0] / factors.worst[0] < 2e8 and factors.power_iteration[0] > 1e9
    assert set(factors.rounding.nlargest(4).index) == {3, 4, 5, 6}
