"""X1 end to end on a tiny model: estimates, their views by hand, resuming, and plans."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, tiny_inputs

from fragility_adjoint.mixed_precision import Contributions
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.theory import mismatch
from fragility_lab.experiments import e2, e3, x1, x1_plans
from fragility_lab.experiments.e2 import window_rows
from fragility_lab.reporting.report import read_tables
from fragility_lab.running.engine import complete
from fragility_lab.running.runs import RunStore
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower

GRID = e2.Grid("tiny", "tiny", ("bf16", "fp16"), (16,), (0,), windows=6, batch_tokens=48)
RUN = ["precision", "length", "seed"]


@pytest.fixture(scope="module")
def inputs():
    return tiny_inputs(random_gpt2(TINY))


@pytest.fixture(scope="module")
def source(inputs, tmp_path_factory):
    """The folder of E2's runs, and their rows."""
    folder = tmp_path_factory.mktemp("e2")
    return folder, complete(e2.MonitoredPasses, e2.specifications(GRID, inputs), inputs, folder)


@pytest.fixture(scope="module")
def estimates(inputs, source, tmp_path_factory):
    specs = x1.EstimateSpec.of(e2.specifications(GRID, inputs), probes=2, redraws=2)
    return complete(x1.Estimates, specs, inputs, tmp_path_factory.mktemp("x1"), source=source[0])


def estimator(inputs, precision, probes):
    low = lower(inputs.model, precision)
    set_attention(low.model, OBSERVED_EAGER)
    return Adjoint(low, probes=probes)


def test_rows_hold_the_estimates_of_e2s_windows(inputs, source, estimates):
    row = estimates[(estimates.precision == "fp16") & (estimates.window == 3)]
    start = window_rows(source[1]).query("precision == 'fp16' and window == 3").start.item()
    prediction = estimator(inputs, "fp16", 2)(inputs.stream[None, start : start + 16])
    assert row.predicted.unique() == pytest.approx([prediction.windows.predicted.item()], rel=1e-6)
    assert row.c2.sum() == pytest.approx(prediction.contributions.c2.sum() / 2, rel=1e-6)
    single = estimator(inputs, "fp16", 1)(inputs.stream[None, start : start + 16])
    assert row.one_probe.unique() == pytest.approx([single.windows.predicted.item()], rel=1e-6)
    assert row.predicted.iloc[0] == pytest.approx((row.c2.sum() / row.final_norm.iloc[0] ** 2) ** 0.5, rel=1e-6)


def test_prediction_and_signals_stand_side_by_side(source, estimates):
    windows = x1.window_table(estimates, source[1])
    assert len(windows) == 12 and not windows.overflow.any()
    assert (windows.ratio == windows.adjoint / windows.mismatch).all()
    runs = x1.run_table(windows).set_index("precision")
    bf16 = windows[windows.precision == "bf16"]
    assert runs.loc["bf16", "adjoint_pearson"] == pytest.approx(np.corrcoef(bf16.adjoint, bf16.mismatch)[0, 1])
    assert runs.loc["bf16", "mean_ratio"] == pytest.approx(bf16.ratio.mean())


def test_draws_of_the_mismatch_say_how_well_it_can_be_predicted(source, estimates):
    windows = x1.window_table(estimates, source[1])
    bf16 = windows[windows.precision == "bf16"].reset_index(drop=True)
    draws = bf16[["mismatch", f"{x1.REDRAWN}0", f"{x1.REDRAWN}1"]]
    run = x1.run_table(bf16).iloc[0]
    assert run.between_draws == pytest.approx(draws.corr().to_numpy()[[0, 0, 1], [1, 2, 2]].mean())
    assert run.ceiling == pytest.approx(max(run.between_draws, 0) ** 0.5)
    each = [np.corrcoef(draws[name], bf16.adjoint)[0, 1] for name in draws]
    assert run.adjoint_with_each == pytest.approx(np.mean(each))
    assert run.adjoint_with_mean == pytest.approx(np.corrcoef(draws.to_numpy().mean(1), bf16.adjoint)[0, 1])
    overflowed = bf16.assign(**{f"{x1.REDRAWN}0": [np.inf, *draws[f"{x1.REDRAWN}0"][1:]]})
    assert x1.run_table(overflowed).between_draws.notna().all()
    assert "between_draws" not in x1.run_table(bf16.drop(columns=list(draws)[1:]))


def test_a_redraw_rounds_the_same_function_otherwise(inputs, source, estimates):
    """Another mismatch of the same size; the model itself moves by less than rounding moves it."""
    tokens = inputs.stream[None, :16]
    model, low = x1.Estimates(inputs, RunStore(source[0]), source[0]).redrawn("bf16", "native", 0)
    with torch.no_grad():
        moved = mismatch(final_hidden(model, tokens), final_hidden(inputs.model, tokens)).item()
    windows = x1.window_table(estimates, source[1]).query("precision == 'bf16'")
    assert 0 < moved < windows.mismatch.mean()
    assert not np.isclose(windows[f"{x1.REDRAWN}0"], windows.mismatch, rtol=1e-3).any()
    assert windows[f"{x1.REDRAWN}0"].mean() == pytest.approx(windows.mismatch.mean(), rel=0.15)
    assert low.model.config._attn_implementation == OBSERVED_EAGER


def test_mean_prediction_is_the_mean_mismatch(source, estimates):
    windows = x1.window_table(estimates, source[1])
    assert windows.groupby("precision").ratio.mean().between(0.85, 1.15).all()


def test_shares_of_sites_add_up(estimates):
    shares = x1.site_shares(estimates)
    assert shares.sum(axis=1).to_numpy() == pytest.approx(np.ones(2))
    assert {"residual", "norm", "scores", "mlp"} <= set(shares)


def test_a_window_that_overflowed_has_no_prediction(source, estimates):
    runs = source[1].assign(overflow=source[1].window == 2)
    kept = estimates[estimates.window != 2]
    table = x1.run_table(x1.window_table(kept, runs))
    assert table.overflowed.tolist() == [1, 1] and table.windows.tolist() == [5, 5]


@pytest.fixture(scope="module")
def patches(inputs, source, tmp_path_factory):
    specs = e3.PatchSpec.of(e2.specifications(GRID, inputs), windows=2, noisy_windows=2, realisations=4)
    return complete(e3.Patches, specs, inputs, tmp_path_factory.mktemp("e3"), source=source[0])


def test_blocks_are_ranked_without_their_output(estimates, patches):
    ranked = x1.ranking_table(estimates, patches)
    assert len(ranked) == 4
    row = ranked.iloc[0]
    inside = estimates[
        (estimates.precision == row.precision) & (estimates.window == row.window) & (estimates.layer >= 0)
    ]
    assert inside.block_output.any()
    c2 = inside[~inside.block_output].groupby("layer").c2.sum()
    effects = patches[(patches.precision == row.precision) & (patches.window == row.window)].set_index("layer")
    average = effects.filter(like=e3.REALISATION).mean(axis=1)
    assert row.adjoint_average == pytest.approx(c2.corr(average, method="spearman"))
    assert row.score_single == pytest.approx(effects.risk.corr(effects.exact_reduction, method="spearman"))


def test_effects_are_averaged_over_more_and_more_realisations(estimates, patches):
    table = x1.realisation_table(estimates, patches)
    ranked = x1.ranking_table(estimates, patches).set_index(e3.WINDOW)
    by_window = table.set_index(["realisations", "ranked_by", *e3.WINDOW]).spearman.sort_index()
    assert by_window.groupby(level=[0, 1]).size().to_dict() == {
        (count, name): 4
        for count in (1, 2, 4)
        for name in ("adjoint", "score", "measurement")
        if (count, name) != (4, "measurement")  # no other four are left
    }
    for window, row in ranked.iterrows():
        assert by_window[4, "adjoint", *window] == row.adjoint_average
        assert by_window[4, "score", *window] == row.score_average
        effects = patches.set_index(e3.WINDOW).sort_index().loc[window].filter(like=e3.REALISATION)
        pairs = effects.T.groupby([0, 0, 1, 1]).mean().T
        assert by_window[2, "measurement", *window] == pytest.approx(pairs[0].corr(pairs[1], method="spearman"))
        each = effects.corr(method="spearman").to_numpy()
        assert by_window[1, "measurement", *window] == pytest.approx((each.sum() - 4) / 12)


def test_summary_counts_the_runs_in_which_the_prediction_is_better():
    measures = ("pearson", "spearman", "retrieval")
    columns = [f"{signal}_{measure}" for signal in ("adjoint", "combined") for measure in measures]
    runs = pd.DataFrame([[0.9, 0.8, 0.7, 0.3, 0.4, 0.7], [0.5, 0.9, 0.8, 0.6, 0.2, 0.1]], columns=columns)
    columns = ["adjoint_single", "score_single", "adjoint_average", "score_average"]
    rankings = pd.DataFrame([[0.5, 0.6, 0.7, 0.6], [0.5, 0.4, 0.9, 0.8]], columns=columns)
    table = x1.summary(runs, rankings)
    assert table.above.tolist() == [1, 2, 1, 1, 2] and (table.runs == 2).all()
    assert table.adjoint.tolist() == pytest.approx([0.7, 0.85, 0.75, 0.5, 0.8])
    assert table.score.tolist() == pytest.approx([0.45, 0.3, 0.4, 0.5, 0.7])


def test_rerun_skips_finished_runs(inputs, source, tmp_path, monkeypatch):
    given = x1.Estimates, x1.EstimateSpec.of(e2.specifications(GRID, inputs)), inputs, tmp_path
    whole = complete(*given, source=source[0])
    monkeypatch.setattr(x1.Estimates, "run", lambda *_: pytest.fail("computed again"))
    pd.testing.assert_frame_equal(complete(*given, source=source[0]), whole)


def test_windows_of_several_seeds_are_computed_once_and_alike(inputs, tmp_path, monkeypatch):
    """25 windows, of which each seed draws 20: the runs of each seed alone give the same rows."""
    grid = dataclasses.replace(GRID, precisions=("bf16",), seeds=(0, 1), windows=20)
    sources = e2.specifications(grid, inputs)
    complete(e2.MonitoredPasses, sources, inputs, tmp_path / "e2")
    computed, estimated = [], x1.Estimates._estimated
    monkeypatch.setattr(
        x1.Estimates, "_estimated", lambda self, *given: computed.append(given[1]) or estimated(self, *given)
    )
    specs = x1.EstimateSpec.of(sources, redraws=1)
    together = complete(x1.Estimates, specs, inputs, tmp_path / "together", source=tmp_path / "e2")
    assert len(computed) == len(set(computed)) < 40
    alone = [complete(x1.Estimates, [s], inputs, tmp_path / f"{s.label}", source=tmp_path / "e2") for s in specs]
    pd.testing.assert_frame_equal(together, pd.concat(alone, ignore_index=True))
    assert len(computed) > 40


@pytest.mark.parametrize("options", [{"probes": 0}, {"redraws": -1}])
def test_counts_out_of_range_are_named(inputs, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        x1.EstimateSpec.of(e2.specifications(GRID, inputs), **options)


def test_plans_run_on_the_windows_that_hold_the_tokens(inputs):
    source = e2.specifications(GRID, inputs)[0]
    counts = {tokens: x1_plans.PlanSpec(source, tokens).windows for tokens in (16, 47, 48, 10_000)}
    assert counts == {16: 1, 47: 2, 48: 3, 10_000: 6}
    with pytest.raises(ValueError, match="a window of 16 at least, got 15"):
        x1_plans.PlanSpec(source, 15)


@pytest.mark.parametrize(("worker", "kind"), [(x1.Estimates, x1.EstimateSpec), (x1_plans.Plans, x1_plans.PlanSpec)])
def test_missing_runs_of_e2_are_named(inputs, tmp_path, worker, kind):
    specs = kind.of(e2.specifications(GRID, inputs))
    with pytest.raises(FileNotFoundError, match="run the notebook of E2 first"):
        complete(worker, specs, inputs, tmp_path / "x1", source=tmp_path / "empty")


@pytest.fixture(scope="module")
def plans(inputs, source, tmp_path_factory):
    options = {"tokens": 48, "probes": 2, "draws": 3, "blocks": (1, 2), "sites": (1, 2)}
    specs = x1_plans.PlanSpec.of(e2.specifications(GRID, inputs), **options)
    return complete(x1_plans.Plans, specs, inputs, tmp_path_factory.mktemp("plans"), source=source[0])


def test_windows_that_overflow_count_for_no_plan(inputs, source, plans, tmp_path):
    """The first of four windows overflows: plans run on the next three; all overflow: there are no plans."""
    spec = x1_plans.PlanSpec(e2.specifications(GRID, inputs)[0], 48, 2, 3, (1,), (1,))
    worker, seen = x1_plans.Plans(inputs, RunStore(tmp_path), source[0]), []
    rows = worker.source.require(spec.source)
    for overflowing in ({0}, {*rows.window}):
        changed = rows.assign(overflow=rows.window.isin(overflowing))
        worker.source.require = lambda asked, changed=changed: changed
        found = worker.run(spec, seen.append)
        assert found.empty == (overflowing != {0})
    nothing = rows[rows.window.isin([1, 2, 3])]
    worker.source.require = lambda asked: nothing.assign(window=nothing.window - 1)
    again = worker.run(spec, seen.append)
    worker.source.require = lambda asked: rows.assign(overflow=rows.window == 0)
    pd.testing.assert_frame_equal(worker.run(spec, seen.append), again)
    with pytest.raises(ValueError, match="plans need windows with a finite mismatch, got none"):
        x1_plans.plan_table(pd.DataFrame())


def test_every_choice_has_a_prediction_and_a_measurement(plans):
    chosen = plans.groupby(["unit", "budget"]).chosen_by.unique()
    assert {"adjoint", "first", "last", "score", "patching", "greedy", "random"} == set(chosen["blocks", 1])
    assert {"adjoint", "each"} <= set(chosen["sites", 2])
    assert plans[["predicted", "measured"]].gt(0).all(axis=None)
    ratio = plans.predicted / plans.measured
    assert ratio.between(0.8, 1.25).all(), "three windows of 16 tokens"


def test_greedy_choice_is_the_best_single_block(plans):
    runs = plans[(plans.unit == "blocks") & (plans.budget == 1)].groupby("precision")
    assert len(runs) == 2
    for _, run in runs:
        greedy = run[run.chosen_by == "greedy"].measured.item()
        assert greedy <= run.measured.min()


def test_plans_without_anything_kept_measure_e2s_mismatch(plans, source):
    for precision, rows in source[1][source[1].window < 3].groupby("precision"):
        none = plans[(plans.precision == precision) & (plans.chosen_by == "none")]
        assert none.measured.item() == pytest.approx(window_rows(rows).mismatch.mean(), rel=0.03)


def test_baselines_are_compared_at_equal_budget(plans):
    against = x1_plans.against_baselines(plans)
    bf16 = plans[(plans.precision == "bf16") & (plans.unit == "blocks") & (plans.budget == 2)]
    measured = bf16.groupby("chosen_by").measured.mean()
    row = against.loc["bf16", 16, 0, "blocks", 2]
    assert row.random == pytest.approx(measured.random / measured.adjoint)
    assert row["first"] == pytest.approx(measured["first"] / measured.adjoint)
    sites = plans[(plans.precision == "bf16") & (plans.unit == "sites") & (plans.budget == 1)]
    best = sites[sites.chosen_by == "each"].measured.min() / sites[sites.chosen_by == "adjoint"].measured.item()
    assert against.loc["bf16", 16, 0, "sites", 1].each == pytest.approx(best)


def test_table_says_how_far_predictions_are_off(plans):
    table = x1_plans.plan_table(plans).set_index(["unit", "budget", "chosen_by"])
    error = (plans.predicted / plans.measured - 1).abs()
    assert table.largest_error.max() == pytest.approx(error.max())
    assert table.loc["blocks", 0, "none"].measured_of_none == 1
    assert table.plans.sum() == len(plans)


def test_contributions_of_a_plan_are_those_of_its_label(inputs):
    windows = inputs.stream[None, :16]
    contributions = Contributions(inputs.model, estimator(inputs, "bf16", 1)(windows))
    assert contributions.keep(blocks=(0, 1)).predicted < contributions.keep().predicted


def test_a_summary_counts_runs_with_numbers():
    agreement = {"adjoint": [0.5, 0.2, np.nan], "combined": [0.1, 0.3, np.nan]}
    measures = ("pearson", "spearman", "retrieval")
    runs = pd.DataFrame({f"{by}_{measure}": values for measure in measures for by, values in agreement.items()})
    ranked = pd.DataFrame({f"{by}_{how}": [0.5] for by in ("adjoint", "score") for how in ("single", "average")})
    table = x1.summary(runs, ranked).set_index("quantity")
    assert table.runs.tolist() == [2, 2, 2, 1, 1] and table.above.tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("results", ["embedded", "embedded-llama", "smollm2-135m", "gemma3-270m"])
def test_committed_summaries_are_those_of_the_tables_beside_them(results):
    known = read_tables(results)
    expected = x1.summary(known["x1_runs"], known["x1_ranking"])
    pd.testing.assert_frame_equal(known["x1_summary"], expected, rtol=1e-4, atol=1e-6)
