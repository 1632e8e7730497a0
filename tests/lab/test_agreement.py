"""Agreement of signals with mismatch, on windows whose answers are known."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fragility_core.surrogates import SIGNALS
from fragility_lab.experiments.agreement import agreement_by_run, binned_trend, retrieval
from fragility_lab.paths import OUTPUTS
from fragility_lab.reporting.verdicts import runs_needed, student


def windows(mismatch, overflow=None, **signals) -> pd.DataFrame:
    mismatch = np.asarray(mismatch, dtype=float)
    frame = pd.DataFrame({"mismatch": mismatch, "overflow": False if overflow is None else overflow})
    for signal in SIGNALS:
        frame[signal] = signals.get(signal, mismatch)
    return frame.assign(precision="bf16", length=16, seed=0)


def test_perfect_and_inverted_signals():
    m = np.arange(1.0, 17)
    row = agreement_by_run(windows(m, combined=2 * m + 1, no_transport=-(m**3))).iloc[0]
    assert row.combined_pearson == pytest.approx(1)
    assert row.no_transport_spearman == pytest.approx(-1)
    assert row.delta_spearman == pytest.approx(2)
    assert (row.combined_retrieval, row.no_transport_retrieval) == (1, 0)


def test_retrieval_counts_the_worst_eighth():
    mismatch = pd.Series(np.arange(96.0))
    signal = mismatch.copy()
    signal[95], signal[94] = -1, -2  # two of the twelve worst are missed
    assert retrieval(signal, mismatch) == pytest.approx(10 / 12)


def test_ties_go_to_the_earlier_window():
    assert retrieval(pd.Series([1.0] * 16), pd.Series(-np.arange(16.0))) == 1  # windows 0 and 1 of both


def test_overflowed_windows_are_left_out_and_counted():
    m = np.arange(1.0, 17)
    overflow = m > 14
    row = agreement_by_run(windows(np.where(overflow, np.nan, m), overflow=overflow, combined=m)).iloc[0]
    assert (row.windows, row.overflowed) == (14, 2)
    assert row.combined_pearson == pytest.approx(1)


def test_a_run_that_overflowed_everywhere_has_no_correlation():
    table = agreement_by_run(windows([np.nan] * 4, overflow=True))
    assert table.overflowed.tolist() == [4]
    assert table.combined_pearson.isna().all()


def test_students_interval_is_around_the_mean_of_the_numbers():
    values = pd.Series([0.1, 0.2, 0.4, 0.3, np.nan])
    low, high = student(values)
    spread = values.std() / 2 * 3.182  # the 97.5 % quantile of Student's t with three degrees of freedom
    assert (low, high) == pytest.approx((0.25 - spread, 0.25 + spread), rel=1e-3)


def test_fewer_than_three_runs_have_no_interval():
    assert np.isnan(student(pd.Series([0.5, 0.6]))).all()


@pytest.mark.parametrize("smallest", [3.0, 0.9, 0.4, 0.1])
@pytest.mark.parametrize("confidence", [0.95, 1 - 0.05 / 8])
def test_needed_runs_are_the_fewest_whose_interval_is_narrow_enough(smallest, confidence):
    values = np.array([-1.0, 0.2, 0.3, 1.5])
    quantile, deviation = stats.t(df=np.arange(2, 10_000)).ppf((1 + confidence) / 2), values.std(ddof=1)
    runs = np.arange(3, 10_001)
    by_trying = runs[quantile * deviation / runs**0.5 <= smallest][0]
    assert runs_needed(values, smallest, confidence) == by_trying


def test_needed_runs_are_unknown_without_scatter_or_a_smallest_effect():
    assert np.isnan([runs_needed(np.ones(5), 0.1), runs_needed(np.arange(5), 0.0), runs_needed(np.arange(2), 1)]).all()


def test_why_intervals_are_students_and_not_a_bootstraps():
    """Differences like those of E5's largest mismatch, with random signs: a mean of 0, which both should include."""
    runs = pd.read_csv(OUTPUTS / "embedded" / "tables" / "e5_seeds.csv")
    largest = runs.pivot(index="seed", columns="policy", values="max_mismatch")
    differences = (largest.bgss - largest.risk_only_same_budget).to_numpy()
    generator, confidence = np.random.default_rng(0), 1 - 0.05 / 8
    samples = generator.choice(differences, (200, 8)) * generator.choice([-1, 1], (200, 8))

    def excludes(interval) -> bool:
        return not interval[0] <= 0 <= interval[1]

    students = sum(excludes(student(pd.Series(x), confidence)) for x in samples)
    options = {"n_resamples": 999, "confidence_level": confidence, "rng": generator}
    bootstraps = sum(excludes(stats.bootstrap((x,), np.mean, **options).confidence_interval) for x in samples)
    assert students <= 4 < 10 <= bootstraps  # of 200; the confidence allows 1.25


def test_trend_bins_hold_equal_counts_in_order_of_risk():
    m = np.random.default_rng(0).permutation(24.0 + np.arange(24))
    bins = binned_trend(windows(m, combined=m), bins=12)
    assert bins.windows.tolist() == [2] * 12
    assert bins.combined.is_monotonic_increasing
    assert bins.mismatch.tolist() == [24.5 + 2 * i for i in range(12)]
