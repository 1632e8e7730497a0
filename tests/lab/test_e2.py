"""E2 end to end on a tiny model: resuming, sharing, overflow, and errors before any work."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fragility_lab.experiments import e2
from fragility_lab.experiments.e2 import window_rows
from fragility_lab.inputs.loading import digest
from fragility_lab.running.engine import complete
from fragility_lab.running.runs import RunStore

GRID = e2.Grid("tiny", "tiny", ("bf16", "fp16"), (16, 24), (0, 1), windows=6, batch_tokens=48)


def run_grid(grid, inputs, folder):
    return complete(e2.MonitoredPasses, e2.specifications(grid, inputs), inputs, folder)


def test_grid_gives_every_window_of_every_run_once(inputs, tmp_path):
    rows = run_grid(GRID, inputs, tmp_path)
    windows = window_rows(rows)
    assert len(windows) == 2 * 2 * 2 * 6
    assert not windows.duplicated(["precision", "length", "seed", "window"]).any()
    assert (rows.groupby(["precision", "length", "seed", "window"]).layer.apply(list).map(len) == 3).all()
    assert ((windows.start % windows.length) == 0).all()


def test_two_runs_give_identical_values(inputs, tmp_path):
    first = run_grid(GRID, inputs, tmp_path / "first")
    second = run_grid(GRID, inputs, tmp_path / "second")
    pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_rerun_skips_finished_runs_and_resumes_identically(inputs, tmp_path, monkeypatch):
    whole = run_grid(GRID, inputs, tmp_path)
    missing = e2.specifications(GRID, inputs)[3]
    RunStore(tmp_path).path(missing).unlink()
    computed = []
    original = e2.MonitoredPasses.run

    def run(passes, spec, advance):
        computed.append(spec)
        return original(passes, spec, advance)

    monkeypatch.setattr(e2.MonitoredPasses, "run", run)
    resumed = run_grid(GRID, inputs, tmp_path)
    assert computed == [missing]
    pd.testing.assert_frame_equal(whole, resumed, check_exact=True)


def test_interrupt_keeps_the_runs_before_it(inputs, tmp_path, monkeypatch):
    original, done = e2.MonitoredPasses.run, []

    def interrupted(passes, spec, advance):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(spec)
        return original(passes, spec, advance)

    monkeypatch.setattr(e2.MonitoredPasses, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_grid(GRID, inputs, tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def test_precisions_share_the_reference_pass(inputs, tmp_path):
    base, shapes = inputs.model.base_model, []

    def count(module, args):
        if module is base:  # the monitored copies inherit the hook
            shapes.append(tuple(args[0].shape))

    base.register_forward_pre_hook(count)
    run_grid(replace(GRID, lengths=(16,), seeds=(0,)), inputs, tmp_path)
    assert shapes == [(3, 16), (3, 16)]  # two batches, for two precisions


def test_batching_changes_values_by_rounding_noise_only(inputs, tmp_path):
    single = run_grid(replace(GRID, batch_tokens=1), inputs, tmp_path)
    batched = run_grid(GRID, inputs, tmp_path)
    for name in ("mismatch", "combined", "no_transport"):
        np.testing.assert_allclose(single[name], batched[name], rtol=2e-2)


def test_stored_run_records_how_it_was_computed(inputs, tmp_path):
    run_grid(GRID, inputs, tmp_path)
    spec = e2.specifications(GRID, inputs)[0]
    record = RunStore(tmp_path).metadata(spec)
    assert record["versions"]["torch"] == torch.__version__
    assert record["specification"]["execution"] in ("native", "emulated")
    assert record["attention"] == {"monitored": "eager", "reference": "sdpa"}
    assert record["seconds"] > 0


def test_other_weights_are_another_run(inputs):
    spec = e2.specifications(GRID, inputs)[0]
    inputs.model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1
    changed = replace(inputs, digest=digest(inputs.model, inputs.stream))
    assert e2.specifications(GRID, changed)[0] != spec


def test_other_stored_buffers_are_other_weights(inputs):
    """DeepSeek-V3 chooses experts by a buffer; masks and rotations, which files do not have, count for nothing."""
    block, before = inputs.model.transformer.h[0], digest(inputs.model, inputs.stream)
    block.register_buffer("mask", torch.ones(2), persistent=False)
    assert digest(inputs.model, inputs.stream) == before
    block.register_buffer("bias_of_experts", torch.zeros(2))
    stored = digest(inputs.model, inputs.stream)
    block.bias_of_experts[0] = 1.0
    assert len({before, stored, digest(inputs.model, inputs.stream)}) == 3


def test_overflowing_windows_are_flagged_counted_and_never_zeroed(inputs, tmp_path):
    for block in inputs.model.transformer.h:
        block.mlp.c_proj.weight.mul_(3e5)  # beyond fp16's 65504, within bf16's range
    rows = run_grid(replace(GRID, lengths=(16,), seeds=(0,)), inputs, tmp_path)
    windows = window_rows(rows)
    fp16, bf16 = windows[windows.precision == "fp16"], windows[windows.precision == "bf16"]
    assert fp16.overflow.all()
    assert not bf16.overflow.any()
    assert not np.isfinite(fp16.mismatch).any()
    assert not np.isfinite(fp16.combined).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (128, 2048)}, r"must fit the context of 'embedded', 1024 tokens, got lengths \[128, 2048\]"),
        ({"windows": 40000}, "must hold 40000 windows of 16 tokens"),
        ({"precisions": ("bf17",)}, "a format must be one of .* got 'bf17'"),
        ({"seeds": ()}, "seeds must name at least one value, got none"),
        ({"seeds": (0, 1, 0)}, r"seeds must name each value once, got \[0, 1, 0\]"),
        ({"windows": 2}, "a correlation needs at least 3 windows, got 2"),
        ({"lengths": (16, 0)}, r"windows must have at least 1 token, got lengths \[16, 0\]"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
    ],
)
def test_impossible_grids_are_refused_before_any_work(change, message):
    grid = replace(GRID, model="embedded", data="embedded", lengths=(16,))
    with pytest.raises(ValueError, match=message):
        e2.load_inputs(replace(grid, **change))
