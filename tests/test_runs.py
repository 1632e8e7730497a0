"""Specifications of runs and the store that keeps their results."""

from dataclasses import replace

import pandas as pd
import pytest

from fragility_lab.experiments.runs import RunSpec, RunStore, Specification, window_rows

SPEC = RunSpec("embedded", "embedded", "bf16", 64, 0, 4, 2, "cpu", "emulated")
FRAME = pd.DataFrame({"window": [0, 0, 1, 1], "layer": [0, 1, 0, 1], "risk": [1.0, 2.0, float("inf"), 4.0]})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("precision", "fp12", "a format must be one of fp32, .* got 'fp12'"),
        ("length", 0, "length must be at least 1, got 0"),
        ("windows", -1, "windows must be at least 1, got -1"),
        ("layernorm", "printed", "layernorm must be one of release, paper, got 'printed'"),
        ("transport", "exact", "transport must be one of release, operator_norm, power_iteration, got 'exact'"),
        ("execution", "auto", "execution must be one of native, emulated, got 'auto'"),
    ],
)
def test_bad_specifications_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **{field: value})


def test_specifications_are_hashable_and_every_field_changes_the_digest():
    changed = [
        replace(SPEC, **change)
        for change in (
            {"model": "gpt2"}, {"data": "x.txt"}, {"precision": "fp16"}, {"length": 65}, {"seed": 1}, {"windows": 5},
            {"batch": 1}, {"device": "cuda"}, {"execution": "native"}, {"layernorm": "paper"},
            {"transport": "operator_norm"}, {"inputs": "0123"},
        )
    ]  # fmt: skip
    assert len({SPEC, *changed}) == len({spec.digest for spec in (SPEC, *changed)}) == 13


def test_saved_run_comes_back_with_its_specification(tmp_path):
    store = RunStore(tmp_path)
    assert store.load(SPEC) is None
    store.save(SPEC, FRAME, {"seconds": 1.5})
    pd.testing.assert_frame_equal(store.load(SPEC), FRAME)
    assert store.metadata(SPEC)["seconds"] == 1.5
    assert RunSpec(**store.metadata(SPEC)["specification"]) == SPEC


def test_records_are_one_row_per_run_under_innermost_names(tmp_path):
    store, other = RunStore(tmp_path), replace(SPEC, seed=1)
    for spec, seconds in ((SPEC, 1.5), (other, 2.5)):
        store.save(
            spec, FRAME, {"seconds": seconds, "versions": {"torch": "2.13"}, "attention": {"monitored": "eager"}}
        )
    records = store.records([SPEC, other])
    assert records.run.tolist() == ["bf16-T64-seed0", "bf16-T64-seed1"]
    assert records[["seconds", "seed", "torch", "monitored"]].to_numpy().tolist() == [
        [1.5, 0, "2.13", "eager"],
        [2.5, 1, "2.13", "eager"],
    ]


def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    store = RunStore(tmp_path)
    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(SPEC, FRAME, {})
    assert list(tmp_path.iterdir()) == []
    assert store.load(SPEC) is None


def test_damaged_file_counts_as_unfinished_and_is_named(tmp_path):
    store = RunStore(tmp_path)
    store.path(SPEC).write_bytes(b"PAR1 not really")
    with pytest.warns(UserWarning, match=r"bf16-T64-seed0-.*\.parquet cannot be read and is computed again"):
        assert store.load(SPEC) is None


def test_window_rows_keep_one_row_per_window():
    assert window_rows(FRAME).window.tolist() == [0, 1]
    assert "layer" not in window_rows(FRAME)


def test_incomplete_specifications_cannot_be_made():
    with pytest.raises(TypeError, match="abstract methods '?label'?, '?size"):
        type("Incomplete", (Specification,), {})()
