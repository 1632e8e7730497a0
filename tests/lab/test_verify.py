"""What ``make verify`` says of numbers that are the committed ones, nearly so, or others."""

import numpy as np
import pandas as pd
import pytest
import torch

from fragility_lab.experiments import verify
from fragility_lab.experiments.verify import beside, first_sweeps, judged

COMMITTED = pd.DataFrame(
    {"precision": "bf16", "seed": [0, 1], "pearson": [0.5, 0.25], "mismatch": [0.03, 0.04], "seconds": [1.0, 2.0]}
)


def test_rows_are_compared_with_those_of_the_same_run():
    pairs = beside(COMMITTED, COMMITTED[COMMITTED.seed == 1].assign(pearson=0.2, seconds=9.0))
    assert pairs.to_dict("list") == {
        "column": ["mismatch", "pearson"],
        "computed": [0.04, 0.2],
        "committed": [0.04, 0.25],
    }
    with pytest.raises(ValueError, match="every row that was computed must be committed, got 0 of 1 rows"):
        beside(COMMITTED, COMMITTED[COMMITTED.seed == 1].assign(seed=7))


@pytest.mark.parametrize(
    ("changed", "said", "alike"),
    [
        ({}, "t: all 4 numbers are the committed ones", True),
        ({"pearson": [0.50000001, 0.25]}, "t: all 4 numbers are the committed ones", True),
        ({"pearson": [0.6, 0.25]}, "t: 3 of 4 numbers are the committed ones; mean mismatches differ by 0.0%", True),
        (
            {"mismatch": [0.033, 0.044]},
            "t: 2 of 4 numbers are the committed ones; mean mismatches differ by 10.0%",
            False,
        ),
    ],
)
def test_noise_of_another_cpu_is_told_from_other_numbers(changed, said, alike):
    assert judged("t", beside(COMMITTED, COMMITTED.assign(**changed))) == (said, alike)


@pytest.mark.parametrize("lacks", [COMMITTED, COMMITTED.assign(pearson=np.nan)])
def test_a_number_that_one_side_lacks_is_another_one(lacks):
    other = COMMITTED.assign(pearson=[np.nan, 0.25]) if lacks is COMMITTED else COMMITTED
    said, _ = judged("t", beside(lacks, other))
    assert said.startswith(f"t: {3 if lacks is COMMITTED else 2} of 4 numbers are the committed ones"), said
    mismatches = COMMITTED.assign(mismatch=[np.nan, 0.04])
    assert judged("t", beside(COMMITTED, mismatches))[1] is False
    table = COMMITTED[["seed", "pearson"]]
    assert judged("t", beside(table, table.assign(pearson=np.nan)))[1] is False


def test_a_table_without_a_number_shows_nothing():
    nothing = COMMITTED[["seed", "pearson"]].assign(pearson=np.nan)
    assert judged("t", beside(nothing, nothing))[1] is False


def test_other_numbers_of_a_table_without_mismatches_are_refused():
    table = COMMITTED[["seed", "pearson"]]
    assert judged("t", beside(table, table.assign(pearson=0.5)))[1] is False


def test_the_first_experiment_is_the_committed_one():
    from fragility_lab.reporting.report import read_tables

    committed = read_tables("embedded")
    assert all(judged(name, beside(committed[name], table))[1] for name, table in first_sweeps())


def test_runs_have_as_many_threads_as_the_committed_ones(monkeypatch):
    before, seen = torch.get_num_threads(), []
    for part in ("first_sweeps", "passes", "training"):
        monkeypatch.setattr(verify, part, lambda *given: iter([seen.append(torch.get_num_threads())][:0]))
    torch.set_num_threads(2)
    try:
        assert verify.main(0) == 0 and seen == [1, 1, 1]
    finally:
        torch.set_num_threads(before)
