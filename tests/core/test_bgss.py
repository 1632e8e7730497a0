"""Controllers of LayerNorm's epsilon: recorded runs, the algorithms written out step by step, and properties."""

import copy
import gzip
import json
import math
import pickle
import random
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawn import seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from release import RELEASED, policy_from_config, recorded_rows

from fragility_core import theory
from fragility_core.bgss import (
    POLICIES,
    Action,
    Limits,
    Policy,
    State,
    action_table,
    advance,
    choose_thresholds,
    get_policy,
    replay,
    trajectory,
)
from fragility_core.bgss.printed import EpsilonBump, PrintedBGSS
from fragility_core.bgss.released import Released
from fragility_core.surrogates import score
from fragility_core.surrogates.monitor import Monitor
from fragility_quantization.quantized import lower

RECORD = Path(__file__).parents[1] / "data" / "e5.json.gz"
NAMES = tuple(POLICIES)
LIKE_RELEASED = tuple(name for name, kind in POLICIES.items() if issubclass(kind, Released))  # new ones, too
REQUIRED = {  # parameters for which the paper gives no values
    "bgss_printed": {"risk_threshold": 1.0, "dominance_threshold": 0.3, "target_ratio": 0.5},
    "eps_bump": {"target_ratio": 0.5},
}
ACTION_FIELDS = {  # of our action table, and the release's
    "step": "step", "layer": "layer", "old_epsilon": "old_epsilon", "new_epsilon": "new_epsilon",
    "priority": "trigger_score", "cooldown_until": "cooldown_after", "earlier_actions": "layer_action_count_prev",
}  # fmt: skip
closed_loop = settings(max_examples=20)  # each example is a whole run


# --- Recorded runs (tests/data/e5.json.gz) -------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict:
    """Configuration and runs of the release."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


@pytest.mark.parametrize("name", ["none", "static_global", "random_same_budget", "bgss"])
def test_replay_gives_the_recorded_actions(recorded, name):
    """Every action agrees to the last bit: step, layer, order, old and new epsilon, and priority."""
    run = recorded["runs"][name]
    table = replay(policy_from_config(name, recorded["config"]), *recorded_rows(run), seed=run["summary"]["seed"])
    assert len(table) == run["summary"]["action_count"]
    for ours, theirs in ACTION_FIELDS.items():
        assert table[ours].tolist() == [float(row[theirs] or 0) for row in run["actions"]], ours


@pytest.mark.parametrize("name", ["none", "static_global", "random_same_budget", "bgss"])
def test_replay_passes_through_the_recorded_states(recorded, name):
    run = recorded["runs"][name]
    layers, windows = recorded_rows(run)
    *states, last = trajectory(policy_from_config(name, recorded["config"]), layers, windows)
    assert [list(state.epsilon) for state in states] == layers.groupby("window").epsilon_1.apply(list).tolist()
    # The record counts the protected layers of a step before its actions.
    counts = [state.protected_layer_steps for state in (*states[1:], last)]
    assert counts == [int(step["protected_layer_steps_cum"]) for step in run["steps"]]
    assert last.step == len(run["steps"])
    assert last.protected_layer_steps == run["summary"]["protected_layer_steps"]


def test_a_recorded_configuration_is_taken_as_it_is(recorded):
    policy = policy_from_config("bgss", recorded["config"] | {"target_precision": "bf16", "epsilon_multiplier": 3.0})
    assert policy == get_policy(
        "bgss", warmup_steps=12, max_total_actions=10, unit_roundoff=2.0**-8, epsilon_multiplier=3.0
    )


@pytest.mark.parametrize(("key", "value"), [("monitor_interval", 2), ("random_candidate_scope", "top_half")])
def test_unknown_variants_of_the_release_are_refused(recorded, key, value):
    with pytest.raises(ValueError, match=f"{key} must be .*, got {value!r}: such a record cannot be replayed"):
        policy_from_config("bgss", recorded["config"] | {key: value})


# --- Runs made up here ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """The statistics of a run, each (steps, layers). Only rho_LN depends on epsilon."""

    risk: np.ndarray
    dominance: np.ndarray
    transport: np.ndarray
    scaled_variance: np.ndarray  # sigma^2 d_model u

    def rows(self, step: int, epsilon: tuple[float, ...]) -> pd.DataFrame:
        """The rows of one step as ``surrogates.score`` would give them."""
        return pd.DataFrame(
            {
                "window": step,
                "layer": np.arange(len(epsilon)),
                "risk": self.risk[step],
                "dominance": self.dominance[step],
                "transport": self.transport[step],
                "layernorm_ratio": self.scaled_variance[step] / epsilon,
                "epsilon_1": epsilon,
            }
        )

    def signal(self, step: int) -> float:
        return 2.0**-11 * float(self.risk[step].sum())


def course(seed: int, steps: int, layers: int, coarse: bool = False) -> Course:
    """Random statistics with values on both sides of every gate; ``coarse`` ones have many ties."""
    generator = np.random.default_rng(seed)
    risk = generator.lognormal(0.5, 1, (steps, layers))
    unit = 1.0 if coarse else 2.0**-30  # sums of its multiples are exact, in any order
    return Course(
        risk=np.ceil(risk / unit) * unit,
        dominance=generator.uniform(0, 1, (steps, layers)).round(1 if coarse else 15),
        transport=generator.integers(0, 3, (steps, layers)).astype(float),
        scaled_variance=10 ** generator.uniform(-6.5, -3, (steps, layers)),
    )


def steps_of(policy: Policy, run: Course, seed: int = 0):
    """The state, rows, signal and actions of each step of a controller in closed loop."""
    steps, layers = run.risk.shape
    state = policy.start(layers, seed)
    for step in range(steps):
        rows, signal = run.rows(step, state.epsilon), run.signal(step)
        actions = policy.decide(state, rows, signal)
        yield state, rows, signal, actions
        state = advance(state, signal, actions)


def final(policy: Policy, run: Course, seed: int = 0) -> State:
    *_, (state, _, signal, actions) = steps_of(policy, run, seed)
    return advance(state, signal, actions)


released = st.fixed_dictionaries(
    {
        "epsilon_max": st.sampled_from([3e-5, 1e-3, 1e-2]),
        "warmup_steps": st.integers(0, 6),
        "trigger_quantile": st.floats(0, 1),
        "max_total_actions": st.integers(0, 15),
        "max_actions_per_step": st.integers(0, 4),
        "max_actions_per_layer": st.integers(0, 4),
        "cooldown_steps": st.integers(0, 6),
        "epsilon_multiplier": st.floats(1.01, 8),
        "update_headroom_weight": st.floats(0, 0.9),
        "update_repetition_penalty": st.floats(0, 2),
    }
)
bounds = {
    "target_ratio": st.floats(0.05, 0.95),
    "monitor_interval": st.integers(1, 4),
    "epsilon_min": st.sampled_from([1e-6, 1e-5, 2e-5]),
    "epsilon_max": st.sampled_from([3e-5, 1e-4, 1e-2]),
}
printed = st.fixed_dictionaries(
    bounds
    | {
        "risk_threshold": st.floats(0, 3),
        "dominance_threshold": st.floats(0, 0.6),
        "budget": st.integers(0, 4),
        "cooldown": st.integers(0, 4),
    }
)
parameters = (
    dict.fromkeys(NAMES, st.just({}))
    | dict.fromkeys(LIKE_RELEASED, released)
    | {
        "static_global": st.fixed_dictionaries({"static_epsilon": st.floats(2e-5, 1)}),
        "bgss_printed": printed,
        "eps_bump": st.fixed_dictionaries(bounds),
    }
)
each_policy = pytest.mark.parametrize("name", NAMES)
shape = {"seed": seeds, "steps": st.integers(1, 20), "layers": st.integers(1, 7)}


# --- The algorithms written out, with their counters and a generator that lives on ----------------


def printed_by_the_book(p, run: Course) -> list[tuple[int, int, float, float]]:
    """Algorithm 1 (`alg:bgss`), line by line: (step, layer, old epsilon, new epsilon)."""
    steps, layers = run.risk.shape
    epsilon, taken = [p.base_epsilon] * layers, []
    counter = [0] * layers
    for t in range(1, steps + 1):
        if t % p.monitor_interval == 0:
            counter = [c - 1 if c > 0 else c for c in counter]
            risk, dominance = run.risk[t - 1], run.dominance[t - 1]
            rows = run.rows(t - 1, epsilon)
            eligible = [
                k for k in range(layers)
                if risk[k] >= p.risk_threshold and dominance[k] >= p.dominance_threshold and rows.layernorm_ratio[k] < 1
            ]  # fmt: skip
            eligible = [k for k in eligible if not counter[k] > 0]
            for k in sorted(eligible, key=lambda k: risk[k], reverse=True)[: p.budget]:
                candidate = rows.layernorm_ratio[k] * epsilon[k] / p.target_ratio
                candidate = min(max(candidate, p.epsilon_min), p.epsilon_max)
                new = max(epsilon[k], candidate)
                if new > epsilon[k]:
                    taken.append((t - 1, k, epsilon[k], new))
                    epsilon[k] = new
                    counter[k] = p.cooldown
    return taken


@given(given=printed, coarse=st.booleans(), **shape)
@closed_loop
def test_printed_controller_line_by_line(given, coarse, seed, steps, layers):
    policy, run = PrintedBGSS(**given), course(seed, steps, layers, coarse)
    actions = final(policy, run).actions
    assert [(a.step, a.layer, a.old_epsilon, a.new_epsilon) for a in actions] == printed_by_the_book(policy, run)


def bump_by_the_book(p, run: Course) -> list[tuple[int, int, float, float]]:
    """Algorithm 2 (`alg:eps-bump`) for a minibatch of one."""
    steps, layers = run.risk.shape
    epsilon, taken = [p.base_epsilon] * layers, []
    for s in range(1, steps + 1):
        if s % p.monitor_interval == 0:
            ratio = run.rows(s - 1, epsilon).layernorm_ratio
            for k in range(layers):
                if ratio[k] < 1:
                    new = min(max(ratio[k] * epsilon[k] / p.target_ratio, p.epsilon_min), p.epsilon_max)
                    if new > epsilon[k]:
                        taken.append((s - 1, k, epsilon[k], new))
                        epsilon[k] = new
    return taken


@given(given=parameters["eps_bump"], **shape)
@closed_loop
def test_epsilon_bump_line_by_line(given, seed, steps, layers):
    policy, run = EpsilonBump(**given), course(seed, steps, layers)
    actions = final(policy, run).actions
    assert [(a.step, a.layer, a.old_epsilon, a.new_epsilon) for a in actions] == bump_by_the_book(policy, run)


def released_by_the_book(p, run: Course, seed: int) -> list[tuple[int, int, float, float]]:
    """Protocol section 6, with the lists a controller would keep."""
    steps, layers = run.risk.shape
    epsilon, count, until, signals, taken = [p.base_epsilon] * layers, [0] * layers, [0] * layers, [], []
    generator = random.Random(seed + 1009)
    for t in range(steps):
        signal, ratio = run.signal(t), run.rows(t, epsilon).layernorm_ratio
        pool = [
            k for k in range(layers)
            if until[k] <= t and count[k] < p.max_actions_per_layer and epsilon[k] < p.epsilon_max
        ]  # fmt: skip
        k_max = min(p.max_actions_per_step, p.max_total_actions - len(taken), len(pool))
        if t >= p.warmup_steps and signals and signal >= np.quantile(signals, p.trigger_quantile) and k_max:

            def ranking(k, t=t, ratio=ratio):
                scaled = 2.0**-11 * run.risk[t, k]
                bonus = (1 + run.dominance[t, k]) * (1 + ratio[k]) if p.name == "bgss" else 1.0
                h = (p.epsilon_max - epsilon[k]) / (p.epsilon_max - p.base_epsilon)
                priority = scaled * bonus * (0.5 + 0.5 * h) * (1 / math.sqrt(1 + count[k]))
                return priority, scaled, run.transport[t, k]

            if p.name == "random_same_budget":
                chosen = [pool[i] for i in sorted(generator.sample(range(len(pool)), k_max))]
            else:
                chosen = sorted(pool, key=ranking, reverse=True)[:k_max]
            for k in chosen:
                h = (p.epsilon_max - epsilon[k]) / (p.epsilon_max - p.base_epsilon)
                grown = (1 - p.update_headroom_weight) + p.update_headroom_weight * h
                damped = 1 + p.update_repetition_penalty * count[k]
                new = min(p.epsilon_max, epsilon[k] * (1 + (p.epsilon_multiplier - 1) * grown / damped))
                taken.append((t, k, epsilon[k], new))
                epsilon[k], until[k] = new, t + p.cooldown_steps
                count[k] += 1
        signals.append(signal)
    return taken


@pytest.mark.parametrize("name", RELEASED)
@given(given=released, coarse=st.booleans(), **shape)
@closed_loop
def test_released_controllers_step_by_step(name, given, coarse, seed, steps, layers):
    policy, run = get_policy(name, **given), course(seed, steps, layers, coarse)
    actions = final(policy, run, seed).actions
    want = released_by_the_book(policy, run, seed)
    assert [(a.step, a.layer, a.old_epsilon) for a in actions] == [action[:3] for action in want]
    assert [a.new_epsilon for a in actions] == pytest.approx([action[3] for action in want], rel=1e-15)


# --- Properties of every policy ------------------------------------------------------------------


@each_policy
@given(data=st.data(), **shape)
@closed_loop
def test_limits_are_kept(name, data, seed, steps, layers):
    """Monotone epsilon within its bounds, budgets in all, per step and per layer, and cooldowns."""
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    limits = policy.limits
    last = final(policy, run, seed)
    taken = [action for action in last.actions if action.step >= 0]
    per_step = pd.Series([action.step for action in taken], dtype=int).value_counts()
    assert len(last.actions) <= limits.actions
    assert (per_step <= limits.per_step).all()
    for layer in range(layers):
        of_layer = [action for action in taken if action.layer == layer]
        assert len(of_layer) <= limits.per_layer
        for before, after in pairwise(of_layer):
            assert after.step >= before.cooldown_until and after.old_epsilon == before.new_epsilon
    for action in last.actions:
        assert action.new_epsilon > action.old_epsilon
        assert limits.epsilon_min <= action.new_epsilon <= limits.epsilon_max


@each_policy
@given(data=st.data(), **shape)
@closed_loop
def test_an_action_is_in_force_from_the_next_step_on(name, data, seed, steps, layers):
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    protected = 0
    for state, _, signal, actions in steps_of(policy, run, seed):
        assert all(action.step == state.step for action in actions)
        protected += sum(epsilon > policy.base_epsilon for epsilon in state.epsilon)
        after = advance(state, signal, actions)
        changed = {action.layer: action.new_epsilon for action in actions}
        assert after.epsilon == tuple(changed.get(layer, old) for layer, old in enumerate(state.epsilon))
        assert after.protected_layer_steps == protected  # this step's action is not yet counted
        assert after.step == state.step + 1


@each_policy
@given(data=st.data(), **shape)
@closed_loop
def test_decisions_do_not_depend_on_later_steps(name, data, seed, steps, layers):
    """Causality: two runs that are equal up to a step have equal actions up to that step."""
    cut = data.draw(st.integers(1, steps))
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    other = Course(**{f.name: getattr(run, f.name).copy() for f in fields(run)})
    other.risk[cut:] *= 3
    other.scaled_variance[cut:] /= 7
    first, second = (
        [action for action in final(policy, each, seed).actions if action.step < cut] for each in (run, other)
    )
    assert first == second


@each_policy
@given(data=st.data(), **shape)
@closed_loop
def test_decide_is_pure(name, data, seed, steps, layers):
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    for state, rows, signal, actions in steps_of(policy, run, seed):
        state_before, rows_before = copy.deepcopy(state), rows.copy()
        assert policy.decide(state, rows, signal) == actions
        assert state == state_before
        pd.testing.assert_frame_equal(rows, rows_before, check_exact=True)


@each_policy
@given(data=st.data(), **shape)
@closed_loop
def test_a_stored_state_goes_on_as_if_never_stored(name, data, seed, steps, layers):
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    (state, rows, signal, actions) = data.draw(st.sampled_from(list(steps_of(policy, run, seed))))
    again = pickle.loads(pickle.dumps(state))
    assert again == state and again.epsilon == state.epsilon
    assert policy.decide(again, rows, signal) == actions
    assert advance(again, signal, actions) == advance(state, signal, actions)


@pytest.mark.parametrize("name", ["risk_only_same_budget", "bgss", "bgss_printed", "eps_bump"])
@given(data=st.data(), **shape)
@closed_loop
def test_numbering_the_layers_otherwise_numbers_the_actions_otherwise(name, data, seed, steps, layers):
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    order = np.random.default_rng(seed).permutation(layers)
    permuted = Course(**{f.name: getattr(run, f.name)[:, order] for f in fields(run)})
    found = {replace(action, layer=int(order[action.layer])) for action in final(policy, permuted).actions}
    assert found == set(final(policy, run).actions)


@each_policy
@given(data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), **shape)
@closed_loop
def test_nonfinite_values_are_never_acted_on(name, data, bad, seed, steps, layers):
    policy, run = get_policy(name, **data.draw(parameters[name])), course(seed, steps, layers)
    generator = np.random.default_rng(seed)
    usual = {"risk", "dominance", "layernorm_ratio"}
    reads = {
        "risk_only_same_budget": {"risk"}, "random_same_budget": {"risk"}, "eps_bump": {"layernorm_ratio"},
    }.get(name, usual)  # fmt: skip
    column = data.draw(st.sampled_from(sorted(usual | reads)))
    state = policy.start(layers, seed)
    for step in range(steps):
        rows, signal = run.rows(step, state.epsilon), run.signal(step)
        spoilt = generator.random(layers) < 0.3
        rows.loc[spoilt, column] = bad
        actions = policy.decide(state, rows, signal)
        if column in reads:
            assert not any(spoilt[action.layer] for action in actions)
        assert all(math.isfinite(action.new_epsilon) for action in actions)
        state = advance(state, signal, actions)


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_signal_triggers_nothing_and_is_forgotten(name, bad):
    policy, run = get_policy(name, warmup_steps=2), course(0, 1, 3)
    state = policy.start(3)
    for signal in (1.0, bad, 2.0):
        state = advance(state, signal)
    assert state.signals == (1.0, 2.0) and state.step == 3
    rows = run.rows(0, state.epsilon)
    assert policy.decide(state, rows, bad) == ()
    assert len(policy.decide(state, rows, 3.0)) == 2


# --- Algorithm 1 (`alg:bgss`) by hand ----------------------------------------------------------------------


def rows_of(**columns) -> pd.DataFrame:
    """Rows of one window; the columns not given are those of a layer at the base epsilon that passes every gate."""
    layers = len(next(iter(columns.values())))
    usual = {"risk": 2.0, "dominance": 0.5, "layernorm_ratio": 0.8, "transport": 0.0, "epsilon_1": 1e-5}
    return pd.DataFrame({"layer": np.arange(layers)} | usual | columns)


def test_gates_by_hand():
    policy = get_policy("bgss_printed", **REQUIRED["bgss_printed"], budget=2, cooldown=3)
    state = policy.start(7)
    state = advance(state, 1.0, [Action(0, 6, 1e-5, 2e-5, 9.0, 1, cooldown_until=3)])
    rows = rows_of(
        risk=[0.5, 9.0, 8.0, 1.0, 3.0, 4.0, 7.0],
        dominance=[0.5, 0.1, 0.5, 0.5, 0.3, 0.5, 0.5],
        layernorm_ratio=[0.8, 0.8, 1.0, 0.8, 0.8, 0.4, 0.8],
    )
    gates = policy.gates(state, rows).drop(columns="target")
    passes = {
        "risk": [0, 1, 1, 1, 1, 1, 1],  # tau_G = 1 itself passes
        "dominance": [1, 0, 1, 1, 1, 1, 1],  # so does tau_phi = 0.3
        "regime": [1, 1, 0, 1, 1, 1, 1],  # rho_LN = 1 does not
        "cooldown": [1, 1, 1, 1, 1, 1, 0],
        "eligible": [0, 0, 0, 1, 1, 1, 0],
        "budget": [0, 1, 1, 0, 1, 1, 1],  # eligible by G: 5, 4, 3
        "selected": [0, 0, 0, 0, 1, 1, 0],
        "raised": [0, 0, 0, 0, 1, 0, 0],  # rho_LN = 0.4 is below rho_* = 0.5 already
    }
    assert {name: gates[name].astype(int).tolist() for name in gates} == passes
    (action,) = policy.decide(state, rows, 1.0)
    # eps_cand = rho_LN eps / rho_* = 0.8e-5 / 0.5
    assert action == Action(1, 4, 1e-5, pytest.approx(1.6e-5, rel=1e-15), 3.0, candidates=3, cooldown_until=4)


def test_the_budget_goes_to_selected_layers_that_do_not_change():
    """B counts selected layers, as in the algorithm, not actions."""
    policy = get_policy("bgss_printed", **REQUIRED["bgss_printed"], budget=1)
    rows = rows_of(risk=[3.0, 2.0], layernorm_ratio=[0.4, 0.8])
    assert policy.decide(policy.start(2), rows, 1.0) == ()


def test_cooldown_counts_monitored_steps():
    policy = get_policy("bgss_printed", **REQUIRED["bgss_printed"], cooldown=2, monitor_interval=3)
    state, acted = policy.start(1), []
    for step in range(12):
        # sigma^2 grows so that there is always something to raise.
        rows = rows_of(risk=[2.0], layernorm_ratio=[0.8], epsilon_1=list(state.epsilon))
        actions = policy.decide(state, rows, 1.0)
        acted += [step for _ in actions]
        state = advance(state, 1.0, actions)
    # t = 3, then two monitored steps on: t = 9; counted from 0.
    assert acted == [2, 8]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(risk=[0.9, 0.9]),
        rows_of(dominance=[0.2, 0.2]),
        rows_of(layernorm_ratio=[1.0, 5.0]),
        rows_of(risk=[0.9, 5.0], dominance=[0.5, 0.2]),
        rows_of(risk=[math.nan, math.nan]),
    ],
    ids=["risk", "dominance", "regime", "no layer passes both", "nonfinite"],
)
def test_no_eligible_layer_no_action(rows):
    policy = get_policy("bgss_printed", **REQUIRED["bgss_printed"])
    assert policy.decide(policy.start(2), rows, 1.0) == ()


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize(
    "change",
    [
        {"max_total_actions": 2},
        {"max_actions_per_layer": 1, "cooldown_steps": 0},
        {"cooldown_steps": 5},
        {"epsilon_max": 2e-5, "cooldown_steps": 0, "update_headroom_weight": 0.0},
    ],
    ids=["budget spent", "layers spent", "all in cooldown", "all at the cap"],
)
def test_no_candidate_no_action(name, change):
    policy = get_policy(name, warmup_steps=1, **change)
    state = advance(policy.start(2), 1.0)
    rows = rows_of(risk=[2.0, 3.0])
    first = policy.decide(state, rows, 1.0)
    assert len(first) == 2
    assert policy.decide(advance(state, 1.0, first), rows, 1.0) == ()


@given(
    ratio=st.floats(1e-6, 1, exclude_max=True),
    target=st.floats(0.01, 0.99),
    base=st.floats(1e-7, 1e-4),
    cap=st.floats(1e-4, 1e-1),
)
def test_the_updated_ratio_meets_its_target_where_that_is_feasible(ratio, target, base, cap):
    """sigma^2 d_model u / eps_{t+1} <= rho_* whenever sigma^2 d_model u / rho_* <= eps_max, else eps_max."""
    variance = ratio * base
    policy = get_policy(
        "bgss_printed", base_epsilon=base, epsilon_min=base, epsilon_max=cap, target_ratio=target,
        risk_threshold=0.0, dominance_threshold=0.0,
    )  # fmt: skip
    state = policy.start(1)
    rows = rows_of(layernorm_ratio=[ratio], epsilon_1=[base])
    (epsilon,) = advance(state, 1.0, policy.decide(state, rows, 1.0)).epsilon
    if variance / target <= cap:
        assert variance / epsilon <= target * (1 + 1e-12)
        assert epsilon == base or variance / epsilon == pytest.approx(target, rel=1e-12)  # and no more than needed
    else:
        assert epsilon == cap


@given(
    variance=st.floats(1e-9, 1e2), remainder=st.floats(0, 1e3), attention=st.floats(0, 1e3),
    input_norm=st.floats(1e-3, 1e3), transport=st.floats(1, 1e3), final_norm=st.floats(1e-2, 1e3),
)  # fmt: skip
def test_an_action_lowers_the_frozen_score_by_the_reduction_formula(
    variance, remainder, attention, input_norm, transport, final_norm
):
    """Eq. (19) (`eq:bgss-reduction`): with everything else fixed, G falls by the transported fall of M_LN."""

    def layernorm(epsilon: float) -> float:
        return theory.frozen_magnitude(1.5, variance, epsilon, input_norm)

    def risk(epsilon: float) -> float:
        return theory.frozen_risk(remainder + attention, layernorm(epsilon), transport, final_norm)

    policy = get_policy("bgss", warmup_steps=0)
    state = advance(policy.start(1), 1.0)
    rows = rows_of(risk=[risk(1e-5)], dominance=[layernorm(1e-5) / (layernorm(1e-5) + remainder + attention)])
    (action,) = policy.decide(state, rows, 2.0)
    fall = risk(action.old_epsilon) - risk(action.new_epsilon)
    before, after = layernorm(action.old_epsilon), layernorm(action.new_epsilon)
    reduction = theory.frozen_risk_reduction(before, after, transport, final_norm)
    assert reduction >= 0
    assert fall == pytest.approx(reduction, rel=1e-9, abs=1e-12 * risk(1e-5))


# --- The released controller by hand --------------------------------------------------------------


def ready(policy: Policy, layers: int) -> State:
    """A state past the warm-up, with a history below any signal."""
    state = policy.start(layers)
    for _ in range(policy.warmup_steps):
        state = advance(state, 0.0)
    return state


def test_trigger_by_hand():
    policy = get_policy("bgss", warmup_steps=5)
    state = policy.start(1)
    for signal in (3.0, 1.0, 2.0, 4.0):
        state = advance(state, signal)
    assert not policy.triggered(state, 100.0)  # step 4
    state = advance(state, 5.0)
    # Sorted 1 2 3 4 5, position 0.8 * 4 = 3.2 between 4 and 5.
    assert not policy.triggered(state, 4.19)
    assert policy.triggered(state, 4.2)


def test_update_by_hand():
    policy = get_policy("bgss", base_epsilon=1.0, epsilon_max=5.0)
    state = policy.start(3)
    # h = 1: 1 + 3 (1/4 + 3/4) = 4; on layer 1 with eps 3 and n = 1, h = 1/2: 3 [1 + 3 (5/8) / 1.6].
    state = advance(state, 1.0, [Action(0, 1, 1.0, 3.0, 0.0, 3, 0)])
    assert policy.headroom(state).tolist() == [1.0, 0.5, 1.0]
    assert policy.updated(state)[0] == 4.0
    assert policy.updated(state)[1] == 5.0  # 6.5 capped
    wide = replace(policy, epsilon_max=1001.0)
    assert wide.updated(state)[1] == pytest.approx(3 * (1 + 3 * (0.25 + 0.75 * 0.998) / 1.6), rel=1e-14)


def test_priorities_by_hand():
    risk = np.array([2.0, 3.0])
    rows = {"scaled": risk, "dominance": np.array([0.5, 0.0]), "ratio": np.array([1.0, 0.0])}
    bgss, risk_only = get_policy("bgss", base_epsilon=1.0, epsilon_max=3.0), get_policy("risk_only_same_budget")
    fresh = bgss.start(2)
    assert bgss.priority(fresh, **rows).tolist() == [6.0, 3.0]  # 2 * 1.5 * 2 and 3
    assert replace(bgss, ln_bonus_weight=0.0).priority(fresh, **rows).tolist() == [4.0, 3.0]
    assert risk_only.priority(risk_only.start(2), **rows).tolist() == [2.0, 3.0]
    used = advance(fresh, 1.0, [Action(0, 0, 1.0, 2.0, 0.0, 2, 0)])  # h = 1/2, n = 1
    assert bgss.priority(used, **rows) == pytest.approx([6 * 0.75 / math.sqrt(2), 3.0], rel=1e-15)


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        (rows_of(risk=[1.0, 2.0, 2.0], dominance=[1.0, 0.0, 0.0], layernorm_ratio=[0.0] * 3), [1, 2]),  # by u G
        (rows_of(risk=[2.0, 2.0, 2.0], transport=[0.0, 1.0, 3.0]), [2, 1]),
        (rows_of(risk=[2.0, 2.0, 2.0]), [0, 1]),
        (rows_of(risk=[2.0, 2.0, 4.0]), [2, 0]),
    ],
    ids=["risk", "transport", "order", "priority"],
)
def test_equal_priorities_go_by_risk_then_transport(rows, first):
    policy = get_policy("bgss")
    assert [action.layer for action in policy.decide(ready(policy, 3), rows, 1.0)] == first


def test_random_draws_depend_on_the_seed_alone():
    policy = get_policy("random_same_budget", max_actions_per_step=3)
    rows = rows_of(risk=np.arange(12.0))
    for seed in range(5):
        state = replace(ready(policy, 12), seed=seed)
        chosen = [action.layer for action in policy.decide(state, rows, 1.0)]
        assert chosen == sorted(random.Random(seed + 1009).sample(range(12), 3))
        shuffled = rows.assign(risk=rows.risk[::-1].to_numpy())
        assert chosen == [action.layer for action in policy.decide(state, shuffled, 1.0)]


# --- eps-bump --------------------------------------------------------------------------------------


def test_epsilon_bump_takes_the_median_of_the_minibatch():
    policy = get_policy("eps_bump", target_ratio=0.5)
    state = policy.start(2)
    for _ in range(4):
        assert policy.decide(state, rows_of(risk=[1.0, 1.0]), 1.0) == ()  # s = 1 to 4
        state = advance(state, 1.0)
    examples = [[0.6, 7.0], [0.8, 0.9], [9.0, 2.0]]  # medians 0.8 and 2: only the first block is in the regime
    rows = pd.concat([rows_of(layernorm_ratio=ratio) for ratio in examples])
    (action,) = policy.decide(state, rows, 1.0)
    assert (action.step, action.layer) == (4, 0)
    assert action.new_epsilon == pytest.approx(0.8e-5 / 0.5, rel=1e-15)


# --- The state -----------------------------------------------------------------------------------


LIMITS = Limits(actions=3, per_step=2, per_layer=1, epsilon_min=1e-5, epsilon_max=1e-2)


def step(layer: int, old: float = 1e-5, new: float = 1e-4, at: int = 1, cooldown_until: int = 0) -> Action:
    return Action(at, layer, old, new, priority=0.0, candidates=4, cooldown_until=cooldown_until)


@pytest.fixture
def at_step_1() -> State:
    """At step 1 of 4 layers; layer 0 has had one action and is in cooldown until step 5."""
    fresh = State(layers=4, base_epsilon=1e-5, limits=LIMITS, step=0)
    return advance(fresh, 1.0, [step(0, at=0, cooldown_until=5)])


def test_a_state_takes_what_is_allowed(at_step_1):
    after = advance(at_step_1, 2.0, [step(1), step(2, new=1e-2)])
    assert after.epsilon == (1e-4, 1e-4, 1e-2, 1e-5)
    assert after.action_counts == (1, 1, 1, 0)
    assert after.signals == (1.0, 2.0)
    assert after.protected_layer_steps == 1  # layer 0, during step 1
    assert advance(after, 3.0).protected_layer_steps == 4
    assert after.allowance == 0
    assert at_step_1.cooled_down.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (
            [step(1), step(2), step(3)],
            r"budget allows 2 more actions \(2 a step, 3 in all, 1 spent\), got 3: take fewer",
        ),
        ([step(1), step(1)], r"act once on a layer, got layers \[1, 1\]"),
        ([step(1, at=2)], "must be of step 1 and layers 0 to 3, got .*step=2.*decide on the state that is advanced"),
        ([step(4)], "layers 0 to 3, got .*layer=4"),
        ([step(-1)], "layers 0 to 3, got .*layer=-1"),
        ([step(1, old=2e-5)], "raise its layer's epsilon from 1e-05, got .*old_epsilon=2e-05"),
        ([step(1, new=1e-5)], "must raise its layer's epsilon from 1e-05, got"),
        ([step(1, new=9e-6)], "must raise its layer's epsilon"),
        ([step(1, new=math.nan)], "must raise its layer's epsilon"),
        ([step(1, new=1.1e-2)], "between 1e-05 and 0.01, got .*new_epsilon=0.011.*: clip it"),
        ([step(0, old=1e-4, new=1e-3)], "may be acted on 1 times and not during its cooldown, got .*layer=0"),
    ],
)
def test_a_state_refuses_what_is_not(at_step_1, actions, message):
    with pytest.raises(ValueError, match=message):
        advance(at_step_1, 2.0, actions)
    assert at_step_1.epsilon == (1e-4, 1e-5, 1e-5, 1e-5)


def test_a_state_refuses_a_layer_in_cooldown(at_step_1):
    patient = replace(at_step_1, limits=replace(LIMITS, per_layer=2))
    again = step(0, old=1e-4, new=1e-3)
    with pytest.raises(
        ValueError, match="acted on 2 times and not during its cooldown, got .*layer=0.* after 1 actions: choose one of"
    ):
        advance(patient, 2.0, [again])
    assert advance(replace(patient, step=5), 2.0, [replace(again, step=5)]).epsilon[0] == 1e-3


def test_a_state_refuses_more_than_the_run_may_spend(at_step_1):
    spent = advance(at_step_1, 2.0, [step(1), step(2)])
    with pytest.raises(ValueError, match=r"0 more actions \(2 a step, 3 in all, 3 spent\), got 1"):
        advance(spent, 3.0, [step(3, at=2)])


def test_action_table(at_step_1):
    patient = replace(at_step_1, limits=Limits(), step=5)
    table = action_table(advance(patient, 2.0, [step(3, at=5), step(0, old=1e-4, new=1e-3, at=5)]))
    assert table.layer.tolist() == [0, 3, 0]
    assert table.earlier_actions.tolist() == [0, 0, 1]
    assert table.new_epsilon.tolist() == [1e-4, 1e-4, 1e-3]
    empty = action_table(get_policy("none").start(2))
    assert empty.empty and list(empty) == list(table)


# --- Thresholds ----------------------------------------------------------------------------------


def test_thresholds_by_hand():
    rows = rows_of(
        risk=[1.0, 2.0, 3.0, 4.0, 5.0], dominance=[0.1, 0.2, 0.3, 0.4, 0.5], layernorm_ratio=[0.2, 0.6, 0.4, 1.0, 9.0]
    )
    policy = choose_thresholds(rows)
    assert (policy.risk_threshold, policy.dominance_threshold) == (3.0, 0.3)
    assert policy.target_ratio == 0.4  # of 0.2, 0.4, 0.6
    assert (policy.budget, policy.cooldown) == (
        get_policy("bgss").max_actions_per_step,
        get_policy("bgss").cooldown_steps,
    )
    assert policy.limits == Limits(
        per_step=2, epsilon_min=get_policy("bgss").base_epsilon, epsilon_max=get_policy("bgss").epsilon_max
    )
    assert choose_thresholds(rows, quantile=0.75, budget=1) == replace(
        policy, risk_threshold=4.0, dominance_threshold=0.4, budget=1
    )


def test_thresholds_where_no_layer_is_in_the_regime_and_some_overflow():
    rows = rows_of(risk=[1.0, 3.0, math.inf], layernorm_ratio=[4.0, 5.0, math.nan])
    policy = choose_thresholds(rows)
    assert (policy.risk_threshold, policy.target_ratio) == (2.0, 0.5)
    with pytest.raises(ValueError, match="need rows with finite risk, got 1 rows without"):
        choose_thresholds(rows.tail(1))


# --- Interfaces ----------------------------------------------------------------------------------


@each_policy
def test_rows_of_a_monitored_pass_are_decided_on(name, tiny_gpt2, tiny_tokens):
    """In a loop as E5 runs it: score, decide, advance, apply."""
    settings = {"warmup_steps": 1, "trigger_quantile": 0.0} if name in LIKE_RELEASED else REQUIRED.get(name, {})
    policy = get_policy(name, **settings)
    monitor = Monitor(lower(tiny_gpt2, "fp16"))
    state = policy.start(len(monitor.blocks))
    for tokens in tiny_tokens.split(1):
        for block, epsilon in zip(monitor.blocks, state.epsilon):
            block.norm_1.eps = block.norm_2.eps = epsilon
        observed = monitor(tokens)
        layers, windows = score(observed.layers, observed.windows, monitor.low.format.unit_roundoff)
        signal = windows.combined.item()
        state = advance(state, signal, policy.decide(state, layers, signal))
    assert state.step == len(state.signals) == 3
    counts = dict.fromkeys(["none", "bgss_printed", "eps_bump"], 0) | dict.fromkeys(
        ["static_global", *LIKE_RELEASED], 3
    )
    assert len(state.actions) <= counts.get(name, math.inf)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of(risk=[1.0, 1.0, 1.0]), r"must hold layers 0 to 1 of each window in order, got layers \[0, 1, 2\]"),
        (rows_of(risk=[1.0, 2.0]).iloc[::-1], r"in order, got layers \[1, 0\]"),
        (rows_of(risk=[1.0, 2.0]).iloc[:0], r"got layers \[\]"),
        (pd.concat([rows_of(risk=[1.0, 2.0])] * 3), "must be those of one window, got 3 windows: give one at a time"),
        (
            rows_of(risk=[1.0, 2.0]).drop(columns=["risk", "layernorm_ratio"]),
            r"\['layernorm_ratio', 'risk'\] are missing",
        ),
    ],
)
@pytest.mark.parametrize("name", ["bgss", "bgss_printed"])
def test_rows_that_are_not_one_window_are_refused(name, rows, message):
    settings = {"warmup_steps": 0} if name == "bgss" else REQUIRED[name]
    policy = get_policy(name, **settings)
    with pytest.raises(ValueError, match=message):
        policy.decide(advance(policy.start(2), 1.0), rows, 1.0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("none", {"base_epsilon": 0.0}, "base_epsilon of policy 'none' must be positive and finite, got 0.0"),
        ("static_global", {"static_epsilon": 1e-5}, "static_epsilon of .* must be above base_epsilon and finite"),
        ("bgss", {"epsilon_max": 1e-5}, "epsilon_max of policy 'bgss' must be above base_epsilon, finite, got 1e-05"),
        ("bgss", {"trigger_quantile": 1.1}, "trigger_quantile .* must lie between 0 and 1, got 1.1"),
        ("bgss", {"update_headroom_weight": -0.1}, "update_headroom_weight .* must lie between 0 and 1"),
        ("bgss", {"epsilon_multiplier": 1.0}, "epsilon_multiplier .* must be above 1 and finite, got 1.0"),
        ("bgss", {"unit_roundoff": 1.0}, "unit_roundoff .* must lie strictly between 0 and 1"),
        ("bgss", {"max_total_actions": -1}, "max_total_actions .* must be at least 0 and finite, got -1"),
        ("bgss", {"update_repetition_penalty": math.nan}, "update_repetition_penalty .* got nan"),
        ("bgss", {"ln_bonus_weight": -1.0}, "ln_bonus_weight .* must be at least 0"),
        ("eps_bump", {"target_ratio": 1.0}, "target_ratio .* must lie strictly between 0 and 1, got 1.0"),
        ("eps_bump", {"monitor_interval": 0}, "monitor_interval .* must be at least 1, got 0"),
        ("eps_bump", {"epsilon_min": 0.0}, "epsilon_min .* must be positive and at most epsilon_max, got 0.0"),
        ("eps_bump", {"epsilon_min": 1e-1}, "epsilon_min .* must be positive and at most epsilon_max"),
        ("eps_bump", {"epsilon_max": 5e-6}, "epsilon_max .* must be finite, not below the base"),
        ("bgss_printed", {"risk_threshold": -1.0}, "risk_threshold .* must be at least 0 and finite"),
        ("bgss_printed", {"dominance_threshold": 2.0}, "dominance_threshold .* must lie between 0 and 1"),
        ("bgss_printed", {"budget": -1}, "budget .* must be at least 0 and finite"),
        ("bgss_printed", {"budget": 1.5}, "budget .* must be an integer, got 1.5"),
        ("bgss_printed", {"cooldown": -1}, "cooldown .* must be at least 0 and finite"),
    ],
)
def test_parameters_out_of_range_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        get_policy(name, **REQUIRED.get(name, {}) | change)


def test_unknown_policies_and_empty_models_are_refused():
    with pytest.raises(ValueError, match="a policy must be one of none, static_global, .*, got 'best'"):
        get_policy("best")
    with pytest.raises(ValueError, match="a model must have at least 1 block, got 0"):
        get_policy("none").start(0)


def test_the_defaults_are_the_protocols():
    assert asdict(get_policy("bgss")) == {
        "base_epsilon": 1e-5, "epsilon_max": 1e-2, "warmup_steps": 24, "trigger_quantile": 0.8,
        "max_total_actions": 24, "max_actions_per_step": 2, "max_actions_per_layer": 6, "cooldown_steps": 10,
        "epsilon_multiplier": 4.0, "update_headroom_weight": 0.75, "update_repetition_penalty": 0.6,
        "unit_roundoff": 2.0**-11, "ln_bonus_weight": 1.0,
    }  # fmt: skip
    assert asdict(get_policy("static_global")) == {"base_epsilon": 1e-5, "static_epsilon": 1e-3}
    bump = get_policy("eps_bump", target_ratio=0.5)
    assert (bump.monitor_interval, bump.epsilon_min, bump.epsilon_max) == (5, 1e-6, 1e-2)


@pytest.mark.parametrize(("base", "missing"), [(Policy, "limits"), (Released, "priority")])
def test_incomplete_policies_cannot_be_made(base, missing):
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        type("Incomplete", (base,), {"name": "incomplete"})()
