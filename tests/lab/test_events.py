"""Onsets of events: against the release's record, and by definition."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragility_lab.experiments.outcomes import SpikeRule, chosen_ratio, onsets, relative_to_recent

SHORT = SpikeRule(ratio=1.5, recent=3, warmup=4, separation=5)


def test_onsets_are_those_of_the_release(reference_training):
    config, series = reference_training["config"], reference_training["series"]
    rule = SpikeRule(
        config["mismatch_spike_ratio"], config["rolling_window"], config["event_warmup_steps"],
        config["event_cooldown_steps"],
    )  # fmt: skip
    found = {name: onsets(np.array(run["mismatch"]), rule) for name, run in series.items()}
    assert found == {name: run["onsets"] for name, run in series.items()}
    assert sum(map(len, found.values())) == 1, "the record holds one event"


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([1, 1, 1, 9, 1, 1, 1], []),  # within the warm-up
        ([1, 1, 1, 1, 9, 1, 1], [4]),
        ([1, 1, 1, 1, 1.5, 1.51], [5]),  # the ratio itself is no spike
        ([1, 1, 1, 1, 9, 1, 9, 1, 1, 9], [4, 9]),  # the second spike is the same event
        ([1, 1, 1, 1, np.nan, 9], [5]),
        ([np.nan, 1, 1, 1, 9, 9], [5]),  # the warm-up counts finite values
        ([2, 9, 2, 2, 2, 2.9], []),
        ([], []),
    ],
)
def test_onsets_by_hand(values, steps):
    assert onsets(np.array(values, dtype=float), SHORT) == steps


def test_infinity_is_a_spike_and_no_part_of_the_median():
    values = np.array([1, 1, 1, 1, np.inf, np.inf, 1, 1, 1, 1.4])
    assert onsets(values, SHORT) == [4]
    assert relative_to_recent(values, SHORT)[-1] == pytest.approx(1.4)


SERIES = st.lists(st.floats(0.1, 10), min_size=5, max_size=60).map(np.array)


@given(SERIES, st.floats(1, 3))
def test_onsets_are_apart_and_causal(values, ratio):
    rule = SpikeRule(ratio, 3, 4, 5)
    steps = onsets(values, rule)
    assert all(later - earlier >= 5 for earlier, later in pairwise(steps))
    cut = len(values) // 2
    assert onsets(values[:cut], rule) == [step for step in steps if step < cut]


def under_none(runs):
    """The steps of ``runs`` (steps,) under policy none, of which the first has seed 0."""
    tables = (pd.DataFrame({"policy": "none", "seed": seed, "mismatch": run}) for seed, run in enumerate(runs))
    return pd.concat(tables, ignore_index=True)


def test_the_ratio_that_is_chosen_hits_the_rate():
    generator = np.random.default_rng(0)
    runs = [generator.lognormal(0, 0.1, 256) for _ in range(3)]
    ratio = chosen_ratio(under_none(runs), target=6)
    assert np.mean([len(onsets(run, SpikeRule(ratio))) for run in runs]) == pytest.approx(6, abs=1)
    assert 1 < ratio < 1.4


def test_runs_without_spikes_have_the_ratio_of_the_release():
    assert chosen_ratio(under_none([np.ones(100)])) == SpikeRule().ratio


@pytest.mark.parametrize(("name", "value"), [("ratio", 0.0), ("recent", 0), ("warmup", 0), ("separation", 0)])
def test_bad_rules_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        SpikeRule(**{name: value})
