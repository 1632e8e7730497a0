"""Specifications of runs and the store that keeps their results."""

import json
import shutil
import warnings
from dataclasses import replace

import pandas as pd
import pyarrow.parquet as pq
import pytest

from fragility_lab.experiments.e2 import RunSpec, window_rows
from fragility_lab.running import runs
from fragility_lab.running.environment import STALE, versions
from fragility_lab.running.runs import RunStore, Specification

VERSIONS = versions()
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


def test_a_run_of_another_specification_counts_as_unfinished_and_is_named(tmp_path):
    store, other = RunStore(tmp_path), replace(SPEC, seed=1)
    store.save(other, FRAME, {})
    shutil.copy(store.path(other), store.path(SPEC))
    with pytest.warns(UserWarning, match=r"seed0-.*\.parquet must hold the run that its name says, but holds another"):
        assert store.load(SPEC) is None
    assert store.load(other) is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [("code_digest", lambda kind: "other"), ("versions", lambda: VERSIONS | {"torch": "2.6.0"})],
)
def test_a_stale_run_is_computed_again_unless_it_is_kept(tmp_path, monkeypatch, name, change):
    store = RunStore(tmp_path)
    store.save(SPEC, FRAME, {})
    assert not store.is_stale(SPEC)
    monkeypatch.setattr(runs, name, change)
    assert store.is_stale(SPEC) and store.load(SPEC) is None
    monkeypatch.setenv(STALE, "keep")
    pd.testing.assert_frame_equal(store.load(SPEC), FRAME)


def test_another_python_or_system_makes_no_run_stale(tmp_path, monkeypatch):
    store = RunStore(tmp_path)
    store.save(SPEC, FRAME, {})
    monkeypatch.setattr(runs, "versions", lambda: VERSIONS | {"python": "3.99.0", "platform": "elsewhere"})
    assert store.load(SPEC) is not None


def test_an_unknown_wish_for_stale_runs_is_refused(tmp_path, monkeypatch):
    store = RunStore(tmp_path)
    store.save(SPEC, FRAME, {})
    monkeypatch.setattr(runs, "code_digest", lambda kind: "other")
    monkeypatch.setenv(STALE, "yes")
    with pytest.raises(ValueError, match="STALE must be keep or unset, got 'yes'"):
        store.load(SPEC)


def test_rows_of_a_missing_run_are_not_left_out(tmp_path):
    store = RunStore(tmp_path)
    store.save(SPEC, FRAME, {})
    with pytest.raises(FileNotFoundError, match="the run bf16-T64-seed1 of E2 must be in .* is missing"):
        store.rows([SPEC, replace(SPEC, seed=1)])


def test_window_rows_keep_one_row_per_window():
    assert window_rows(FRAME).window.tolist() == [0, 1]
    assert "layer" not in window_rows(FRAME)


def test_incomplete_specifications_cannot_be_made():
    with pytest.raises(TypeError, match="abstract methods '?label'?, '?size"):
        type("Incomplete", (Specification,), {})()


def test_no_flipped_byte_changes_a_finished_run(tmp_path):
    """Each byte in turn: rows and record are read as they were written, or computed again with a warning."""
    store = RunStore(tmp_path)
    rows = pd.DataFrame({"window": range(20), "risk": [1 / (n + 1) for n in range(20)]})
    store.save(SPEC, rows, {"seconds": 1.0, "threads": 2})
    record = store.metadata(SPEC)
    path = store.path(SPEC)
    whole = path.read_bytes()
    silent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in range(0, len(whole), max(1, len(whole) // 1500)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            found = store.load(SPEC)
            if found is not None and not (found.equals(rows) and store.metadata(SPEC) == record):
                silent.append(place)
    assert not silent


def test_a_run_of_older_code_without_a_checksum_is_still_read(tmp_path, monkeypatch):
    """Only where stale runs are kept; a run of this code always has one."""
    store = RunStore(tmp_path)
    store.save(SPEC, FRAME, {})
    table = pq.read_table(store.path(SPEC))
    record = json.loads(table.schema.metadata[runs.METADATA_KEY])
    del record[runs.CHECKSUM]
    pq.write_table(table.replace_schema_metadata({runs.METADATA_KEY: json.dumps(record)}), store.path(SPEC))
    with pytest.warns(UserWarning, match="its rows and its record are not those that were written"):
        assert store.load(SPEC) is None
    monkeypatch.setattr(runs, "code_digest", lambda kind: "other")
    monkeypatch.setenv(STALE, "keep")
    pd.testing.assert_frame_equal(store.load(SPEC), FRAME)
