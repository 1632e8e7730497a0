"""What the limits of a controller decide, checked on the controllers themselves."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from release import RELEASED

from fragility_core import theory
from fragility_core.bgss import get_policy, trajectory

FIRST, STEPS = 3, 48


def last_states(blocks: int, per_step: int, cooldown: int, budget: int, seeds=range(3)):
    """The state after a run, for every controller and ``seeds`` of priorities, under a trigger that always fires."""
    limits = {
        "warmup_steps": FIRST, "max_total_actions": budget, "max_actions_per_step": per_step,
        "max_actions_per_layer": budget, "cooldown_steps": cooldown,
    }  # fmt: skip
    for name in RELEASED:
        policy = get_policy(name, **limits)
        for seed in seeds:
            rows = random_rows(blocks, seed)
            windows = pd.DataFrame({"window": range(STEPS), "combined": np.arange(STEPS, dtype=float)})
            *_, last = trajectory(policy, rows, windows, seed)
            yield last


def random_rows(blocks: int, seed: int) -> pd.DataFrame:
    """Rows (STEPS * blocks) of random risks."""
    generator = np.random.default_rng(seed)
    drawn = {name: generator.random(STEPS * blocks) for name in ("risk", "dominance", "layernorm_ratio", "transport")}
    order = {"window": np.repeat(np.arange(STEPS), blocks), "layer": np.tile(np.arange(blocks), STEPS)}
    return pd.DataFrame(order | drawn)


def ledgers(*limits: int) -> tuple[set, set, set]:
    """The protected layer-steps, the protected blocks and the final epsilons that occur."""
    states = list(last_states(*limits))
    protected = {tuple(np.array(state.epsilon) > state.base_epsilon) for state in states}
    return {state.protected_layer_steps for state in states}, protected, {state.epsilon for state in states}


def test_the_paper_s_ledger_is_forced():
    assert theory.protected_layer_steps(blocks=12, per_step=2, first=24, steps=256) == 2742
    assert theory.forced_protection(12, 2, 10, 24) and theory.forced_epsilon(12, 2, 10, 24)
    (layer_steps,), protected, (epsilon,) = ledgers(12, 2, 10, 24)
    assert layer_steps == theory.protected_layer_steps(12, 2, FIRST, STEPS)
    assert protected == {(True,) * 12}
    assert epsilon == pytest.approx((1.148e-4,) * 12, rel=1e-3)


@settings(max_examples=20)
@given(blocks=st.integers(1, 7), per_step=st.integers(1, 4), extra=st.integers(0, 4), budget=st.integers(0, 15))
def test_limits_force_the_ledger_whatever_the_priorities(blocks, per_step, extra, budget):
    limits = blocks, per_step, -(-blocks // per_step) + extra, blocks + budget
    assert theory.forced_protection(*limits)
    layer_steps, protected, epsilons = ledgers(*limits)
    assert layer_steps == {theory.protected_layer_steps(blocks, per_step, FIRST, STEPS)}
    assert protected == {(True,) * blocks}
    if theory.forced_epsilon(*limits):
        assert len(epsilons) == 1 and len(set(*epsilons)) == 1


def test_a_budget_below_the_blocks_leaves_a_choice():
    assert not theory.forced_protection(12, 2, 10, 10)
    assert len(ledgers(12, 2, 10, 10)[1]) > 1


def test_a_short_cooldown_leaves_a_choice():
    assert not theory.forced_protection(12, 2, 5, 24)
    assert len(ledgers(12, 2, 5, 24)[0]) > 1


def test_a_part_of_a_round_leaves_a_choice_of_epsilon():
    assert theory.forced_protection(12, 2, 10, 30) and not theory.forced_epsilon(12, 2, 10, 30)
    layer_steps, protected, epsilons = ledgers(12, 2, 10, 30)
    assert len(layer_steps) == len(protected) == 1 < len(epsilons)


@pytest.mark.parametrize("limits", [(0, 2, 10, 24), (12, 0, 10, 24)])
def test_no_block_or_no_action_is_an_error(limits):
    with pytest.raises(ValueError, match="must be at least 1, got"):
        theory.forced_protection(*limits)
