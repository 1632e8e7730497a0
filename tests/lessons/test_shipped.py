"""Shipped results are those that the code computes: a part of each is computed again.

The plans of notebook 7 are compared in test_lessons_adjoint_predictor.
"""

import numpy as np
import pytest

from fragility_lessons import shipped, shipping
from fragility_lessons.constants import summarize_slack
from fragility_lessons.explorers import Explorer, listed
from fragility_lessons.pictures import FORMATS

# Sums round in another order on another CPU. Single draws move by a few roundings, quantiles of thousands hardly.
CLOSE = 0.05
ROOM = 2_500_000  # bytes


@pytest.fixture(scope="module")
def bf16():
    return shipping.slack_of("bf16")


def test_files_are_small_and_have_every_format():
    files = {path.name: path.stat().st_size for path in shipped.FOLDER.rglob("*.*")}
    drawn = {f"{name}.json.gz" for name in listed()}
    tables = (shipped.KERNELS, shipped.QUANTILES, shipped.SUMMARY, shipped.SITES, shipped.READINGS, shipped.TRANSPORT)
    assert files.keys() == {path.name for path in (shipped.PLANS, *tables)} | drawn
    assert sum(files.values()) < ROOM
    for table in (shipped.constants(), shipped.slack_quantiles(), shipped.slack_summary()):
        assert set(table.format) == set(FORMATS)


def test_shipped_slack_is_that_of_the_kernels(bf16):
    keys = ["format", "statement", "share"]
    tables = shipped.slack_quantiles(), shipping.slack_quantiles(bf16)
    known, found = (table.set_index(keys).slack for table in tables)
    known = known.loc[found.index]
    assert len(known) == 7 * shipping.SHARES
    for share in (0.05, 0.5, 0.9):
        old, new = (table.xs(share, level="share") for table in (known, found))
        np.testing.assert_allclose(old, new, rtol=CLOSE)


def test_the_shipped_summary_is_that_of_the_kernels(bf16):
    known = shipped.slack_summary().query("format == 'bf16'").reset_index(drop=True)
    found = summarize_slack(bf16).reset_index()
    assert known.statement.tolist() == found.statement.tolist() and known.draws.tolist() == found.draws.tolist()
    np.testing.assert_allclose(known[["median", "95 %"]], found[["median", "95 %"]], rtol=CLOSE)
    np.testing.assert_allclose(known.exact, found.exact, atol=0.01)


def test_another_format_would_be_noticed(bf16):
    """The comparisons above can fail."""
    other = shipped.slack_summary().query("format == 'fp8_e4m3'").set_index("statement")["median"]
    ours = summarize_slack(bf16).droplevel(["format", "execution"])["median"]
    assert (np.abs(other / ours - 1) > 2 * CLOSE).any()


def test_shipped_constants_are_those_of_the_kernels():
    known = shipped.constants()
    known = known[known.format == "fp16"].set_index("constant")
    found = shipping.kernel_constants_of("fp16").set_index("constant")
    assert list(known.index) == list(found.index)
    np.testing.assert_allclose(known.measured, found.measured, rtol=CLOSE)
    np.testing.assert_allclose(known["a priori"], found["a priori"], rtol=1e-6)


class Checkpoint:
    """Stands in for ``fragility_lessons.embedded``."""

    sites, matrix_readings, transport = shipped.sites, shipped.readings, shipped.transport


def test_writing_leaves_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "plan_views", lambda: [{"kind": "keep"}])
    monkeypatch.setattr(shipping, "kernel_constants_of", lambda format: shipped.constants().query("format == @format"))
    monkeypatch.setattr(shipping, "embedded", Checkpoint)
    monkeypatch.setattr(shipping, "slack_tables", lambda: (shipped.slack_quantiles(), shipped.slack_summary()))
    shipping.write(tmp_path / "lessons")
    tables = (shipped.KERNELS, shipped.SUMMARY, shipped.QUANTILES, shipped.SITES, shipped.READINGS, shipped.TRANSPORT)
    for path in tables:
        assert (tmp_path / "lessons" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "lessons" / "plans.json").read_text() == '[{"kind":"keep"}]\n'


def test_names_choose_what_is_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(Explorer, "write", lambda explorer: drawn.append(explorer.file.name.split(".")[1]))
    shipping.draw(["controller", "residual_depth.depth"])
    assert drawn == ["depth", "failure", "frozen", "update", "tour"]
    shipping.draw()
    assert len(drawn) == 5 + len(listed())
