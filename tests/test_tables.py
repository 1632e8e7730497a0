"""The paper's numbers stand beside ours, and a claim that does not hold is said not to."""

import pandas as pd
import pytest

from fragility_core.published import E2_PAPER, E3_PAPER
from fragility_core.tables import e2_counts, e2_summary, e3_summary, e5_counts, e5_summary, save_table


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


def test_e3_summary_sets_the_paper_beside_the_run():
    row = e3_summary(pd.DataFrame({quantity: [0.1, 0.2, 0.6] for quantity in E3_PAPER})).loc["top3_overlap"]
    assert (row.paper, row.paper_sd, row.runs) == (0.505, 0.108, 3)  # Table gpt2_summary
    assert row["mean"] == pytest.approx(0.3)


def test_claims_count_runs_and_say_when_they_fail(runs):
    table = e2_counts(runs)
    assert table.here.tolist() == ["3/3", "1/3", "2/3"]
    assert table["majority here"].tolist() == [True, False, True]
    assert table.paper.tolist() == ["18/18", "17/18", "12/18"]


def test_saved_table_reads_back(runs, tmp_path):
    save_table(e2_summary(runs), tmp_path, "summary")
    read = pd.read_csv(tmp_path / "summary.csv", index_col="quantity")
    assert read.loc["combined_spearman", "paper"] == 0.351


@pytest.fixture
def policies():
    table = pd.DataFrame(
        [(policy, seed) for policy in ("static_global", "random_same_budget", "risk_only_same_budget", "bgss")
         for seed in range(3)], columns=["policy", "seed"],
    )  # fmt: skip
    measured = {"onsets": table.seed + 1.0, "final_mismatch": 1e-3, "protected_layer_steps": 100 * table.seed}
    largest = table.seed.where(table.policy == "bgss", 1.5)
    return table.assign(max_mismatch=largest, **measured)


def test_e5_summary_sets_the_paper_beside_every_policy(policies, tmp_path):
    summary = e5_summary(policies)
    row = summary.loc[("bgss", "max_mismatch")]
    assert (row.paper, row.paper_sd) == (3.14e-3, 1.01e-3)  # protocol section 7
    assert (row["mean"], row.sd, row.runs) == (1.0, 1.0, 3)
    assert summary.loc[("static_global", "protected_layer_steps"), "difference"] == 100 - 3072
    save_table(summary, tmp_path, "summary")
    read = pd.read_csv(tmp_path / "summary.csv", index_col=["policy", "quantity"])
    assert read.loc[("random_same_budget", "onsets"), "mean"] == 2


def test_e5_claim_counts_seeds(policies):
    assert e5_counts(policies).iloc[0].to_dict() == {"paper": "3/3", "here": "2/3", "majority here": True}
