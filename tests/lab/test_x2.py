"""X2: ratios with intervals, changed choices, greedy decoding, single layers and plans against passes made by hand."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, random_tokens

from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.predictor import Adjoint
from fragility_lab.experiments import x2, x2_flips
from fragility_lab.experiments.realisations import dithered
from fragility_lab.experiments.x2_runs import ANALYSES, Analyses, Recipes
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.decoding import greedy, kept_length
from fragility_lab.measurement.growth import growth
from fragility_lab.reporting import figures_x2
from fragility_lab.running.engine import complete
from fragility_quantization.operands import linear_weights, owner, rounded_weight
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import LINEAR, NARROW, get_recipe
from fragility_quantization.schemes import Scheme


@pytest.fixture(scope="module")
def evaluator():
    tokens = random_tokens(3, 40)
    return x2.Evaluator(random_gpt2(TINY), tokens, probes=4)


def test_the_interval_of_a_ratio_covers_it():
    """Of pairs with a known ratio of means, 95 % of the intervals hold it."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        size = generator.uniform(1, 2, 12)
        found = x2.ratio(1.2 * size * generator.normal(1, 0.1, 12), size * generator.normal(1, 0.1, 12))
        held += found["low"] < 1.2 < found["high"]
    assert 0.91 < held / 400 < 0.98
    assert np.isnan(x2.ratio(np.ones(1), np.ones(1))["low"])


def test_fp32_passes_that_take_much_memory_are_not_kept(evaluator, monkeypatch):
    low = lower(evaluator.model, "w4a16-g32")
    want = evaluator.measure(low)
    monkeypatch.setattr(x2, "KEPT", 0)
    fresh = replace(evaluator)
    assert fresh.measure(low).equals(want) and "exact" not in vars(fresh)


def test_one_layer_alone_is_quantized(evaluator):
    rows = x2.layer_rows(evaluator, "w4a16-g32")
    by_hand = random_gpt2(TINY)
    path = "transformer.h.1.mlp.c_fc.weight"
    weight = linear_weights(by_hand)[path]
    weight.data = rounded_weight(by_hand, path, weight.data, LINEAR["w4a16-g32"].weights)
    row = rows[rows.layer == owner(path)].iloc[0]
    passes = (x2.Evaluator(model, evaluator.windows).exact for model in (evaluator.model, by_hand))
    exact, changed = ([seen.logits[0] for seen in found] for found in passes)
    want = np.mean([
        float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1).mean()) for a, b in zip(exact, changed)
    ])  # fmt: skip
    assert len(rows) == len(linear_weights(by_hand)) and row.measured == pytest.approx(want, rel=0.02)
    agreement = x2.layer_agreement(rows)
    assert agreement.spearman.item() > 0.5 and 0.3 < agreement["median"].item() < 1.5
    assert figures_x2.x2_layers(rows).get_xlabel() == "predicted KL (nats)"


def test_recipes_and_plans_have_the_error_that_was_predicted(evaluator):
    table = pd.concat([x2.recipe_rows(evaluator, name) for name in ("bf16", "w8a16-g32")])
    assert set(table.quantity) == set(x2.QUANTITIES) and len(table) == 4
    divergences = table[table.quantity == "kl"]
    assert divergences.ratio.between(0.6, 1.8).all()  # one draw of a small model
    assert len(figures_x2.x2_recipes(table).get_yticks()) == 2
    plans = x2.plan_rows(evaluator, ["w4a16-g32", "w8a16-g32", "bf16"], 3)
    best, chance = (plans[plans.chosen_by == name] for name in ("prediction", "chance"))
    assert (best.measured.to_numpy() <= 1.1 * chance.measured.to_numpy()).all() and best.ratio.between(0.5, 2).all()
    assert (chance.bits.to_numpy() <= best.bits.to_numpy() + 1).all()
    assert figures_x2.x2_plans(plans).get_xlabel() == "bits a weight"
    known = plans[plans.changed_measured > 0.05]  # six of 120 tokens: fewer are a matter of chance
    assert (
        len(known) >= 3 and known.changed_ratio.between(0.3, 3).all() and best.changed_predicted.is_monotonic_decreasing
    )
    assert (plans.changed_predicted[plans.changed_measured <= 0.05] < 0.15).all()


@pytest.fixture
def analyses(evaluator):
    inputs = Inputs(evaluator.model, evaluator.windows.flatten(), "digest")
    return Analyses("tiny", "given", inputs, probes=1)


def test_analyses_are_runs_that_go_on_where_they_stopped(analyses, tmp_path, monkeypatch):
    """Every analysis gives the rows of its function, once for each recipe or ladder, and is not computed again."""
    model, windows = analyses.inputs.model, analyses.inputs.windows(40, 3, 0)[1]
    evaluator = x2.Evaluator(model, windows, probes=1)
    prompts = x2.Evaluator(model, analyses.inputs.windows(5, 2, 0)[1])
    ladder = ["w4a16-g32", "bf16"]
    want = {
        ("recipes", "bf16", 3, 40, 1): x2.recipe_rows(evaluator, "bf16"),
        ("growth", "fp16", 3, 40, 1): x2.growth_rows(evaluator, "fp16"),
        ("coherence", "bf16", 3, 40, 2): x2.coherence_rows(evaluator, "bf16", 2),
        ("draws", "w4a16-g32", 3, 40, 2): x2.draw_rows(evaluator, "w4a16-g32", 2),
        ("realisations", "w4a16-g32", 3, 40, 2): x2.realisation_rows(evaluator, "w4a16-g32", 2),
        ("changed", "w4a16-g32", 3, 40, 1): x2_flips.changed_rows(evaluator, "w4a16-g32"),
        ("lengths", "w4a16-g32", 2, 5, 6): x2_flips.length_rows(prompts, "w4a16-g32", 6),
        ("layers", "w4a16-g32", 3, 40, 1): x2.layer_rows(evaluator, "w4a16-g32"),
        ("plans", (*ladder,), 3, 40, 2): x2.plan_rows(evaluator, ladder, 2),
    }  # fmt: skip
    assert {analysis for analysis, *_ in want} == {*ANALYSES}
    for _ in range(2):
        for (analysis, recipes, *size), rows in want.items():
            found = complete(Recipes, analyses.of(analysis, [recipes], *size), analyses.inputs, tmp_path)
            pd.testing.assert_frame_equal(found, rows.reset_index(drop=True), rtol=1e-4)
        monkeypatch.setattr(Recipes, "run", None)


def test_an_analysis_that_there_is_not_is_refused(analyses):
    with pytest.raises(ValueError, match="analysis must be one of recipes, growth"):
        analyses.of("recipe", ["bf16"], 3, 40)
    with pytest.raises(ValueError, match="windows must be at least 1, got 0"):
        analyses.of("recipes", ["bf16"], 0, 40)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_recipe_whose_windows_overflow_has_no_numbers(analyses, tmp_path):
    """Some windows: the others count. All of them: every analysis has a row without numbers, and figures are drawn."""
    predicted, found = np.array([1.0, np.nan, 3.0]), np.array([1.0, 1.0, 3.0])
    assert x2.row("fp16", "kl", predicted, found)["windows"] == 2
    assert x2.row("fp16", "kl", predicted, found)["measured"] == 2
    model = random_gpt2(TINY)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.mul_(1e6)
    analyses = replace(analyses, inputs=replace(analyses.inputs, model=model))
    sizes = {"recipes": (3, 40), "growth": (3, 40), "coherence": (3, 40, 2), "changed": (3, 40), "lengths": (2, 5, 6)}
    sizes |= dict.fromkeys(("draws", "realisations"), (3, 40, 2))
    tables = {}
    for analysis, size in sizes.items():
        runs = analyses.of(analysis, ["fp16", "bf16"], *size)
        tables[analysis] = complete(Recipes, runs, analyses.inputs, tmp_path).set_index("recipe")
        numbers = tables[analysis].drop(columns=["quantity", "windows", "draws", "realisations"], errors="ignore")
        assert numbers.loc["fp16"].isna().all(axis=None) and numbers.loc["bf16"].notna().any(axis=None), analysis
    for analysis in ("recipes", "changed"):
        assert len(figures_x2.x2_recipes(tables[analysis].reset_index()).get_yticks()) == 2


def test_errors_that_act_together_add_up_to_what_is_measured(evaluator):
    """In fp32 but for the weights, so that passes of their own have the same errors on every CPU."""
    table = x2.coherence_rows(evaluator, "w4a16-g32@fp32", probes=8).squeeze().to_dict()
    measured = evaluator.measure(lower(evaluator.model, get_recipe("w4a16-g32@fp32"))).kl.mean()
    assert table["measured"] == pytest.approx(measured, rel=0.02) and table["remainder"] < 1e-3
    assert table["overall"] == pytest.approx(table["inside"] * table["between"])
    assert 0 < table["between_error"] < 1
    assert table["pairs"] == 0  # three windows tell no pair from chance


def test_a_prediction_is_the_mean_over_signs_of_the_errors(evaluator):
    """In fp32 but for the weights: each draw is a model whose weights have errors of the same sizes."""
    recipe, draws = "w4a16-g32@fp32", 24
    row = x2.draw_rows(evaluator, recipe, draws).squeeze()
    low, generator = lower(evaluator.model, get_recipe(recipe)), torch.Generator().manual_seed(5)
    means = []
    for _ in range(draws):
        drawn = copy.deepcopy(evaluator.model)
        for exact, rounded in zip(drawn.parameters(), low.model.parameters()):
            signs = torch.randint(2, exact.shape, generator=generator) * 2 - 1
            exact.data += signs * (rounded.float() - exact)
        passes = [x2.observe(drawn, window[None]) for window in evaluator.windows]
        pairs = zip(passes, evaluator.exact, evaluator.windows[:, None])
        means.append(np.mean([x2.compare(*each)[0].kl.item() for each in pairs]))
    assert row.drawn == pytest.approx(np.mean(means), rel=0.1)
    assert row.scatter == pytest.approx(np.std(means, ddof=1) / np.mean(means), rel=0.6)
    assert row.predicted == pytest.approx(row.drawn, rel=0.15) and row.low < row.ratio < row.high
    assert row.measured == pytest.approx(evaluator.measure(low).kl.mean())
    assert row.beyond == pytest.approx((row.measured / row.drawn - 1) / row.scatter)


def test_a_weight_has_one_error_in_all_windows_of_a_draw(evaluator):
    same = x2.Evaluator(evaluator.model, evaluator.windows[[0, 0]])
    _, realisations = x2.realised(same.model, "w4a16-g32@fp32")
    first, again, other = *x2.one_draw(same, realisations), x2.one_draw(same, realisations)[0]
    assert first == again != other


def test_weights_that_are_moved_have_other_errors_of_the_same_size(evaluator):
    """By less than a step, so that the function stays; a moved weight's error says nothing about the error before."""
    recipe = get_recipe("w4a16-g32@fp32")
    model, scheme = evaluator.model, recipe.linear.weights
    moved = dithered(model, recipe, 1)
    for path, weight in linear_weights(model).items():  # GPT-2's layers have their inputs first
        x, y = weight.detach().mT, linear_weights(moved)[path].detach().mT
        assert ((y - x).abs() <= scheme.ulp(x) / 2 * (1 + 1e-5)).all()
        errors = torch.stack([(scheme.round(each) - each).flatten() for each in (x, y)])
        assert errors.corrcoef()[0, 1].abs() < 6 / errors.shape[1] ** 0.5
        assert errors[1].square().mean() == pytest.approx(errors[0].square().mean().item(), rel=0.25)
    for exact, other in zip(model.transformer.wte.parameters(), moved.transformer.wte.parameters()):
        torch.testing.assert_close(other, exact)
    again, other = (linear_weights(dithered(model, recipe, number)) for number in (1, 2))
    for path, weight in linear_weights(moved).items():
        assert torch.equal(weight, again[path]) and not torch.equal(weight, other[path])


def test_realisations_are_means_over_moved_models(evaluator):
    recipe = "w4a16-g32@fp32"
    row = x2.realisation_rows(evaluator, recipe, 3).squeeze()
    found = []
    for model in (evaluator.model, *(dithered(evaluator.model, get_recipe(recipe), number) for number in (1, 2, 3))):
        moved = x2.Evaluator(model, evaluator.windows, evaluator.probes)
        predicted = moved.predict(get_recipe(recipe), "kl").windows.predicted.mean()
        found.append((predicted, moved.measure(lower(model, get_recipe(recipe))).kl.mean()))
    ratios, means = [predicted / measured for predicted, measured in found], np.mean(found[1:], 0)
    assert len(set(ratios)) == 4 and row.low < row.ratio < row.high
    want = {"predicted": means[0], "measured": means[1], "ratio": means[0] / means[1], "as_stored": ratios[0]}
    assert row[[*want, "scatter"]].to_dict() == pytest.approx(want | {"scatter": np.std(ratios[1:], ddof=1)}, rel=1e-3)


def test_weights_out_of_range_are_counted_with_their_errors():
    """By hand: in a group of 32 the largest weight is 500, which the rule FLOOR of MX leaves above 448."""
    model = random_gpt2(TINY)
    for path, weight in linear_weights(model).items():
        x = weight.data.mT if "c_" in path else weight.data  # GPT-2's layers have their inputs first
        x.copy_(torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.5, 255.0, 256.0))
        x[:, ::32] = 500.0
    table = x2.saturation_table(model, ["bf16", "mxfp8", "mxfp8-ceil", "w8a16-g32"]).set_index("recipe")
    assert table.index.tolist() == ["mxfp8", "mxfp8-ceil", "w8a16-g32"]
    assert x2.saturation_table(model, ["bf16"]).columns.tolist() == ["recipe", "saturated", "of_error"]  # can be read
    share = sum(x[:, ::32].numel() for x in weights_by_row(model)) / sum(x.numel() for x in weights_by_row(model))
    assert table.saturated["mxfp8"] == pytest.approx(share) and 0.99 < table.of_error["mxfp8"] < 1
    assert not table.loc[["mxfp8-ceil", "w8a16-g32"]].any(axis=None)


def weights_by_row(model) -> list[torch.Tensor]:
    return [x.mT if "c_" in path else x for path, x in linear_weights(model).items()]


def test_greedy_decoding_reads_the_cache_and_gives_the_text_of_whole_passes():
    model, prompts = random_gpt2(TINY), torch.arange(18).view(3, 6)
    for low in (None, lower(model, "kv-int8")):
        text = prompts
        for _ in range(8):
            with nullcontext() if low is None else low.running():
                logits = (model if low is None else low.model)(text).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        found = greedy(model if low is None else low.model, prompts, 8, low)
        assert torch.equal(found, text[:, 6:])
    coarse = replace(get_recipe("kv-int8"), cache=Scheme(NARROW["int3"], "row"))
    low, reference = lower(model, coarse), greedy(model, prompts, 8)
    equal = greedy(low.model, prompts, 8, low) == reference
    assert not equal.all()
    steps = []
    low.model.register_forward_hook(lambda *given: steps.append(given))
    kept = kept_length(low, prompts, reference)
    assert torch.equal(kept, equal.cumprod(1).sum(1))
    assert len(steps) == min(8, kept.max() + 1)


def test_changed_tokens_and_lengths_are_those_that_were_predicted():
    model = random_gpt2(TINY)
    tokens = random_tokens(16, 40)
    windows, prompts, names = x2.Evaluator(model, tokens), x2.Evaluator(model, tokens[:, :8]), ("bf16", "fp8_e4m3")
    changed = pd.concat([x2_flips.changed_rows(windows, name, draws=2) for name in names], ignore_index=True)
    rows = [x2_flips.length_rows(prompts, name, 24, draws=2) for name in names]
    lengths = pd.concat(rows, ignore_index=True)
    assert changed.measured.is_monotonic_increasing and lengths.measured.is_monotonic_decreasing
    assert changed.ratio[1] == pytest.approx(1, abs=0.5) and lengths.ratio[1] == pytest.approx(1, abs=0.5)
    assert len(figures_x2.x2_recipes(pd.concat([changed, lengths])).get_yticks()) == 2


def test_changed_experts_are_those_that_were_predicted():
    table = x2_flips.expert_table(["w4a16-g32"], windows=8)
    assert table.ratio.between(0.7, 1.4).all() and (table.measured > 0).all()


def test_the_ratio_of_a_recipe_is_that_of_the_diagnosis(evaluator):
    """Four times the squared error with half of every rounding error, over the whole."""
    table = x2.growth_rows(evaluator, "fp8_e4m3").set_index("quantity")
    low = lower(evaluator.model, "fp8_e4m3")
    whole = evaluator.measure(low)
    realisations = ErrorSamples(Adjoint(low, evaluator.model, gradients="both"))
    for quantity in x2.QUANTITIES:
        want = growth(realisations, evaluator.model, evaluator.windows, whole, quantity)
        found = table.loc[quantity]
        assert (found.ratio, found.low, found.high) == pytest.approx((want.ratio, want.low, want.high))
