"""The format table and rounding, against torch.finfo and an exact fp64 oracle."""

import math

import pytest
import torch
from drawn import seeded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fragility_numerics import formats
from fragility_numerics.formats import FORMATS, NARROW, Format, get_format, has_native_kernels, random_bits
from fragility_quantization.recipes import POWERS

TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Bits of exponent and fraction, and what the largest exponent is for: infinities and NaN ("ieee"), numbers but for one
# NaN ("fn"), or numbers alone ("finite"). OCP 8-bit Floating Point 1.0 and Microscaling Formats 1.0 (2023).
LAYOUTS = {
    "fp32": (8, 23, "ieee"), "tf32": (8, 10, "ieee"), "bf16": (8, 7, "ieee"), "fp16": (5, 10, "ieee"),
    "fp8_e4m3": (4, 3, "fn"), "fp8_e5m2": (5, 2, "ieee"), "fp6_e3m2": (3, 2, "finite"), "fp6_e2m3": (2, 3, "finite"),
    "fp4_e2m1": (2, 1, "finite"),
}  # fmt: skip
WITH_INFINITIES = ["fp32", "tf32", "bf16", "fp16", "fp8_e5m2"]
each_number_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def round_exactly(x: float, format: Format) -> float:
    """Round to nearest even in ``format`` by the definition, in fp64.

    Every step is exact: scaling by a power of two, and Python's round, which is half to even. The
    spacing is that of the binade of x, or of the smallest normal one where x lies below (subnormals).
    """
    if math.isnan(x) or x == 0:
        return x
    if math.isinf(x):
        return math.copysign(format.largest, x) if format.saturates else x
    binade = max(math.frexp(x)[1] - 1, int(math.log2(format.smallest_normal)))
    spacing_exponent = binade - format.significand + 1
    rounded = math.copysign(math.ldexp(round(math.ldexp(x, -spacing_exponent)), spacing_exponent), x)
    if abs(rounded) > format.largest:
        return math.copysign(format.largest if format.saturates else math.inf, x)
    return rounded


def assert_same_float(got: float, want: float):
    """Equal with NaN equal to itself and the sign of zero significant."""
    assert (math.isnan(got) and math.isnan(want)) or (got == want and math.copysign(1, got) == math.copysign(1, want))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_table_agrees_with_torch(name):
    format, info = get_format(name), torch.finfo(TORCH_DTYPES[name])
    assert format.unit_roundoff == info.eps / 2
    assert format.spacing == info.eps
    assert format.largest == info.max
    assert format.smallest_normal == info.smallest_normal
    assert format.storage == TORCH_DTYPES[name]


def test_the_table_follows_from_the_layout_of_bits():
    """Of every format, those without a dtype of torch among them: nothing here is read from the table."""
    floats = {name: format for name, format in (FORMATS | NARROW).items() if format.lowest is None}
    assert floats.keys() == LAYOUTS.keys(), "add the layout of a new format to LAYOUTS"
    for name, (exponent, fraction, kind) in LAYOUTS.items():
        format, bias = floats[name], 2 ** (exponent - 1) - 1
        top = 2**exponent - 1 - bias - (kind == "ieee")  # the largest exponent of a number
        steps = 2 if kind == "fn" else 1  # from the largest number to the next power of two
        want = (1 + fraction, 2.0 ** (1 - bias), (2 - steps * 2.0**-fraction) * 2.0**top, kind != "ieee")
        assert (format.significand, format.smallest_normal, format.largest, format.saturates) == want, name
        assert format.bits == 1 + exponent + fraction or name == "tf32", name  # which is stored in 32


def test_the_integers_are_those_of_twos_complement():
    integers = {name: format for name, format in NARROW.items() if format.lowest is not None}
    assert len(integers) >= 2
    for name, format in integers.items():
        bits = int(name.removeprefix("int"))
        assert (format.bits, format.lowest, format.largest) == (bits, -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
        numbers = torch.arange(2**bits) - 2.0 ** (bits - 1)
        assert format.round(torch.tensor([-1e4, 1e4])).tolist() == [format.lowest, format.largest]
        assert format.round(numbers).double().equal(numbers.double()) and format.spacing * format.smallest_normal == 1


def test_tf32_has_the_exponent_of_fp32_and_the_significand_of_fp16():
    tf32 = get_format("tf32")  # NVIDIA A100 whitepaper: 8 exponent bits, 10 fraction bits
    assert tf32.unit_roundoff == 2.0**-11 == get_format("fp16").unit_roundoff
    assert tf32.smallest_normal == get_format("fp32").smallest_normal
    assert tf32.largest == 3.4011621342146535e38  # (2 - 2^-10) 2^127


def test_unit_roundoffs_are_those_of_the_protocol():
    published = {"fp16": 2**-11, "bf16": 2**-8, "fp32": 2**-24, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "tf32": 2**-11}
    assert {name: FORMATS[name].unit_roundoff for name in published} == published  # protocol section 1


@each_number_format
def test_compute_dtype_holds_every_value(format):
    values = torch.tensor([format.largest, 2 - format.spacing, format.smallest_normal * format.spacing])
    assert torch.equal(format.round(values).to(torch.float64), values.double())
    assert torch.finfo(format.compute_dtype).eps <= format.spacing
    assert format.round(values).dtype == format.compute_dtype


@each_number_format
@given(x=st.floats(width=32))
@example(x=math.nan)
@example(x=math.inf)
@example(x=-math.inf)
@example(x=-0.0)
@example(x=3.4028234663852886e38)  # largest fp32
@example(x=1.401298464324817e-45)  # smallest subnormal of fp32
@example(x=65520.0)  # tie between fp16's largest and overflow
@example(x=464.0)  # tie between fp8_e4m3's largest and the first value it lacks
@example(x=61440.0)  # tie between fp8_e5m2's largest and overflow
@settings(max_examples=300)
def test_rounds_like_the_oracle(format, x):
    assert_same_float(format.round(torch.tensor(x)).item(), round_exactly(x, format))


def test_a_format_without_a_dtype_may_have_infinities():
    format, x = Format("like fp8_e5m2", 8, 3, 2.0**-14, 57344.0), torch.tensor([1.1, -57344, 61439, 61440, -1e9])
    assert format.storage is None and format.round(x).equal(FORMATS["fp8_e5m2"].round(x))


# fp32 is left out: no fp32 number lies between two of its values.
@pytest.mark.parametrize("format", [f for name, f in FORMATS.items() if name != "fp32"], ids=lambda f: f.name)
@given(data=st.data())
@settings(max_examples=300)
def test_rounds_ties_to_even(format, data):
    """Midpoints of neighbouring values, subnormals included, and their fp32 neighbours."""
    exponent = data.draw(st.integers(int(math.log2(format.smallest_normal)), math.frexp(format.largest)[1] - 1))
    significand = data.draw(st.integers(0, 2**format.significand - 2))  # below 2^(s-1): subnormal scale
    midpoint = math.ldexp(significand + 0.5, exponent - format.significand + 1)
    tie = torch.tensor(midpoint)
    assert tie.item() == midpoint
    around = torch.stack(
        [tie, torch.nextafter(tie, tie.new_tensor(0.0)), torch.nextafter(tie, tie.new_tensor(math.inf))]
    )
    for x, rounded in zip(around.tolist(), format.round(around).tolist()):
        assert_same_float(rounded, round_exactly(x, format))
        assert_same_float(-rounded, round_exactly(-x, format))


@each_number_format
@given(data=st.data())
def test_unit_roundoff_bounds_the_relative_error(format, data):
    """|round(x) - x| <= u |x| for normal x in range: what the paper's epsilon_mach means."""
    size = data.draw(st.floats(format.smallest_normal, format.largest, width=32))
    for x in (size, -size, 1.0 + 2**-12):
        assert abs(format.round(torch.tensor(x)).item() - x) <= format.unit_roundoff * abs(x)


@each_number_format
@given(x=st.floats(width=32, allow_nan=False))
def test_rounding_twice_changes_nothing(format, x):
    once = format.round(torch.tensor(x))
    assert_same_float(format.round(once).item(), once.item())


@pytest.mark.parametrize("name", WITH_INFINITIES)
def test_overflows_to_infinity(name):
    format = get_format(name)
    beyond = torch.tensor([format.largest, -format.largest], dtype=torch.float64) * (1 + format.unit_roundoff)
    assert format.round(beyond.float()).tolist() == [math.inf, -math.inf]


def test_fp8_e4m3_saturates():
    beyond = torch.tensor([449.0, -1e30, math.inf, -math.inf, math.nan])
    assert get_format("fp8_e4m3").round(beyond).tolist()[:4] == [448.0, -448.0, 448.0, -448.0]
    assert get_format("fp8_e4m3").round(beyond)[4].isnan()


# --- Stochastic rounding -------------------------------------------------------------------------


def neighbours(x: float, format: Format) -> set[float]:
    """The values of ``format`` next to ``x`` below and above, in fp64 by the definition; ``x`` alone if it is one."""
    binade = max(math.frexp(x)[1] - 1, int(math.log2(format.smallest_normal)))
    spacing_exponent = binade - format.significand + 1
    scaled = math.ldexp(x, -spacing_exponent)
    around = {math.ldexp(count, spacing_exponent) for count in (math.floor(scaled), math.ceil(scaled))}
    beyond = format.largest if format.saturates else math.inf
    return {value if abs(value) <= format.largest else math.copysign(beyond, value) for value in around}


@each_number_format
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(x=65519.0)
@example(x=450.0)
@example(x=60000.0)
@example(x=-0.0)
@example(x=2.0**-25 + 2.0**-40)
@settings(max_examples=200)
def test_stochastic_rounding_gives_a_neighbour(format, x):
    rounded = format.round(torch.full((50,), x), seeded())
    assert rounded.dtype == format.compute_dtype
    if neighbours(x, format) == {x}:
        for value in rounded.tolist():
            assert_same_float(value, x)
    else:
        assert set(rounded.tolist()) <= neighbours(x, format)


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@given(data=st.data())
@settings(max_examples=20)
def test_stochastic_rounding_is_unbiased(name, data):
    """Over all values of the random bits, exactly the right share is rounded away from zero.

    A subnormal is first brought to the resolution of those bits, by at most half a unit.
    """
    format = get_format(name)
    resolution = 2 ** (24 - format.significand)
    exponent = data.draw(st.integers(-3, math.frexp(format.largest)[1] - 2 if name != "tf32" else 10))
    x = data.draw(st.floats(1, 2, exclude_max=True, width=32)) * 2.0**exponent
    if data.draw(st.booleans()):
        x = x / 2.0**exponent * format.smallest_normal / 4 if name not in ("bf16", "tf32") else x
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK_ELEMENTS", resolution)
        patch.setattr(formats, "random_bits", lambda count, *_: torch.arange(1 << count, dtype=torch.int32))
        rounded = format.round(torch.full((resolution,), x), seeded()).double()
    below, above = min(neighbours(x, format)), max(neighbours(x, format))
    share = (rounded > below).double().mean().item() if above > below else 0.0
    exact = (x - below) / (above - below) if above > below else 0.0
    assert share == exact or (abs(x) < format.smallest_normal and abs(share - exact) <= 0.5 / resolution)


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_stochastic_rounding_of_a_sample_keeps_its_mean(name):
    format = get_format(name)
    for x in (1 + 0.3 * format.spacing, -(1 + 0.3 * format.spacing), 0.3 * format.smallest_normal * format.spacing):
        x = torch.tensor(x).item()
        rounded = format.round(torch.full((2**16,), x), seeded()).double()
        below, above = min(neighbours(x, format)), max(neighbours(x, format))
        assert abs((rounded.mean().item() - x) / (above - below)) < 5 * 0.5 / 2**8  # five standard deviations


@pytest.mark.parametrize("count", [0, 8, 13, 16, 21])
def test_random_bits_are_fair_and_independent(count):
    drawn = random_bits(count, torch.empty(3, 2**14 + 1), seeded())
    assert drawn.shape == (3, 2**14 + 1) and drawn.dtype == torch.int32
    assert ((drawn >= 0) & (drawn < 2**count)).all()
    if count:
        bits = (drawn.flatten() >> torch.arange(count)[:, None] & 1).double()  # (count, N)
        assert ((bits.mean(-1) - 0.5).abs() < 5 * 0.5 / bits.shape[1] ** 0.5).all()
        neighbours = torch.cat([bits[:, 1:], bits[:, :-1]]).corrcoef() - torch.eye(2 * count)
        assert neighbours.abs().max() < 6 / bits.shape[1] ** 0.5


@each_number_format
def test_stochastic_rounding_is_drawn_from_the_generator(format):
    x = torch.randn(1000, generator=seeded(1))
    drawn = [format.round(x, seeded(seed)) for seed in (2, 2, 3)]
    assert torch.equal(drawn[0], drawn[1])
    assert format.name == "fp32" or not torch.equal(drawn[0], drawn[2])


@each_number_format
@pytest.mark.parametrize("copies", [2, 4])
def test_copies_are_rounded_with_the_same_bits(format, copies):
    x = torch.randn(3, 40, generator=seeded(1))
    expected = format.round(x, seeded(2)).repeat(copies, 1)
    assert torch.equal(format.round(x.repeat(copies, 1), seeded(2), copies=copies), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK_ELEMENTS", 8 * copies)
        assert torch.equal(format.round(x.repeat(copies, 1), seeded(2), copies=copies), expected)
    by_columns = x.repeat(copies, 1).mT.contiguous().mT
    assert torch.equal(format.round(by_columns, seeded(2), copies=copies), expected)


@each_number_format
def test_stochastic_rounding_passes_what_is_not_finite(format):
    odd_nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert format.round(torch.cat([odd_nan, torch.tensor([math.nan])]), seeded()).isnan().all()
    infinite = torch.tensor([math.inf, -math.inf])
    assert torch.equal(format.round(infinite, seeded()), format.round(infinite))


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match="must be one of fp32, tf32, .*, fp4_e2m1, .*, got 'int9'"):
        get_format("int9")
    with pytest.raises(ValueError, match=r"got 'float16' \(do you mean fp16\?\)"):
        get_format("float16")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_every_device_has_fp32(device):
    assert has_native_kernels(get_format("fp32"), device)


@pytest.mark.parametrize("name", ["tf32", "fp8_e4m3", "fp8_e5m2"])
def test_formats_that_are_only_stored_or_only_multiplied_are_emulated(name):
    assert not has_native_kernels(get_format(name), "cpu")


@pytest.mark.parametrize(
    ("capability", "native"),
    [((5, 2), {"fp32"}), ((5, 3), {"fp32", "fp16"}), ((7, 5), {"fp32", "fp16"}), ((8, 0), {"fp32", "fp16", "bf16"})],
)
def test_a_gpu_has_the_formats_of_its_capability(capability, native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {name for name, format in FORMATS.items() if has_native_kernels(format, "cuda")} == native


def test_a_cpu_has_fp32_and_what_it_multiplies(monkeypatch):
    monkeypatch.setattr(formats, "cpu_multiplies", lambda dtype: dtype == torch.bfloat16)
    assert {name for name, format in FORMATS.items() if has_native_kernels(format, "cpu")} == {"fp32", "bf16"}


# --- Scaled per tensor -----------------------------------------------------------------------------

every_scaled_format = pytest.mark.parametrize("format", POWERS.values(), ids=POWERS.keys())
tensors = st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=8).map(torch.tensor)


@every_scaled_format
@given(x=tensors)
def test_the_largest_entry_just_fits(format, x):
    scale, largest = 1 / format.scales(x).item(), x.abs().max().item()
    assert math.frexp(scale)[0] == 0.5  # a power of two
    assert scale * largest <= format.format.largest
    assert largest < 2.0**-80 or 2 * scale * largest > format.format.largest


@every_scaled_format
@given(x=tensors, exponent=st.integers(-20, 20))
def test_scaling_a_tensor_scales_its_roundings(format, x, exponent):
    """By powers of two, as in exact arithmetic: the size of a tensor does not matter, only its spread."""
    x = torch.where(x.abs() < 2.0**-40, 0.0, x)
    torch.testing.assert_close(format.round(x * 2.0**exponent), format.round(x) * 2.0**exponent, rtol=0, atol=0)


@every_scaled_format
@given(x=tensors)
def test_scaled_rounding_is_that_of_the_scaled_numbers(format, x):
    plain, scale = format.format, 1 / format.scales(x).item()
    rounded = format.round(x)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    for got, number in zip(rounded.tolist(), x.tolist()):
        assert got == round_exactly(number * scale, plain) / scale
    assert torch.equal(format.round(rounded), rounded)


@every_scaled_format
def test_masks_do_not_set_the_scale(format):
    lowest = torch.finfo(torch.bfloat16).min
    x = torch.tensor([1.0, -0.3, lowest, -torch.inf, torch.nan])
    rounded = format.round(x)
    assert torch.equal(rounded[:2], format.round(x[:2])) and rounded[2] == lowest
    assert rounded[3] == -torch.inf and rounded[4].isnan()
    assert (format.round(torch.zeros(3)) == 0).all()


@every_scaled_format
def test_scaled_stochastic_rounding_is_unbiased(format):
    x = torch.tensor([300.0, 1.0, 0.37, 1e-3])
    generator = torch.Generator().manual_seed(0)
    mean = torch.stack([format.round(x, generator).float() for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, x, rtol=4 * format.spacing / 4000**0.5, atol=1e-3)


@every_scaled_format
def test_nothing_is_rounded_to_nothing(format):
    assert format.round(torch.empty(0, 4)).shape == (0, 4)
