"""Notebook 3: rows through LayerNorm, the embedded checkpoint's sites, and the kernels' constants, against oracles."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from drawn import many
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import embedded_windows

matplotlib.use("Agg")

from fragility_core import theory
from fragility_lab.inputs.checkpoints import EMBEDDED, load_model
from fragility_lessons import embedded, kernel_constants, layernorm_epsilon, rows, shipped
from fragility_lessons.constants import CONSTANTS
from fragility_numerics.formats import get_format

exponents = st.floats(-3, 3)


# --- Rows ---------------------------------------------------------------------------------------


@given(variance=exponents, offset=st.floats(0, 8))
@many
def test_drawn_rows_have_the_variance_and_the_mean(variance, offset):
    x = rows.drawn(10**variance, offset, draws=3).double()
    deviation, mean = torch.std_mean(x, -1, correction=0)
    torch.testing.assert_close(
        deviation, torch.full((3,), 10 ** (variance / 2), dtype=torch.float64), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(mean / deviation, torch.full((3,), offset, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_both_kernels_compute_layernorm():
    x, gamma = rows.drawn(2.0, 1.0, draws=5).double(), rows.uneven_gamma(0.5).double()
    for kernel in (rows.fused, rows.stepwise):
        torch.testing.assert_close(kernel(x, gamma, 1e-3), theory.layernorm_path(x, gamma, 1e-3))


def test_error_and_bound_by_hand():
    # x = (1, 3), gamma = (2, 4), sigma^2 = 1, epsilon = 3: Z = (-1, 2) exactly, M_LN = 4 * 5/8 * sqrt(10).
    table = rows.errors(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0, 4.0]), 3.0, "bf16", "every step")
    assert table.observed.item() == 0
    assert table.bound.item() == pytest.approx(2**-8 * 5 * 2.5 * 10**0.5)
    assert table.relative_bound.item() == pytest.approx(table.bound.item() / 5**0.5)


@given(
    variance=exponents,
    offset=st.floats(0, 8),
    epsilon=st.floats(-8, 1),
    spread=st.floats(0, 1),
    format=st.sampled_from(["fp16", "bf16"]),
    rounded=st.sampled_from(list(rows.A_LN)),
)
@settings(max_examples=100)
def test_constants_hold_within_the_range_of_a_format(variance, offset, epsilon, spread, format, rounded):
    """Up to underflow, which fp16 has for the squares and outputs of the smallest rows."""
    table = rows.errors(rows.drawn(10**variance, offset, 20), rows.uneven_gamma(spread), 10**epsilon, format, rounded)
    assert (table.observed <= table.bound).all()


def test_the_inputs_rounding_counts_only_where_asked_for():
    drawn, gamma = rows.drawn(3.0, 2.0, 20), torch.ones(rows.FEATURES)
    on_the_grid = get_format("bf16").round(drawn).float()
    for x, more in ((on_the_grid, 1.0), (drawn, 1.5)):
        result, both = (rows.errors(x, gamma, 1e-5, "bf16", rounded) for rounded in ("the result", "input and result"))
        assert (both.observed >= more * result.observed).all()
        np.testing.assert_allclose(both.bound, 2 * result.bound, rtol=1e-3)
    np.testing.assert_array_equal(
        both.path, torch.linalg.vector_norm(theory.layernorm_path(drawn, gamma, 1e-5), dim=-1)
    )


def test_emulated_kernel_errs_as_the_native_bf16_kernel_does():
    x, gamma = rows.drawn(3.0, 2.0, 200).bfloat16(), rows.uneven_gamma(0.3).bfloat16()
    native = torch.nn.functional.layer_norm(x, gamma.shape, gamma, None, 1e-5).double()
    observed = torch.linalg.vector_norm(native - theory.layernorm_path(x, gamma, 1e-5), dim=-1)
    table = rows.errors(x.float(), gamma.float(), 1e-5, "bf16", "the result")
    assert observed.mean().item() == pytest.approx(table.observed.mean(), rel=0.1)
    assert (observed.numpy() <= table.bound).all()


def test_squares_that_underflow_leave_the_bound():
    table = rows.errors(rows.drawn(10**-3.25, 0.0, 20), torch.ones(rows.FEATURES), 1e-5, "fp8_e4m3", "every step")
    assert (table.observed > 5 * table.bound).all()


@given(
    share=st.floats(-4, 4), offset=st.floats(0, 8), spread=st.floats(0, 1.5), format=st.sampled_from(["fp16", "bf16"])
)
@many
def test_every_step_to_the_bound_gives_something_away(share, offset, spread, format):
    x, gamma = rows.drawn(3.0, offset, 20), rows.uneven_gamma(spread)
    steps = rows.ladder(x, gamma, 3 * 10**share, format)
    assert (steps.diff(axis=1).iloc[:, 1:] >= -1e-12 * steps.iloc[:, 1:]).all(axis=None)
    assert steps[rows.STEPS[-1]].tolist() == rows.errors(x, gamma, 3 * 10**share, format, "the result").bound.tolist()


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_the_mean_variance_makes_no_bound_where_every_step_rounds(format):
    quiet = rows.quiet_and_loud(1.0, format)
    assert (get_format(format).round(quiet).float() == quiet).all()  # given exactly
    here = rows.mean_variance(1.0, 1e-6, format, "every step")
    assert 5 * here["bound with the mean variance"] < here["observed"] <= here["bound"]


@given(loudness=st.floats(-12, 4), epsilon=st.floats(-8, -2), format=st.sampled_from(["fp16", "bf16"]))
@many
def test_the_mean_variance_makes_a_bound_where_the_result_is_rounded(loudness, epsilon, format):
    here = rows.mean_variance(2.0**loudness, 10**epsilon, format, "the result")
    assert here["observed"] <= here["bound with the mean variance"] * (1 + 1e-12)


# --- The failure --------------------------------------------------------------------------------


def test_a_stored_row_is_normalised_to_other_numbers():
    table = layernorm_epsilon.failure()
    assert table.iloc[:, 1].tolist() == [100, 100.5, 100, 100]
    exact, stored, small, small_stored = (table.iloc[:, column].to_numpy() for column in (2, 3, 4, 5))
    assert exact[0] > 0 > stored[0] and stored[2] == stored[3]
    for z, kept in ((exact, stored), (small, small_stored)):  # by hand: mean 100.15, variance 0.0325
        assert np.linalg.norm(kept - z) / np.linalg.norm(z) == pytest.approx(0.62, abs=0.12)
    assert exact == pytest.approx(np.array([0.05, 0.25, -0.25, -0.05]) / 0.0325**0.5, abs=0.01)
    assert np.abs(small).max() < 0.2 * np.abs(exact).max()


def test_neighbours_in_the_recall_question():
    assert layernorm_epsilon.EXERCISES[0].solution == get_format("bf16").ulp(torch.tensor([100.0])).item()


def test_the_derivation_bounds_the_error_of_a_centred_row():
    """The steps of the notebook: numerator and divisor move Z by at most f times the error, to first order."""
    x, epsilon = rows.drawn(0.5, 0.0, draws=50).double(), 0.2
    error = 1e-6 * rows.standard_normal(*x.shape)
    error -= error.mean(-1, keepdim=True)
    gamma = torch.ones(x.shape[-1]).double()
    moved = theory.layernorm_path(x + error, gamma, epsilon) - theory.layernorm_path(x, gamma, epsilon)
    bound = theory.layernorm_factor(0.5, epsilon) * error.norm(dim=-1)
    assert (moved.norm(dim=-1) <= bound * (1 + 1e-4)).all()


def test_medians_are_those_of_the_summary():
    table, full = kernel_constants.medians(), kernel_constants.summary()["median"]
    assert list(table.columns) == list(layernorm_epsilon.FORMATS) and len(table) == 7
    for (statement, format), value in full.items():
        assert table.loc[statement, format] == f"{value:.2g}"


# --- What is drawn ------------------------------------------------------------------------------


@pytest.mark.parametrize(("variance", "epsilon"), [(-1.0, -1.0), (2.0, -8.0), (-4.0, 4.0)])
def test_readout_of_the_factor(variance, epsilon):
    (axes, _), readout = layernorm_epsilon.factor(variance, epsilon)
    v, e = 10**variance, 10**epsilon
    assert f"f(ε) = {theory.layernorm_factor(v, e):.3g};" in readout
    relative = theory.layernorm_factor(v, e) * (v + e) ** 0.5 / 2  # of C_LN: 2 at epsilon = 0
    assert readout.endswith(f"their quotient to {relative:.3g}")
    curve = axes.lines[3].get_xydata()  # behind the value of the control and the two limits
    np.testing.assert_allclose(curve[:, 1], theory.layernorm_factor(v, curve[:, 0]))


def test_an_underflow_is_told_as_a_failure_of_the_bound():
    _, readout = layernorm_epsilon.two_rows(0, -6.0, "bf16", "every step")
    assert "with the mean variance 0.22 (fails, the error is 6.4 times as large)" in readout
    _, readout = layernorm_epsilon.two_rows(-12, -6.0, "bf16", "every step")
    assert readout.endswith("(holds)")


# --- The embedded checkpoint --------------------------------------------------------------------


@pytest.fixture(scope="module")
def hidden() -> list[torch.Tensor]:
    """The residual stream before every block, by a plain fp32 pass."""
    window = embedded_windows(embedded.LENGTH, 1)
    with torch.no_grad():
        return load_model(EMBEDDED, "cpu")(window, output_hidden_states=True).hidden_states[:-1]


def test_sites_have_the_variance_of_the_residual_stream(hidden):
    sites = shipped.sites()
    assert len(sites) == 2 * len(hidden)
    expected = [x.double().var(-1, correction=0).mean().item() for x in hidden]
    np.testing.assert_allclose(sites.variance[sites.site == 1], expected, rtol=1e-4)


@pytest.mark.parametrize("format", layernorm_epsilon.FORMATS)
def test_the_gate_is_shut_at_the_checkpoints_epsilon(format):
    sites = layernorm_epsilon.gate(1e-5, 128, format)
    u = get_format(format).unit_roundoff
    np.testing.assert_allclose(sites.ratio, sites.variance / 1e-5 * 128 * u)
    assert (sites.ratio > 30).all()
    _, readout = layernorm_epsilon.regimes(-5.0, "128", format)
    assert "the gate is open at 0, " in readout
    opens = 1.01 * sites.variance.max() * 128 * u
    assert f"the gate is open at {len(sites)}, " in layernorm_epsilon.regimes(np.log10(opens), "128", format)[1]


def test_shipped_layernorms_are_those_of_the_checkpoint():
    pd.testing.assert_frame_equal(shipped.sites(), embedded.sites(), rtol=1e-3)
    pd.testing.assert_frame_equal(shipped.readings(), embedded.matrix_readings(), rtol=1e-3)


def test_matrix_readings_are_the_magnitudes_of_the_residual_stream(hidden):
    readings = shipped.readings()
    gamma, x = load_model(EMBEDDED, "cpu").h[3].ln_1.weight.abs().max().double(), hidden[3][0].double()
    variance, squares = x.var(-1, correction=0), x.square().sum(-1)
    by_row = gamma * (theory.layernorm_factor(variance, 1e-5) ** 2 * squares).sum().sqrt()
    mean = gamma * theory.layernorm_factor(variance.mean(), 1e-5) * squares.sum().sqrt()
    assert readings.loc[3].tolist() == pytest.approx([by_row.item(), mean.item()], rel=1e-4)


def test_what_the_exercises_say_of_the_checkpoint_and_of_a_single_rounding():
    sites = shipped.sites()
    assert sites.variance.min() == pytest.approx(0.006, rel=0.05) and sites.variance.max() == pytest.approx(
        15, rel=0.05
    )
    assert layernorm_epsilon.EXERCISES[3].solution == "about 1"
    needed = 1e-5 * layernorm_epsilon.gate(1e-5, 128, "fp16").ratio.max()
    assert needed == pytest.approx(1, rel=0.1)  # a hundred times the cap
    for variance, offset, epsilon in ((3.0, 0.0, 1e-5), (3.0, 8.0, 1e-5), (0.01, 2.0, 1e-5), (3.0, 2.0, 10.0)):
        table = rows.errors(rows.drawn(variance, offset, 200), torch.ones(rows.FEATURES), epsilon, "bf16", "the result")
        assert (table.relative * 2**8).median() == pytest.approx(0.42, abs=0.03)


# --- The kernels' constants ---------------------------------------------------------------------


def test_measured_constants_lie_below_those_a_priori():
    table = kernel_constants.constants()
    assert list(table.index) == list(CONSTANTS)
    for _, both in table.T.groupby(level=0):
        measured, a_priori = both.droplevel(0).loc[["measured", "a priori"]].to_numpy()
        assert (measured > 0).all() and (measured <= a_priori).all()


@pytest.mark.parametrize("statement", kernel_constants.STATEMENTS.values())
def test_shares_of_slack_are_those_of_the_quantiles(statement):
    quantiles = kernel_constants.slack_quantiles("bf16")[statement]
    row = kernel_constants.summary().loc[statement, "bf16"]
    assert quantiles.iloc[0] == pytest.approx(row.smallest) and row.smallest >= 1
    (axes,), readout = kernel_constants.statements(1.0, statement, "bf16")
    share = (quantiles <= 10).mean()
    assert f"{share:.0%} of {row.draws:.0f} draws" in readout and f"the median {row['median']:.3g}" in readout
    curve = next(line for line in axes.lines if line.get_label() == statement).get_xydata()
    within = curve[curve[:, 0] <= 10]
    assert within[-1, 1] == pytest.approx(share, abs=1 / 300)
