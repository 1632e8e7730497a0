"""Two sets of results side by side."""

import pandas as pd
import pytest

from fragility_lab import paths
from fragility_lab.reporting import reruns


def claims(*rows: tuple[str, str, float, str]) -> pd.DataFrame:
    """A table ``claims.csv`` of (experiment, claim, mean, verdict)."""
    table = pd.DataFrame(rows, columns=["experiment", "claim", "mean", "verdict"])
    return table.assign(
        quantity="x", paper=None, paper_sd=None, paper_runs=None, sd=None, difference=None, low=None, high=None,
        runs=3, sampled=True, digits=".2f", tested="", remark="",
    )  # fmt: skip


@pytest.fixture
def outputs(monkeypatch, tmp_path):
    """A folder of outputs with three sets of results."""
    results = {
        "mine": claims(
            ("E2", "a", 0.5, "holds"), ("E2", "b", -1, "undecided"), ("E3", "a", 2, "holds"), ("E3", "", 0, "")
        ),
        "theirs": claims(("E2", "b", 1, "holds"), ("E2", "a", 0.4, "holds"), ("E3", "a", 2, "not run")),
        "empty": claims(("E3", "a", 2, "not run"), ("E3", "", 0, "")),
    }
    for name, table in results.items():
        (tmp_path / name / "tables").mkdir(parents=True)
        table.to_csv(tmp_path / name / "tables" / "claims.csv", index=False)
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    return tmp_path


def test_claims_are_matched_and_those_not_run_left_out(outputs):
    both = reruns.side_by_side({results: reruns.read_claims(results) for results in ("mine", "theirs")})
    assert [*both.index] == [("E2", "a"), ("E2", "b")]
    assert both.loc[("E2", "b")].tolist() == ["−1.00", "undecided", "1.00", "holds"]
    assert [*reruns.differing(both).index] == [("E2", "b")]


def test_what_is_printed(outputs, capsys):
    reruns.main("mine", "theirs")
    count, head, row = capsys.readouterr().out.splitlines()
    assert count == "1 of 2 claims have the same verdict in outputs/mine and outputs/theirs"
    assert "verdict (mine)" in head and "undecided" in row


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("nowhere", "got 'nowhere', which has none.*: empty, mine, theirs"),
        ("", "got none: make reruns WITH="),
        ("mine", "got 'mine' twice"),
        ("empty", "judged the same claims, got none"),
    ],
)
def test_results_that_cannot_be_compared(outputs, second, message):
    with pytest.raises(ValueError, match=message):
        reruns.main("mine", second)
