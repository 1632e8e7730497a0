"""What is kept is kept: what a plan says it removes does not round in the planned pass, for every recipe and unit."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from families import OLDER
from tiny import TINY, random_gpt2, random_model, random_tokens
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OpenAIGPTConfig,
)

from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.mixed_precision.errors import predict as errors_of
from fragility_adjoint.mixed_precision.plans import protect
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import block_paths, branch_paths, within
from fragility_lab.diagnosis.passes import estimator, measure, predict
from fragility_lab.inputs.loading import load
from fragility_lab.inputs.text import select_windows
from fragility_numerics import lowering
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import RECIPES, Operands, get_recipe
from fragility_quantization.static_scales import calibrated

ROUNDING = [name for name, recipe in RECIPES.items() if recipe.rounds]
TOKENS = random_tokens(2, 12, seed=0, smallest=1)
WINDOW = TOKENS[:1]  # windows run the same kernels, one by one
SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS = {
    "gpt2": lambda: random_gpt2(TINY),
    "llama": lambda: random_model(LlamaConfig(**SIZES, **HEADS)),
    "llama of 40 blocks": lambda: random_model(LlamaConfig(**SIZES | {"num_hidden_layers": 40}, **HEADS)),
    "mixtral": lambda: random_model(MixtralConfig(num_local_experts=4, **SIZES, **HEADS)),
}


def squares(prediction) -> pd.Series:
    """The squared errors by place, known by its module, name, number and kind."""
    rows = prediction.contributions.groupby("place").agg(
        {"module": "first", "name": "first", "kind": "first", "c2": "sum"}
    )
    rows["occurrence"] = rows.groupby(["module", "name", "kind"]).cumcount()
    return rows.set_index(["module", "name", "occurrence", "kind"]).c2


def test_static_layers_leave_the_dynamic_inputs_of_others():
    model, layer = random_gpt2(TINY), "transformer.h.0.mlp.c_fc"
    low = apply(model, Plan("w8a8-int8", layers=((layer, "fp8-static"),)), tokens=TOKENS)
    assert low.recipe.operands(layer).inputs.largest_input > 0
    assert low.recipe.operands("transformer.h.1.mlp.c_fc") == get_recipe("w8a8-int8").linear


@pytest.mark.parametrize("path", ["", "transformer.h.1.mlp.dropout"])
def test_models_in_training_mode_are_refused(path):
    model = random_gpt2(TINY)
    model.get_submodule(path).train()
    with pytest.raises(ValueError, match=r"eval mode, got training mode: call model\.eval"):
        apply(model, Plan("bf16", modules=("transformer.h.0",)))
    with pytest.raises(ValueError, match=r"eval mode, got training mode: call model\.eval"):
        calibrated(model, get_recipe("fp8-static"), TOKENS)


def test_a_model_without_blocks_has_plans_of_none():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    known = Contributions(model, Adjoint(lower(model, "bf16"), model)(random_tokens(1, 12, vocabulary=50)))
    for unit in ("blocks", "modules", "sites"):
        assert known.plan(0, unit).modules == ()


SHARING = Gemma3nTextConfig(
    vocab_size=101, vocab_size_per_layer_input=101, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=48,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16, laurel_rank=8, altup_num_inputs=2,
    activation_sparsity_pattern=[0.0] * 4, bos_token_id=0, eos_token_id=0, pad_token_id=0, max_position_embeddings=64,
)  # fmt: skip


def planned(model, plan):
    """The squared errors by place of the model as ``plan`` runs it."""
    return squares(Adjoint(apply(model, plan, tokens=TOKENS), model, gradients="low")(WINDOW))


@pytest.mark.parametrize("name", ROUNDING)
def test_what_a_plan_removes_does_not_round_in_the_planned_pass(name):
    """Blocks, sites and single modules, their weights, inputs of products, keys and values of the cache."""
    heads = 1 if name in ("kv-q8_0", "kv-q4_0") else TINY.n_head  # of whole blocks of 32
    model = random_gpt2(GPT2Config(**TINY.to_diff_dict() | {"n_head": heads}))
    recipe = calibrated(model, get_recipe(name), TOKENS)
    prediction = Adjoint(lower(model, recipe), model, gradients="low")(WINDOW)
    known, before = Contributions(model, prediction), squares(prediction)
    units = [known.keep(blocks=[1]), *(known.keep(sites=[site]) for site in known.structure.sites)]
    units += [known.keep(modules=[f"transformer.h.2.{path}"]) for path in ("attn", "mlp.c_fc", "ln_1")]
    for plan in units:
        left = planned(model, plan)
        gone = before.index[known.vanishing(plan)].intersection(left.index)
        assert (left[gone] <= 1e-12 * before.sum()).all(), (plan.label, left[gone][left[gone] > 0])


@pytest.mark.parametrize("name", ["kv-int8", "w8a8-int8"])
def test_what_a_plan_removes_does_not_round_on_a_device_without_bf16(name, monkeypatch):
    monkeypatch.setattr(lowering, "has_native_kernels", lambda format, device: format.name == "fp32")
    test_what_a_plan_removes_does_not_round_in_the_planned_pass(name)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("name", ["kv-fp8", "kv-int8", "w8a8-int8+kv-fp8", "fp8-dynamic"])
def test_kept_blocks_of_other_families_round_nothing(model, name):
    model = MODELS[model]()
    prediction = Adjoint(lower(model, name), model, gradients="low")(WINDOW)
    known, before = Contributions(model, prediction), squares(prediction)
    plan = known.keep(blocks=[0])
    left = planned(model, plan)
    gone = before.index[known.vanishing(plan)].intersection(left.index)
    assert len(gone) and (left[gone] <= 1e-12 * before.sum()).all()
    cached = [place for place in before.index if place[1] in ("key cache", "value cache")]
    assert len(cached) == 4 * ("kv" in name)  # two of each block
    assert {place[0] for place in cached if left.get(place, 0.0)} <= {"model.layers.1.self_attn"}


@pytest.mark.parametrize("unit", ["block", "modules", "site"])
def test_plans_of_models_whose_layers_share_keys_and_values(unit):
    """What is kept gives keys and values in fp32 to layers that are not kept, and gets those of others."""
    model = random_model(SHARING)
    errors = errors_of(model, WINDOW, "bf16")
    for count in (1, 2):
        plan = errors.plan(f"{count} {unit}")
        assert 0 < plan.predicted < errors.predicted and not {"", "model"} & {*plan.plan.modules}
        plan.apply()  # which checks that it is in force


@pytest.mark.parametrize("family", OLDER)
def test_kept_blocks_of_older_families_keep_their_cache(family):
    model = random_model(OLDER[family])
    prediction = Adjoint(lower(model, "kv-fp8"), model, gradients="low")(WINDOW)
    known, before = Contributions(model, prediction), squares(prediction)
    plan = known.keep(blocks=[0])
    left = planned(model, plan)
    gone = before.index[known.vanishing(plan)]
    assert len([place for place in gone if place[1] in ("key cache", "value cache")]) == 2
    assert (left[gone.intersection(left.index)] <= 1e-12 * before.sum()).all()
    assert len([place for place in left.index if place[1] in ("key cache", "value cache")]) == 2  # of the other block


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("name", "path"),
    [("kv-int8", "blocks"), ("kv-fp8", "attention"), ("w8a8-int8", "mlp")],
)
def test_roundings_without_a_dtype_of_their_own_are_not_in_force(model, name, path):
    """A plan is refused where a cache or inputs of products are rounded inside of what it keeps."""
    model = MODELS[model]()
    blocks = block_paths(model)
    attention, mlp = (path for path in branch_paths(model) if within(path, blocks[1]))
    kept = {"blocks": blocks[1], "attention": attention, "mlp": mlp}[path]
    plan = Plan(name, modules=(kept,))
    with pytest.raises(ValueError, match=rf"not in force: {kept} must round nothing inside, got a relative error of"):
        protect(lower(model, get_recipe(name)), model, plan, TOKENS)
    apply(model, plan, tokens=TOKENS)


def test_all_blocks_kept_under_a_rounded_cache_is_bf16_without_blocks():
    """On the embedded checkpoint, predicted and measured in nats."""
    inputs = load("embedded", "embedded", [128], 3, None, AutoModelForCausalLM)
    model, windows = inputs.model, select_windows(inputs.stream, 128, 3, 0)[1].split(1)
    known = Contributions(model, predict(estimator(lower(model, "kv-fp8"), model, 4, "kl"), windows))
    found = {}
    for count in (0, 6, 12):
        plan = known.keep(blocks=range(count))
        measured = measure(apply(model, plan), model, windows, "the plan")[0].kl.mean()
        assert measured == pytest.approx(plan.predicted, rel=0.25)
        found[count] = measured
    bf16 = Plan("bf16", modules=tuple(known.structure.blocks))
    assert found[12] == pytest.approx(measure(apply(model, bf16), model, windows, "bf16")[0].kl.mean(), rel=1e-6)
    assert found[12] < found[6] / 3 < found[0] / 3


def test_a_scheme_a_layer_is_in_force_and_all_others_stay():
    model = random_gpt2(TINY)
    plan = Plan("bf16", layers=(("transformer.h.1.mlp.c_fc", "w4a16-g32"),))
    low = apply(model, plan)
    exact, own = (m.transformer.h[1].mlp.c_fc.weight for m in (model, low.model))
    scheme = get_recipe("w4a16-g32").linear.weights
    assert torch.equal(own.float(), scheme.round(exact.mT).mT.bfloat16().float())
    assert torch.equal(low.model.transformer.h[0].mlp.c_fc.weight, model.transformer.h[0].mlp.c_fc.weight.bfloat16())


# --- Layers by name -----------------------------------------------------------------------------

INT8 = get_recipe("w8a8-int8").linear


def with_layers(layers, kernels="fp32"):
    return replace(get_recipe(kernels), name="named", layers=layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"lm_hed": INT8}, "got 'lm_hed': see lm_head"),
        ({"model.layers.7.mlp.up_proj": INT8}, r"got 'model.layers.7.mlp.up_proj': see .*model.layers.0.mlp.up_proj"),
        ({"model.norm": INT8}, "must be linear layers of blocks, embeddings or the head, got 'model.norm'"),
        ({"": INT8}, "got '': see"),
    ],
)
@pytest.mark.parametrize("execution", ["auto", "emulated", "weights"])
def test_layers_that_the_model_does_not_have_are_refused(layers, message, execution):
    with pytest.raises(ValueError, match=message):
        lower(MODELS["llama"](), with_layers(layers), execution)


def test_embedding_and_head_are_quantized_by_name():
    """Against products in fp64 of rounded weights and inputs."""
    model = MODELS["llama"]()
    low = lower(model, with_layers({"lm_head": INT8, "model.embed_tokens": INT8}))
    table = INT8.weights.round(model.model.embed_tokens.weight)
    assert torch.equal(low.model.model.embed_tokens.weight, table)
    with torch.no_grad(), low.running():
        final = low.model.model(TOKENS).last_hidden_state
        logits = low.model(TOKENS).logits
    weight, inputs = INT8.weights.round(model.lm_head.weight).double(), INT8.inputs.round(final).double()
    assert torch.allclose(logits.double(), inputs @ weight.mT, rtol=1e-4, atol=1e-4)
    found = squares(Adjoint(low, model, target="kl", gradients="low")(TOKENS))
    rounding = {place[:2] for place in found.index[found > 0]}
    assert rounding == {("model.embed_tokens", "weight"), ("lm_head", "weight"), ("lm_head", "operand")}


@pytest.mark.parametrize("named", [["lm_head"], ["transformer.wte"], ["lm_head", "transformer.wte"]])
def test_a_tied_head_is_quantized_with_its_embedding(named):
    model = random_gpt2(TINY)
    low = lower(model, with_layers(dict.fromkeys(named, INT8)))
    table = INT8.weights.round(model.transformer.wte.weight)
    assert (
        torch.equal(low.model.transformer.wte.weight, table)
        and low.model.lm_head.weight is low.model.transformer.wte.weight
    )
    with torch.no_grad(), low.running():
        final = low.model.transformer(TOKENS).last_hidden_state
        logits = low.model(TOKENS).logits
    inputs = INT8.inputs.round(final) if "lm_head" in named else final
    assert torch.allclose(logits.double(), inputs.double() @ table.double().mT, rtol=1e-4, atol=1e-4)
    found = squares(Adjoint(low, model, target="kl", gradients="low")(TOKENS))
    assert (found[[place for place in found.index if place[1] == "operand"]] > 0).any() == ("lm_head" in named)


def test_a_tied_head_cannot_be_stored_in_two_ways():
    layers = {"lm_head": INT8, "transformer.wte": get_recipe("w4a16-g32").linear}
    with pytest.raises(ValueError, match="is tied to 'transformer.wte', so both must store their one matrix alike"):
        lower(random_gpt2(TINY), with_layers(layers))


def test_a_kept_head_is_not_quantized():
    model = MODELS["llama"]()
    plan = Plan("bf16", modules=("lm_head",), layers=(("lm_head", "w8a8-int8"),))
    low = apply(model, plan)
    assert torch.equal(low.model.lm_head.weight, model.lm_head.weight)
    found = planned(model, plan)
    assert not [place for place in found.index[found > 0] if place[0] == "lm_head" and place[1] != "linear"]


def test_an_activation_that_all_blocks_share_counts_in_each():
    model = random_model(OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=101))
    assert model.transformer.h[0].mlp.act is model.transformer.h[1].mlp.act
    errors = errors_of(model, WINDOW, "bf16")
    found = errors.by("layer", "module")
    assert [*found.layer[found.module.str.endswith("mlp.act")].sort_values()] == [0, 1]
    errors.plan("1 block").apply()


@pytest.mark.parametrize("name", ["bf16", "w8a8-int8"])
def test_a_kept_head_keeps_what_is_done_with_its_logits(name):
    """Gemma 2 caps them: they are fp32 when they come, and stay so."""
    model = random_model(Gemma2Config(**SIZES, **HEADS, head_dim=8, final_logit_softcapping=30.0))
    prediction = Adjoint(lower(model, name), model, target="kl", gradients="low")(WINDOW)
    known = Contributions(model, prediction)
    plan = known.keep(sites=["head"])
    gone = known.structure.places[known.vanishing(plan)]
    assert [*gone.name[gone.module == ""]] == ["div", "tanh", "mul"]
    left = squares(Adjoint(apply(model, plan), model, target="kl", gradients="low")(WINDOW))
    assert not [place for place in left.index[left > 0] if place[0] in ("", "lm_head")]


@pytest.mark.parametrize(("recipe", "places"), [("bf16", 0), ("ggml-q8_0@bf16", 1)])
def test_a_kept_embedding_spares_a_scheme_but_no_cast(recipe, places):
    """Its rows are rounded to the kernels' format in any case."""
    model = MODELS["llama"]()
    known = Contributions(model, Adjoint(lower(model, recipe), model, gradients="low")(WINDOW))
    vanishing = known.vanishing(known.keep(["model.embed_tokens"]))
    assert known.structure.places[vanishing].module.tolist() == places * ["model.embed_tokens"]


def test_a_kept_block_beside_an_fp32_stream_computes_in_fp32_inside():
    low = apply(random_gpt2(TINY), Plan("bf16", modules=("transformer.h.1",), residual=True), "emulated")
    seen = []
    for block in low.model.transformer.h[:2]:
        block.ln_1.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad(), low.running():
        low.model(TOKENS)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("modules", ["transformer.h.0", (3,), (None,)])
def test_modules_of_a_plan_are_paths(modules):
    with pytest.raises(ValueError, match="the modules of a plan must be a tuple of paths, got"):
        Plan("bf16", modules=modules)


@pytest.mark.parametrize("layers", [("lm_head",), (("lm_head", "w8a8-int8", 1),)])
def test_layers_of_a_plan_are_pairs(layers):
    with pytest.raises(ValueError, match="must be pairs of a path and a recipe's name"):
        Plan("bf16", layers=layers)


@pytest.mark.parametrize("name", ["bf16", "fp8-dynamic"])
def test_a_shared_module_is_kept_for_all_its_users(name):
    """What a plan of one of two blocks would do to the other is not what was predicted."""
    model = random_gpt2(TINY)
    model.transformer.h[2].attn = model.transformer.h[1].attn
    prediction = Adjoint(lower(model, name), model, gradients="low")(WINDOW)
    known, before = Contributions(model, prediction), squares(prediction)
    with pytest.raises(ValueError, match=r"got transformer\.h\.2\.attn.*: keep transformer\.h\.1\.attn.*, too"):
        apply(model, known.keep(blocks=[2]))
    for plan in (known.keep(blocks=[1, 2]), known.keep(["transformer.h.1.attn"])):
        left, vanishing = planned(model, plan), known.vanishing(plan)
        gone = before.index[vanishing].intersection(left.index)
        assert vanishing.any() and (left[gone] <= 1e-12 * before.sum()).all(), (plan.label, left[gone])


def test_no_operands_are_those_of_all_other_kernels():
    assert not Operands()


# --- Tied heads beside 16-bit kernels, recipes that are lowered again, and nested paths -------------


@pytest.mark.parametrize("execution", ["auto", "emulated"])
@pytest.mark.parametrize("kernels", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("named", [["lm_head"], ["transformer.wte"], ["lm_head", "transformer.wte"]])
def test_a_tied_head_is_quantized_beside_any_kernels(named, kernels, execution):
    """The embedding gives numbers of the kernels' dtype, and inputs of the head are rounded only if it is named."""
    if (kernels, execution) == ("fp16", "auto"):
        execution = "emulated"  # native fp16 is slow on a CPU without it
    model = random_gpt2(TINY)
    low = lower(model, with_layers(dict.fromkeys(named, INT8), kernels), execution)
    dtype, seen = low.format.compute_dtype, []
    low.model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    low.model.transformer.wte.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad(), low.running():
        logits = low.model(TOKENS).logits
    embedded, final = seen
    assert embedded.dtype == final.dtype == logits.dtype == dtype
    table = INT8.weights.round(model.transformer.wte.weight).to(dtype)
    assert torch.equal(low.model.transformer.wte.weight.to(dtype), table)
    inputs = INT8.inputs.round(final.float()) if "lm_head" in named else final.float()
    want = inputs.double() @ table.double().mT
    assert torch.allclose(logits.double(), want, rtol=2 * low.format.unit_roundoff, atol=1e-3 * float(want.abs().max()))
    found = squares(Adjoint(low, model, target="kl", gradients="low")(TOKENS))
    operands = [place for place in found.index[found > 0] if place[:2] == ("lm_head", "operand")]
    assert bool(operands) == ("lm_head" in named)
    assert found[[place for place in found.index if place[0] == "transformer.wte" and place[3] == "weight"]].gt(0).any()


@pytest.mark.parametrize("named", [["lm_head"], ["transformer.wte"], ["lm_head", "transformer.wte"]])
def test_a_recipe_that_is_lowered_again_gives_the_same(named):
    model = random_gpt2(TINY)
    once = lower(model, with_layers(dict.fromkeys(named, INT8)))
    plan = Plan("fp32", layers=tuple((path, "w8a8-int8") for path in named))
    found = []
    for low in (once, lower(model, once.recipe), apply(model, plan)):
        with torch.no_grad(), low.running():
            found.append(low.model(TOKENS).logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kernels", ["bf16", "fp32"])
def test_a_kept_embedding_leaves_the_tied_head_quantized(kernels):
    model = random_gpt2(TINY)
    low = apply(model, Plan(kernels, modules=("transformer.wte",), layers=(("lm_head", "w8a8-int8"),)))
    exact = model.transformer.wte.weight
    assert torch.equal(low.model.transformer.wte.weight, exact)
    assert torch.equal(low.model.lm_head.weight.float(), INT8.weights.round(exact).to(low.format.compute_dtype).float())
    found = squares(Adjoint(low, model, target="kl", gradients="low")(TOKENS))
    assert found[("lm_head", "operand", 0, "kernel")] > 0 and not found.get(
        ("transformer.wte", "weight", 0, "weight"), 0
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_module_inside_of_a_kept_one_is_kept_with_it(order):
    model, paths = random_gpt2(TINY), ("transformer.h.1", "transformer.h.1.mlp", "transformer.h.1.mlp.c_fc")
    found = []
    for modules in (paths[:1], paths[::order]):
        low = apply(model, Plan("bf16", modules=modules))
        with torch.no_grad(), low.running():
            found.append(low.model(TOKENS).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": 3}, "the modules of a plan must be a tuple of paths, got 3"),
        ({"modules": None}, "the modules of a plan must be a tuple of paths, got None"),
        ({"layers": 3}, "must be pairs of a path and a recipe's name, got 3"),
        ({"layers": ((3, "w8a8-int8"),)}, "must be pairs of a path and a recipe's name"),
        ({"layers": (("lm_head", INT8),)}, "must be pairs of a path and a recipe's name"),
        ({"residual": "yes"}, "residual must be True or False, got 'yes'"),
        ({"scores": 1}, "scores must be True or False, got 1"),
        ({"format": 3}, "the format of a plan must be the name of a recipe, got 3"),
    ],
)
def test_values_of_other_types_in_a_plan_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Plan(**({"format": "bf16"} | changes))


@pytest.mark.parametrize("layers", [{"lm_head": "w8a8-int8"}, {"lm_head": None}, {3: INT8}])
def test_layers_of_a_recipe_are_operands_by_path(layers):
    with pytest.raises(ValueError, match="layers of a recipe must be Operands by path, got"):
        lower(random_gpt2(TINY), with_layers(layers))
