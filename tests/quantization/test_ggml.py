"""GGUF's types against the package gguf bit for bit, their edges, and the mixes of llama-quantize.

tests/engines/test_ggml_library.py compares with ggml itself where its library is installed.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from packed import packed
from tiny import random_model
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from fragility_core.models.paths import embedding_paths, head_paths
from fragility_numerics.formats import FORMATS
from fragility_quantization.ggml import MIXES, TYPES, WEIGHTS, inputs_beside
from fragility_quantization.gguf_mixes import ends, more_bits, tensor_name, tensor_names, types_by_path
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
def test_more_bits_make_smaller_errors_and_no_type_more_than_its_step(name):
    x = rows()[:40]  # normal
    kind, read = TYPES[name], TYPES[name].round(x)
    error = ((read - x).norm() / x.norm()).item()
    assert error < {2: 0.35, 3: 0.2, 4: 0.12, 5: 0.06, 6: 0.03, 8: 0.01}[kind.significant]
    if name in SIMPLE:  # under a scale that fits the range; others search for the least squares
        assert ((read - x).abs() <= 1.01 * kind.ulp(x)).all()


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
