"""Formats and schemes bit for bit as in other libraries: gfloat, torchao, NVIDIA ModelOpt and compressed-tensors.

Where implementations differ, the test says how. `make test-peers` runs these, in an environment of their own.
"""

import hypothesis.strategies as st
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from gfloat import RoundMode, round_float
from gfloat.formats import (
    format_info_ocp_e2m1,
    format_info_ocp_e2m3,
    format_info_ocp_e3m2,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_int8,
)
from hypothesis import given, settings
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from fragility_numerics.formats import FORMATS, NARROW
from fragility_quantization.recipes import LINEAR
from fragility_quantization.schemes import Scheme

GFLOAT = {
    "fp8_e4m3": format_info_ocp_e4m3, "fp8_e5m2": format_info_ocp_e5m2, "fp6_e2m3": format_info_ocp_e2m3,
    "fp6_e3m2": format_info_ocp_e3m2, "fp4_e2m1": format_info_ocp_e2m1,
}  # fmt: skip


def rows(seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Numbers (64, 512) whose rows differ in size by powers of ten, with outliers and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 512, generator=generator)
    x *= 10 ** (spread * (torch.rand(64, 1, generator=generator) - 0.5))
    x[torch.rand(x.shape, generator=generator) < 0.01] *= 30
    x[3, :128] = 0
    return x


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bit for bit, but for the sign of zero."""
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", GFLOAT)
@settings(max_examples=400)
@given(x=st.floats(width=32, allow_nan=False))
def test_formats_are_those_of_gfloat(name, x):
    format = (FORMATS | NARROW)[name]
    saturates = format.saturates
    want = round_float(GFLOAT[name], x, RoundMode.TiesToEven, sat=saturates)
    same(format.round(torch.tensor([x])), torch.tensor([want]))


@settings(max_examples=400)
@given(x=st.floats(-300, 300, width=32))
def test_int8_is_gfloats_with_the_point_moved_by_six_bits(x):
    """OCP's int8 has the numbers -2 to 127/64. In MXINT8 the scale takes the factor 64."""
    want = 64 * round_float(format_info_ocp_int8, x / 64, RoundMode.TiesToEven, sat=True)
    same(NARROW["int8"].round(torch.tensor([x])), torch.tensor([want]))


MX = {"mxfp8": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}


@pytest.mark.parametrize("recipe", MX)
@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("ceil", "RCEIL")])
@pytest.mark.parametrize("seed", range(3))
def test_microscaling_is_torchaos(recipe, rule, mode, seed):
    """Both rules: OCP's FLOOR, which the recipes have, and RCEIL, which NVIDIA's devices have."""
    x = rows(seed)
    theirs = MXTensor.to_mx(x, MX[recipe], 32, scaling_mode=getattr(ScaleCalculationMode, mode))
    scheme = Scheme(LINEAR[recipe].weights.format, "group", 32, "e8m0", rule)
    same(scheme.round(x), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_is_torchaos(seed):
    x = rows(seed, spread=1.0)
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    same(LINEAR["nvfp4-w"].weights.round(x), theirs.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("recipe", "block"),
    [("w8a16-channel", 512), ("w8a16-g32", 32), ("w4a16-g128", 128), ("w4a16-channel", 512), ("w3a16-g64", 64)],
)
def test_symmetric_integers_are_torchaos(recipe, block):
    """With its narrow range: the largest magnitude becomes 2^(bits - 1) - 1."""
    x, scheme = rows(), LINEAR[recipe].weights
    low, high = -int(scheme.format.largest), int(scheme.format.largest)
    how = {"block_size": (1, block), "quant_min": low, "quant_max": high}
    scale, zero = choose_qparams_affine(
        x, MappingType.SYMMETRIC, target_dtype=torch.int8, eps=2.0**-120, scale_dtype=torch.float32, **how
    )
    numbers = quantize_affine(x, how["block_size"], scale, zero, torch.int8, low, high)
    theirs = dequantize_affine(
        numbers, how["block_size"], scale, zero, torch.int8, low, high, output_dtype=torch.float32
    )
    same(scheme.round(x), theirs)


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("w4a16-range-g128", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        ("w4a16-zero-g128", {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}),
        ("fp8-dynamic", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("fp8-tensor", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ],
)
def test_compressed_tensors(recipe, how):
    """Its zeros are rounded beside the lowest level, ours beside 0: the same integers, since levels are whole."""
    x, args = rows(), QuantizationArgs(**how)
    size = how.get("group_size", x.shape[-1] if args.strategy == "channel" else x.numel())
    groups = x.unflatten(-1, (-1, size)) if args.strategy != "tensor" else x.flatten()
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme = LINEAR[recipe].weights
    if scheme.scale == "bf16":
        scale = scale.bfloat16().float()
        zero = (-8 - groups.amin(-1).clamp_max(0) / scale).round()
    scale, zero = (v.reshape(1) if args.strategy == "tensor" else v for v in (scale, zero))
    same(scheme.round(x), fake_quantize(x, scale, zero, args))


@pytest.mark.parametrize(("bits", "recipe"), [(8, "w8a16-channel"), (4, "w4a16-channel"), (8, "fp8-dynamic")])
def test_modelopt_differs_in_the_last_bit_alone(bits, recipe):
    """ModelOpt multiplies by the largest number over m and divides by it again, where others divide and multiply."""
    x, scheme = rows(), LINEAR[recipe].weights
    number = (4, 3) if recipe.startswith("fp8") else bits
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=number, axis=0))
    quantizer.amax = x.abs().amax(1, keepdim=True)
    theirs, ours = quantizer(x), scheme.round(x)
    ties = (theirs - ours).abs() > 2e-7 * ours.abs()
    assert ties.float().mean() < 1e-4
    torch.testing.assert_close(ours[~ties], theirs[~ties], rtol=2**-22, atol=0)
