"""E5 end to end on a tiny model: resuming bit for bit, policies, ends, and views of the rows."""

import os
from dataclasses import replace
from functools import cache
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, tiny_inputs

from fragility_core.bgss import get_policy
from fragility_lab.experiments import e5, evidence, outcomes
from fragility_lab.experiments.outcomes import SpikeRule
from fragility_lab.reporting.tables import policy_summary
from fragility_lab.running import runs
from fragility_lab.running.engine import complete
from fragility_lab.running.files import write_sealed

RELEASED = ("none", "static_global", "random_same_budget", "risk_only_same_budget", "bgss")
SETTING = e5.TrainingSetting("tiny", "tiny", length=16, windows=12, steps=10, learning_rate=2e-3, warmup_steps=4)
EAGER = {"warmup_steps": 2, "cooldown_steps": 2, "trigger_quantile": 0.0, "max_total_actions": 7}


def dropping(inputs):
    """``inputs`` with dropout, so that the random generator matters."""
    for module in inputs.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return inputs


@pytest.fixture
def inputs(inputs):
    return dropping(inputs)


def run_policies(setting, policies, seeds, inputs, folder, **options):
    return complete(e5.Mitigation, e5.specifications(setting, policies, seeds, inputs), inputs, folder, **options)


def acting(name: str):
    return get_policy(name, **EAGER)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The rows of every policy and seed, none of whose runs share a step."""
    inputs = dropping(tiny_inputs(random_gpt2(TINY)))
    policies = e5.policies(RELEASED, SETTING, inputs, **EAGER)
    return run_policies(SETTING, policies, (0, 1), inputs, tmp_path_factory.mktemp("apart"), shared_steps=0)


def test_a_mismatch_that_never_rises_leaves_the_papers_ratio():
    steps = pd.DataFrame({"policy": "none", "seed": 0, "step": range(60), "mismatch": np.linspace(2, 1, 60)})
    assert outcomes.chosen_ratio(steps) == 1.22


def test_policies_that_need_a_value_say_so(inputs):
    with pytest.raises(ValueError, match=r"policy 'eps_bump' needs target_ratio, .* e.g. \{'target_ratio': 0.5\}"):
        e5.policies(["none", "eps_bump"], SETTING, inputs)
    _, bump = e5.policies(["none", "eps_bump"], SETTING, inputs, target_ratio=0.25)
    assert bump.target_ratio == 0.25
    with pytest.raises(ValueError, match=r"among those of the chosen policies, .*cooldown.*, got cooldown_stepz"):
        e5.policies(["none", "bgss"], SETTING, inputs, cooldown_stepz=3)
    (bgss,) = e5.policies(["bgss"], SETTING, inputs, base_epsilon=1e-4)
    assert bgss.base_epsilon == 1e-4


def test_every_policy_and_seed_has_every_step_and_block_once(apart):
    assert len(apart) == 5 * 2 * 10 * 3
    assert not apart.duplicated(["policy", "seed", "step", "layer"]).any()
    steps = outcomes.step_rows(apart, 1e-5)
    assert (steps.groupby(["policy", "seed"]).step.apply(list).map(lambda s: s == list(range(10)))).all()
    acted = outcomes.action_rows(apart)
    assert set(acted.policy) == {"random_same_budget", "risk_only_same_budget", "bgss"}
    assert (acted.groupby(["policy", "seed"]).size() == 7).all(), "the whole budget is spent and never more"
    assert (steps[steps.policy == "static_global"].protected == 3).all()
    assert (steps[steps.policy == "none"].protected == 0).all()


def test_runs_of_several_settings_are_those_of_each_alone(inputs, tmp_path):
    settings = (SETTING, replace(SETTING, learning_rate=1e-2))
    specs = [e5.specifications(setting, [acting("bgss")], (0,), inputs) for setting in settings]
    rows = complete(e5.Mitigation, [*specs[1], *specs[0]], inputs, tmp_path / "together")
    alone = [complete(e5.Mitigation, part, inputs, tmp_path / "alone") for part in specs]
    pd.testing.assert_frame_equal(rows, pd.concat(alone[::-1], ignore_index=True))
    assert (alone[0].mismatch != alone[1].mismatch).any()


def test_an_action_is_in_force_from_the_next_step_on(inputs, tmp_path):
    rows = run_policies(SETTING, [acting("bgss")], (0,), inputs, tmp_path)
    epsilon = rows.pivot(index="step", columns="layer", values="epsilon").to_numpy()
    wanted = rows.pivot(index="step", columns="layer", values="new_epsilon").to_numpy()
    np.testing.assert_array_equal(epsilon[1:], np.where(np.isnan(wanted), epsilon, wanted)[:-1])
    assert (rows.epsilon == rows.epsilon_1).all() and (rows.epsilon == rows.epsilon_2).all()
    unmoved = run_policies(SETTING, [get_policy("none")], (0,), inputs, tmp_path)
    first = outcomes.action_rows(rows).step.min()
    same = ["mismatch", "loss", "combined", "risk", "epsilon"]
    pd.testing.assert_frame_equal(rows[rows.step <= first][same], unmoved[unmoved.step <= first][same])
    assert (rows[rows.step > first].mismatch != unmoved[unmoved.step > first].mismatch).any()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows of a run that nothing interrupts, by policy and seed."""

    @cache
    def rows(policy, seed: int):
        inputs = dropping(tiny_inputs(random_gpt2(TINY)))
        return run_policies(SETTING, [policy], (seed,), inputs, tmp_path_factory.mktemp("whole"))

    return rows


def interrupted_after(monkeypatch, steps: int):
    """The training of a run is interrupted at its step number ``steps``."""
    original, done = e5.one_step, []

    def step(*arguments):
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(1)
        return original(*arguments)

    monkeypatch.setattr(e5, "one_step", step)
    return done


@pytest.mark.parametrize("steps", [2, 5, 9])
@pytest.mark.parametrize("policy", ["random_same_budget", "bgss"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(inputs, tmp_path, monkeypatch, whole, policy, steps):
    """The checkpoint holds model, optimizer, random generators, controller and followed norms."""
    run = [acting(policy)], (3,), inputs
    with monkeypatch.context() as patch:
        interrupted_after(patch, steps)
        with pytest.raises(KeyboardInterrupt):
            run_policies(SETTING, *run, tmp_path / "cut", checkpoint_interval=2)
    assert len(list((tmp_path / "cut").glob("*.checkpoint"))) == 1
    torch.manual_seed(12345)  # the caller's generator plays no part
    with monkeypatch.context() as patch:
        done = interrupted_after(patch, 100)
        resumed = run_policies(SETTING, *run, tmp_path / "cut", checkpoint_interval=2)
    assert len(done) == 10 - steps // 2 * 2, "it went on from the last checkpoint"
    pd.testing.assert_frame_equal(whole(acting(policy), 3), resumed, check_exact=True)
    assert list((tmp_path / "cut").glob("*.checkpoint")) == []


def test_runs_of_equal_seeds_share_what_comes_before_the_first_action(apart, inputs, tmp_path, monkeypatch):
    """The same rows bit for bit, in fewer steps; static_global acts before the first step and shares nothing."""
    policies = e5.policies(RELEASED, SETTING, inputs, **EAGER)
    done = interrupted_after(monkeypatch, 1000)
    together = run_policies(SETTING, policies, (0, 1), inputs, tmp_path / "together", shared_steps=2)
    assert len(done) == 2 * (5 * SETTING.steps - 3 * 2)
    pd.testing.assert_frame_equal(apart, together, check_exact=True)
    assert list((tmp_path / "together").glob("*.start")) == []


def test_a_shared_start_of_other_code_is_made_anew(inputs, tmp_path, monkeypatch):
    policies = [get_policy("none"), acting("bgss"), acting("random_same_budget")]
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run_policies(SETTING, policies, (0,), inputs, tmp_path, shared_steps=2)
    assert len(list(tmp_path.glob("*.start"))) == 1
    monkeypatch.setattr(runs, "code_digest", lambda kind: "other")
    done = interrupted_after(monkeypatch, 1000)
    with pytest.warns(UserWarning, match="left by other code or other versions of packages, its run starts again"):
        run_policies(SETTING, policies, (0,), inputs, tmp_path, shared_steps=2)
    assert len(done) == 3 * SETTING.steps - 2 * 2


def test_a_policy_that_may_act_earlier_shares_nothing(inputs, tmp_path, monkeypatch):
    done = interrupted_after(monkeypatch, 1000)
    run_policies(SETTING, [get_policy("none"), acting("bgss")], (0,), inputs, tmp_path, shared_steps=3)
    assert len(done) == 2 * SETTING.steps


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_checkpoint_is_started_over(inputs, tmp_path, monkeypatch, whole, share):
    policy = get_policy("none")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            run_policies(SETTING, [policy], (0,), inputs, tmp_path / "broken", checkpoint_interval=2)
    (path,) = (tmp_path / "broken").glob("*.checkpoint")
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.warns(UserWarning, match=r"cannot be read .*, its run starts again"):
        again = run_policies(SETTING, [policy], (0,), inputs, tmp_path / "broken")
    pd.testing.assert_frame_equal(whole(policy, 0), again, check_exact=True)


def test_a_flipped_byte_of_a_checkpoint_is_noticed(inputs, tmp_path, monkeypatch):
    """Anywhere in the file, also in the weights, which torch reads without a check."""
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run_policies(SETTING, [get_policy("none")], (0,), inputs, tmp_path, checkpoint_interval=2)
    (path,) = tmp_path.glob("*.checkpoint")
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.warns(UserWarning, match=r"cannot be read \(its bytes are not those .*, its run starts again"):
            assert e5.restore(path, None, None) is None


def test_a_checkpoint_of_other_code_is_started_over(inputs, tmp_path, monkeypatch):
    run = [get_policy("none")], (0,), inputs, tmp_path
    with monkeypatch.context() as patch:
        interrupted_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run_policies(SETTING, *run, checkpoint_interval=2)
    monkeypatch.setattr(runs, "code_digest", lambda kind: "other")
    done = interrupted_after(monkeypatch, 100)
    with pytest.warns(UserWarning, match="left by other code or other versions of packages, its run starts again"):
        run_policies(SETTING, *run, checkpoint_interval=2)
    assert len(done) == SETTING.steps


def test_runs_do_not_touch_the_callers_random_generator(inputs, tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run_policies(replace(SETTING, steps=2), [get_policy("none")], (0,), inputs, tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_finished_runs_do_not_change_the_others(inputs, tmp_path):
    short = replace(SETTING, steps=4)
    policies = [get_policy("none"), acting("bgss")]
    whole = run_policies(short, policies, (0, 1), inputs, tmp_path / "whole")
    run_policies(short, policies[1:], (1,), inputs, tmp_path / "part")
    part = run_policies(short, policies, (0, 1), inputs, tmp_path / "part")
    pd.testing.assert_frame_equal(whole, part, check_exact=True)


def test_an_overflow_ends_its_run_and_no_other(inputs, tmp_path):
    """Weights within fp32's range and beyond fp16's: the shadow's mismatch is not finite."""
    for block in inputs.model.transformer.h:
        block.mlp.c_proj.weight.mul_(3e5)
    rows = run_policies(SETTING, [get_policy("none"), acting("bgss")], (0,), inputs, tmp_path)
    steps = outcomes.step_rows(rows, 1e-5)
    assert steps.groupby("policy").size().to_dict() == {"none": 1, "bgss": 1}
    assert (steps.event == "nonfinite mismatch").all()
    runs = outcomes.run_summary(steps)
    assert (runs.onsets == 1).all() and (runs.ended == "nonfinite mismatch").all()
    assert not np.isfinite(runs.max_mismatch).any()
    assert runs.final_mismatch.isna().all()


@pytest.mark.parametrize(("spikes", "events"), [([40], 1), ([20, 40], 2), ([], 1)])
def test_an_end_that_is_an_onset_too_is_one_event(spikes, events):
    """A mismatch that becomes infinite stands above the median of those before it, and ends the run."""
    steps = pd.DataFrame({"policy": "none", "seed": 0, "step": range(41), "mismatch": 1e-3, "event": ""})
    steps = steps.assign(shadow_loss=4.0, actions=0, protected=0)
    steps.loc[spikes, "mismatch"] = 1e-2
    steps.loc[40, ["mismatch", "event"]] = [np.inf if 40 in spikes else 1e-3, "nonfinite mismatch"]
    (run,) = outcomes.run_summary(steps, SpikeRule(warmup=12)).itertuples()
    assert run.onsets == events


def test_a_nonfinite_loss_ends_the_run_before_the_shadow_is_asked(inputs, tmp_path):
    inputs.model.transformer.ln_f.weight[0] = torch.inf
    rows = run_policies(SETTING, [get_policy("none")], (0,), inputs, tmp_path)
    assert len(rows) == 3 and (rows.event == "nonfinite loss").all()
    assert outcomes.step_rows(rows, 1e-5).mismatch.isna().all()


def test_a_policy_that_never_acts_has_the_run_of_none(inputs, tmp_path, monkeypatch):
    """Trained in earnest in an empty folder, taken over where ``none`` is there: the same rows bit for bit."""
    printed = get_policy("bgss_printed", risk_threshold=0.0, dominance_threshold=0.0, target_ratio=0.5)
    trained = run_policies(SETTING, [printed], (0,), inputs, tmp_path / "alone")
    assert (trained.layernorm_ratio > 1).all()
    run_policies(SETTING, [get_policy("none")], (0,), inputs, tmp_path / "both")
    done = interrupted_after(monkeypatch, 100)
    taken = run_policies(SETTING, [printed], (0,), inputs, tmp_path / "both")
    assert done == []
    pd.testing.assert_frame_equal(trained, taken, check_exact=True)
    run_policies(SETTING, [acting("bgss")], (0,), inputs, tmp_path / "both")
    assert len(done) == 10, "a policy that acts is trained"
    rates = outcomes.gate_rates(printed, taken).iloc[0]
    assert rates.layer_steps == 30
    assert (rates.risk, rates.regime, rates.selected, rates.raised) == (1, 0, 0, 0)


def test_summaries_by_hand():
    steps = pd.DataFrame(
        {"policy": "none", "seed": 0, "step": range(30), "mismatch": [1.0] * 25 + [9.0, 1.0, 1.0, 1.0, 2.0],
         "shadow_loss": [2.0] * 29 + [4.0], "actions": [0] * 29 + [2], "protected": [1] * 30, "event": ""}
    )  # fmt: skip
    run = outcomes.run_summary(steps, SpikeRule(1.5)).iloc[0]
    assert (run.onsets, run.first_onset, run.loss_spikes, run.actions, run.protected_layer_steps) == (1, 25, 1, 2, 30)
    assert (run.max_mismatch, run.final_mismatch, run.peak_ratio) == (9.0, 2.0, 9.0)
    lenient = outcomes.run_summary(steps, SpikeRule(10)).iloc[0]
    assert (lenient.onset_ratio, lenient.onsets, lenient.onsets_release_ratio) == (10, 0, 1)
    both = pd.concat([steps, steps.assign(seed=1, mismatch=1.0)])
    summary = policy_summary(outcomes.run_summary(both, SpikeRule(1.5))).loc["none"]
    assert (summary.onsets, summary.final_mismatch, summary.max_mismatch) == (0.5, 1.5, 5.0)
    assert summary.onsets_sd == pytest.approx(0.5**0.5)
    assert outcomes.chosen_ratio(both, target=0.5) > 1


def test_random_weights_are_drawn_by_the_seed_of_the_run(inputs):
    """Two seeds start from different models, neither of them the checkpoint's; a seed from the same one each time."""
    setting = replace(SETTING, initial="random")
    first, again, other = (e5.initial_model(inputs.model, setting, seed) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other, inputs.model)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])
    assert e5.initial_model(inputs.model, SETTING, 0) is inputs.model


def test_another_realisation_moves_all_weights_by_half_a_unit_roundoff(inputs):
    before = [p.detach().clone() for p in inputs.model.parameters()]
    moved = e5.initial_model(inputs.model, replace(SETTING, realisation=3), 0)
    assert all(torch.equal(p, kept) for p, kept in zip(inputs.model.parameters(), before))
    factors = torch.cat([(p / kept)[kept != 0] - 1 for p, kept in zip(moved.parameters(), before)])
    assert factors.std().item() == pytest.approx(2.0**-12, rel=0.05)
    other = e5.initial_model(inputs.model, replace(SETTING, realisation=4), 0)
    assert not torch.equal(next(other.parameters()), next(moved.parameters()))


def test_firing_steps_are_those_at_which_a_controller_would_act(inputs, tmp_path):
    policy = get_policy("bgss", warmup_steps=3, trigger_quantile=0.5)
    rows = run_policies(SETTING, e5.policies(["none"], SETTING, inputs), [0], inputs, tmp_path)
    signals = rows[rows.layer == 0].combined.to_numpy()
    expected = [step for step in range(3, 10) if signals[step] >= np.median(signals[:step])]
    assert outcomes.firing_steps(policy, signals) == expected
    assert outcomes.firing_steps(policy, np.arange(10.0)) == list(range(3, 10))
    assert outcomes.firing_steps(policy, -np.arange(10.0)) == []


@pytest.mark.parametrize(
    ("signal", "loss", "fires", "falls"), [(1.0, -1.0, 2, 2), (1.0, 1.0, 2, 0), (-1.0, -1.0, 0, 2)]
)
def test_regime_counts_the_runs_like_the_papers(signal, loss, fires, falls):
    steps = pd.DataFrame({"seed": np.repeat([0, 1], 60), "step": [*range(60)] * 2, "mismatch": 1.0, "event": ""})
    steps = steps.assign(combined=signal * steps.step, loss=loss * steps.step)
    found = outcomes.regime(steps, get_policy("bgss"), layers=12)
    assert (found["runs"], found["fires_as_in_the_paper"], found["loss_falls"], found["ended"]) == (2, fires, falls, 0)
    assert found["fires"] == (60 - 24) * (fires > 0)


def test_evidence_computes_only_the_runs_that_its_table_lacks(inputs, tmp_path, monkeypatch):
    policies = e5.policies(["none", "bgss"], SETTING, inputs)
    specs = e5.specifications(SETTING, policies, [0, 1], inputs)
    first = evidence.summaries(specs, inputs, tmp_path / "a", 1)
    assert first.policy.tolist() == ["none", "bgss"] and first.seed.tolist() == [0, 0]
    both = evidence.summaries(specs, inputs, tmp_path / "b", 2, known=first)
    assert both.policy.tolist() == ["none", "none", "bgss", "bgss"] and both.seed.tolist() == [0, 1, 0, 1]
    assert len(list((tmp_path / "b").glob("*.parquet"))) == 2
    pd.testing.assert_frame_equal(both[both.seed == 0].reset_index(drop=True), first)
    assert both.run.tolist() == [spec.digest for spec in specs]
    pd.testing.assert_frame_equal(evidence.summaries(specs, inputs, tmp_path / "c", 1, known=both), both)
    stale = both.assign(code="older", max_mismatch=7.0)
    with pytest.warns(UserWarning, match=r"4 runs of other code are left out \(STALE=keep takes them\)"):
        assert (evidence.summaries(specs, inputs, tmp_path / "b", 2, known=stale).max_mismatch < 7).all()
    monkeypatch.setenv("FRAGILITY_STALE", "keep")
    assert (evidence.summaries(specs, inputs, tmp_path / "c", 2, known=stale).max_mismatch == 7).all()


def test_windows_are_selected_then_shuffled(inputs):
    windows = e5.training_windows(inputs, SETTING, seed=0)
    again = e5.training_windows(inputs, SETTING, seed=0)
    other = e5.training_windows(inputs, SETTING, seed=1)
    assert windows.shape == (12, 16) and torch.equal(windows, again)
    starts = [((inputs.stream.unfold(0, 16, 1) == window).all(-1)).nonzero()[0].item() for window in windows]
    assert starts != sorted(starts) and all(start % 16 == 0 for start in starts)
    assert not torch.equal(windows, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 2048}, r"must fit the context of 'embedded', 1024 tokens, got lengths \[2048\]"),
        ({"windows": 40000}, "must hold 40000 windows of 256 tokens"),
        ({"precision": "bf17"}, "a format must be one of .* got 'bf17'"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(change, message):
    with pytest.raises(ValueError, match=message):
        e5.load_inputs(replace(e5.TrainingSetting("embedded", "embedded"), **change))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0), ("learning_rate", 0.0), ("learning_rate", float("inf")), ("initial", "drawn"),
        ("realisation", -1),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        replace(SETTING, **{name: value})


class Planted:
    """What a file may hold that is to run code when it is read."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code of the file ran')",)


def test_a_planted_checkpoint_runs_no_code(tmp_path):
    path = tmp_path / "run.checkpoint"
    content = BytesIO()
    torch.save({"provenance": {}, "rows": Planted()}, content)
    write_sealed(path, content.getvalue())
    with pytest.warns(UserWarning, match="run.checkpoint cannot be read .*, its run starts again"):
        assert e5.restore(path, None, None) is None


def test_a_ledger_is_that_of_the_last_policy_that_has_one():
    """As of a policy of one's own, which shares nothing with the released ones, in last place or alone."""
    released, other = get_policy("bgss", base_epsilon=1e-5, unit_roundoff=2.0**-11), get_policy("none")
    table = outcomes.ledgers([released, other], 12, 60)
    assert table.actions.tolist() == [released.max_total_actions, 6]
    assert outcomes.ledgers([other], 12, 60).empty
