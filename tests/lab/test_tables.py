"""Tables are read back as they were written, and show the paper's numbers beside ours."""

import numpy as np
import pandas as pd
import pytest

from fragility_lab.reporting import tables
from fragility_lab.reporting.claims import E2, E3
from fragility_lab.reporting.verdicts import compare


@pytest.fixture
def compared():
    measured = {"combined_pearson": [0.2, 0.3, 0.4], "delta_pearson": [-0.1, -0.2, 0.3]}
    return compare({"e2_runs": pd.DataFrame(measured)}, [quantity for quantity in E2 if "earson" in quantity.name])


def test_paper_stands_beside_the_run(compared):
    shown = tables.shown(compared).set_index("quantity")
    row = shown.loc["Pearson of combined and mismatch"]
    assert (row.paper, row.here) == ("0.370 ± 0.119", "0.300 ± 0.100")  # Table 1 (`tab:gpt2_summary`)
    low, high = compared.set_index("quantity").loc[row.name, ["low", "high"]]
    assert (row.difference, row.interval, row.runs) == ("−0.070", f"{low:.3f} to {high:.3f}", "3")
    assert row.verdict == "holds" and "correlates positively" in row.claim


def test_counts_are_given_as_runs(compared):
    row = tables.shown(compared).set_index("quantity").loc["Runs in which transport improves Pearson"]
    assert (row.paper, row.here, row.verdict) == ("17 of 18", "1 of 3", "does not hold")


def test_brief_says_what_was_tested(compared):
    brief = tables.brief(compared)
    assert brief.index.tolist() == compared.quantity.tolist()
    assert brief.tested["ΔPearson, combined − no_transport"] == "mean above 0"
    assert brief.verdict["Pearson of no_transport and mismatch"] == "not run"


def test_saved_table_is_shown_as_the_original(compared, tmp_path):
    tables.save_table(compared, tmp_path, "claims")
    words = {"claim": "", "tested": "", "verdict": "", "remark": ""}
    read = pd.read_csv(tmp_path / "claims.csv").fillna(words)
    pd.testing.assert_frame_equal(tables.shown(read), tables.shown(compared))


def test_names_that_look_like_numbers_stay_text(tmp_path):
    table = pd.DataFrame({"run": ["1e5"], "code": ["470e90816521"], "model": ["0135"], "data": [""], "seconds": [2.5]})
    tables.save_table(table, tmp_path, "records")
    read = tables.read_table(tmp_path / "records.csv")
    assert read.to_dict("list") | {"data": [""]} == table.to_dict("list")


def test_a_ranking_that_cannot_miss_decides_nothing():
    """The best three of three blocks are always found."""
    (overlap,) = (quantity for quantity in E3 if quantity.values == "top3_overlap")
    runs = pd.DataFrame({"top3_overlap": 1.0, "layers": 2, "length": [16, 16, 32], "seed": [0, 1, 0]})
    assert compare({"e3_runs": runs}, [overlap]).verdict.tolist() == ["undecided"]
    runs = runs.assign(layers=12, top3_overlap=[0.9, 1.0, 0.95])
    assert compare({"e3_runs": runs}, [overlap]).verdict.tolist() == ["holds"]


def test_exponents_are_written_short():
    (gap,) = (quantity for quantity in E3 if quantity.values == "recompute_gap")
    runs = pd.DataFrame({"recompute_gap": [1e-7, 2e-7, 3e-7], "base_mismatch": 1e-3})
    shown = tables.shown(compare({"e3_runs": runs}, [gap])).iloc[0]
    assert (shown.paper, shown.here) == ("9.24e-7 ± 3.47e-7", "2.00e-7 ± 1.00e-7")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.37, ".3f", "0.370"), (-0.0123, ".3f", "−0.012"), (1.243e-3, ".3e", "1.243e-3"), (-4e-5, "+.1e", "−4.0e-5"),
        (0.0, "+.3f", "0.000"), (-1e-9, "+.2f", "0.00"), (0.0, "+.2e", "0.00"), (0.163, "+.3f", "+0.163"),
        (0.5, ".0%", "50 %"), (np.nan, ".3f", "–"), (None, "", "–"), ("text", ".3f", "text"), (2e58, ".2g", "2e58"),
    ],
)  # fmt: skip
def test_numbers_as_readers_see_them(value, digits, text):
    assert tables.number(value, digits).replace("\N{NO-BREAK SPACE}", " ") == text
