"""The knapsack against all choices: schemes, parts that overlap, storage that is shared, parts that need others."""

import os
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragility_adjoint.mixed_precision import knapsack
from fragility_adjoint.mixed_precision.knapsack import Knapsack


def test_a_closed_output_needs_no_silence():
    """As a service without one starts Python."""
    kept = os.dup(1)
    os.close(1)
    try:
        with knapsack.silenced():
            done = True
        with pytest.raises(OSError):
            os.fstat(1)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert done


@st.composite
def problems(draw):
    """Two groups with up to three schemes, and up to three parts with all kinds of dependences."""
    schemes, parts, places = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 4))
    count, rng = 2 * schemes + parts, np.random.default_rng(draw(st.integers(0, 2**31)))
    chance = draw(st.floats(0.1, 0.9))
    first = 2 * schemes
    kept = list(range(first, count))
    covers = rng.random((count, places)) < chance
    covers[:first] &= rng.random((first, 1)) < 0.3
    errors, sizes = rng.random(count), rng.random(count)
    errors[first:] = 0
    sizes[first:] *= rng.random(parts) < 0.7  # some parts are free
    several = parts > 1
    return Knapsack(
        errors, sizes, rng.random(places) * 10.0 ** rng.integers(-3, 1, places), covers,
        shared=[(rng.random(), kept[:2])] if several else [],
        saved=[(0.1 * rng.random(), [kept[:1], kept[1:]])] if several else [],
        alternatives=[range(schemes), range(schemes, first)], needs=[(kept[-1], 0)] if several else [],
    )  # fmt: skip


def every_choice(known: Knapsack):
    """All decisions that are allowed, with their error and size, by the definitions."""
    for bits in product([False, True], repeat=len(known.errors)):
        taken = np.array(bits)
        if all(taken[list(g)].sum() == 1 for g in known.alternatives) and all(
            taken[j] >= taken[i] for i, j in known.needs
        ):
            yield known.error(taken), known.size(taken)


@given(problems(), st.floats(0, 1))
@settings(max_examples=80)
def test_no_choice_is_better(known, share):
    errors, sizes = np.array(list(every_choice(known))).T
    budget = sizes.min() + share * np.ptp(sizes) + 1e-9
    taken = known.least_error(budget)
    assert known.size(taken) <= budget * (1 + 1e-5) + 1e-9
    assert known.error(taken) <= errors[sizes <= budget].min() * (1 + 1e-5) + 1e-9
    bound = errors.min() + share * np.ptp(errors) + 1e-9
    taken = known.least_size(bound)
    assert known.error(taken) <= bound * (1 + 1e-5)
    assert known.size(taken) <= sizes[errors <= bound].min() + 1e-5
    assert known.error(known.least_error()) == pytest.approx(errors.min(), abs=1e-9)


def test_by_hand():
    """Part 0 covers the first place, part 1 both, part 2 nothing. Storage of 3 is shared by the first two."""
    covers = np.array([[True, False], [True, True], [False, False]])
    known = Knapsack(np.zeros(3), np.array([1.0, 2.0, 0.0]), np.array([5.0, 1.0]), covers, shared=[(3.0, (0, 1))])
    assert known.error(np.array([True, False, False])) == 1 and known.size(np.array([True, True, False])) == 6
    assert known.least_error(4.5).tolist() == [True, False, False]
    assert known.least_error().tolist() == [False, True, False]
    assert known.least_size(0.5).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="no choice keeps the budget of -1"):
        known.least_error(-1.0)


def test_what_the_solver_prints_does_not_reach_a_reader(capfd, monkeypatch):
    def talkative(*args, **options):
        os.write(1, b"HighsMipSolverData\n")
        return solve(*args, **options)

    solve = knapsack.milp
    monkeypatch.setattr(knapsack, "milp", talkative)
    known = Knapsack(
        np.array([3.0, 1.0]), np.array([1.0, 2.0]), np.zeros(0), np.zeros((2, 0), bool), alternatives=[[0, 1]]
    )
    assert known.least_error(2.0).tolist() == [False, True]
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
