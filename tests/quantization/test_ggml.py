"""GGUF's types against the package gguf bit for bit, their edges, and the mixes of llama-quantize.

tests/engines/test_ggml_library.py compares with ggml itself where its library is installed.
"""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from packed import packed
from tiny import random_model
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from fragility_core.models.paths import embedding_paths, head_paths
from fragility_numerics.formats import FORMATS
from fragility_quantization.ggml import MIXES, TYPES, WEIGHTS, inputs_beside
from fragility_quantization.ggml_blocks import IQ4_VALUES
from fragility_quantization.gguf_mixes import (
    ends,
    is_70b,
    more_bits,
    of_down,
    of_output,
    of_values,
    tensor_name,
    tensor_names,
    types_by_path,
    types_of_mix,
)
from fragility_quantization.operands import linear_weights, owner, rounded_bits, weight_schemes, with_known_layers
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import GGUF, RECIPES, Operands, get_recipe

SIMPLE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")  # the gguf package quantizes these
every_type = pytest.mark.parametrize("name", WEIGHTS)
LLAMA = {"intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def kind_of(name: str) -> Type:
    return Type[name.upper()]


def rows(scale: float = 1.0, columns: int = 512) -> torch.Tensor:
    """Rows of several kinds: normal, heavy tails, all positive, all negative, one large entry, integers, zeros."""
    drawn = torch.Generator().manual_seed(0)
    normal = torch.randn(40, columns, generator=drawn)
    kinds = [normal, normal**3, normal.abs() + 0.5, -normal.abs() - 0.5, normal.round(), torch.zeros(2, columns)]
    spiked = normal.clone()
    spiked[:, 5] *= 100
    return torch.cat([*kinds, spiked, torch.full((1, columns), 0.25), torch.full((1, columns), -3.0)]) * scale


def llama(width: int = 256, tied: bool = False, **changed):
    return random_model(LlamaConfig(hidden_size=width, vocab_size=64, tie_word_embeddings=tied, **LLAMA | changed))


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_numbers_are_those_of_the_package_gguf(name, scale):
    x = rows(scale)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind_of(name)), kind_of(name))
    np.testing.assert_array_equal(TYPES[name].round(x).numpy(), theirs)


@every_type
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_what_is_stored_reads_as_the_package_gguf_reads_it(name, scale):
    x = rows(scale)
    stored = packed(TYPES[name], x)
    assert 8 * stored.shape[1] / TYPES[name].size == TYPES[name].bits
    theirs = gguf.quants.dequantize(stored.reshape(len(x), -1), kind_of(name))
    np.testing.assert_array_equal(TYPES[name].round(x).numpy(), theirs)


@every_type
def test_numbers_too_small_for_any_scale_read_as_zeros(name):
    """Their scale has no inverse in fp32: weights that decayed, of tokens that no text has."""
    x = rows()[:3]
    x[1] *= 1e-39
    read = TYPES[name].round(x)
    assert not read[1].any()
    assert read[0].equal(TYPES[name].round(x[:1])[0])


@every_type
def test_more_bits_make_smaller_errors_and_no_type_more_than_its_step(name):
    x = rows()[:40]  # normal
    kind, read = TYPES[name], TYPES[name].round(x)
    error = ((read - x).norm() / x.norm()).item()
    assert error < {2: 0.35, 3: 0.2, 4: 0.12, 5: 0.06, 6: 0.03, 8: 0.01}[kind.significant]
    if name in SIMPLE:  # under a scale that fits the range; others search for the least squares
        assert ((read - x).abs() <= 1.01 * kind.ulp(x)).all()


@pytest.mark.parametrize("name", [*TYPES])
def test_rounding_commutes_with_powers_of_two(name):
    """Groups of very different sizes too, as long as fp16 holds the scale of their block."""
    kind, x = TYPES[name], rows()[:40]
    if kind.size == 256:
        x = x * 2.0 ** -(torch.arange(512) // 16 % 8)
    assert kind.round(1024 * x).equal(1024 * kind.round(x))


@pytest.mark.parametrize("name", [*TYPES])
def test_edges(name):
    kind = TYPES[name]
    assert kind.round(torch.zeros(2, 256)).equal(torch.zeros(2, 256))
    assert kind.round(torch.zeros(0, 256)).shape == (0, 256) and kind.ulp(torch.zeros(0, 256)).shape == (0, 256)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    x[0, 3], x[0, 300], x[1, 7], x[2, 9] = torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).min
    read, plain = kind.round(x), kind.round(torch.where(x.abs() < 1e30, x, 0.0))
    strange = ~(x.abs() < 1e30)
    assert read[~strange].equal(plain[~strange]) and torch.equal(read[strange].nan_to_num(7), x[strange].nan_to_num(7))
    huge = torch.full((1, 256), 1e-3)
    huge[0, -1] = 1e5
    assert kind.round(huge)[0, -1] == pytest.approx(1e5, rel=0.05) and kind.round(huge)[0, :200].abs().max() < 1e4
    assert kind.round(x.bfloat16()).dtype == torch.bfloat16
    alone = torch.cat([kind.round(part) for part in torch.randn(6, 256).split(1)])
    assert alone.shape == (6, 256)
    many = torch.randn(1100, 512, generator=torch.Generator().manual_seed(2))  # more than one chunk
    assert torch.equal(kind.round(many)[-3:], kind.round(many[-3:]))


@pytest.mark.parametrize("name", [*TYPES])
def test_stochastic_rounding_has_the_mean_of_its_input(name):
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    drawn = torch.Generator().manual_seed(0)
    read = TYPES[name].round(x.expand(2000, -1).contiguous(), drawn)
    step = TYPES[name].ulp(x)
    inside = ((read.amin(0) < x) & (x < read.amax(0))).flatten()
    bound = 0.5 if name == "iq4_nl" else 0.06  # its distances are unequal
    assert ((read.mean(0) - x[0]).abs() / step[0])[inside].max() < bound and inside.float().mean() > 0.8
    alike = TYPES[name].round(x.expand(4, -1).contiguous(), drawn, copies=2)
    assert torch.equal(alike[:2], alike[2:])


def test_iq4_nl_takes_the_best_of_sixteen_scales():
    numbers, x = np.array(IQ4_VALUES), rows()[:40].view(-1, 32).double().numpy()
    largest = np.take_along_axis(x, abs(x).argmax(1, keepdims=True), 1)
    best, scale = np.full((len(x), 1), -1.0), np.zeros((len(x), 1))
    for top in [127, *range(-134, -119)]:
        q = numbers[abs((top * x / largest)[..., None] - numbers).argmin(-1)]
        qx, q2 = (x**2 * q * x).sum(1, keepdims=True), (x**2 * q**2).sum(1, keepdims=True)
        scale, best = np.where(qx**2 / q2 > best, qx / q2, scale), np.maximum(best, qx**2 / q2)
    nearest = numbers[abs((x / scale)[..., None] - numbers).argmin(-1)]
    same = TYPES["iq4_nl"].round(rows()[:40]).view(-1, 32).numpy() == nearest * scale.astype(np.float16)
    assert same.all(1).mean() > 0.99  # nearly equal errors may compare otherwise in fp32


def test_unequal_distances_are_those_to_the_next_number():
    found = TYPES["iq4_nl"].ulp(torch.tensor(2 * IQ4_VALUES).float())
    assert found.tolist() == 2 * [
        23,
        21,
        18,
        16,
        14,
        13,
        12,
        11,
        12,
        12,
        13,
        15,
        16,
        20,
        24,
        24,
    ]  # the last one's: before


def test_rows_that_do_not_fit_fall_back_as_in_llama_cpp():
    fallen = {name: TYPES[name].of_width(576).name for name in TYPES if TYPES[name].size == 256}
    assert fallen == {
        "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q8_k": "q8_0",
    }  # fmt: skip
    x = torch.randn(3, 576)
    assert TYPES["q4_k"].round(x).equal(TYPES["q5_0"].round(x)) and TYPES["q4_k"].ulp(x).equal(TYPES["q5_0"].ulp(x))
    assert TYPES["q6_k"].of_width(48) is FORMATS["fp16"]
    odd = torch.randn(3, 48)
    assert TYPES["q6_k"].round(odd).equal(odd.half().float())


def test_what_a_kernel_asks():
    assert inputs_beside(TYPES["q4_k"]) is TYPES["q8_k"] and inputs_beside(TYPES["iq4_nl"]) is TYPES["q8_0"]
    kind = TYPES["q4_k"]
    assert kind.unit_roundoff == 2**-3 and kind.spacing == 2**-2 and kind.scale_bits == 128 and not kind.elementwise
    assert kind.exact_in(torch.float32) and not kind.exact_in(torch.bfloat16)


def test_recipes_by_name():
    assert {*GGUF}.isdisjoint(RECIPES) and len(GGUF) == len(WEIGHTS) + len(MIXES)
    mixed = get_recipe("gguf-q4_k_m+kv-fp16")
    assert mixed.kernels is FORMATS["fp32"] and mixed.cache is FORMATS["fp16"] and mixed.gguf == "gguf-q4_k_m"
    assert get_recipe("ggml-q4_k@bf16").kernels is FORMATS["bf16"]
    with pytest.raises(ValueError, match=r"got 'gguf-q4_k_x' \(do you mean .*gguf-q4_k_[ms]"):
        get_recipe("gguf-q4_k_x")


def test_names_are_those_of_the_package_gguf():
    for arch, model in ((gguf.MODEL_ARCH.LLAMA, llama()), (gguf.MODEL_ARCH.GPT2, random_model(GPT2Config(n_layer=2)))):
        names = gguf.get_tensor_name_map(arch, 8)
        for path in (*map(owner, linear_weights(model)), *embedding_paths(model), *head_paths(model)):
            assert tensor_name(path) == f"{names.get_name(path)}.weight"
    tied = llama(tied=True)
    assert set(tensor_names(tied, ends(tied)).values()) == {"token_embd.weight"}
    with pytest.raises(ValueError, match=r"got the module 'model\.layers\.0\.mlp\.experts'"):
        types_by_path("q4_k_m", *moe())


def moe():
    model = random_model(MixtralConfig(hidden_size=64, vocab_size=64, num_local_experts=4, **LLAMA))
    return model, [*map(owner, linear_weights(model))]


def test_which_blocks_get_more_bits():
    assert [i for i in range(8) if more_bits(i, 8)] == [0, 3, 6, 7]
    assert sum(more_bits(i, 32) for i in range(32)) == 16


def test_a_mix_says_what_each_tensor_gets():
    """As llama-quantize prints for such a model; tests/engines/test_ggml_library.py asks it."""
    model = llama()
    layers = with_known_layers(model, get_recipe("gguf-q4_k_m")).layers
    more = {f"model.layers.{i}.{name}" for i in (0, 3, 6, 7) for name in ("self_attn.v_proj", "mlp.down_proj")}
    assert {path for path, o in layers.items() if o.weights.name == "q6_k"} == more | {"lm_head"}
    assert {o.weights.name for o in layers.values()} == {"q4_k", "q6_k"}
    assert layers["model.embed_tokens"] == Operands(TYPES["q4_k"])
    assert layers["lm_head"] == Operands(TYPES["q6_k"], TYPES["q8_k"])
    found = {mix: sorted({*types_by_path(mix, model, layers).values()}) for mix in MIXES}
    assert found["q2_k"] == ["q2_k", "q3_k", "q6_k"] and found["q3_k_m"] == ["q3_k", "q4_k", "q5_k", "q6_k"]
    assert found["q4_0"] == ["q4_0", "q6_k"] and found["q8_0"] == ["q8_0"] and found["q6_k"] == ["q6_k"]
    tied = with_known_layers(llama(tied=True), get_recipe("gguf-q4_k_s"))
    assert tied.layers["model.embed_tokens"].weights is TYPES["q6_k"]


@pytest.mark.parametrize(
    ("mix", "i", "shared", "layers", "experts", "expected"),
    [
        ("q2_k", 0, 4, 32, 0, "q4_k"), ("q2_k", 0, 3, 32, 0, "q3_k"), ("q2_k", 0, 8, 80, 0, "q5_k"),
        ("q3_k_s", 0, 8, 32, 0, "q3_k"), ("q3_k_s", 0, 8, 80, 0, "q5_k"), ("q3_k_s", 0, 1, 80, 0, "q3_k"),
        ("q3_k_m", 1, 1, 32, 0, "q5_k"), ("q3_k_m", 2, 1, 32, 0, "q4_k"), ("q3_k_l", 31, 1, 32, 0, "q5_k"),
        ("iq4_nl", 0, 4, 32, 0, "q5_k"), ("iq4_nl", 0, 3, 32, 0, "iq4_nl"),
        ("q4_k_s", 3, 1, 32, 0, "q5_k"), ("q4_k_s", 4, 1, 32, 0, "q4_k"), ("q4_k_s", 4, 8, 80, 0, "q5_k"),
        ("q4_k_m", 3, 1, 32, 0, "q6_k"), ("q4_k_m", 4, 1, 32, 0, "q4_k"), ("q4_k_m", 3, 8, 80, 0, "q6_k"),
        ("q5_k_m", 6, 1, 32, 0, "q6_k"), ("q5_k_m", 7, 1, 32, 0, "q5_k"), ("q6_k", 0, 8, 80, 0, "q6_k"),
        ("q4_k_m", 4, 4, 32, 8, "q8_0"), ("q4_k_m", 4, 4, 32, 16, "q4_k"),
    ],
)  # fmt: skip
def test_types_of_values_in_each_mix(mix, i, shared, layers, experts, expected):
    known = shared, layers == 80 and is_70b("llama", shared), experts
    assert of_values(mix, MIXES[mix], i, 32, known) == expected


def test_values_of_80_blocks_follow_what_llama_cpp_calls_70b():
    """Any Qwen2 of 80 blocks, as Qwen1.5 72B without shared keys; of other families Llama and Mistral alone."""
    found = {
        (kind, shared) for kind in ("llama", "mistral", "qwen2", "qwen3") for shared in (1, 8) if is_70b(kind, shared)
    }
    assert found == {("llama", 8), ("mistral", 8), ("qwen2", 1), ("qwen2", 8)}
    names = [f"blk.{i}.attn_v.weight" for i in range(80)]
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 80}
    made = {
        kind.model_type: types_of_mix("q3_k_s", SimpleNamespace(config=kind(**sizes)), names).values()
        for kind in (LlamaConfig, Qwen2Config)
    }
    assert {name: {*found} for name, found in made.items()} == {"llama": {"q3_k"}, "qwen2": {"q5_k"}}


@pytest.mark.parametrize(
    ("mix", "i", "expected"),
    [
        ("q2_k", 31, "q3_k"), ("q3_k_s", 0, "q3_k"), ("q3_k_m", 1, "q5_k"), ("q3_k_m", 2, "q4_k"),
        ("q3_k_l", 31, "q5_k"), ("iq4_nl", 3, "q5_k"), ("iq4_nl", 4, "iq4_nl"), ("q4_k_s", 3, "q5_k"),
        ("q4_k_s", 4, "q4_k"), ("q4_k_m", 31, "q6_k"), ("q4_k_m", 4, "q4_k"), ("q5_k_m", 6, "q6_k"),
        ("q5_k_m", 5, "q5_k"), ("q5_k_s", 0, "q5_k"),
    ],
)  # fmt: skip
def test_types_behind_the_activation_in_each_mix(mix, i, expected):
    assert of_down(mix, MIXES[mix], i, 32) == expected


def test_types_behind_attention_in_each_mix():
    found = {experts: {mix: of_output(mix, base, experts) for mix, base in MIXES.items()} for experts in (0, 8)}
    assert found[0] == MIXES | {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}
    more = ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m")
    assert found[8] == MIXES | dict.fromkeys(more, "q5_k")


def test_a_lowered_model_stores_what_the_mix_says():
    model = llama(width=192, tied=True)
    low = lower(model, "gguf-q4_k_m")
    schemes = weight_schemes(low.model, low.recipe)
    weights = linear_weights(low.model) | {"lm_head.weight": low.model.lm_head.weight}
    for path, weight in weights.items():
        assert weight.equal(schemes[id(weight)].round(model.get_parameter(path)))
    table = low.model.model.embed_tokens.weight
    assert table.equal(TYPES["q8_0"].round(model.model.embed_tokens.weight)) and table is low.model.lm_head.weight
    assert rounded_bits(low.model, "lm_head.weight", TYPES["q6_k"]) == 8.5
    with torch.no_grad(), low.running():
        assert low.model(torch.arange(8)[None]).logits.isfinite().all()
    gpt2 = random_model(GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=101))
    pure = lower(gpt2, "ggml-q4_k")
    assert pure.model.transformer.wpe.weight.equal(gpt2.transformer.wpe.weight)
    weight = gpt2.transformer.h[0].mlp.c_fc.weight
    assert pure.model.transformer.h[0].mlp.c_fc.weight.equal(TYPES["q5_0"].round(weight.mT).mT)
