"""What the teaching notebooks compute, against closed forms, all numbers of a format, and native kernels."""

import math
import re

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

matplotlib.use("Agg")

from fragility_core import theory
from fragility_lessons import adjoint_predictor, attention_error, bits, floating_point, residual_depth
from fragility_lessons.attention_error import DRAWS, KEYS, WIDTH
from fragility_lessons.exercises import exercises
from fragility_numerics.formats import get_format

formats = st.sampled_from(floating_point.LOW)
some = settings(max_examples=30)


def positive_numbers(name: str) -> np.ndarray:
    """Every positive finite number of a format, ascending."""
    return floating_point.all_numbers(name)[floating_point.all_numbers(name) > 0]


# --- 1: bits ------------------------------------------------------------------------------------


def read_back(bits_of: str, lowest: int) -> float:
    """The value of "sign exponent fraction", by the definition of a normal or subnormal number."""
    sign, exponent, fraction = bits_of.split()
    normal = "1" in exponent
    significand = normal + int(fraction, 2) / 2 ** len(fraction)
    return (-1) ** int(sign) * significand * 2.0 ** (lowest + (int(exponent, 2) - 1 if normal else 0))


@pytest.mark.parametrize("name", bits.NAMES)
@given(x=st.floats(-6, 6, width=32))
@some
def test_bits_stand_for_the_rounded_number(name, x):
    format = get_format(name)
    assert read_back(bits.pattern(x, format), bits.widths(format).lowest) == format.round(torch.tensor(x)).item()


@pytest.mark.parametrize(("dtype", "integer", "name"), [
    (torch.float32, torch.int32, "fp32"), (torch.bfloat16, torch.int16, "bf16"), (torch.float16, torch.int16, "fp16"),
    (torch.float8_e4m3fn, torch.uint8, "fp8_e4m3"), (torch.float8_e5m2, torch.uint8, "fp8_e5m2"),
])  # fmt: skip
@pytest.mark.parametrize("x", [5.3, -0.1, 0.0, 1e-7, 400.0])
def test_bits_are_those_in_memory(dtype, integer, name, x):
    memory = torch.tensor([x]).to(dtype).view(integer).item() % 2 ** get_format(name).bits
    assert bits.pattern(x, get_format(name)).replace(" ", "") == f"{memory:0{get_format(name).bits}b}"


def test_an_overflow_has_the_bits_of_infinity():
    assert bits.pattern(-1e6, get_format("fp16")) == "1 11111 0000000000"


def test_table_of_formats_is_that_of_the_library():
    table = bits.formats_table()
    assert list(table.index) == list(bits.NAMES)
    assert table.loc["fp8_e4m3"].tolist() == ["1+4+3", 4, "2⁻⁴", "448", "0.016"]
    for name, row in table.iterrows():
        used = sum(map(int, row["bits"].split("+")))
        assert used == (19 if name == "tf32" else get_format(name).bits)


def test_picture_of_bits_says_the_same_without_its_script():
    picture = bits.Bits(5.3, "fp8_e4m3")
    assert picture.told() == "bits 0 1001 011, value 5.5, relative error 0.0377."
    static = picture._repr_mimebundle_()["text/html"]
    assert picture.told() in static and '"exponent": 4, "fraction": 3, "lowest": -6' in static


def test_the_failure_is_a_tie():
    shares = {name: floating_point.stored_scores(299, name).softmax(0)[0].item() for name in ("fp32", "fp16", "bf16")}
    assert shares["bf16"] == 0.5 and min(shares["fp32"], shares["fp16"]) > 0.84
    assert floating_point.stored_scores(299, "bf16").tolist() == [300, 300]
    _, readout = floating_point.failure(299)
    assert "bf16 50%" in readout and "fp16 85%" in readout


# --- 1: floating point and softmax --------------------------------------------------------------


@pytest.mark.parametrize("name", floating_point.LOW)
def test_all_numbers_of_a_format(name):
    """From its definition: significands of t bits times powers of two, and the subnormal numbers."""
    format = get_format(name)
    t, lowest = round(-math.log2(format.unit_roundoff)), round(math.log2(format.smallest_normal))
    scales = 2.0 ** np.arange(lowest, math.floor(math.log2(format.largest)) + 1)
    normal = np.multiply.outer(scales, 1 + np.arange(2 ** (t - 1)) / 2 ** (t - 1)).ravel()
    subnormal = np.arange(2 ** (t - 1)) / 2 ** (t - 1) * format.smallest_normal
    expected = np.concatenate([subnormal, normal[normal <= format.largest]])
    np.testing.assert_array_equal(floating_point.all_numbers(name), np.unique([-expected, expected]))


@pytest.mark.parametrize("name", floating_point.LOW)
def test_spacing_is_that_of_all_numbers(name):
    numbers = positive_numbers(name)
    expected = np.diff(numbers)
    found = [floating_point.spacing(x, get_format(name)) for x in numbers[:-1]]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal([floating_point.spacing(-x, get_format(name)) for x in numbers[:-1]], expected)


@pytest.mark.parametrize("name", floating_point.LOW)
@given(position=st.floats(0.01, 0.99))
@some
def test_nearest_number_is_taken(name, position):
    numbers = positive_numbers(name)
    x = float(np.float32(np.exp(position * np.log(numbers[-1]) + (1 - position) * np.log(numbers[0]))))
    nearest = np.abs(numbers - x).min()
    assert floating_point.relative_errors(np.array([x]), get_format(name)) == nearest / x


def test_worst_error_is_u_over_one_plus_u_inside_the_range():
    table = floating_point.worst_errors().pivot(index="exponent", columns="format", values="error")
    for name in floating_point.LOW:
        u = get_format(name).unit_roundoff
        assert table.loc[-6:7, name].tolist() == pytest.approx([u / (1 + u)] * 14, rel=1e-12)
    # fp16 below its smallest normal number 2^-14: half of the spacing 2^-24 over the number itself.
    assert table.loc[-20, "fp16"] == pytest.approx(2**-25 / (2**-20 + 2**-25))
    assert table.loc[-30, "fp16"] == 1
    assert math.isinf(table.loc[16, "fp16"])
    assert table.loc[16, "fp8_e4m3"] == pytest.approx(1 - 448 / (2**17 - 2**6), rel=1e-3)


@given(margin=st.floats(-6, 8), rivals=st.integers(1, 15))
@some
def test_sensitivity_of_one_against_many_in_closed_form(margin, rivals):
    # J has the eigenvectors (rivals, -1, ..., -1) and those among the rivals alone.
    p = floating_point.one_against_many(margin, rivals)
    first, rest = p[0].item(), p[1].item()
    expected = max(first * (1 - first) * (rivals + 1) / rivals, rest if rivals > 1 else 0)
    assert floating_point.row_sensitivity(p).item() == pytest.approx(expected)
    assert expected <= 0.5


@given(offset=st.floats(0, 64), spread=st.floats(0.25, 8), format=formats)
@some
def test_half_of_the_scores_error_is_never_exceeded(offset, spread, format):
    rows = floating_point.rounded_scores(offset, spread, format)
    assert (rows.observed <= rows.guaranteed * (1 + 1e-12)).all()
    assert (rows.first_order <= rows.guaranteed * (1 + 1e-12)).all()


def test_first_order_bound_holds_in_fine_formats_and_fails_in_coarse_ones():
    fine, coarse = floating_point.rounded_scores(8, 1, "fp16"), floating_point.rounded_scores(64, 8, "fp8_e5m2")
    assert (fine.observed <= fine.first_order).all()
    assert (coarse.observed > coarse.first_order).any()


@pytest.mark.parametrize(("x", "format", "nearest"), [(1.23, "fp8_e4m3", "1.25"), (3.9, "fp8_e5m2", "4")])
def test_readout_of_neighbours(x, format, nearest):
    (line, _), readout = floating_point.neighbours(x, format)
    assert readout.startswith(f"{format}: {x} is rounded to {nearest}, ")
    grid = line.lines[0].get_xdata()
    assert grid[0] < x < grid[-1]


@given(x=st.floats(0.3, 3.9), format=formats)
@some
def test_the_grid_has_every_number_of_its_window(x, format):
    (line, _), _ = floating_point.neighbours(x, format)
    grid, numbers = line.lines[0].get_xdata(), floating_point.all_numbers(format)
    np.testing.assert_array_equal(grid, numbers[(numbers >= grid[0]) & (numbers <= grid[-1])])
    assert np.abs(grid - x).min() == np.abs(numbers - x).min() and len(grid) >= 7


def test_the_grid_changes_its_spacing_at_one():
    (line, _), _ = floating_point.neighbours(1.23, "fp8_e4m3")
    expected = [0.75, 0.8125, 0.875, 0.9375, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75]
    assert line.lines[0].get_xdata().tolist() == expected


def test_triangle_is_one_half_at_the_middle_of_a_side():
    assert floating_point.triangle(6.0, 6.0)[1].startswith("‖J(p)‖₂ = 0.499")
    assert floating_point.triangle(0.0, 0.0)[1].startswith("‖J(p)‖₂ = 0.333")


# --- 2: attention error -------------------------------------------------------------------------


def test_peaked_heads_have_the_margin_and_values_that_cancel():
    margins = torch.tensor([0.5, 3.0])
    query, key, value = attention_error.peaked(margins, value_scale=4.0)
    assert value.shape == (2, DRAWS, KEYS, WIDTH)
    scores = query @ key.mT / math.sqrt(WIDTH)
    wanted = (margins.double()[:, None, None, None] * torch.eye(KEYS)).expand_as(scores)
    single = {"rtol": 1e-6, "atol": 3e-6}  # rows and values are numbers of fp32
    torch.testing.assert_close(scores, wanted, **single)
    torch.testing.assert_close(value.sum(-2), torch.zeros_like(value.sum(-2)), **single)


@given(spread=st.floats(0.1, 8), format=formats)
@some
def test_bound_holds_within_the_range_of_a_format(spread, format):
    table = attention_error.errors(attention_error.stored(attention_error.normal(spread, 50), format), format)
    assert (table.observed <= table.bound).all()
    assert table.relative.to_numpy() == pytest.approx((table.observed / table.context).to_numpy())


def test_bound_is_theorem_attn_by_hand():
    # Two keys tie: S = 0, P = 1/2 everywhere, ||P|| = 1, ||J|| = 1/2, kappa = 0; Q = (1, 1)^T, K = (1, -1) crosswise.
    query, key = torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    value = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    chi = 2 * 2 / math.sqrt(2) * 0.5
    norms = theory.attention_norms(query, key, value)
    assert attention_error.error_bound(norms, "bf16").item() == pytest.approx(2**-8 * (1 + 0 + chi + 1) * 1 * 3)


def test_emulated_head_errs_as_native_bf16_kernels_do():
    inputs = attention_error.stored(attention_error.normal(1.0, 200), "bf16")
    query, key, value = inputs
    native = ((query @ key.mT / math.sqrt(WIDTH)).softmax(-1) @ value).double()
    *_, exact = theory.exact_attention(*inputs)
    native_errors = torch.linalg.matrix_norm(native - exact)
    table = attention_error.errors(inputs, "bf16")
    assert native_errors.mean().item() == pytest.approx(table.observed.mean(), rel=0.05)
    assert (native_errors.numpy() <= table.bound).all()


@pytest.mark.parametrize("format", ["fp16", "bf16", "fp8_e5m2"])  # in fp8_e4m3 some results are subnormal
def test_values_scaled_by_a_power_of_two_scale_the_error_exactly(format):
    margins = torch.tensor([1.0])
    one, four = (
        attention_error.errors(attention_error.stored(attention_error.peaked(margins, scale), format), format)
        for scale in (1.0, 4.0)
    )
    np.testing.assert_array_equal(four.observed, 4 * one.observed)
    np.testing.assert_array_equal(four.relative, one.relative)


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_every_step_of_the_proof_gives_something_away(format):
    heads = attention_error.stored(attention_error.normal(2.0, 100), format)
    steps, table = attention_error.ladder(heads, format), attention_error.errors(heads, format)
    np.testing.assert_allclose(steps[attention_error.STEPS[0]], table.observed)
    np.testing.assert_allclose(steps[attention_error.STEPS[-1]], table.bound)
    assert (steps.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)


def test_readout_names_the_value_scales_that_break_the_bound():
    _, readout = attention_error.beyond_range(2.0, "bf16")
    assert "holds from 2^-30 to 2^20" in readout  # the range of the figure: bf16 leaves it at neither end
    _, readout = attention_error.beyond_range(2.0, "fp16")
    assert readout.endswith("and 2^16 to 2^20; it is 0.0052 ‖A‖")  # values of a few 2^14 still fit below 65504
    _, readout = attention_error.beyond_range(0.5, "fp8_e4m3")
    assert "fails for values of 2^10;" in readout  # far above, all saturate: the bound exceeds ‖A‖ and allows it


def test_what_the_exercises_say_of_attention():
    def looser(format: str, margin: float) -> float:
        mean = attention_error.sweep(0, format).groupby("margin").mean().loc[margin]
        return mean.bound / mean.observed

    assert 3.5 < looser("bf16", 8) < 4.5 and 27 < looser("bf16", 10) < 35
    assert looser("fp8_e4m3", 10) > 300 and looser("fp8_e5m2", 10) > 300
    largest = [
        attention_error.low_attention(attention_error.peaked(torch.tensor([m])), "bf16")[1].max() for m in (8.0, 10.0)
    ]
    assert largest[0] < 1 == largest[1]
    _, readout = attention_error.looseness(1.0, "bf16")
    assert re.search(r"median 2[345],", readout), readout
    steps = attention_error.ladder(attention_error.stored(attention_error.normal(1.0, 200), "bf16"), "bf16")
    lost = np.log(steps).diff(axis=1).mean().iloc[1:]
    assert lost.idxmax() == attention_error.STEPS[-1]


# --- Exercises ----------------------------------------------------------------------------------

HALVES = {"target": 0.5, "epsilon_min": 1e-5, "epsilon_max": 1e-2}

# The answers that the library can compute, by lesson and by the place of the exercise in it.
SOLUTIONS = {
    ("floating_point", 0): lambda: floating_point.rounded(9.4, get_format("fp8_e4m3")),
    ("floating_point", 4): lambda: floating_point.spacing(300, get_format("bf16")),
    ("floating_point", 6): lambda: math.hypot(101, 99) / math.hypot(1, -1),
    ("attention_error", 4): lambda: math.log(64),
    ("attention_error", 6): lambda: 1 / get_format("fp8_e5m2").unit_roundoff,
    ("layernorm_epsilon", 0): lambda: floating_point.spacing(100, get_format("bf16")),
    ("layernorm_epsilon", 5): lambda: theory.layernorm_factor(0.04, 0.0),
    ("layernorm_epsilon", 6): lambda: theory.layernorm_ratio(10.0, 1e-5, 768, 2**-11),
    ("residual_depth", 2): lambda: torch.linalg.cond(torch.diag(torch.tensor([1.5, 0.5])), 2),
    ("residual_depth", 4): lambda: torch.linalg.matrix_norm(torch.linalg.matrix_power(0.5 * torch.eye(2), 3), 2),
    ("residual_depth", 5): lambda: 2**10 / residual_depth.course("rotation", 1.0, 10).worst.iloc[-1],
    ("controller", 3): lambda: theory.layernorm_ratio(0.01, 1e-5, 128, 2**-8),
    ("controller", 4): lambda: theory.epsilon_update(1e-5, theory.epsilon_candidate(0.8e-5, 1, 1, **HALVES)),
    ("controller", 5): lambda: 1.0 / theory.layernorm_ratio(1.0, 1e-5, 128, 2**-11),  # proportional to σ²
    ("controller", 6): lambda: 11 + math.ceil(math.log2(96_000)),
    ("adjoint_predictor", 1): lambda: 0.1 * np.linalg.norm(adjoint_predictor.gradients(np.array(1.0))),
    ("window", 4): lambda: theory.layernorm_magnitude(1.2, 20.0, 1e-5, 400.0),
    ("window", 5): lambda: theory.downstream_transport(torch.tensor([0.0, 0.5, 0.2]))[0],
}


def test_answers_to_the_exercises_are_those_of_the_library():
    lessons = {lesson for lesson, _ in SOLUTIONS}
    asked = {(lesson, place): x for lesson in lessons for place, x in enumerate(exercises(lesson))}
    assert SOLUTIONS.keys() == {key for key, exercise in asked.items() if not exercise.options}
    for key, solution in SOLUTIONS.items():
        assert asked[key].solution == pytest.approx(float(solution()), rel=1e-5), key


def test_the_output_is_lost_where_the_scores_become_equal():
    shown = attention_error.failure()
    outputs = {"fp32": 0.69, "fp16": 0.7, "bf16": 0, "fp8_e4m3": 0, "fp8_e5m2": 0}
    assert shown.output.map(float).to_dict() == pytest.approx(outputs)
    assert shown["stored scores"][["fp32", "bf16"]].tolist() == ["300.7, 299", "300, 300"]
