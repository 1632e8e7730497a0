"""The short way beyond the paper: errors of a recipe in one call, by layer and site, and plans in words."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, random_tokens
from transformers import GPT2Config

import fragility_adjoint
from fragility_adjoint import Adjoint, Choices, Contributions, apply, fused_layers, lower, predict, predictions
from fragility_adjoint.mixed_precision.budget import mixes_schemes, parse_budget
from fragility_exports.libraries import compressed_tensors
from fragility_exports.plan import from_json
from fragility_numerics.formats import FORMATS
from fragility_quantization.operands import Operands
from fragility_quantization.recipes import ENGINES, get_recipe


@pytest.fixture(scope="module")
def known():
    model = random_gpt2(TINY)
    tokens = random_tokens(3, 20)
    return model, tokens, predict(model, tokens, "w4a16-g32", target="kl", probes=3)


def test_errors_are_those_of_an_adjoint(known):
    model, tokens, errors = known
    want = Adjoint(lower(model, "w4a16-g32"), model, 3, target="kl", gradients="both")(tokens)
    assert errors.predicted == pytest.approx(want.windows.predicted.mean(), rel=1e-6)
    assert errors.windows.predicted.tolist() == pytest.approx(want.windows.predicted.tolist(), rel=1e-6)


@pytest.mark.parametrize("budget", ["1 block", "5 bits"])
@pytest.mark.parametrize(
    "changed", [{"cache": FORMATS["fp8_e4m3"]}, {"layers": {"transformer.h.0.mlp.c_fc": Operands()}}]
)
def test_a_plan_needs_a_recipe_that_its_name_says(budget, changed):
    """The plan, and what is exported, would have the recipe of that name."""
    model, tokens = random_gpt2(TINY), random_tokens(2, 12)
    errors = predict(model, tokens, replace(get_recipe("w4a16-g32"), **changed), target="kl")
    with pytest.raises(ValueError, match="a plan has its recipe by name, but 'w4a16-g32' was changed"):
        errors.plan(budget)


OWN = ["fp8-static", "gguf-q4_k_m", "kv-fp8", "w4a16-g32+kv-int8", "w8a8-int8@fp32", torch.float16]


@pytest.mark.parametrize("recipe", [*OWN, *ENGINES, "ggml-q4_0", "torch-int8@bf16"])
def test_recipes_by_name_have_plans_whatever_a_model_adds_to_them(recipe):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0)
    model = random_gpt2(config)
    plan = predict(model, random_tokens(2, 12, vocabulary=40), recipe).plan("1 block")
    assert len(plan.plan.modules) == 1 and plan.apply().name.startswith(plan.plan.format)


def test_gradients_are_taken_at_both_ends_where_there_are_two(known):
    """The rule of ``Adjoint``, of ``predictions`` and of ``predict``: else they are taken in low precision."""
    model, tokens, errors = known
    low = lower(model, "w4a16-g32")
    rows = {how: Adjoint(low, model, 3, target="kl", gradients=how)(tokens).contributions for how in ("low", "both")}
    assert not rows["low"].c2.equals(rows["both"].c2)
    for prediction in (
        Adjoint(low, model, 3, target="kl")(tokens),
        predictions(model, ["w4a16-g32"], tokens, probes=3)["w4a16-g32"],
        errors.prediction,
    ):
        assert prediction.contributions.c2.equals(rows["both"].c2)
    for alone in ((low, None), (lower(model, "bf16").stochastic(0), model)):
        c2, want = (Adjoint(*alone, probes=2, **given)(tokens).contributions.c2 for given in ({}, {"gradients": "low"}))
        assert c2.equals(want)
    with pytest.raises(ValueError, match="gradients must be auto or taken at one of low, fp32, both, secant, got 'up'"):
        Adjoint(low, model, gradients="up")


@pytest.mark.parametrize("recipe", ["bf16", "w4a16-g32"])
def test_estimators_beside_one_another_share_the_fp32_copies_of_weights(recipe):
    model, tokens = random_gpt2(TINY), random_tokens(2, 12)
    low = lower(model, recipe)
    first = Adjoint(low, model, 2)
    assert {*first.rounded.kept} == {*first.rounded.tensors}
    for gradients in ("low", "fp32", "both", "secant"):
        known = Adjoint(low, model, 2, target="kl", gradients=gradients, beside=first)
        alone = Adjoint(low, model, 2, target="kl", gradients=gradients)(tokens)
        first(tokens)  # passes of one leave those of the other alone
        assert known.rounded.kept is first.rounded.kept
        pd.testing.assert_frame_equal(known(tokens).contributions, alone.contributions, check_exact=True)
        for parameter, leaf in known.points[0].parameters.weights.items():
            other = first.points[-1 if gradients == "fp32" else 0].parameters.weights[parameter]
            assert leaf is not other and leaf.data_ptr() == other.data_ptr()
    with pytest.raises(ValueError, match="share the weights of one low-precision model, got two models: lower it once"):
        Adjoint(lower(model, recipe), model, beside=first)
    with torch.no_grad():
        low.model.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(2)
    with pytest.raises(ValueError, match="needs the weights as they were read, but they changed"):
        Adjoint(low, model, beside=first)


@pytest.mark.parametrize("target", ["kl", "hidden"])
def test_groups_of_errors_add_up_to_the_squared_prediction(known, target):
    """By any columns, without probes or norms to divide by; shares add up to 1."""
    model, tokens, errors = known
    errors = errors if target == "kl" else predict(model, tokens, "bf16", probes=3)
    square = errors.windows.predicted if target == "kl" else errors.windows.predicted**2
    for columns in (["layer"], ["site"], ["layer", "site"], ["kind"]):
        table = errors.by(*columns)
        assert table.square.sum() == pytest.approx(square.mean(), rel=1e-6) and table.share.sum() == pytest.approx(1)
        assert table.square.is_monotonic_decreasing and list(table) == [*columns, "square", "share"]
    layers = errors.by("layer").set_index("layer").square
    cells = errors.by("layer", "site")
    assert cells[cells.layer == 1].square.sum() == pytest.approx(layers[1])
    for wrong in ((), ("lair",), ("layer", 3), (("layer", "site"),), (["layer"],)):
        with pytest.raises(ValueError, match="errors are grouped by some of layer, site"):
            errors.by(*wrong)


def test_a_plot_has_a_bar_for_each_group(known):
    *_, errors = known
    _, other = plt.subplots()  # the current axes stay as they are
    ax = errors.plot()
    assert ax is not other and not other.patches and ax.get_xlabel() == "layer" and ax.get_legend() is None
    table = errors.by("layer")
    assert sorted(bar.get_height() for bar in ax.patches) == pytest.approx(sorted(table.share))
    assert errors.plot("site", ax=ax) is ax
    plt.close("all")


def test_a_plan_of_blocks_is_that_of_contributions(known):
    model, _, errors = known
    plan = errors.plan("2 blocks")
    want = Contributions(model, errors.prediction).plan(2, "blocks")
    assert plan.plan == want and (plan.label, plan.predicted) == (want.label, want.predicted)


def test_a_plan_of_bits_chooses_schemes_and_is_applied(known):
    model, tokens, errors = known
    plan = errors.plan("6 bits")
    recipes = ["w4a16-g32", "w8a16-g128", "bf16"]
    choices = Choices(model, predictions(model, recipes, tokens, probes=3), fused_layers(model, tokens))
    want = choices.plan(choices.within_bits(6.0))
    assert plan.plan.layers == want.layers and plan.predicted == pytest.approx(want.predicted, rel=1e-6)
    assert plan.predicted < errors.predicted
    assert plan.apply()(tokens).logits.shape == (3, 20, TINY.vocab_size)
    bound = errors.plan(f"KL {plan.predicted * 1.01:.6f}")
    assert bound.predicted <= plan.predicted * 1.02


def test_what_is_printed_says_what_it_is(known):
    *_, errors = known
    assert repr(errors) == f"<errors of w4a16-g32, kl {errors.predicted:.3g}>"
    shown = repr(errors.plan("2 blocks"))
    assert shown.startswith("ModelPlan(plan=Plan(format='w4a16-g32'") and "GPT2" not in shown and "tensor" not in shown


def test_a_plan_is_exported(known, tmp_path):
    model, _, errors = known
    plan = errors.plan("6 bits")
    made = plan.export("compressed-tensors", tmp_path / "config.json")
    assert (
        json.loads((tmp_path / "config.json").read_text()) == made.config == compressed_tensors(plan.plan, model).config
    )
    written = plan.export("json", tmp_path / "plan.json")
    assert written.config == json.loads((tmp_path / "plan.json").read_text()) != {}
    assert from_json((tmp_path / "plan.json").read_text()) == plan.plan
    with pytest.raises(ValueError, match="a library must be one of modelopt, .* json, got 'onnx'"):
        plan.export("onnx")


@pytest.mark.parametrize(
    ("budget", "want"),
    [("2 blocks", (2, "blocks")), ("3", (3, "blocks")), ("1 site", (1, "sites")), ("40 MB", (40_000_000, "bytes")),
     ("4.5 bits", (4.5, "bits")), ("KL 1e-3", (1e-3, "kl"))],
)  # fmt: skip
def test_budgets_in_words(budget, want):
    assert parse_budget(budget) == want


def test_bytes_are_divided_between_schemes_where_weights_have_one():
    assert mixes_schemes("40 MB", get_recipe("w4a16-g32")) and not mixes_schemes("40 MB", get_recipe("bf16"))
    assert mixes_schemes("5 bits", get_recipe("bf16")) and not mixes_schemes("2 blocks", get_recipe("w4a16-g32"))


def test_schemes_beside_a_mix_are_types_of_single_tensors(monkeypatch):
    beside = ["ggml-q8_0", "fp32"]
    monkeypatch.setattr(
        "fragility_adjoint.mixed_precision.errors.schemes_beside", lambda name: [get_recipe(each) for each in beside]
    )
    plan = predict(random_gpt2(TINY), random_tokens(2, 12), "gguf-q8_0", "kl").plan("8.5 bits").plan
    assert {name for _, name in plan.layers} == {"ggml-q8_0"}


@pytest.mark.parametrize("budget", ["", "3 s", "2.5 blocks", "5 wolves", "bits", "KL", "9" * 400 + " MB", "-1 block"])
def test_other_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="a budget is a number of blocks") as caught:
        parse_budget(budget)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("budget", [2, None, ["2 blocks"]])
def test_a_budget_is_a_text(known, budget):
    with pytest.raises(TypeError, match='a budget is a text such as "2 blocks" or "5 bits", got'):
        known[2].plan(budget)


def test_a_budget_of_kl_needs_errors_in_kl(known):
    model, tokens, _ = known
    with pytest.raises(ValueError, match=r'needs errors in KL, got those in hidden: predict\(..., target="kl"\)'):
        predict(model, tokens, "w4a16-g32").plan("KL 0.1")
    with pytest.raises(TypeError, match="a tensor .B, T. of token ids, got a list"):
        Adjoint(lower(model, "bf16"), model)(tokens.tolist())


def test_static_scales_are_measured_over_the_windows(tiny_gpt2, tiny_tokens):
    errors = predict(tiny_gpt2, tiny_tokens, "fp8-static")
    assert errors.windows.predicted.between(1e-3, 1).all() and isinstance(errors.windows, pd.DataFrame)


def test_names_of_the_package():
    assert {"predict", "Adjoint", "Contributions", "Plan", "apply", "Choices", "lower"} <= set(
        fragility_adjoint.__all__
    )
    assert len(fragility_adjoint.__all__) <= 20


def test_padding_and_seed_reach_all_schemes(known):
    """A plan over padded windows is that over the tokens alone, with the same probes for every scheme."""
    model, tokens, _ = known
    padded = torch.cat([torch.zeros_like(tokens[:, :5]), tokens], 1)
    given = {"input_ids": padded, "attention_mask": (torch.arange(25) >= 5).long().expand(3, -1)}
    plans = [predict(model, each, "w4a16-g32", "kl", seed=3).plan("6 bits") for each in (given, tokens)]
    assert plans[0].plan.layers == plans[1].plan.layers
    assert plans[0].predicted == pytest.approx(plans[1].predicted, rel=1e-4)
    with pytest.raises(ValueError, match="static scales of .* need windows without padding, got a mask"):
        predict(model, given, "fp8-static")


def test_apply_takes_a_plan_and_no_words(known):
    with pytest.raises(TypeError, match=r"apply takes a Plan, got '2 blocks': predict.*has its own apply\(\)"):
        apply(known[0], "2 blocks")
