"""The paper's numbers stand beside ours, and a claim that does not hold is said not to."""

import pandas as pd
import pytest

from fragility_core.published import E2_PAPER
from fragility_core.tables import e2_counts, e2_summary, save_table


@pytest.fixture
def runs():
    columns = {quantity: [0.1, 0.2, 0.6] for quantity in E2_PAPER}
    return pd.DataFrame(columns | {"delta_pearson": [-0.1, -0.2, 0.3], "delta_retrieval": [0.0, 0.1, 0.1]})


def test_summary_sets_the_paper_beside_the_run(runs):
    row = e2_summary(runs).loc["combined_pearson"]
    assert (row.paper, row.paper_sd) == (0.370, 0.119)  # Table gpt2_summary
    assert row["mean"] == pytest.approx(0.3)
    assert row.difference == pytest.approx(-0.07)
    assert row.low <= row["mean"] <= row.high
    assert row.runs == 3


def test_claims_count_runs_and_say_when_they_fail(runs):
    table = e2_counts(runs)
    assert table.here.tolist() == ["3/3", "1/3", "2/3"]
    assert table["majority here"].tolist() == [True, False, True]
    assert table.paper.tolist() == ["18/18", "17/18", "12/18"]


def test_saved_table_reads_back(runs, tmp_path):
    save_table(e2_summary(runs), tmp_path, "summary")
    read = pd.read_csv(tmp_path / "summary.csv", index_col="quantity")
    assert read.loc["combined_spearman", "paper"] == 0.351
