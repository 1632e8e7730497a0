"""Schemes against numbers in exact arithmetic, and recipes by name; tests/peers has the comparison with libraries."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from families import EXPERTS, TOKENS
from hypothesis import given
from hypothesis.extra.numpy import arrays
from tiny import random_model

from fragility_adjoint.mixed_precision import Plan, apply
from fragility_numerics.formats import FORMATS, NARROW
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import LINEAR, RECIPES, Operands, get_recipe
from fragility_quantization.schemes import Scheme
from fragility_quantization.static_scales import calibrated

STORED = {s.name: s for r in LINEAR.values() for s in (r.weights, r.inputs) if s is not None and not s.static}
every_scheme = pytest.mark.parametrize("scheme", STORED.values(), ids=STORED.keys())
matrices = arrays("float32", (3, 70), elements=st.floats(-1e6, 1e6, width=32)).map(torch.from_numpy)


def numbers(format):
    """All numbers of a narrow ``format``, by its bits."""
    if format.lowest is not None:
        return [Fraction(n) for n in range(int(format.lowest), int(format.largest) + 1)]
    found, exponent = {Fraction(0)}, Fraction(format.smallest_normal)
    steps = 2 ** (format.significand - 1)
    found |= {exponent * i / steps for i in range(steps)}
    while exponent <= format.largest:
        found |= {exponent * (1 + Fraction(i, steps)) for i in range(steps)}
        exponent *= 2
    return sorted({sign * x for x in found if x <= format.largest for sign in (1, -1)})


@pytest.mark.parametrize("format", NARROW.values(), ids=NARROW.keys())
@given(x=st.floats(-300, 300, width=32))
def test_narrow_formats_round_to_the_nearest_number(format, x):
    every = numbers(format)
    got = Fraction(format.round(torch.tensor([x])).item())
    distances = {n: abs(n - Fraction(x)) for n in every}
    assert got in distances and distances[got] == min(distances.values())
    if format.lowest is not None:
        assert len(every) == 2**format.bits
        return
    significand = math.frexp(format.largest)[0] * 2**format.significand
    above = 2 * (2**format.significand - 1 - significand)  # codes that are no numbers: NaN of either sign
    assert len(every) == 2**format.bits - 1 - above  # one zero less


@every_scheme
@given(x=matrices)
def test_errors_are_at_most_half_a_step(scheme, x):
    """Where no number saturates, and those that do become the last one: three rules cut off. Asymmetric integers also
    round their zero.
    """
    read, step = scheme.round(x), scheme.ulp(x)
    margin = 1.01 if scheme.scale == "e8m0" else 1.2  # numbers at a power of two, scales that were rounded
    close = (read - x).abs() <= margin * step * (1 if scheme.symmetric and scheme.scale != "e4m3" else 2) + 1e-30
    if scheme.rule not in ("floor", "mse", "range"):
        assert close.all()
        return
    groups = scheme._grouped(x)
    scale = scheme._ungrouped(scheme._scale(groups).expand_as(groups), x.shape)
    lowest = scheme.format.lowest if scheme.rule == "range" else -scheme.format.largest
    last = torch.where(x > 0, scheme.format.largest, lowest) * scale
    beyond = x.abs() > last.abs()
    assert close[~beyond].all() and read[beyond].equal(last[beyond])


@every_scheme
@given(x=matrices, exponent=st.integers(-10, 10))
def test_rounding_commutes_with_powers_of_two(scheme, x, exponent):
    x = torch.where(x.abs() < 1e-3, 0.0, x)
    x[:, 0] = 1 + x[:, 0].abs()  # a tensor or row of zeros has a scale that stays
    torch.testing.assert_close(scheme.round(x * 2.0**exponent), scheme.round(x) * 2.0**exponent, rtol=0, atol=0)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
def test_entries_share_scales_as_stated(granularity):
    size = {"group": 32, "block": 16}.get(granularity, 0)
    scheme = Scheme(NARROW["int8"], granularity, size)
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0))
    groups = {
        "tensor": [x], "row": list(x), "group": [part for row in x for part in row.split(32)],
        "block": [tile for band in x.split(16) for tile in band.split(16, 1)],
    }[granularity]  # fmt: skip
    want = torch.stack([part.abs().amax() / 127 for part in groups])
    assert torch.equal(scheme.scales(x), want)
    rounded = scheme.round(x)
    assert torch.equal(rounded[0, :16], (x[0, :16] / want[0]).round() * want[0])
    assert torch.equal(rounded[-1, -6:], (x[-1, -6:] / want[-1]).round() * want[-1])


def of_four(format: str, **how) -> Scheme:
    """A scheme of groups of four."""
    return Scheme((FORMATS | NARROW)[format], "group", 4, **how)


@pytest.mark.parametrize(
    ("scheme", "x", "read"),
    [
        (of_four("int4", symmetric=False), [-3.4, 0.2, 6.6, 11.6], [-3, 0, 7, 12]),  # scale 15 / 15, zero 3
        (of_four("int4", symmetric=False), [-3.5, 0.0, 6.6, 11.5], [-4, 0, 7, 11]),  # zero 4: level 16 is cut off
        (of_four("int4", symmetric=False), [3.0, 7.4, 15.0, 3.0], [3, 7, 15, 3]),  # 0 is in the range all the same
        (of_four("int4", symmetric=False), [-3.0, -7.4, -15.0, -3.0], [-3, -7, -15, -3]),
        (of_four("int4", symmetric=False, scale="bf16"), [0.0, 6.0, 1.0], [0, 6.005859375, 0.80078125]),
        (of_four("int4", rule="signed"), [8.0, -7.4, 1.2, 0.4, -4.0, 3.9, 0.1, 0.3], [8, -7, 1, 0, -4, 3.5, 0, 0.5]),
        (of_four("int4", rule="range"), [7.5, -7.5, 1.2, 0.4], [7, -8, 1, 0]),
        (of_four("int4", scale="bf16"), [0.7 * 2, 1.0, 0.0, -1.4], [1.4013671875, 1.0009765625, 0, -1.4013671875]),
        (of_four("fp4_e2m1", scale="e8m0", rule="floor"), [7.0, 5.2, 0.3, -3.4], [6, 6, 0.5, -3]),
        (of_four("fp4_e2m1", scale="e8m0", rule="ceil"), [7.0, 5.2, 0.3, -3.6], [8, 6, 0, -4]),
        (of_four("fp4_e2m1", scale="e8m0", rule="ceil"), [6.0, 5.2, 0.3, -3.4], [6, 6, 0.5, -3]),
        # Groups under scales 448, 2.1 and 2^-10 / 6, the last two of which e4m3 has as 2 and, its smallest, 2^-9.
        (
            of_four("fp4_e2m1", scale="e4m3"), [2688.0, 0, 500, 0, 12.6, 2, 0, -12.6, 2.0**-10, 0, 0, -(2.0**-10)],
            [2688, 0, 448, 0, 12, 2, 0, -12, 2.0**-10, 0, 0, -(2.0**-10)],
        ),
    ],
)  # fmt: skip
def test_numbers_by_hand(scheme, x, read):
    assert scheme.round(torch.tensor(x)).tolist() == read


@pytest.mark.parametrize(
    ("scheme", "x", "distances"),
    [
        (Scheme(NARROW["int8"]), [127.0, 1.0, 0.0, -3.0], [1, 1, 1, 1]),
        (of_four("int4", symmetric=False), [-3.4, 0.2, 6.6, 11.6], [1, 1, 1, 1]),
        (of_four("int4", rule="signed"), [8.0, -7.0, 1.0, 0.0, -4.0, 3.0, 0.0, 0.0], [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]),
        (of_four("fp4_e2m1"), [6.0, 3.0, 1.5, 0.2, 12.0, 3.0, 1.5, 0.2], [2, 1, 0.5, 0.5, 4, 1, 1, 1]),
    ],
)
def test_distances_of_numbers_by_hand(scheme, x, distances):
    assert scheme.ulp(torch.tensor(x)).tolist() == distances


@every_scheme
def test_a_dtype_is_said_to_hold_the_numbers_exactly_if_it_does(scheme):
    read = scheme.round(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))
    for dtype in (torch.float32, torch.bfloat16):
        assert scheme.exact_in(dtype) == read.to(dtype).float().equal(read), dtype


@pytest.mark.parametrize("symmetric", [True, False])
def test_infinities_and_masks_leave_the_numbers_of_their_group(symmetric):
    """Models mask by the lowest number of a dtype."""
    scheme, numbers = Scheme(NARROW["int8"], symmetric=symmetric), torch.tensor([1.0, 2.0, -3.0, 0.5])
    alone = scheme.round(numbers)
    for other in (torch.inf, -torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min):
        read = scheme.round(torch.cat([numbers, torch.tensor([other])]))
        assert torch.equal(read[:4], alone) and read[4] == other
    assert scheme.round(torch.zeros(3, 0)).shape == (3, 0)


def test_the_rule_mse_has_the_least_squared_error():
    """Of the largest entry times 61 factors from 1 to 0.4, tried one by one in fp64."""
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    groups = x.double().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 7 * torch.linspace(1, 0.4, 61).double()[:, None, None, None]
    tried = ((groups / scales).round().clamp(-7, 7) * scales - groups).square().sum(-1)
    read = Scheme(NARROW["int4"], "group", 128, rule="mse").round(x).double().unflatten(-1, (-1, 128))
    torch.testing.assert_close((read - groups).square().sum(-1), tried.amin(0), rtol=1e-4, atol=0)
    assert (tried.argmin(0) > 0).any() and tried.amin(0).sum() < 0.9 * tried[0].sum()


def test_bits_count_the_scales():
    bits = {"w4a16-g128": 4.125, "w4a16-g32": 4.5, "mxfp4": 4.25, "nvfp4-w": 4.5, "w8a8-int8": 8}
    assert {name: RECIPES[name].linear.weights.bits for name in bits} == bits
    assert RECIPES["fp8-block"].linear.weights.bits == 8 + 32 / 128**2
    assert RECIPES["w4a16-zero-g128"].linear.weights.bits == 4 + (16 + 4) / 128


@pytest.mark.parametrize("name", ["w3a16-g64", "w4a16-g32", "w4a16-g128", "w8a16-g128"])
def test_a_scale_in_16_bits_hardly_changes_the_error(name):
    """Numbers are rounded under the stored scale, so that its own rounding only moves the steps."""
    scheme = RECIPES[name].linear.weights
    x = torch.randn(500, 512, generator=torch.Generator().manual_seed(0))
    exact, stored = ((s.round(x) - x).square().sum().item() for s in (scheme, replace(scheme, scale="bf16")))
    assert exact != stored and abs(stored / exact - 1) < 0.03


@pytest.mark.parametrize(
    ("given_scheme", "message"),
    [
        ({"granularity": "column"}, "granularity must be one of tensor, row, group, block, got 'column'"),
        ({"granularity": "group"}, "size must be above 0 for a group or block, else 0: got group, 0"),
        ({"scale": "e8m0"}, 'the rule of e8m0 scales is "floor" or "ceil", got \'largest\''),
        ({"granularity": "row", "size": 4}, "size must be above 0 for a group or block, else 0: got row, 4"),
        ({"rule": "floor"}, 'the rule of e8m0 scales is "floor" or "ceil", got \'floor\' for fp32'),
        ({"rule": "ceil", "scale": "e4m3"}, 'the rule of e8m0 scales is "floor" or "ceil", got \'ceil\' for e4m3'),
        ({"symmetric": False, "format": FORMATS["fp8_e4m3"]}, "only integers .* may be asymmetric"),
        ({"symmetric": False, "scale": "e4m3"}, "only integers .* may be asymmetric"),
        ({"symmetric": False, "scale": "e8m0", "rule": "ceil"}, "only integers .* may be asymmetric"),
        ({"symmetric": False, "rule": "mse"}, "only integers .* may be asymmetric"),
        ({"rule": "range", "format": FORMATS["fp8_e4m3"]}, 'only integers have the rule "range", got fp8_e4m3'),
        ({"rule": "signed", "format": FORMATS["fp8_e4m3"]}, 'only integers have the rule "signed", got fp8_e4m3'),
        ({"static": True, "granularity": "row"}, "for the whole tensor by its largest input, got one for a row"),
        ({"static": True, "granularity": "tensor", "symmetric": False}, "got one for a tensor, symmetric=False"),
        ({"static": True, "granularity": "tensor", "rule": "mse"}, "got one for a tensor, symmetric=True, rule='mse'"),
    ],
)
def test_schemes_that_make_no_sense_are_refused(given_scheme, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**{"format": NARROW["int4"]} | given_scheme)


def test_static_scales_are_those_of_the_largest_inputs_in_fp32(tiny_gpt2, tiny_tokens):
    recipe = get_recipe("fp8-static")
    with pytest.raises(ValueError, match=r"fp8_e4m3_tensor.* needs its layer.s largest input, got none: calibrate"):
        recipe.linear.inputs.round(torch.ones(3))
    with pytest.raises(ValueError, match="static scales must be measured .*, got fp8-static: calibrate it"):
        lower(tiny_gpt2, recipe)
    known = calibrated(tiny_gpt2, recipe, tiny_tokens)
    seen, layer = [], tiny_gpt2.transformer.h[1].mlp.c_proj
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].abs().max().item()))
    tiny_gpt2(tiny_tokens)
    hook.remove()
    inputs = known.operands("transformer.h.1.mlp.c_proj").inputs
    assert inputs.largest_input == pytest.approx(max(seen)) and calibrated(tiny_gpt2, known, tiny_tokens) is known
    x = torch.linspace(-2 * max(seen), 2 * max(seen), 999)
    scale = torch.tensor(inputs.largest_input) / 448
    want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(inputs.round(x), want)
    low = apply(tiny_gpt2, Plan("fp8-static", modules=("transformer.h.0",)), tokens=tiny_tokens)
    assert not low.recipe.operands("transformer.h.0.mlp.c_fc") and low.recipe.operands("transformer.h.1.mlp.c_fc")


def test_experts_in_one_module_have_no_static_scales():
    model = random_model(EXPERTS[0])
    with pytest.raises(ValueError, match=r"need linear layers that are modules, got the experts model\.layers\.0\.mlp"):
        calibrated(model, get_recipe("fp8-static"), TOKENS[:1])


def test_recipes_by_name():
    assert get_recipe("fp8-dynamic+kv-fp8").cache == FORMATS["fp8_e4m3"]
    beside = get_recipe("fp8-dynamic@fp16")
    assert (beside.name, beside.kernels.name, beside.linear) == ("fp8-dynamic@fp16", "fp16", LINEAR["fp8-dynamic"])
    assert get_recipe(beside) is beside and get_recipe(FORMATS["bf16"]) == RECIPES["bf16"]
    for wrong in ("w4", "bf16+bf16", "fp8-dynamic@int8", "@bf16", ""):
        with pytest.raises(ValueError, match=re.escape(f"got {wrong!r}")):
            get_recipe(wrong)
    with pytest.raises(ValueError, match=r"do you mean fp8_e4m3 or fp8_\w+ or fp8_\w+\?\): take"):
        get_recipe("fp8")
    assert not Operands() and not RECIPES["fp32"].rounds and get_recipe("w4a16-g128@fp32").rounds


def test_names_say_bits_and_groups():
    """w4a16-g128: weights of 4 bits in groups of 128 beside inputs of 16 bits, which are those of the kernels."""
    said = {name: found for name in LINEAR if (found := re.match(r"w(\d+)a(\d+)(.*-g(\d+)$|-channel$|)", name))}
    assert len(said) > 10
    for name, (bits, inputs, how, size) in ((name, found.groups()) for name, found in said.items()):
        weights, read = LINEAR[name].weights, LINEAR[name].inputs
        assert (weights.format.bits, read.format.bits if read else 16) == (int(bits), int(inputs)), name
        if how:
            assert (weights.granularity, weights.size) == (("group", int(size)) if size else ("row", 0)), name


@every_scheme
def test_strange_tensors_pass(scheme):
    assert scheme.round(torch.empty(0, 4)).shape == (0, 4)
    assert (scheme.round(torch.zeros(2, 130)) == 0).all()
    x = torch.tensor([[1.0, -torch.inf, torch.finfo(torch.bfloat16).min, torch.nan]])
    rounded = scheme.round(x)
    assert rounded[0, 1] == -torch.inf and rounded[0, 2] == x[0, 2] and rounded[0, 3].isnan()


@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-zero-g128", "mxfp4-w", "nvfp4-w", "w8a16-channel", "fp8-w"])
@pytest.mark.parametrize("width", [48, 128, 176, 576])
def test_bits_count_the_scales_that_rounding_makes(name, width):
    scheme = get_recipe(name).linear.weights
    groups = scheme.scales(torch.randn(3, width)).numel() if scheme.granularity == "group" else 0
    zero = 0 if scheme.symmetric else scheme.format.bits
    stored = 3 * width * scheme.format.bits + groups * (scheme.scale_bits + zero)
    assert scheme.bits_of_width(width) == pytest.approx(stored / (3 * width))
