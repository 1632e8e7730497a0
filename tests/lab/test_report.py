"""Verdicts on tables made by hand. The page: complete, in one file, with the same bytes for the same run."""

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragility_lab import paths
from fragility_lab.experiments import e1
from fragility_lab.reporting import report
from fragility_lab.reporting.claims import E2, QUANTITIES, Quantity
from fragility_lab.reporting.html import inline
from fragility_lab.reporting.tables import duration, policy_summary
from fragility_lab.reporting.verdicts import (
    FAILS,
    HOLDS,
    NO_DIFFERENCE,
    NOT_RUN,
    TESTS,
    UNDECIDED,
    VERDICTS,
    by_look,
    compare,
    interval,
    judge,
)
from fragility_lab.running.provenance import ASKED

POLICIES = ("none", "static_global", "random_same_budget", "risk_only_same_budget", "bgss", "bgss_printed")
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")


def one_row(values: list[float], **options) -> pd.Series:
    """The row of one quantity ``x`` with the given ``values``."""
    quantity = Quantity("E9", "x", "t", "x", claim="a claim", **options)
    return compare({"t": pd.DataFrame({"x": values})}, [quantity]).iloc[0]


# --- Verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "verdict"),
    [
        ([0.2, 0.3, 0.4, 0.3, 0.2, 0.3], {"test": "above"}, HOLDS),
        ([-0.2, -0.3, -0.4, -0.3, -0.2, -0.3], {"test": "above"}, FAILS),
        ([-0.2, 0.3, -0.4, 0.3, -0.2, 0.3], {"test": "above"}, UNDECIDED),
        ([0.2, 0.3, 0.4, 0.3, 0.2, 0.3], {"test": "above", "bound": "0.5"}, FAILS),
        ([-0.2, -0.3, -0.4], {"test": "below"}, HOLDS),
        ([0.2, 0.3, 0.4], {"test": "below"}, FAILS),
        ([-1.0, -1.2, -1.4], {"test": "at most"}, HOLDS),
        ([1.0, 1.2, 1.0], {"test": "at most"}, FAILS),
        ([0.0, 0.0, 0.0], {"test": "at most"}, UNDECIDED),
        ([0.0, 0.0, 0.0], {"test": "below"}, UNDECIDED),
        ([0.0, 0.0, 0.0], {"test": "equal"}, HOLDS),
        ([3.0, 4.0, 3.0], {"test": "equal"}, FAILS),
        ([3.0, -4.0, 0.0], {"test": "equal"}, FAILS),
        ([3.0], {"test": "equal"}, FAILS),
        ([0.5, 0.5], {"test": "above"}, UNDECIDED),
    ],
)
def test_verdict_on_a_mean(values, options, verdict):
    assert one_row(values, **options).verdict == verdict


@pytest.mark.parametrize(
    ("test", "count", "runs", "verdict"),
    [
        ("every", 18, 18, HOLDS),
        ("every", 17, 18, FAILS),
        ("every", 3, 3, HOLDS),
        ("every", 2, 2, UNDECIDED),
        ("every", 0, 1, FAILS),
        ("most", 17, 18, HOLDS),
        ("most", 12, 18, UNDECIDED),  # as in the paper: Wilson's interval is 0.44 to 0.84
        ("most", 9, 18, FAILS),
        ("most", 0, 2, UNDECIDED),
    ],
)
def test_verdict_on_a_count(test, count, runs, verdict):
    table = pd.DataFrame({"x": [1.0] * count + [-1.0] * (runs - count)})
    quantity = Quantity("E9", "x", "t", "x > 0", (17, 18), "a claim", test, counted=True)
    row = compare({"t": table}, [quantity]).iloc[0]
    assert row.verdict == verdict
    assert row["mean"] == count / runs
    assert row.paper == 17 / 18


def test_interval_of_a_share_is_wilsons():
    """12 of 18 at 95 %: centre 0.638, half width 0.198 (Wilson 1927)."""
    values = np.arange(18) < 12
    low, high = interval(values, Quantity("E9", "x", "t", "x", counted=True))
    assert (low, high) == pytest.approx((0.4375, 0.8372), abs=1e-4)


@given(st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=3, max_size=8), st.floats(-10, 10))
def test_claim_and_opposite_never_both_hold(values, bound):
    values = np.array(values)
    low, high = interval(values, Quantity("E9", "x", "t", "x"))
    assert low <= values.mean() + 1e-12
    assert high >= values.mean() - 1e-12
    above, below = (judge(test, values, low, high, bound) for test in ("above", "below"))
    assert (above == HOLDS) == (below == FAILS)
    assert (above == UNDECIDED) == (below == UNDECIDED)


def test_runs_on_the_same_windows_are_drawn_together():
    """Two formats with the same values are one observation, not two."""
    once = pd.DataFrame({"x": [0.1, 0.5, 0.2, 0.9, 0.4, 0.3], "length": [1, 1, 1, 2, 2, 2], "seed": [0, 1, 2] * 2})
    both = pd.concat([once, once])
    quantity = Quantity("E9", "x", "t", "x", claim="positive", test="above")
    ends = ["mean", "low", "high"]
    single, doubled = (compare({"t": table}, [quantity]).iloc[0] for table in (once, both))
    assert doubled[ends].tolist() == pytest.approx(single[ends].tolist()) and doubled.runs == 12
    apart = compare({"t": both.drop(columns="seed")}, [quantity]).iloc[0]
    assert apart.high - apart.low < 0.8 * (single.high - single.low)


@pytest.mark.parametrize("counted", [False, True])
def test_two_sets_of_windows_are_too_few_however_many_runs(counted):
    table = pd.DataFrame({"x": [0.1, 0.2, 0.3, 0.2], "length": [1, 2, 1, 2], "seed": 0})
    row = compare({"t": table}, [Quantity("E9", "x", "t", "x > 0", (17, 18), "c", "most", counted=counted)]).iloc[0]
    assert np.isnan(row.low) and row.verdict == UNDECIDED
    assert row.remark == "too few, 4 runs of 2 sets of windows"


def test_interval_of_a_share_counts_sets_of_windows():
    once = pd.DataFrame({"x": [1.0] * 8 + [-1.0], "length": [1, 2, 3] * 3, "seed": [0, 0, 0, 1, 1, 1, 2, 2, 2]})
    quantity = Quantity("E9", "x", "t", "x > 0", (17, 18), "c", "most", counted=True)
    single, doubled = (compare({"t": t}, [quantity]).iloc[0] for t in (once, pd.concat([once, once])))
    assert (doubled.low, doubled.high) == pytest.approx((single.low, single.high)) and doubled.runs == 18


def test_weak_and_undecided_verdicts_say_why():
    assert one_row([1.0, 1.2, 1.4], test="above").remark == "weak, 3 runs"
    assert one_row([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], test="above").remark == ""
    assert one_row([1.0, 2.0], test="above").remark == "too few, 2 runs"
    assert one_row([-1.0, 2.0, 0.5], test="above").remark == "the interval includes 0"
    assert one_row([0.0, 0.0, 0.0], test="below").remark == "no run differs"


def test_runs_without_a_finite_value_are_left_out_and_counted():
    row = one_row([1.0, np.nan, 1.2, np.inf, 1.4], test="above")
    assert (row.runs, row["mean"], row.verdict) == (3, pytest.approx(1.2), HOLDS)
    assert row.remark == "2 of 5 runs left out, not finite; weak, 3 runs"
    assert one_row([np.nan], test="above").verdict == NOT_RUN


def test_bound_may_depend_on_the_table():
    table = pd.DataFrame({"x": [0.4, 0.5, 0.6], "layers": [6, 6, 6]})
    quantity = Quantity("E9", "x", "t", "x", claim="better than chance", test="above", bound="1 / layers")
    row = compare({"t": table}, [quantity]).iloc[0]
    assert (row.verdict, row.tested) == (HOLDS, "mean above 0.167")
    assert compare({"t": table.assign(layers=1)}, [quantity]).iloc[0].verdict == FAILS


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.4, 0.4, NO_DIFFERENCE), (-0.4, -0.1, NO_DIFFERENCE), (-0.6, 0.4, UNDECIDED), (-0.9, -0.1, HOLDS),
        (0.6, 0.9, FAILS),
    ],
)  # fmt: skip
def test_an_interval_within_the_smallest_effect_is_no_difference(low, high, verdict):
    assert judge("below", np.array([low, high]), low, high, bound=0.0, smallest=0.5) == verdict


def seeds(count: int, mean: float) -> pd.DataFrame:
    """Runs of two policies whose largest mismatches differ by ``mean``, and by 1 from seed to seed."""
    noise = np.random.default_rng(0).normal(size=count)
    runs = pd.DataFrame({"seed": np.repeat(range(count), 2), "policy": ["bgss", "random_same_budget"] * count})
    return runs.assign(max_mismatch=np.ravel(np.column_stack([10 + mean + noise, np.full(count, 10.0)])))


def test_a_plan_of_looks_ends_with_the_first_that_decides():
    quantity = Quantity("E5", "x", "e5_runs", "max_mismatch_bgss - max_mismatch_random", claim="c", test="below")
    tables = {"e5_runs": seeds(3, -100), "e5_seeds": seeds(30, -0.7)}
    looks = by_look(quantity, tables)
    assert [row["runs"] for row in looks] == [8, 16, 24]
    verdicts = [row["verdict"] for row in looks]
    first = verdicts.index(HOLDS)
    row = compare(tables, [quantity]).iloc[0]
    assert (row.verdict, row.runs) == (HOLDS, looks[first]["runs"]) and first > 0
    values = looks[0]["mean"] + np.random.default_rng(0).normal(size=8)
    wide, narrow = (np.ptp(interval(values, quantity, confidence=level)) for level in (1 - 0.05 / 8, 0.95))
    assert wide > 1.2 * narrow


def test_fewer_seeds_than_the_plan_starts_with_are_one_look():
    quantity = Quantity("E5", "x", "e5_runs", "max_mismatch_bgss - max_mismatch_random", claim="c", test="below")
    assert [row["runs"] for row in by_look(quantity, {"e5_seeds": seeds(5, -1)})] == [5]
    assert [row["runs"] for row in by_look(quantity, {"e5_runs": seeds(5, -1)})] == [5]


def test_the_smallest_effect_may_depend_on_the_table():
    quantity = Quantity(
        "E5", "x", "e5_runs", "max_mismatch_bgss - max_mismatch_random", claim="c", test="below",
        smallest="0.5 * max_mismatch_random",
    )  # fmt: skip
    row = compare({"e5_runs": seeds(8, -0.1)}, [quantity]).iloc[0]
    assert (row.verdict, row.smallest) == (NO_DIFFERENCE, 5.0)


# --- A whole run, made up -------------------------------------------------------------------------


def mitigation(shift: float) -> pd.DataFrame:
    """Runs of E5 in which BGSS is better than the other policies by ``shift`` in every quantity."""
    runs = pd.DataFrame([(policy, seed) for policy in POLICIES for seed in range(3)], columns=["policy", "seed"])
    better = shift * (runs.policy == "bgss") * (1 + 0.1 * runs.seed)
    quantities = dict.fromkeys(("onsets", "onsets_release_ratio", "final_mismatch", "max_mismatch"), 10 - better)
    protected = runs.policy.map({"static_global": 3072}).fillna(2742)
    return runs.assign(
        **quantities, steps=256, onset_ratio=1.05, peak_ratio=1.1, mean_mismatch=1.0, final_loss=3.0, actions=24,
        ended="", protected_layer_steps=protected,
    )  # fmt: skip


def records(**columns) -> pd.DataFrame:
    recorded = {"precision": ["bf16", "fp16"], "execution": ["native", "emulated"], "seconds": [100.0, 158.0]}
    return pd.DataFrame(recorded).assign(
        run="x", model="embedded", data="embedded", device_name="some CPU", threads=1, monitored="eager",
        reference="sdpa", python="3.11.7", torch="2.13.0", learning_rate=6e-4, **columns,
    )  # fmt: skip


@pytest.fixture(scope="module")
def complete() -> dict[str, pd.DataFrame]:
    """A run of everything in which the claims of E2 fail and those of E5 hold, but not with six actions."""
    ramp = np.linspace(0.9, 1.1, 6)
    e2 = pd.DataFrame({quantity.values: -quantity.paper[0] * ramp for quantity in E2 if not quantity.counted})
    e2 = e2.assign(
        precision="fp16", length=64, seed=range(6), delta_retrieval=-0.1, overflowed=[0] * 5 + [2], windows=96
    )
    rankings = {"spearman": 0.4, "pairwise_accuracy": 0.7, "top1_hit": 0.5, "top3_overlap": 0.6, "top5_overlap": 0.7}
    e3 = pd.DataFrame({name: value * ramp for name, value in rankings.items()})
    e3 = e3.assign(layers=12, recompute_gap=1e-7 * ramp, base_mismatch=1e-3, noise_floor=0.9)
    estimators = pd.DataFrame({"layernorm": ["release", "paper"], "transport": "release"})
    agreement = {"combined_pearson": [0.41, 0.39], "combined_spearman": 0.3, "combined_retrieval": 0.2}
    scarce = mitigation(-1.0).astype({"ended": object})
    scarce.loc[(scarce.policy == "none") & (scarce.seed == 1), "ended"] = "nonfinite loss"
    gates = {"risk": 0.5, "dominance": 0.5, "regime": 0.0, "eligible": 0.0, "raised": 0.0}
    return {f"e1_{name}": table for name, table in e1.sweeps().items()} | {
        "e2_runs": e2, "e3_runs": e3, "e5_runs": mitigation(1.0), "e5_scarce_seeds": scarce,
        "e2_estimators": estimators.assign(**agreement, median_ratio=2e4), "e2_records": records(),
        "e3_records": records(), "e5_records": records(),
        "e5_gates": pd.DataFrame([{"policy": "bgss_printed", "seed": 0, "layer_steps": 3072} | gates]),
        "e5_policies": policy_summary(mitigation(1.0)).reset_index(),
    }  # fmt: skip


@pytest.fixture
def tables(complete) -> dict[str, pd.DataFrame]:
    """A copy of ``complete`` that a test may change."""
    return dict(complete)


@pytest.fixture(scope="module")
def compared(complete) -> pd.DataFrame:
    return compare(complete)


def verdicts_of(experiment: str, compared) -> set[str]:
    return set(compared[(compared.experiment == experiment) & (compared.claim != "")].verdict)


def test_claims_are_judged_in_both_directions(compared):
    assert verdicts_of("E1", compared) == {HOLDS}
    assert verdicts_of("E2", compared) == {FAILS}
    assert verdicts_of("E3", compared) == {HOLDS}
    e5 = compared[compared.experiment == "E5"].set_index("quantity")
    assert e5.loc["Largest mismatch, BGSS − risk-only", ["verdict", "mean"]].tolist() == [HOLDS, pytest.approx(-1.1)]
    assert e5.loc["Protected layer-steps, BGSS − static", "mean"] == 2742 - 3072
    assert e5.loc["Final mismatch, BGSS − risk-only", "verdict"] == FAILS  # the paper: a slight cost
    assert verdicts_of("E5, six actions", compared) == {FAILS, HOLDS}


def test_every_number_of_the_paper_is_there(compared):
    """Protocol section 7, number by number."""
    shown = report.shown(compared).groupby("experiment").paper.agg(list)
    assert shown["E1"] == ["0.999999", "1.000000", "9 of 9", "9 of 9", "8 of 8"]
    assert set(shown["E2"]) == {
        "0.370 ± 0.119", "0.351 ± 0.060", "18 of 18", "0.206", "0.212", "17 of 18", "12 of 18", "0.163", "0.139",
    }  # fmt: skip
    assert set(shown["E3"]) >= {
        "0.362 ± 0.156", "0.643 ± 0.061", "0.264", "0.505 ± 0.108", "0.622 ± 0.084", "9.24e-7 ± 3.47e-7",
    }  # fmt: skip
    assert set(shown["E5"]) >= {
        "11.67", "10.67", "10.67 ± 1.15", "1.284e-3", "1.221e-3", "1.243e-3 ± 2.87e-5", "8.49e-3", "5.71e-3",
        "3.14e-3 ± 1.01e-3", "3 of 3", "2742", "3072",
    }  # fmt: skip


def test_x1_of_another_model_is_left_out():
    """Two models that were given one folder of results."""
    run = {"precision": "bf16", "length": [64, 64], "seed": [0, 1], "windows": 16}
    e2, x1 = (pd.DataFrame(run | {"combined_pearson": found}) for found in ([0.3, 0.2], [0.3, 0.2000001]))
    tables = {"e2_runs": e2, "x1_runs": x1, "x1_summary": x1, "x2_recipes": x1}
    assert report.of_one_model(tables) is tables
    other = tables | {"x1_runs": x1.assign(combined_pearson=[0.1, 0.2])}
    assert [*report.of_one_model(other)] == ["e2_runs", "x2_recipes"]
    fewer = tables | {"x1_runs": x1.assign(combined_pearson=[0.1, 0.2], windows=8)}  # of other windows: nothing is said
    assert report.of_one_model(fewer) is fewer


def test_every_claim_has_a_verdict_and_a_number_has_none(compared):
    assert compared[compared.claim != ""].verdict.isin(VERDICTS).all()
    assert (compared[compared.claim == ""].verdict == "").all()


def test_quantities_are_well_formed():
    assert {quantity.experiment for quantity in QUANTITIES} == {"E1", "E2", "E3", "E5", "E5, six actions"}
    assert len({(quantity.experiment, quantity.name) for quantity in QUANTITIES}) == len(QUANTITIES)
    for quantity in QUANTITIES:
        assert (quantity.test in TESTS) == bool(quantity.claim), quantity.name


def test_summary_is_generated_from_the_verdicts(compared):
    first, second, third, _ = report.sentences(compared)
    assert first.startswith("E1: 5 of 5 claims hold (the attention proxy tracks")
    assert second.startswith("E2: 0 of 7 claims hold, 7 do not hold (the score correlates positively")
    assert third.startswith("E3: 6 of 6 claims hold")
    absent = compared.assign(verdict=compared.verdict.where(compared.experiment != "E3", NOT_RUN))
    assert report.sentences(absent)[2] == "E3 was not run."


# --- The page -------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Checks that tags are balanced and collects what the page refers to."""

    VOID = {"meta", "img", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.references, self.ids, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.references += [attributes[name] for name in ("src", "href", "srcset", "data") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    for name in ("e1_attention", "e5_outcomes"):
        (folder / f"{name}.png").write_bytes(PIXEL)
    return folder


@pytest.fixture(scope="module")
def html(complete, figures) -> str:
    """The page of the complete run."""
    return report.page("smoke", complete, figures)


def test_page_stands_alone(html):
    page = parsed(html)
    assert page.references, "the page has links to its sections"
    for reference in page.references:
        assert reference.startswith("data:image/png;base64,") or reference[1:] in page.ids
    assert not re.search(r"@import|url\(|<script|<link|<iframe", html)
    names = [tag for tag, _ in page.tags]
    assert names.count("img") == 2
    assert base64.b64encode(PIXEL).decode() in html


def test_page_is_accessible(html):
    page = parsed(html)
    assert dict(page.tags)["html"]["lang"] == "en"
    assert any(given.get("name") == "viewport" for tag, given in page.tags if tag == "meta")
    assert all(given["alt"] for tag, given in page.tags if tag == "img")
    assert all(given.get("scope") in ("row", "col") for tag, given in page.tags if tag == "th")
    tables_in_page = sum(tag == "table" for tag, _ in page.tags)
    assert tables_in_page == sum(tag == "caption" for tag, _ in page.tags) >= 8
    assert len(page.ids) == len(set(page.ids))


def test_adjoint_predictor_is_shown_where_it_was_run(html, complete, figures):
    assert "make predictor" in html
    tables = complete | {
        "x1_runs": pd.DataFrame(
            {
                "mean_ratio": [0.991, 1.017],
                "between_draws": [0.7, 0.8],
                "ceiling": [0.8, 0.9],
                "adjoint_with_each": [0.7, 0.9],
            }
        ),
        "x1_summary": pd.DataFrame(
            [{"quantity": "E2: Pearson with the mismatch", "adjoint": 0.901, "adjoint_sd": 0.03, "score": 0.407,
              "score_sd": 0.166, "above": 18, "runs": 18}]
        ),
    }  # fmt: skip
    text = " ".join(" ".join(parsed(report.page("smoke", tables, figures)).text).split())
    for stated in ("0.991 to 1.017", "correlate at 0.75", "a correlation of 0.85", "has 0.80"):
        assert stated in text
    assert "E2: Pearson with the mismatch 0.901 ± 0.030 0.407 ± 0.166 18 18" in text
    assert "make predictor" not in text


def test_page_says_what_was_run(html):
    text = " ".join("".join(parsed(html).text).split())
    assert "bf16 native, fp16 emulated" in text
    assert "4 min 18 s" in text  # 100 s + 158 s
    assert "NVIDIA H100" in text
    assert "eager monitored, sdpa for the reference" in text
    assert "torch 2.13.0" in text
    assert "six actions, none, seed 1: nonfinite loss at step 255" in text
    assert "In E2 2 of 578 windows overflowed" in text
    assert "regime gate ρLN < 1 lets 0.00 % of them through" in text
    assert "mean Pearson 0.390 instead of 0.410" in text
    assert "from runs of policy none alone: 1.05" in text
    assert "make reproduce PROFILE=smoke" in text


def test_same_run_same_bytes(html, tables, figures):
    assert report.page("smoke", dict(reversed(tables.items())), figures) == html


@pytest.mark.parametrize("experiment", report.EXPERIMENTS)
def test_missing_experiment_is_named_with_its_command(experiment, tables, figures):
    notebook, _ = report.EXPERIMENTS[experiment]
    left = {name: table for name, table in tables.items() if not name.startswith(experiment.lower())}
    text = "".join(parsed(report.page("embedded", left, figures)).text)
    assert f"{experiment} was not run: its tables are not in outputs/embedded/tables" in text
    assert f"notebooks/{notebook}.ipynb" in text
    others = [other for other in report.EXPERIMENTS if other != experiment]
    assert not any(f"{other} was not run" in text for other in others)


def test_report_of_nothing_is_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    path = report.write("smoke")
    assert path == tmp_path / "smoke" / "report.html"
    text = "".join(parsed(path.read_text(encoding="utf-8")).text)
    assert all(f"{experiment} was not run." in text for experiment in report.EXPERIMENTS)


def test_written_report_reads_tables_and_figures(tables, figures, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    for name, table in tables.items():
        table.to_csv(paths.output_folder("smoke", "tables") / f"{name}.csv", index=False)
    (paths.output_folder("smoke", "figures") / "e2_trend.png").write_bytes(PIXEL)
    html = report.write("smoke").read_text(encoding="utf-8")
    (image,) = (given for tag, given in parsed(html).tags if tag == "img")
    assert image["alt"].startswith("Points on logarithmic axes: mean mismatch")
    assert "was not run" not in html
    assert report.write("smoke").read_text(encoding="utf-8") == html


def test_names_from_outside_are_escaped(tables, figures):
    evil = "<script>alert(1)</script>&"
    tables["e2_records"] = records().assign(model=evil)
    html = report.page("smoke", tables, figures)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html


def test_command_names_another_model_and_text():
    assert report.command("embedded", None) == "make reproduce"
    assert report.command("paper", None) == "make reproduce PROFILE=paper"
    other = records().assign(model="my models/gpt2", data="text.txt")
    assert report.command("embedded-custom", other) == "make reproduce MODEL='my models/gpt2' DATA=text.txt"


def test_command_names_a_folder_of_another_name(tables, figures, monkeypatch):
    assert report.command("mine", None) == "make reproduce RESULTS=mine"
    assert report.command("my own", None, "paper") == "make reproduce PROFILE=paper RESULTS='my own'"
    other = records().assign(model="gpt2")
    assert report.command("paper", other, "embedded") == "make reproduce MODEL=gpt2 RESULTS=paper"
    monkeypatch.setenv(ASKED, '{"profile": "smoke"}')
    assert "make reproduce PROFILE=smoke RESULTS=mine" in report.page("mine", tables, figures)


def test_notebooks_show_a_page_below_a_link_to_it():
    shown = parsed(inline(paths.OUTPUTS / "my & own" / "report.html", "The report").data)
    address = "../outputs/my & own/report.html"
    assert shown.references == [address, address] and "outputs/my & own/report.html" in "".join(shown.text)
    assert dict(shown.tags)["iframe"]["title"] == "The report"


def test_results_of_a_model_of_ones_own_have_a_report(tables, figures):
    """The Makefile keeps them in a folder beside the profile's, whose name reaches the report."""
    assert f",{report.CUSTOM})" in (paths.PROJECT / "Makefile").read_text()
    tables["e2_records"] = records().assign(model="my-gpt2")
    html = report.page(f"laptop{report.CUSTOM}", tables, figures)
    assert "make reproduce PROFILE=laptop MODEL=my-gpt2" in html


@pytest.mark.parametrize(("seconds", "text"), [(3.14, "3.1 s"), (258, "4 min 18 s"), (7500, "2 h 5 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


# --- The first screen -----------------------------------------------------------------------------

COMMITTED = paths.OUTPUTS / "embedded" / "report.html"
WORDS = 1500  # on the page before anything is unfolded
TERMS = {"score", "mismatch", "window", "windows", "transport", "kernel", "probe", "probes", "bf16", "fp32"}


class Visible(Reader):
    """The words of a page with everything folded."""

    def handle_data(self, data):
        folded = [name for name in self.open if name in ("details", "summary")]
        if "style" not in self.open and "title" not in self.open and folded in ([], ["details", "summary"]):
            self.text.append(data)


@pytest.fixture(scope="module")
def committed() -> str:
    return COMMITTED.read_text(encoding="utf-8")


def words_of(html: str) -> list[str]:
    """The words that show before anything is unfolded."""
    reader = Visible()
    reader.feed(html)
    return "".join(reader.text).split()


def strip_of(html: str) -> dict[str, list[list[str]]]:
    """The verdicts and claims of the strip's cells: by question, one list per cell."""
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", html.partition("strip")[2], re.S)[:5]
    cells = {question.partition(" <span")[0]: re.findall(r"<td.*?</td>", row, re.S) for question, row in rows}
    return {key: [re.findall(r'aria-label="(.*?)"', cell) for cell in row] for key, row in cells.items()}


def test_few_words_show_before_anything_is_unfolded(html, committed):
    for each in (html, committed):
        assert 200 < len(words_of(each)) <= WORDS < len("".join(parsed(each).text).split())


def test_the_first_sentence_has_no_term_of_the_project(committed):
    first = committed.partition('<p class="lead">')[2].partition(". ")[0]
    assert len(first.split()) > 10 and not TERMS & {*re.findall(r"\w+", first.lower())}


def test_every_cell_of_the_strip_agrees_with_the_tables(committed):
    strip = strip_of(committed)
    models = {name: report.read_tables(name) for name in report.LABELS}
    wanted = {name: compare(tables) for name, tables in models.items()}
    for experiment, cells in zip(("E1", "E2", "E3", "E5", "E5, six actions"), strip.values(), strict=True):
        for cell, rows in zip(cells, wanted.values()):
            rows = rows[(rows.experiment == experiment) & (rows.claim != "")]
            shown = [label.replace("&#39;", "'") for label in cell]
            assert shown == [f"{row.verdict}: {row.claim}" for row in rows.itertuples()]
        assert len(cells) == (1 if experiment == "E1" else len(models))
    verdicts = [label.partition(":")[0] for cells in strip.values() for cell in cells for label in cell]
    for verdict, words in ((HOLDS, "support the paper"), (FAILS, "contradict it"), (UNDECIDED, "are undecided")):
        assert f"{verdicts.count(verdict)} {words}" in " ".join(words_of(committed))
    assert {*verdicts} <= {*VERDICTS}


def test_the_strip_says_which_models_are_toys(committed, html):
    head = committed.partition('<table class="strip">')[2].partition("</thead>")[0]
    kinds = re.findall(r'class="kind (\w+)">\1</span>', head)
    assert kinds == ["toy", "toy", "real", "real"]
    assert "SmolLM2 135M" in head and html.count('class="kind toy"') == 1


def test_a_model_of_ones_own_is_no_toy(tables):
    tables["e2_records"] = records().assign(model="my/gpt2")
    assert [report.column("mine", tables)[name] for name in ("label", "kind")] == ["my/gpt2", "real"]
    assert [report.column("mine", {})[name] for name in ("label", "kind")] == ["mine", ""]


def test_a_verdict_comes_first_in_a_row_of_the_comparison(committed):
    rows = re.findall(r'<tr><th scope="row">[^<]*<small>.*?</tr>', committed, re.S)
    assert len(rows) == 38
    assert all('<b class="verdict' in re.findall(r"<td.*?</td>", row, re.S)[0] for row in rows)


def test_what_holds_on_toys_and_on_real_models_is_counted_apart(committed):
    strip = strip_of(committed)
    texts, training = [*strip.values()][1:3], [*strip.values()][3:]
    found = {}
    for kind, places in (("toy", (0, 1)), ("real", (2, 3))):
        labels = [label for cells in texts for place in places for label in cells[place]]
        found[kind] = (sum(label.startswith("holds:") for label in labels), len(labels))
    lead = " ".join(words_of(committed)).partition("A square is one claim")[0]
    assert "{} of {} hold on toy models".format(*found["toy"]) in lead
    assert "{} of {} on real ones".format(*found["real"]) in lead
    tried = [label for cells in training for label in cells[0] if not label.startswith("not run")]
    holding = sum(label.startswith("holds:") for label in tried)
    assert f"{holding} of {len(tried)} hold{'s' * (holding == 1)}." in lead
