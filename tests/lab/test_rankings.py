"""Agreement of rankings: the release's numbers, scipy, and the definitions pair by pair."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fragility_lab.experiments.rankings import (
    agreement,
    noise_floor,
    pairwise_accuracy,
    rank_gap,
    ranks,
    spearman,
    top_overlap,
)


def tied_rows(minimum: int = 2):
    """Two rows of equal length with ties among few values."""
    row = st.lists(st.integers(-3, 3).map(float), min_size=minimum, max_size=8)
    return row.flatmap(lambda first: st.tuples(st.just(first), st.permutations(first)))


def test_metrics_of_the_recorded_rows_are_the_recorded_ones(reference_e3):
    for record in reference_e3:
        proxy, exact = (record["layers"][name] for name in ("proxy_score", "exact_reduction"))
        assert ranks(proxy).tolist() == record["layers"]["proxy_rank"]
        assert ranks(exact).tolist() == record["layers"]["exact_rank"]
        measures = agreement(proxy, exact)
        for name in ("spearman", "pairwise_accuracy", "top1_hit", "mean_rank_gap"):
            assert measures[name] == record[name], name
        for count in (1, 2, 3):
            assert top_overlap(proxy, exact, count) == record[f"topk_overlap_{count}"]


@given(tied_rows())
def test_spearman_is_scipys(pair):
    if np.ptp(pair[0]) == 0:
        assert np.isnan(spearman(*pair))
    else:
        assert spearman(*pair) == pytest.approx(stats.spearmanr(*pair).statistic, abs=1e-12)


@given(tied_rows())
def test_pairwise_accuracy_counts_untied_pairs(pair):
    first, second = pair
    untied = [(i, j) for i, j in combinations(range(len(first)), 2) if first[i] != first[j] and second[i] != second[j]]
    same = [(i, j) for i, j in untied if (first[i] > first[j]) == (second[i] > second[j])]
    got = pairwise_accuracy(first, second)
    assert got == len(same) / len(untied) if untied else np.isnan(got)


@given(tied_rows(), st.integers(1, 9))
def test_top_overlap_breaks_ties_by_the_number_of_the_block(pair, count):
    count = min(count, len(pair[0]))
    first, second = (set(sorted(range(len(row)), key=lambda layer: (-row[layer], layer))[:count]) for row in pair)
    assert top_overlap(*pair, count) == len(first & second) / count


@given(tied_rows(minimum=3))
def test_agreement_depends_on_the_order_alone(pair):
    first, second = map(np.array, pair)
    changed = agreement(np.exp(first), 5 * second**3 - 1)
    for name, value in agreement(first, second).items():
        np.testing.assert_array_equal(changed[name], value)


def test_perfect_and_inverted_rankings():
    scores = np.array([0.4, 3.0, -1.0, 2.0, 7.0, 1.0])
    same, opposite = agreement(scores, scores), agreement(scores, -scores)
    assert same == pytest.approx(
        {"spearman": 1, "pairwise_accuracy": 1, "top1_hit": 1, "top3_overlap": 1, "top5_overlap": 1, "mean_rank_gap": 0}
    )
    assert opposite == pytest.approx(
        {"spearman": -1, "pairwise_accuracy": 0, "top1_hit": 0, "top3_overlap": 0, "top5_overlap": 0.8,
         "mean_rank_gap": 3}
    )  # fmt: skip


def test_many_windows_at_once_are_each_by_itself():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 4, 5, 12))
    together = agreement(first, second)
    for at in np.ndindex(4, 5):
        assert {name: value[at] for name, value in together.items()} == agreement(first[at], second[at])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_window_with_a_nonfinite_effect_has_no_agreement(value):
    proxy = np.arange(12.0).reshape(2, 6)
    exact = proxy.copy()
    exact[0, 3] = value
    for measure in agreement(proxy, exact).values():
        assert np.isnan(measure[0]) and np.isfinite(measure[1])


def test_rank_gap_by_hand():
    assert rank_gap([3, 2, 1, 1], [1, 2, 3, 4]) == pytest.approx((3 + 1 + 1.5 + 2.5) / 4)


def test_noise_floor_is_the_mean_over_pairs():
    realisations = np.array([[[1.0, 2, 3, 4]], [[1.0, 2, 4, 3]], [[4.0, 3, 2, 1]]])  # (R = 3, W = 1, L = 4)
    floor = noise_floor(realisations, [[1.0, 2, 3, 4]])
    assert floor["between_realisations"] == pytest.approx([(0.8 - 1 - 0.8) / 3])
    assert floor["noise_floor"] == pytest.approx([(1 + 0.8 - 1) / 3])


def test_one_realisation_has_no_pair():
    floor = noise_floor([[[1.0, 2, 3]]], [[1.0, 3, 2]])
    assert np.isnan(floor["between_realisations"]).all()
    assert floor["noise_floor"] == pytest.approx([0.5])


def test_independent_effects_have_a_floor_near_zero_and_noisy_ones_below_one():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(400, 12))
    for noise, low, high in ((0.0, 1, 1), (1.0, 0.40, 0.55), (1e6, -0.05, 0.05)):
        floor = noise_floor(signal + noise * rng.normal(size=(2, 400, 12)), signal)["between_realisations"].mean()
        assert low - 1e-12 <= floor <= high + 1e-12


@pytest.mark.parametrize("noise", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("noise_of_nearest", [0.3, 1.0])
def test_a_score_without_noise_reaches_the_ceiling(noise, noise_of_nearest):
    rng = np.random.default_rng(0)
    effects = rng.normal(size=(4000, 12))
    realisations = effects + noise * rng.normal(size=(2, 4000, 12))
    nearest = effects + noise_of_nearest * rng.normal(size=(4000, 12))
    floor = {name: values.mean() for name, values in noise_floor(realisations, nearest).items()}
    ceiling = floor["noise_floor"] / floor["between_realisations"] ** 0.5
    assert spearman(effects, nearest).mean() == pytest.approx(ceiling, abs=0.03)
