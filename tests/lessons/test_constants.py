"""Kernel constants and slack: the samples, constants on fresh samples, and constants that are too small."""

import math

import pandas as pd
import pytest
import torch
from drawn import seeded

from fragility_core import theory
from fragility_lessons.constants import (
    CONSTANTS,
    a_priori_constants,
    attention_terms,
    bound_slack,
    constant_values,
    gamma_n,
    measure_constants,
    summarize_slack,
)
from fragility_lessons.kernel_samples import (
    ATTENTION_SHAPES,
    FEATURES,
    HEADS,
    arithmetic,
    draw_heads,
    draw_rows,
    draw_stacks,
    observe_attention,
    observe_layernorm,
    observe_stack,
    sample_attention,
    underflow,
)
from fragility_numerics.formats import FORMATS, get_format

TRANSFER = 1.5  # how far a fresh sample may exceed measured constants: each is the maximum of a finite sample
KERNELS = list(CONSTANTS.values())


# --- Samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_inputs_are_given_exactly_in_the_format(format):
    drawn = [x for family in HEADS for x in draw_heads(family, (2, 5, 3), 4, format, seeded())]
    drawn += [*draw_rows(8, 4, format, seeded()).values(), *draw_stacks((2, 4), 0.5, 3, format, seeded())]
    for x in drawn:
        assert x.dtype == format.compute_dtype and torch.equal(format.round(x.float()), x)


def test_shapes_of_what_is_drawn():
    bf16 = get_format("bf16")
    assert [x.shape for x in draw_heads("normal", (2, 5, 3), 4, bf16, seeded())] == [(4, 2, 3), (4, 5, 3), (4, 5, 3)]
    assert {x.shape for x in draw_rows(8, 4, bf16, seeded()).values()} == {(4, 8)}
    assert [x.shape for x in draw_stacks((2, 4), 0.5, 3, bf16, seeded())] == [(3, 4, 4), (2, 3, 4, 4)]


def test_families_do_what_they_are_for():
    norms = {
        family: theory.attention_norms(*draw_heads(family, (4, 8, 8), 200, FORMATS["fp32"], seeded()))
        for family in HEADS
    }
    alignment = {name: 1 / theory.kappa_score(*one[:3], 8) for name, one in norms.items()}
    assert alignment["parallel"].min() > 0.999 > alignment["normal"].max()
    assert alignment["cancelling"].median() < 0.1
    assert norms["cancelling"].kappa_value.median() > 20 * norms["normal"].kappa_value.median()
    # Rows from even (1/8) to one-hot.
    assert norms["normal"].probability_norm.min() < 1.01 * (4 / 8) ** 0.5
    assert norms["normal"].probability_norm.max() > 0.99 * 4**0.5


def test_underflow_by_hand():
    # fp8_e4m3: subnormals lie 2^-9 apart; four entries err by at most half of that each.
    assert underflow(get_format("fp8_e4m3"), 4) == 2 * 2.0**-10


def test_observed_attention_by_hand():
    # d = 1, so no scaling error; q k = 1.0078125 * 1.0078125 is rounded to bf16, where the spacing is 2^-7.
    query, key = torch.tensor([[[1.0078125]]]).bfloat16(), torch.tensor([[[1.0078125], [0.0]]]).bfloat16()
    value = torch.tensor([[[1.0], [0.0]]]).bfloat16()
    row = observe_attention(query, key, value, arithmetic("bf16", execution="emulated")).iloc[0]
    exact, rounded = 1.0078125**2, 1.015625
    assert row.score_error == row.spread == pytest.approx(exact - rounded)
    p, low = 1 / (1 + math.exp(-rounded)), 0.734375  # nearest to 0.73413...; its complement 0.2659 becomes 0.265625
    assert row.softmax_error == pytest.approx(math.hypot(low - p, 0.265625 - (1 - p)))
    assert row.softmax_exact_norm == pytest.approx(math.hypot(p, 1 - p)) and row.gemm_error == 0
    assert row.gemm_left_norm == pytest.approx(math.hypot(low, 0.265625))
    assert row.attention_error == pytest.approx(abs(low - 1 / (1 + math.exp(-exact))))
    assert row.score_norm == pytest.approx(exact) and row.head_width == 1


def test_observed_layernorm_by_hand():
    # x = (1, 4), epsilon = 0.75: mean 2.5, variance 2.25, Z = (-1, 1) 1.5 / sqrt(3), in fp8_e4m3 (-1, 1) 0.875.
    low = arithmetic("fp8_e4m3")
    row = observe_layernorm(torch.tensor([[1.0, 4.0]]).bfloat16(), torch.ones(2).bfloat16(), 0.75, low).iloc[0]
    assert row.layernorm_error == pytest.approx(2**0.5 * (0.875 - 1.5 / 3**0.5))
    assert (row.variance, row.epsilon, row.gamma_max) == (2.25, 0.75, 1.0)


def test_observed_stack_by_hand():
    # 1 + 1 * 0.00390625 = 1.00390625, halfway between 1 and 1.0078125 in bf16: rounded to even.
    x, weight = torch.ones(1, 1, 1).bfloat16(), torch.full((1, 1, 1, 1), 2.0**-8).bfloat16()
    row = observe_stack(x, weight, arithmetic("bf16")).iloc[0]
    exact = 1 + 2.0**-8
    assert row.mismatch == pytest.approx(2.0**-8 / exact)
    assert row.addition_bound == pytest.approx(2.0**-8) and row.product_bound == pytest.approx(2.0**-16 / exact)


def test_draws_that_leave_the_range_are_left_out():
    query, key = torch.tensor([[[30.0]], [[2.0]]]).bfloat16(), torch.tensor([[[30.0]], [[2.0]]]).bfloat16()
    observed = observe_attention(query, key, torch.ones(2, 1, 1).bfloat16(), arithmetic("fp8_e4m3"))
    assert observed.index.tolist() == [1]  # 900 > 448


def test_samples_are_reproducible():
    low = arithmetic("fp8_e5m2")
    first, again, other = sample_attention(low, 3), sample_attention(low, 3), sample_attention(low, 4)
    pd.testing.assert_frame_equal(first, again)
    assert not first.equals(other)
    assert set(first["shape"]) == {f"{n}x{m}x{d}" for n, m, d in ATTENTION_SHAPES} and set(first.family) == set(HEADS)


# --- A priori ------------------------------------------------------------------------------------


def test_a_priori_constants_by_hand():
    assert gamma_n(8, 2.0**-4) == 1.0  # 1/2 / (1 - 1/2)
    constants = a_priori_constants("bf16", keys=256, head_width=64, features=768)
    fine = 2.0**-16  # fp32's unit roundoff over bf16's
    assert constants["c_gemm_out"] == pytest.approx(1 + 8 * 256 * fine, rel=1e-3)
    assert constants["c_softmax"] == pytest.approx(1 + 544 * fine, rel=1e-4)
    assert constants["a_ln"] == pytest.approx(1 + 1552 * fine, rel=1e-3)
    assert constants["c_gemm"] == pytest.approx(1 + 2.0**-8 + 64 * fine, rel=1e-3)


# --- Constants and slack -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bf16", "fp16", "fp8_e4m3"])
def format(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def measured(format) -> pd.DataFrame:
    return measure_constants(format, seed=0)


@pytest.fixture(scope="module")
def slack(format, measured) -> pd.DataFrame:
    return bound_slack(format, seed=1, constants=constant_values(measured))


def test_measured_constants_are_those_of_kernels_that_round_once(format, measured):
    """Positive, and at most what the error model allows for the largest shapes of the sample."""
    assert measured.constant.tolist() == list(CONSTANTS)
    largest = [max(shape[axis] for shape in ATTENTION_SHAPES) for axis in range(3)]
    allowed = a_priori_constants(format, keys=largest[1], head_width=largest[2], features=max(FEATURES))
    for row in measured.itertuples():
        assert 0.2 < row.value <= allowed[row.constant], row.constant
        assert row.statement == CONSTANTS[row.constant] and row.format == format and row.device == "cpu"
        assert row.execution == arithmetic(format).execution and row.sample > 10_000


def test_measured_constants_are_the_smallest_that_hold(format, measured):
    low = arithmetic(format)
    terms = attention_terms(sample_attention(low, 0), low.format)
    for row in measured.itertuples():
        if row.constant == "a_ln":
            continue
        own = terms[terms.constant == row.constant]
        ratio = own.observed / (own.free + row.value * own.unit)
        assert ratio.max() == pytest.approx(1, abs=1e-12)
        attained = own.loc[ratio.idxmax()]
        assert (attained.family, attained["shape"]) == (row.family, row.shape)


def test_measured_constants_hold_on_a_fresh_sample(slack):
    kernels = slack[slack.statement.isin(KERNELS)]
    assert set(kernels.statement) == set(KERNELS)
    assert kernels.slack.min() > 1 / TRANSFER


def test_a_constant_set_too_low_is_found_out(format, measured, slack):
    """Each of the four constants, halved, fails on the fresh sample."""
    halved = bound_slack(format, seed=1, constants=(measured.set_index("constant").value / 2).to_dict())
    assert (halved[halved.statement.isin(KERNELS)].groupby("statement").slack.min() < 0.95).all()
    assert (slack[slack.statement.isin(KERNELS)].groupby("statement").slack.min() > 1 / TRANSFER).all()


def test_slack_of_the_theorems(format, slack):
    """Theorem 3 (`thm:unified`), and Theorem 1 (`thm:attn`) with its O(u^2), hold for every draw.

    To first order only, Theorem 1 fails in fp8.
    """
    smallest = slack.groupby("statement").slack.min()
    assert smallest["Theorem 1 with remainder"] > 1 and smallest["Theorem 3"] > 1
    assert (smallest["Theorem 1"] < 1) == (format == "fp8_e4m3")


def test_slack_is_bound_over_observed(slack):
    errors = slack[slack.observed > 0]
    assert len(errors) > 0.5 * len(slack) and (errors.slack == errors.bound / errors.observed).all()
    assert (slack.slack[slack.observed == 0] == math.inf).all()


def test_slack_measures_its_constants_by_itself():
    rows = bound_slack("fp16", seed=0)
    assert rows[rows.statement.isin(KERNELS)].slack.min() == pytest.approx(1, abs=1e-12)  # the sample of the constants


def test_summary_of_slack_by_hand():
    rows = pd.DataFrame(
        {
            "statement": ["a"] * 4 + ["b"], "format": "bf16", "execution": "native",
            "observed": [0.0, 1.0, 1.0, 1.0, 2.0], "slack": [math.inf, 2.0, 4.0, 6.0, 8.0],
        }
    )  # fmt: skip
    summary = summarize_slack(rows)
    assert summary.loc[("a", "bf16", "native")].tolist() == pytest.approx([4, 0.25, 2, 2.04, 4, 5.8, 6])
    assert summary.loc[("b", "bf16", "native")].tolist() == [1, 0, 8, 8, 8, 8, 8]


def test_tf32_rounds_factors_of_products_alone():
    constants = constant_values(measure_constants("tf32"))
    assert 0.5 < constants["c_gemm_out"] < 1.1
    assert constants["c_gemm"] == 0 and 0 < max(constants["c_softmax"], constants["a_ln"]) < 0.01


def test_formats_and_executions_are_checked():
    with pytest.raises(ValueError, match="a recipe must be known, got 'fp4'"):
        measure_constants("fp4")
    with pytest.raises(ValueError, match="no device computes a whole model in tf32"):
        bound_slack("tf32", execution="native")
