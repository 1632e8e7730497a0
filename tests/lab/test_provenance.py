"""Every table has, beside it, what wrote it."""

import json
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pandas as pd

from fragility_lab.reporting.tables import save_table
from fragility_lab.running import provenance


def test_a_table_says_what_wrote_it(tmp_path, monkeypatch):
    asked = {"notebook": "e2_predictor", "profile": "smoke", "parameters": {"windows": 16}}
    monkeypatch.setenv(provenance.ASKED, json.dumps(asked))
    save_table(pd.DataFrame({"a": [1]}), tmp_path, "second")
    monkeypatch.delenv(provenance.ASKED)
    save_table(pd.DataFrame({"a": [1]}), tmp_path, "first")
    known = json.loads((tmp_path / "provenance.json").read_text())
    assert [*known] == ["first", "second"]
    assert known["second"]["parameters"] == {"windows": 16} and "parameters" not in known["first"]
    assert {"device", "versions"} <= {*known["first"]}
    if provenance.commit():
        assert len(known["first"]["commit"]) == 40 and isinstance(known["first"]["clean"], bool)


def test_tables_that_are_saved_at_once_are_all_recorded(tmp_path):
    names = [f"table{number}" for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: provenance.record(tmp_path, name), names))
    assert {*json.loads((tmp_path / "provenance.json").read_text())} == {*names}


def test_tables_are_recorded_without_locks(tmp_path, monkeypatch):
    """As on Windows, which has no fcntl: half of the lab imports this module."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(provenance.__file__)["record"](tmp_path, "table")
    assert [*json.loads((tmp_path / "provenance.json").read_text())] == ["table"]


def test_a_damaged_record_is_begun_anew(tmp_path):
    (tmp_path / "provenance.json").write_text("{")
    save_table(pd.DataFrame({"a": [1]}), tmp_path, "table")
    assert [*json.loads((tmp_path / "provenance.json").read_text())] == ["table"]


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setattr(provenance, "PROJECT", provenance.PROJECT / "no such folder")
    provenance.commit.cache_clear()
    assert provenance.commit() == {}
    provenance.commit.cache_clear()
