"""Overflow: the kernel that leaves the range first is named, and so is a division by zero; plans that bring it back."""

from html import escape
from itertools import combinations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fragility_adjoint.mixed_precision import Contributions, apply
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.overflow import first_overflow, kind_of
from fragility_core.models.paths import block_paths, final_hidden
from fragility_lab import diagnosis
from fragility_lab.diagnosis import page, plans, remedy
from fragility_lab.diagnosis.needs import Forecast
from fragility_lab.diagnosis.request import Request
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.offloaded import load_offloaded
from fragility_numerics.nested import tensors
from fragility_quantization.quantized import lower

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
TOKENS = torch.arange(3, 51).view(3, 16)
TOKENS[1] = TOKENS[0].roll(1)
TOKENS[2, 5] = 60  # the token that overflows in some cases


def made(family, depth):
    """A small model of ``depth`` blocks with eager attention."""
    torch.manual_seed(0)
    config, kind, own = {
        "llama": (LlamaConfig, LlamaForCausalLM, GROUPED), "qwen2": (Qwen2Config, Qwen2ForCausalLM, GROUPED),
        "neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {}),
        "gpt2": (GPT2Config, GPT2LMHeadModel, {"bos_token_id": 0, "eos_token_id": 0}),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM, GROUPED | {"head_dim": 16, "attention_bias": True}),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GROUPED | {"head_dim": 16}),
        "mixtral": (MixtralConfig, MixtralForCausalLM, GROUPED | {"num_local_experts": 4}),
    }[family]  # fmt: skip
    sizes = config(**SIZES, **own, num_hidden_layers=depth, tie_word_embeddings=False, attn_implementation="eager")
    return kind(sizes).eval().requires_grad_(False)


def with_query_and_key_bias(family, sign=1.0):
    def change(model, block):
        if family == "gpt2":
            block.attn.c_attn.bias[:64] = 300.0
        elif family == "neox":
            block.attention.query_key_value.bias.view(2, 3, -1)[:, :2] = 300.0
        else:
            block.self_attn.q_proj.bias.fill_(300.0)
            block.self_attn.k_proj.bias.fill_(sign * 300.0)

    return change


def with_large_down_projection(model, block):
    """The first two channels are large, the one or the other, whatever the sign of the direction in the stream."""
    direction = 2 * torch.arange(32.0).cos()
    block.mlp.gate_proj.weight[:2] = block.mlp.up_proj.weight[:2] = torch.stack([direction, -direction])
    block.mlp.down_proj.weight[:, :2] = 6e4


def with_large_activations(model, block):
    direction = 200 * torch.arange(32.0).cos()
    block.mlp.gate_proj.weight[:2] = block.mlp.up_proj.weight[:2] = torch.stack([direction, -direction])
    block.mlp.down_proj.weight[:, :2] = 1e-6


def with_a_large_weight(model, block):
    """The norm before makes the product small again."""
    block.post_attention_layernorm.weight[0] = 1e-4
    block.mlp.up_proj.weight[0, 0] = 1e5


def with_residuals_that_add_up(model, block):
    """Token 60 alone has something in channel 0, to which attention in ``block`` adds what fits fp16, too."""
    model.model.embed_tokens.weight[:, 0] = 0.0
    model.model.embed_tokens.weight[60, 0] = 4e4
    for each in model.model.layers:
        each.self_attn.o_proj.weight[0] = each.mlp.down_proj.weight[0] = 0.0
    block.self_attn.v_proj.weight.zero_()
    block.self_attn.v_proj.weight[:, 0] = 1.0
    block.self_attn.o_proj.weight[0] = 3.5e4 / 32 / (32**0.5 / 6)  # the sixth position sees as many


class SquaredNorm(nn.Module):
    """x / rms(x), computed in the dtype of x: its square may overflow where x does not."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width), requires_grad=False), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


def with_squares(model, block):
    model.model.embed_tokens.weight[60, 0] = 1e3
    block.input_layernorm = SquaredNorm(32)


def with_large_embedding(model, block):
    model.model.embed_tokens.weight[60] = 1e5


def with_zeros(model, block):
    """The token 60 is zero, and epsilon rounds to zero."""
    model.model.embed_tokens.weight[60] = 0.0
    block.input_layernorm = SquaredNorm(32)
    block.input_layernorm.epsilon = 1e-9


def with_large_scaled_embedding(model, block):
    """Gemma 3 multiplies what the table holds by the root of the width."""
    model.model.embed_tokens.weight[60] = 2e4


def with_large_experts(model, block):
    for weight, size in zip(block.mlp.experts.parameters(), (300.0, 6e4), strict=True):
        weight.mul_(size)
    block.mlp.experts.down_proj.clamp_(-6e4, 6e4)


CASES = {  # family, the change, the words of the place, the kind, whether only the window with token 60 overflows
    "QK^T of Qwen2": ("qwen2", with_query_and_key_bias("qwen2"), "QK^T in {block}.self_attn", "overflow", False),
    "QK^T of GPT-NeoX": ("neox", with_query_and_key_bias("neox"), "QK^T in {block}.attention", "overflow", False),
    "QK^T of GPT-2": ("gpt2", with_query_and_key_bias("gpt2"), "QK^T in {block}.attn", "overflow", False),
    "QK^T below a softcap": (  # tanh of -inf is -1: the output is finite
        "gemma2", with_query_and_key_bias("gemma2", -1.0), "QK^T in {block}.self_attn", "overflow", False,
    ),
    "a scaled embedding": (
        "gemma3", with_large_scaled_embedding, "mul in model.embed_tokens", "overflow", True,
    ),
    "experts": ("mixtral", with_large_experts, "{block}.mlp.experts", "overflow", False),
    "a projection": ("llama", with_large_down_projection, "{block}.mlp.down_proj", "overflow", False),
    "an activation": ("llama", with_large_activations, "mul in {block}.mlp", "overflow", False),
    "a stored weight of a block": (
        "llama", with_a_large_weight, "the stored weights of {block}.mlp.up_proj", "stored", False,
    ),
    "residual addition": ("llama", with_residuals_that_add_up, "residual addition in {block}", "overflow", True),
    "variance": ("llama", with_squares, "variance of the norm {block}.input_layernorm", "overflow", True),
    "embedding": ("llama", with_large_embedding, "the stored weights of model.embed_tokens", "stored", True),
    "epsilon": (
        "llama", with_zeros, "division by zero (1/0) in the norm {block}.input_layernorm", "infinite", True,
    ),
}  # fmt: skip


def case(name, depth):
    """The model of a case, the words that are right, the kind, and the windows that overflow."""
    family, change, words, kind, some = CASES[name]
    model = made(family, depth)
    place = 0 if name == "epsilon" else depth // 2
    path = block_paths(model)[place]
    change(model, model.get_submodule(path))
    model.eval()
    return model, words.format(block=path), kind, [False, False, True] if some else [True, True, True]


@pytest.mark.parametrize("depth", [2, 40])
@pytest.mark.parametrize("name", CASES)
def test_the_first_kernel_that_leaves_the_range_is_named(name, depth):
    model, words, kind, overflowing = case(name, depth)
    low = lower(model, "fp16", "emulated")
    places = [first_overflow(low, lambda m, x=x: final_hidden(m, x)) for x in TOKENS.split(1)]
    assert [place is not None for place in places] == overflowing
    assert {(place.words, place.kind) for place in places if place} == {(words, kind)}
    if depth == 2:
        named = Adjoint(low, model, gradients="low")(TOKENS).windows
        assert named.overflow.tolist() == [words if each else "" for each in overflowing]
        assert named.predicted.notna().tolist() == [not each for each in overflowing]


@pytest.mark.parametrize("name", ["QK^T of Qwen2", "a projection", "an activation", "residual addition", "embedding"])
def test_a_streamed_model_has_the_same_place(name, tmp_path):
    model, words, _, overflowing = case(name, 2)
    model.save_pretrained(tmp_path)
    streamed = load_offloaded(str(tmp_path), "cpu")
    streamed.set_attn_implementation("eager")
    named = Adjoint(lower(streamed, "fp16", "emulated"), streamed, gradients="low")(TOKENS).windows
    assert named.overflow.tolist() == [words if each else "" for each in overflowing]


OTHERS = ["fp8-dynamic", "fp8-block", "mxfp8", "nvfp4-w4a4", "kv-fp8", "kv-int8", "w8a8-int8"]


@pytest.mark.parametrize("depth", [2, 40])
@pytest.mark.parametrize("recipe", OTHERS)
def test_recipes_that_store_other_numbers_beside_fp16_name_the_same_place(recipe, depth):
    """torch has no isfinite for fp8, and a cache rounds beside the kernels."""
    model, words, kind, overflowing = case("residual addition", depth)
    low = lower(model, f"{recipe}@fp16")
    place = first_overflow(low, lambda m: final_hidden(m, TOKENS[2:]))
    assert (place.words, place.kind) == (words, kind)
    if depth == 2:
        named = Adjoint(low, model)(TOKENS).windows
        assert named.overflow.tolist() == [words if each else "" for each in overflowing]


def test_what_stays_in_range_has_no_place():
    for family in ("llama", "qwen2", "neox"):
        low = lower(made(family, 2), "fp16", "emulated")
        assert first_overflow(low, lambda m: final_hidden(m, TOKENS)) is None


def of_zeros():
    """A diagnosis of a model of zeros."""
    model = made("llama", 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    request = Request("embedded", "embedded", "fp16", "1 site", windows=3, length=16)
    return diagnosis.diagnose(request, Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None))


def test_an_output_of_zeros_is_no_overflow():
    found = of_zeros()
    words = "not a number (0/0) in the error relative to an output of zeros"
    assert set(found.prediction.windows.overflow) == {words}
    html = " ".join(page.page(found).split())
    found.require_complete()
    assert f"3 of 3 windows are not finite</b>, first in <code>{words}</code>" in html
    assert "windows overflow" not in html and "brings" not in html


class Steps(nn.Module):
    """Runs a function."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(()), requires_grad=False), function
        self.eval()

    def forward(self, x):
        return self.function(self.scale * x.to(self.scale.dtype))


def masked_square(x):
    square = x * x
    return square.masked_fill(torch.isinf(square), 0.0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * x, "mul in the model"),
        (lambda x: -(x * x), "mul in the model"),
        (lambda x: -x * x, "mul in the model"),
        (lambda x: (x - x) / (x - x), "not a number (0/0) in div in the model"),
        (lambda x: 1 / (x - x), "division by zero (1/0) in reciprocal in the model"),
        (lambda x: x + torch.full_like(x, -65504.0), None),  # an additive mask
        (lambda x: x + torch.full_like(x, -torch.inf), None),
        (masked_square, None),  # scores that are hidden
        (lambda x: torch.softmax(x + torch.full_like(x, -torch.inf), -1), "not a number (0/0) in softmax in the model"),
        (lambda x: x.float() * x.float(), None),
        (lambda x: (x.float() * x.float()).to(x.dtype), "a cast in the model"),
        (lambda x: x.clone().mul_(x), "mul_ in the model"),
        (lambda x: torch.zeros_like(x).copy_(x.float() * 400), "copy_ in the model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("execution", ["emulated", "native"])
def test_what_counts_as_an_overflow(function, words, execution):
    low = lower(Steps(function), "fp16", execution)
    place = first_overflow(low, lambda model: model(torch.full((1, 4), -300.0)))
    assert (place and place.words) == words


def test_a_kernel_without_fp64_has_overflowed_and_another_error_is_raised():
    number, bad = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert kind_of(torch.ops.aten.bitwise_and.Tensor, (number, number), {}, bad) == "overflow"  # takes no doubles
    assert kind_of(torch.ops.aten._grouped_mm.default, (number, number), {}, bad) == "overflow"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        kind_of(torch.ops.aten.mm.default, (number, number), {}, bad)


# --- Remedies -----------------------------------------------------------------------------------------

MENDED = {  # the cheapest plan that mends the case, and whether a larger epsilon does
    "QK^T of Qwen2": ("attention scores", False),
    "QK^T of GPT-NeoX": ("attention scores", False),
    "QK^T of GPT-2": ("attention scores", False),
    "QK^T below a softcap": ("model.layers.1.self_attn", False),  # its scores are not those of other models
    "a scaled embedding": ("residual stream, model.embed_tokens", False),
    "experts": ("residual stream, model.layers.1", False),
    "a projection": ("residual stream, model.layers.1", False),
    "an activation": ("model.layers.1.mlp", False),
    "a stored weight of a block": ("model.layers.1.mlp.up_proj", False),
    "residual addition": ("residual stream", False),
    "variance": ("residual stream", False),
    "embedding": ("residual stream, model.embed_tokens", False),
    "epsilon": ("residual stream", True),
}  # fmt: skip


@torch.no_grad()
def finite_by_hand(low, tokens):
    """Whether all outputs of all modules are finite, with no part of what named the overflow."""
    seen = []
    hooks = [
        module.register_forward_hook(lambda m, args, output: seen.extend(tensors(output)))
        for module in low.model.modules()
    ]
    with low.running():
        low.model(tokens)
    for hook in hooks:
        hook.remove()
    return all(bool(x.isfinite().all()) for x in seen if x.is_floating_point())


@pytest.mark.parametrize("name", CASES)
def test_the_cheapest_plan_that_mends_every_window_is_found(name):
    model, words, _, overflowing = case(name, 2)
    low = lower(model, "fp16", "emulated")
    found = remedy.find(model, low, Adjoint(low, model, gradients="low")(TOKENS), TOKENS, range(3), "auto")
    assert [number in found.places for number in range(3)] == overflowing
    assert {place.words for place in found.places.values()} == {words}
    label, raised = MENDED[name]
    assert found.plan.label == label and (found.epsilon is not None) == raised
    assert [attempt.left is None for attempt in found.tried] == [False] * (len(found.tried) - 1) + [True]
    for number in found.places:
        assert finite_by_hand(apply(model, found.plan), TOKENS[number : number + 1])


@pytest.mark.parametrize("name", ["QK^T of Qwen2", "variance", "embedding", "epsilon"])
def test_the_page_says_what_mends_an_overflow(name):
    model, words, _, overflowing = case(name, 2)
    request = Request("embedded", "embedded", "fp16", "1 site", windows=3, length=16)
    found = diagnosis.diagnose(request, Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None))
    html = " ".join(page.page(found).split())
    found.require_complete()
    assert f"<b>{escape(words)}</b> ({sum(overflowing)} window" in html
    assert (
        f"<b>{found.remedy.plan.label}</b>" in html and " ".join(escape(plans.price(found.remedy.plan)).split()) in html
    )
    assert ("cannot help a variance that overflows" in html) == (name == "variance")
    assert ("rounds to zero. With an epsilon of" in html) == (name == "epsilon")


def test_no_remedy_is_looked_for_where_nothing_overflows():
    model = made("llama", 2)
    low = lower(model, "fp16", "emulated")
    found = remedy.find(model, low, Adjoint(low, model, gradients="low")(TOKENS), TOKENS, range(3), "auto")
    assert found.places == {} and found.tried == [] and found.plan is None


BUDGETS = {  # what is kept beside the remedy of "residual addition", an fp32 stream; whether the budget pays for that
    "0 sites": (0, False), "2 sites": (1, True), "2 blocks": (1, True), "3 modules": (2, True),
    "1 KB": (None, False), "40 KB": (None, True),
}  # fmt: skip


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_plan_brings_windows_back_and_spends_the_rest(budget):
    model, _, _, overflowing = case("residual addition", 2)
    request = Request("embedded", "embedded", "fp16", budget, windows=3, length=16)
    found = diagnosis.diagnose(request, Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None))
    found.require_complete()
    html, plan, known = " ".join(page.page(found).split()), found.plan, found.contributions
    more, pays = BUDGETS[budget]
    amount, unit = request.parsed_budget
    assert plan.residual
    if unit == "bytes":
        assert (known.size(plan, unit) <= amount) == pays
    assert [finite_by_hand(apply(model, plan), window) for window in TOKENS.split(1)] == [True] * 3
    assert found.protected.mismatch.notna().all() and found.measured.mismatch.isna().tolist() == overflowing
    assert (f"A budget of {budget} is too small" in html) != pays
    assert "<b>residual stream</b>, which takes" in html and "still overflow" not in html
    stream = known.keep(sites=["residual"])
    if not pays:
        assert known.vanishing(plan).tolist() == known.vanishing(stream).tolist()
    elif more is not None:
        units = [known.keep(**{unit: each}) for each in combinations(single_units(known, unit), more)]
        best = min(known.remaining(known.together([stream, each])) for each in units)
        assert known.remaining(plan) == pytest.approx(best, rel=1e-5)
    else:
        assert known.remaining(plan) < known.remaining(stream)


def single_units(known, unit):
    """What a budget of ``unit`` may keep."""
    structure = known.structure
    return {"sites": structure.sites, "blocks": range(len(structure.blocks)), "modules": structure.modules}[unit]


def test_a_plan_beside_another_needs_a_budget_for_it():
    model = made("llama", 2)
    known = Contributions(model, Adjoint(lower(model, "fp16", "emulated"), model, gradients="low")(TOKENS))
    stream = known.keep(sites=["residual"])
    with pytest.raises(ValueError, match="the budget must pay for residual, 1 sites, got 0: raise it"):
        known.plan(0, "sites", beside=stream)
    assert known.plan(1, "sites", beside=stream).modules == stream.modules
    size = known.size(stream, "bytes")
    assert known.plan(size, "bytes", beside=stream).residual
    with pytest.raises(ValueError, match="the budget must pay for residual"):
        known.plan(size - 1, "bytes", beside=stream)


@pytest.mark.parametrize("name", ["QK^T of Qwen2", "residual addition", "embedding"])
def test_a_streamed_model_has_the_same_remedy(name, tmp_path):
    model, words, *_ = case(name, 2)
    model.save_pretrained(tmp_path)
    streamed = load_offloaded(str(tmp_path), None, AutoModelForCausalLM)
    streamed.set_attn_implementation("eager")
    request = Request("embedded", "embedded", "fp16", "1 site", windows=3, length=16)
    found = diagnosis.diagnose(request, Inputs(streamed, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None))
    found.require_complete()
    assert {place.words for place in found.remedy.places.values()} == {words}
    assert found.remedy.plan.label == MENDED[name][0] and [*found.mended.window] == [*found.remedy.places]
    assert found.mended.predicted.gt(0).all() and found.mended.mismatch.gt(0).all()


def test_a_mix_of_schemes_says_what_mends_its_kernels():
    """The schemes are of weights; the windows overflow in the kernels beside them."""
    model, *_, overflowing = case("residual addition", 2)
    request = Request("embedded", "embedded", "w4a16-g32@fp16", "6 bits", windows=3, length=16)
    found = diagnosis.diagnose(request, Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None))
    found.require_complete()
    assert {*found.remedy.places} == {number for number, out in enumerate(overflowing) if out}
    assert found.remedy.plan.residual and "<b>residual stream</b>" in " ".join(page.page(found).split())
