"""Linear layers that read fp8 in a model that is otherwise in bf16."""

from dataclasses import replace

import pytest
import torch
from drawn import normal
from families import EXPERTS
from tiny import low_hidden, random_model
from torch import nn
from torch.nn import functional
from transformers import (
    GPT2LMHeadModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from fragility_adjoint.mixed_precision import Plan, apply
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.monitor import Monitor
from fragility_core.theory import mismatch
from fragility_numerics.formats import get_format
from fragility_quantization.operands import RoundedOperands, linear_weights
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import POWERS, Recipe, both, get_recipe

EXECUTIONS = ["native", "emulated"]


class Two(nn.Module):
    """Two linear layers in blocks, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])
        self.head = nn.Linear(16, 50, bias=False)
        self.eval().requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.no_grad()
def low_output(low, tokens):
    with low.running():
        return low.model(tokens)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["fp8_e4m3_linear", "fp8_e5m2_linear"])
def test_products_by_hand(name, execution):
    """Both factors are in fp8, the sum with the bias is rounded to bf16 once; embedding and head are in bf16."""
    model, tokens, format = Two(), torch.arange(50)[None], get_format("bf16")
    operands = POWERS[name.replace("linear", "scaled")]
    assert get_recipe(name) == Recipe(name, format, both(operands))
    x = format.round(model.embedding.weight)[tokens]
    for layer in model.layers:
        weight, bias = operands.round(layer.weight), format.round(layer.bias)
        x = functional.linear(operands.round(x).float(), weight.float(), bias.float()).bfloat16()
    want = functional.linear(x.float(), format.round(model.head.weight).float()).bfloat16()
    got = low_output(lower(model, name, execution), tokens)
    assert got.dtype == torch.bfloat16
    assert (got != want).float().mean() < 2e-3  # sums in another order may be rounded to the other neighbour
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: functional.linear(x, w[1]),
        lambda x, w: x @ w[1].T,
        lambda x, w: torch.addmm(x.new_ones(8), x, w[1].mT),
        lambda x, w: functional.linear(input=x, weight=w[2]),
        lambda x, w: torch.einsum("ti,oi->to", x, w[1]),
        lambda x, w: torch.einsum("ti,oi->to", [x, w[1]]),
        lambda x, w: torch.bmm(x.expand(3, -1, -1), w.mT),
    ],
    ids=["linear", "matmul", "addmm", "by name", "einsum", "einsum of a list", "bmm"],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_whatever_multiplies_by_experts_reads_rounded_operands(product, context):
    block = nn.Module()
    block.weights = nn.Parameter(normal(3, 8, 8).bfloat16())
    model, format, x = nn.Sequential(block), POWERS["fp8_e4m3_scaled"], normal(5, 8, seed=1).bfloat16()
    with context(), RoundedOperands(model, get_recipe("fp8_e4m3_linear"), torch.no_grad):
        got = product(x, block.weights)
        of_values = product(x, normal(3, 8, 8).bfloat16())
    assert torch.equal(got, product(format.round(x), block.weights))
    assert torch.equal(of_values, product(x, normal(3, 8, 8).bfloat16()))  # not a weight


def test_linear_weights_are_those_of_blocks(tiny_gpt2: GPT2LMHeadModel):
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert set(linear_weights(tiny_gpt2)) == {f"transformer.h.{i}.{layer}.weight" for i in range(3) for layer in layers}
    convolution = nn.Sequential(nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.Linear(4, 4)))
    assert set(linear_weights(convolution)) == {"0.1.weight"}


@pytest.mark.parametrize("config", EXPERTS, ids=lambda config: config.model_type)
def test_experts_are_linear_and_routers_are_not(config):
    model = random_model(config)
    found = linear_weights(model)
    assert {path.split(".")[-1] for path in found} == {"weight", "gate_up_proj", "down_proj"}
    assert not any(path.endswith("mlp.gate.weight") for path in found)
    rounded = dict(lower(model, "fp8_e4m3_linear").model.named_parameters())
    for path, parameter in model.named_parameters():
        format = POWERS["fp8_e4m3_scaled"] if path in found else get_format("bf16")
        assert torch.equal(rounded[path], format.round(parameter).bfloat16()), path
    places = Adjoint(lower(model, "fp8_e4m3_linear"))(torch.arange(20)[None]).contributions
    assert (places.name == "operand").sum() == len(found)  # each weight is in one product, which reads rounded values
    assert not places[places.name == "operand"].site.isin(["router", "head"]).any()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_kept_layer_reads_and_multiplies_in_fp32(execution):
    model, tokens = Two(), torch.arange(50)[None]
    low = apply(model, Plan("fp8_e4m3_linear", modules=("layers.0",)), execution, tokens)
    seen = []
    low.model.layers[0].register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    low_output(low, tokens)
    ((x, y),) = seen
    assert torch.equal(x, get_format("bf16").round(model.embedding.weight)[tokens].float())
    torch.testing.assert_close(
        y.float(), functional.linear(x, model.layers[0].weight, model.layers[0].bias).bfloat16().float()
    )


def test_emulated_mismatch_is_the_native_one(tiny_gpt2, tiny_tokens):
    reference = final_hidden(tiny_gpt2, tiny_tokens)
    native, emulated = (
        mismatch(low_hidden(lower(tiny_gpt2, "fp8_e4m3_linear", execution), tiny_tokens), reference).mean()
        for execution in EXECUTIONS
    )
    assert emulated == pytest.approx(native.item(), rel=0.05)


def test_vectors_of_three_dimensions_are_no_experts():
    """RWKV mixes tokens by (1, 1, d), which no product reads."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 32, "vocab_size": 50}
    found = linear_weights(RwkvForCausalLM(RwkvConfig(**sizes)))
    assert found and all(x.ndim == 2 for x in found.values())


@torch.enable_grad()
def test_a_state_of_an_earlier_pass_with_gradients_is_copied_without_them():
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
            head_dim=16, num_key_value_heads=1, attention_window_size=8, lru_width=32, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    tokens = torch.arange(12)[None]
    before = low_hidden(lower(model, "bf16", "emulated"), tokens)
    model(tokens)
    assert torch.equal(low_hidden(lower(model, "bf16", "emulated"), tokens), before)


def test_operands_are_rounded_stochastically_with_the_rest():
    low, tokens = lower(Two(), "fp8_e4m3_linear"), torch.arange(50)[None]
    first, again, other = (low_output(low.stochastic(seed), tokens) for seed in (0, 0, 1))
    assert torch.equal(first, again) and (first != other).float().mean() > 0.5
    mean = torch.stack([low_output(low.stochastic(seed), tokens).float() for seed in range(200)]).mean(0)
    exact = low_output(lower(Two(), "fp32"), tokens)
    weights = low_output(
        lower(Two(), "fp8_e4m3_linear", "weights"), tokens
    )  # weights are rounded the same way every time
    assert mismatch(mean, weights) < 0.2 * mismatch(low_output(low, tokens).float(), exact)


@pytest.mark.parametrize("name", ["fp8_e4m3_linear", "w8a8-int8", "w8a8-int8@fp32"])
def test_weights_alone(name):
    model, tokens = Two(), torch.arange(50)[None]
    low = lower(model, name, "weights")
    x = get_recipe(name).kernels.round(model.embedding.weight).float()[tokens]
    for layer in low.model.layers:
        x = layer(x)
    assert torch.equal(low_output(low, tokens), low.model.head(x)) and x.dtype == torch.float32


def test_weights_alone_are_those_that_kernels_read():
    alone, emulated = (lower(Two(), "w4a16-g32", execution).model.state_dict() for execution in ("weights", "emulated"))
    assert all(x.dtype == torch.float32 and x.equal(emulated[name].float()) for name, x in alone.items())


@pytest.mark.parametrize(
    "part",
    [
        *({name: both(POWERS["fp8_e4m3_scaled"])} for name in ("linear", "embedding", "head")),
        {"layers": {"layers.0": both(POWERS["fp8_e4m3_scaled"])}},
        {"cache": get_format("fp8_e4m3")},
    ],
)
def test_a_recipe_with_other_numbers_anywhere_is_not_plain(part):
    recipe = Recipe("some", get_format("fp32"))
    assert recipe.plain and not recipe.rounds
    recipe = replace(recipe, **part)
    assert recipe.rounds and not recipe.plain


def test_the_score_has_one_unit_roundoff(tiny_gpt2):
    with pytest.raises(ValueError, match="one unit roundoff for all of a model, got fp8_e4m3_linear, .*Adjoint"):
        Monitor(lower(tiny_gpt2, "fp8_e4m3_linear"))
