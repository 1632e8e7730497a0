"""X2's rivals without their libraries: tasks, budgets, differences, and the committed plans measured against ours.

tests/peers/test_rivals.py runs the libraries.
"""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_tokens

from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.text import load_rows, tokenize
from fragility_lab.paths import OUTPUTS
from fragility_lab.reporting import figures_x2
from fragility_peers import own, rivals, tasks
from fragility_peers.ladders import LADDERS, get_ladder
from fragility_quantization.operands import rounded_weight
from fragility_quantization.recipes import LINEAR

SMALL = "own int4 int8"


@pytest.fixture(scope="module")
def benchmark(reference_model_path, tmp_path_factory):
    tokens = random_tokens(7, 24, vocabulary=257)
    return rivals.Benchmark(str(reference_model_path), tokens[:3], tokens[3:], tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def tables(benchmark):
    return rivals.compare_all(benchmark, [SMALL], [0.1, 0.5], 2)


def test_the_model_computes_as_before(reference_model, benchmark):
    """Its Conv1D are nn.Linear, with the same numbers."""
    with torch.no_grad():
        want, got = (m(benchmark.held).logits for m in (reference_model, benchmark.loaded))
        headless = tasks.without_head(benchmark.loaded)(benchmark.held).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(headless, got, rtol=0, atol=0)
    assert len(benchmark.paths) == 16 and all(
        type(benchmark.loaded.get_submodule(p)) is torch.nn.Linear for p in benchmark.paths
    )


def test_windows_are_not_measured_on_that_methods_have_seen():
    stream = Inputs(None, torch.arange(1000), "")
    known, held = rivals.split_windows(stream, 10, 20, 30, 0)
    assert known.shape == (20, 10) and held.shape == (30, 10)
    assert not set(known[:, 0].tolist()) & set(held[:, 0].tolist())
    with pytest.raises(ValueError, match="held must be at least 2"):
        rivals.split_windows(stream, 10, 20, 1, 0)


def test_one_layer_alone_is_measured_as_by_hand(benchmark, tables):
    path = benchmark.paths[6]
    by_hand = tasks.linear_model(benchmark.model)
    weight = by_hand.get_submodule(path).weight
    weight.data = rounded_weight(by_hand, f"{path}.weight", weight.data, LINEAR["w4a16-g32"].weights)
    with torch.no_grad():
        exact, changed = (m(benchmark.held).logits.double().log_softmax(-1) for m in (benchmark.loaded, by_hand))
    row = tables["layers"].query("unit == @path").iloc[0]
    assert row.measured == pytest.approx(float((exact.exp() * (exact - changed)).sum(-1).mean()), rel=1e-9)
    assert row.rung == "w4a16-g32" and row.layers == 1


def test_plans_are_within_their_budgets_and_better_than_chance(benchmark, tables):
    plans, summary = tables["plans"], rivals.summary(tables["plans"])
    check_plans(plans, list(benchmark.sizes.values()))
    assert set(plans.chosen_by) == {"ours", "oracle", "random"} and len(plans) == 8
    assert (summary.ours < summary.random).all() and (summary.better == "").all()
    ranking = rivals.ranking(tables["layers"]).set_index("method")
    assert ranking.spearman.min() > 0.7 and 0.3 < ranking["median"].ours < 1.5  # random weights, 72 tokens
    assert set(tables["costs"].method) == {"ours", "oracle"} and (tables["costs"].seconds > 0).all()
    assert figures_x2.x2_rivals(summary).get_ylabel() == "share of random's KL"


def check_plans(plans, sizes):
    """What holds for every table of plans: the bits of the choice are those it has, within the budget's."""
    for row in plans.itertuples():
        bits = [get_ladder(row.ladder).bits[ord(letter) - ord("a")] for letter in row.choice]
        assert np.dot(bits, sizes) / sum(sizes) == pytest.approx(row.bits, rel=1e-5)
        assert row.bits <= row.budget_bits * (1 + 1e-5)
    theirs = plans[plans.chosen_by == plans.rival]
    assert np.allclose(theirs.bits, theirs.budget_bits, rtol=1e-5)
    assert plans.kl.gt(0).all() and plans.kl_low.le(plans.kl).all() and plans.kl.le(plans.kl_high).all()


@pytest.mark.parametrize("name", ["embedded", "embedded-llama"])
def test_committed_plans(name):
    """Every library's plans are there, in six budgets each, with ours at exactly their size."""
    folder, model = OUTPUTS / name / "tables", tasks.linear_model(name)
    plans, summary = (pd.read_csv(folder / f"x2_rivals{end}.csv") for end in ("_plans", ""))
    check_plans(plans, [model.get_submodule(path).weight.numel() for path in tasks.layer_paths(model)])
    for _, group in plans.groupby(["ladder", "rival"]):
        assert group.budget.nunique() == 6 and {"ours", "oracle", "random"} < set(group.chosen_by)
    again = rivals.summary(plans)
    pd.testing.assert_frame_equal(again[summary.columns], summary, rtol=1e-4)
    assert {"modelopt", "autoround", "olive"} == {ladder.split()[0] for ladder in summary.ladder}
    assert figures_x2.x2_rivals_difference(summary).get_xlabel().startswith("KL of our plan")


def test_a_committed_plan_of_olive_measures_again():
    """Its quantizer is our asymmetric scheme, so that its plan can be measured without it."""
    plans = pd.read_csv(OUTPUTS / "embedded" / "tables" / "x2_rivals_plans.csv").query("ladder == 'olive int4 int8'")
    row = plans[plans.chosen_by == "kld_gradient"].iloc[0]
    stream = tokenize(load_rows("embedded"), load_tokenizer("embedded"))
    _, held = rivals.split_windows(Inputs(None, stream, ""), 128, 8, 16, 0)
    model = tasks.linear_model("embedded")
    with torch.no_grad():
        exact = tasks.log_probabilities(model, held)
        for path, letter in zip(tasks.layer_paths(model), row.choice, strict=True):
            weight = model.get_submodule(path).weight
            weight.data = get_ladder(row.ladder).rungs[ord(letter) - ord("a")].ours.weights.round(weight.data)
        found = np.mean(tasks.divergences(model, held, exact))
    assert found == pytest.approx(row.kl, rel=1e-3)


@pytest.mark.parametrize("budget", [4.0, 4.7, 6.1, 8.0])
def test_no_plan_is_better(budget):
    errors = np.random.default_rng(0).uniform(size=(5, 3))
    sizes, ladder = [3, 1, 4, 1, 5], get_ladder("autoround mxfp4 int4 int8")
    (best,) = own.best_plans(errors, sizes, ladder, [budget])
    within = [
        plan for plan in product(range(3), repeat=5)
        if np.dot(sizes, [ladder.bits[r] for r in plan]) <= budget * sum(sizes) * (1 + 1e-9)
    ]  # fmt: skip
    want = min(rivals.total(errors, plan) for plan in within)
    assert tuple(best) in within and rivals.total(errors, best) == pytest.approx(want)


def test_who_is_better_follows_the_interval():
    plan = pd.DataFrame({"choice": ["ab", "ba"], "difference_low": [-2.0, 0.1], "difference_high": [-1.0, 0.2]})
    (_, mine), (_, theirs) = plan.iterrows()
    assert rivals.better(mine, theirs) == "ours" and rivals.better(theirs, mine) == "rival"
    assert rivals.better(mine, mine) == "same" and rivals.better(mine, None) == ""
    assert rivals.better(mine.replace(-1.0, 1.0), theirs) == "open"
    kl = rivals.interval("kl", np.array([1.0, 2.0, 3.0]))
    assert kl["kl"] == 2 and kl["kl_high"] - 2 == pytest.approx(4.303 * 1 / 3**0.5, rel=1e-3)


def test_ladders_go_up_and_name_a_recipe():
    for ladder in LADDERS.values():
        assert ladder.bits == sorted(ladder.bits)
        assert all((rung.recipe is None) == (rung.name == "none") for rung in ladder.rungs)
    with pytest.raises(ValueError, match="a ladder must be one of modelopt fp8, .*, got 'fp8'"):
        get_ladder("fp8")


def test_what_cannot_be_asked_is_said(benchmark, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="a task must be"):
        tasks.carry_out({"kind": "sing", "model": benchmark.model, "ladder": SMALL, "calibration": [[1]]})
    monkeypatch.setattr(rivals, "PEERS", tmp_path / "python")
    with pytest.raises(OSError, match="there is no .*python: make rivals"):
        benchmark.ask(get_ladder("olive int4 int8"), "refuse")
    monkeypatch.setattr(rivals, "PEERS", "/bin/false")
    with pytest.raises(RuntimeError, match="the driver failed"):
        benchmark.ask(get_ladder("olive int4 int8"), "refuse")


def test_finished_answers_are_kept(benchmark, monkeypatch, tmp_path):
    """A second question of the same kind starts no process."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "{\\"3 bits\\": \\"no\\"}" > "$4"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(rivals, "PEERS", fake)
    first = benchmark.ask(get_ladder("olive int4 int8"), "refuse")
    monkeypatch.setattr(rivals, "PEERS", tmp_path / "none")
    assert benchmark.ask(get_ladder("olive int4 int8"), "refuse") == first == {"3 bits": "no"}
    assert not list(benchmark.folder.glob("*.task"))
