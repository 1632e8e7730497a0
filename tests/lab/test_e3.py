"""E3 end to end on a tiny model: what is read from E2, resuming, tables by hand, and overflows."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from test_e2 import GRID

from fragility_core.surrogates.patching import Patching
from fragility_core.theory import mismatch
from fragility_lab.experiments import e2, e3
from fragility_lab.experiments.e2 import window_rows
from fragility_lab.running.engine import complete
from fragility_lab.running.runs import RunStore
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

OPTIONS = {"windows": 4, "noisy_windows": 1, "realisations": 2}


@pytest.fixture
def source(inputs, tmp_path):
    """The folder of E2's runs, and their rows."""
    return tmp_path / "e2", complete(e2.MonitoredPasses, e2.specifications(GRID, inputs), inputs, tmp_path / "e2")


def patches(inputs, source, folder, **options):
    return complete(e3.Patches, specifications(inputs, **options), inputs, folder, source=source[0])


def specifications(inputs, **options):
    return e3.PatchSpec.of(e2.specifications(GRID, inputs), **OPTIONS | options)


def test_the_worst_windows_of_every_run_are_patched(inputs, source, tmp_path):
    rows = patches(inputs, source, tmp_path / "e3")
    assert len(rows) == 8 * 4 * 3
    for identity, run in source[1].groupby(["precision", "length", "seed"]):
        chosen = rows.set_index(["precision", "length", "seed"]).loc[identity].reset_index()
        worst = window_rows(run).nlargest(4, "mismatch").window.tolist()
        assert chosen[chosen.layer == 0].window.tolist() == worst
        scores = run.set_index(["window", "layer"]).risk
        assert (chosen.set_index(["window", "layer"]).risk == scores.loc[list(zip(chosen.window, chosen.layer))]).all()
    assert (rows.recompute_gap <= 0.02 * rows.source_mismatch).all(), "E2 batches its windows"


def test_effects_are_those_of_the_windows_tokens(inputs, source, tmp_path):
    rows = patches(inputs, source, tmp_path / "e3")
    row = rows[(rows.precision == "fp16") & (rows.place == 2)].iloc[0]
    start = window_rows(source[1]).set_index(["precision", "length", "seed", "window"]).start
    start = start.loc[(row.precision, row.length, row.seed, row.window)]
    tokens = inputs.stream[None, start : start + row.length]
    with torch.no_grad():
        reference = inputs.model.base_model(tokens).last_hidden_state
    base, first, *_ = mismatch(Patching(inputs.model, lower(inputs.model, "fp16"))(tokens), reference)
    assert row.base_mismatch == pytest.approx(base.item(), rel=1e-6)
    assert row.exact_reduction == pytest.approx((base - first).item(), rel=1e-6)


def test_rerun_skips_finished_runs_and_resumes_identically(inputs, source, tmp_path, monkeypatch):
    whole = patches(inputs, source, tmp_path / "e3")
    missing = sorted((tmp_path / "e3").glob("*.parquet"))[3]
    missing.unlink()
    computed = []
    original = e3.Patches.run
    monkeypatch.setattr(
        e3.Patches, "run", lambda worker, spec, advance: computed.append(spec.label) or original(worker, spec, advance)
    )
    resumed = patches(inputs, source, tmp_path / "e3")
    assert len(computed) == 1 and missing.name.startswith(computed[0])
    pd.testing.assert_frame_equal(whole, resumed, check_exact=True)


def test_no_two_windows_of_a_run_are_rounded_with_the_same_random_bits(inputs, source, tmp_path, monkeypatch):
    seeds, original = [], LowPrecision.stochastic
    monkeypatch.setattr(LowPrecision, "stochastic", lambda low, seed: seeds.append(seed) or original(low, seed))
    spec = specifications(inputs, noisy_windows=4)[0]
    e3.Patches(inputs, RunStore(tmp_path), source[0]).run(spec, lambda _: None)
    assert len(seeds) == len(set(seeds)) == 4 * 2


def test_progress_adds_up(inputs, source, tmp_path):
    spec = specifications(inputs)[0]
    counted = []
    e3.Patches(inputs, RunStore(tmp_path), source[0]).run(spec, counted.append)
    assert sum(counted) == spec.size


def test_without_e2_it_says_what_to_run(inputs, tmp_path):
    with pytest.raises(FileNotFoundError, match="bf16-T24-seed0 of E2 must be in .* run the notebook of E2 first"):
        patches(inputs, (tmp_path / "nothing", None), tmp_path / "e3")


def test_a_run_of_overflows_has_no_rows_and_stops_no_other(inputs, tmp_path):
    for block in inputs.model.transformer.h:
        block.mlp.c_proj.weight.mul_(3e5)  # beyond fp16's range, within bf16's
    complete(e2.MonitoredPasses, e2.specifications(GRID, inputs), inputs, tmp_path / "e2")
    rows = patches(inputs, (tmp_path / "e2", None), tmp_path / "e3")
    assert set(rows.precision) == {"bf16"}
    assert np.isfinite(rows.exact_reduction).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": 0}, "windows must be between 1 and E2's 6, got 0"),
        ({"windows": 7}, "windows must be between 1 and E2's 6, got 7"),
        ({"noisy_windows": 5}, "noisy_windows must be between 0 and windows, got 5 of 4"),
        ({"realisations": 0}, "realisations must be at least 1, got 0"),
    ],
)
def test_impossible_counts_are_refused(inputs, change, message):
    with pytest.raises(ValueError, match=message):
        specifications(inputs, **change)


def test_other_runs_of_e2_are_other_runs_of_e3(inputs):
    spec = specifications(inputs)[0]
    others = [replace(spec, windows=3), replace(spec, source=replace(spec.source, inputs="0"))]
    assert len({spec.digest, *(other.digest for other in others)}) == 3


@pytest.fixture
def table_rows():
    """Two windows of three blocks: the score right in the first, reversed in the second."""
    nothing = [np.nan] * 3
    rows = pd.DataFrame(
        {
            "window": [4, 4, 4, 1, 1, 1],
            "layer": [0, 1, 2] * 2,
            "risk": [3.0, 2.0, 1.0] * 2,
            "exact_reduction": [0.3, 0.2, 0.1, 0.1, 0.2, 0.3],
            "base_mismatch": 1.0,
            "recompute_gap": [0.1] * 3 + [0.3] * 3,
            "stochastic_reduction_0": [0.3, 0.2, 0.1, *nothing],
            "stochastic_reduction_1": [0.3, 0.1, 0.2, *nothing],
        }
    )
    return e3.ranked(rows).assign(precision="bf16", length=16, seed=0)


def test_tables_by_hand(table_rows):
    windows = e3.window_table(table_rows)
    assert windows.spearman.tolist() == pytest.approx([1, -1])
    assert windows.pairwise_accuracy.tolist() == [1, 0]
    assert windows.top1_hit.tolist() == [1, 0]
    assert windows.noise_floor[0] == pytest.approx(0.75) and np.isnan(windows.noise_floor[1])
    assert windows.between_realisations[0] == pytest.approx(0.5)
    run = e3.run_table(windows).iloc[0]
    assert (run.spearman, run.pairwise_accuracy, run.top1_hit, run.windows) == (0, 0.5, 0.5, 2)
    assert run.recompute_gap == pytest.approx(0.2)
    assert run.noise_floor == pytest.approx(0.75), "of the windows where it was measured"


def test_runs_without_a_finite_window_are_refused():
    with pytest.raises(ValueError, match="every window of E2's runs overflowed"):
        e3.window_table(pd.DataFrame())


def test_rank_counts_by_hand(table_rows):
    assert e3.rank_counts(table_rows).to_numpy().tolist() == [[1, 0, 1], [0, 2, 0], [1, 0, 1]]
    tied = e3.ranked(table_rows.assign(risk=[1.0, 1.0, 0.0, 3.0, 2.0, 1.0]))
    assert e3.rank_counts(tied).to_numpy().tolist() == [[0.5, 0.5, 1], [0.5, 1.5, 0], [1, 0, 1]]
