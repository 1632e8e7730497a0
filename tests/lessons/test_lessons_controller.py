"""Notebook 5: the recorded runs, the frozen formula on them, and what stops which block."""

import json
import re
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_inputs

matplotlib.use("Agg")

from fragility_core import theory
from fragility_core.bgss import get_policy, replay
from fragility_core.bgss.printed import PrintedBGSS
from fragility_lab.experiments import e5
from fragility_lab.inputs.loading import Inputs
from fragility_lab.paths import ASSETS, RECORDED_RUNS
from fragility_lab.running.engine import complete
from fragility_lab.running.runs import METADATA_KEY, RunStore
from fragility_lessons import controller, record

SETTING = e5.TrainingSetting("tiny", "tiny", length=16, windows=4, steps=3, learning_rate=2e-3, warmup_steps=1)
OPEN = {"risk_threshold": 1.0, "dominance_threshold": 1e-4, "target_ratio": 0.5}
START = {
    "run": "steady", "precision": 11, "risk": 3.2, "dominance": -2.1, "target": 0.5, "budget": 2, "cooldown": 10,
    "step": 128,
}  # fmt: skip
RUNS = pytest.mark.parametrize("run", controller.RUNS)


# --- Recording ------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tiny_gpt2) -> Inputs:
    return tiny_inputs(tiny_gpt2, 80)


def finished(inputs: Inputs, folder, name: str, **changes) -> tuple:
    """The rows of a finished run of policy ``name``, and its file."""
    setting = replace(SETTING, **changes)
    specs = e5.specifications(setting, [get_policy(name)], (0,), inputs)
    return complete(e5.Mitigation, specs, inputs, folder), RunStore(folder).path(specs[0])


def test_a_recorded_run_has_what_the_run_had(inputs, tmp_path):
    """To the last bit, rho_LN from its formula included: a replay decides as the run would have."""
    slow, slow_file = finished(inputs, tmp_path, "none")
    fast, fast_file = finished(inputs, tmp_path, "none", learning_rate=4e-3)
    target = tmp_path / "recorded.parquet"
    record.freeze([slow_file, fast_file], target)
    for rows, rate in ((slow, 2e-3), (fast, 4e-3)):
        loaded = controller.with_ratio(record.load(rate, target), precision=11)
        columns = [*record.COLUMNS, "layernorm_ratio"]
        pd.testing.assert_frame_equal(loaded[columns], rows[columns], check_exact=True)
        assert (loaded.window == loaded.step).all()
    assert not slow.risk.equals(fast.risk)


def test_only_runs_without_actions_are_recorded(inputs, tmp_path):
    _, file = finished(inputs, tmp_path, "static_global")
    with pytest.raises(ValueError, match="must be of policy none, got 'static_global' in static_global-seed0"):
        record.freeze([file], tmp_path / "recorded.parquet")
    assert not (tmp_path / "recorded.parquet").exists()


def test_an_unknown_rate_is_named():
    with pytest.raises(ValueError, match=r"learning rates 0\.0006, 0\.03, got 1\.0: choose one of them"):
        record.load(1.0)


@RUNS
def test_recorded_runs_are_whole_and_agree_with_themselves(run):
    rows = controller.recorded(run)
    assert (rows.groupby("step").layer.apply(list).map(lambda layers: layers == list(range(12)))).all()
    assert rows.step.unique().tolist() == list(range(256))
    assert (rows.epsilon_1 == controller.BASE).all() and (rows.d_model == 128).all()
    layernorm = rows.layernorm_1_term + rows.layernorm_2_term
    np.testing.assert_array_equal(rows.dominance, layernorm / rows.magnitude)
    first = rows.groupby("step").first()
    np.testing.assert_allclose(first.combined, controller.FP16 * rows.groupby("step").risk.sum(), rtol=1e-12)


def test_the_asset_is_small_and_says_where_it_comes_from():
    assert RECORDED_RUNS.stat().st_size < 400_000
    assert RECORDED_RUNS.name in (ASSETS / "README.md").read_text()
    records = json.loads(pq.read_schema(RECORDED_RUNS).metadata[METADATA_KEY])
    assert [r["specification"]["setting"]["learning_rate"] for r in records] == list(controller.RUNS.values())
    assert {(r["specification"]["policy"], r["specification"]["setting"]["precision"]) for r in records} == {
        ("none", "fp16")
    }


# --- The frozen formula ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed() -> pd.DataFrame:
    """Scored rows of made-up statistics at both sites, with what ``raised`` does not get to see."""
    generator = np.random.default_rng(0)
    names = ("gamma_1_max", "gamma_2_max", "input_1_norm", "input_2_norm", "other", "risk")
    rows = pd.DataFrame({name: generator.lognormal(0, 1, 40) for name in names})
    for site in (1, 2):
        rows[f"variance_{site}"] = 10 ** generator.uniform(-6, 3, 40)
        rows[f"layernorm_{site}_term"] = magnitude(rows, site, 1e-5)
    layernorm = rows.layernorm_1_term + rows.layernorm_2_term
    return rows.assign(epsilon_1=1e-5, magnitude=rows.other + layernorm)


def magnitude(rows: pd.DataFrame, site: int, epsilon) -> pd.Series:
    return theory.frozen_magnitude(
        rows[f"gamma_{site}_max"], rows[f"variance_{site}"], epsilon, rows[f"input_{site}_norm"]
    )


@given(exponents=st.tuples(st.floats(-5, 2), st.floats(-5, 2)))
def test_raised_is_proposition_bgss(observed, exponents):
    """Against the magnitudes from gamma and input norms; it falls, and G with it, by the same share of M."""
    low, high = (10.0**exponent for exponent in sorted(exponents))
    changes = [controller.raised(observed, epsilon) for epsilon in (low, high)]
    for epsilon, change in zip((low, high), changes):
        expected = magnitude(observed, 1, epsilon) + magnitude(observed, 2, epsilon)
        np.testing.assert_allclose(change.after, expected, rtol=1e-12)
        risk = observed.risk * (observed.other + expected) / observed.magnitude
        np.testing.assert_allclose(change.reduction, observed.risk - risk, atol=1e-11 * observed.risk.max())
    assert (changes[1].after <= changes[0].after * (1 + 1e-14)).all()
    assert (changes[1].reduction <= observed.risk).all()


def test_the_old_epsilon_changes_nothing(observed):
    change = controller.raised(observed, 1e-5)
    np.testing.assert_allclose(change.after, change.before, rtol=1e-14)


def test_frozen_shows_every_block_and_marks_the_chosen():
    (_, bars), readout = controller.frozen(block=3, exponent=-2.0)
    rows = controller.first_step()
    expected = controller.raised(rows, 1e-2).reduction / rows.risk
    np.testing.assert_allclose([bar.get_height() for bar in bars.patches], expected)
    colours = [bar.get_facecolor() for bar in bars.patches]
    assert [colour != colours[0] for colour in colours] == [block == 3 for block in range(12)]
    assert readout.startswith("block 3, ε from 1e-05 to 0.01")


# --- The failure ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 41, 71, 256])
def test_the_failure_is_where_the_controller_acts_and_where_epsilon_helps(step):
    (errors, falls), readout = controller.failure(step)
    rows = controller.recorded("steady")
    rows = rows[rows.step == step - 1].reset_index(drop=True)
    np.testing.assert_allclose([bar.get_height() for bar in errors.patches], 100 * rows.risk / rows.risk.sum())
    removed = [bar.get_height() for bar in falls.patches]
    assert 10 < removed[0] < 25 and max(removed[1:]) < 0.1
    acted = controller.released("steady")
    blocks = sorted(set(acted[acted.step < step].layer))
    for axes in (errors, falls):
        colours = [bar.get_facecolor() for bar in axes.patches]
        assert [block for block, colour in enumerate(colours) if colour != colours[0]] == blocks
    assert f"raised ε: {', '.join(map(str, blocks)) or 'none'}. " in readout


def test_the_worked_numbers_are_those_of_the_run():
    rows = controller.first_step()
    for block, variance, factors in ((0, 0.0058, (26.2, 10.9)), (4, 12, (0.577, 0.577))):
        assert rows.variance_1[block] == pytest.approx(variance, rel=0.03)
        for epsilon, factor in zip((controller.BASE, controller.CAP), factors):
            assert theory.layernorm_factor(variance, epsilon) == pytest.approx(factor, rel=3e-3)
    assert rows.dominance[[0, 4]].tolist() == pytest.approx([0.25, 0.0006], rel=0.1)
    change = controller.raised(rows, controller.CAP)
    assert (change.reduction / rows.risk)[[0, 4]].tolist() == pytest.approx([0.15, 5e-7], rel=0.1)


# --- The update -----------------------------------------------------------------------------------

updates = st.fixed_dictionaries(
    {
        "variance_exponent": st.floats(-6, 3),
        "target": st.floats(0.05, 0.95),
        "cap_exponent": st.floats(-4.5, 0),
        "precision": st.integers(8, 30),
    }
)


@given(values=updates)
@settings(max_examples=10)
def test_update_shows_the_guarantee_kept(values):
    (axes, ratios), readout = controller.update(**values)
    before, guarantee, after = (line.get_ydata() for line in ratios.lines[1:4])
    assert (after <= guarantee * (1 + 1e-12)).all() and (after <= before).all()
    epsilon = axes.lines[1].get_ydata()
    assert (np.diff(epsilon) >= 0).all() and epsilon.min() >= 1e-5
    ratio = theory.layernorm_ratio(10 ** values["variance_exponent"], 1e-5, 128, 2.0 ** -values["precision"])
    assert f"the gate ρ_LN < 1 is {'open' if ratio < 1 else 'closed'}" in readout


# --- The replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [11, 27, 28, 53])
@pytest.mark.parametrize("change", [{}, {"budget": 12, "cooldown": 0}, {"target_ratio": 0.1, "cooldown": 3}])
def test_inspections_are_those_of_the_interval(precision, change):
    """The actions are those of the same policy replayed on all steps with m = INTERVAL."""
    rows = controller.recorded("steady", precision)
    seen = controller.inspections(PrintedBGSS(**OPEN | change), "steady", precision)
    policy = PrintedBGSS(**OPEN | change, monitor_interval=controller.INTERVAL)
    expected = replay(policy, rows, rows[rows.layer == 0])
    found = [
        (controller.INTERVAL * (i + 1) - 1, block) for i, x in enumerate(seen) for block in np.flatnonzero(x.stop == 6)
    ]
    assert sorted(found) == sorted(zip(expected.step, expected.layer))
    assert (precision in (27, 28)) == bool(found)


def test_stop_is_the_first_gate_in_the_way():
    for inspection in controller.inspections(PrintedBGSS(**OPEN | {"risk_threshold": 500.0}), "steady", 28):
        for block, stop in enumerate(inspection.stop):
            closed = [name for name in controller.GATES if not inspection.gates[name][block]]
            assert stop == (controller.GATES.index(closed[0]) if closed else 6)


def test_playground_shows_every_stop_and_every_action():
    values = START | {"precision": 28, "risk": 2.0, "dominance": -3.0}
    (axes, _), readout = controller.playground(**values)
    policy = PrintedBGSS(risk_threshold=100.0, dominance_threshold=1e-3, target_ratio=0.5)
    stop = np.stack([inspection.stop for inspection in controller.inspections(policy, "steady", 28)], 1)
    shades = np.array(list(controller.STOPS.values()))
    np.testing.assert_allclose(axes.collections[0].get_array(), shades[stop])
    acted = controller.released("steady")
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.stack([acted.step + 1, acted.layer], 1))
    assert f"raised: {(stop == 6).sum()}." in readout and (stop == 6).any()


def test_the_table_shows_one_inspection():
    (_, table), _ = controller.playground(**START | {"step": 8})
    rows = controller.recorded("steady")
    rows = rows[rows.step == 7]
    shown = [text.get_text() for text in table.texts]
    assert shown == [f"{x:.2g}" for row in rows[["risk", "dominance", "layernorm_ratio"]].to_numpy() for x in row]
    passed = (table.collections[0].get_array() == controller.PASSED).all(-1)
    np.testing.assert_array_equal(passed[:, 0], rows.risk >= 10**3.2)
    np.testing.assert_array_equal(passed[:, 1], rows.dominance >= 10**-2.1)
    assert not passed[:, 2].any() and passed[:, 3].all() and not passed[:, 4:].any()


# --- What the notebook says -----------------------------------------------------------------------


def stops(precision: int) -> np.ndarray:
    """What stops each block with both thresholds as low as the sliders go (inspections, layers)."""
    return np.stack(
        [inspection.stop for inspection in controller.inspections(PrintedBGSS(**OPEN), "steady", precision)]
    )


def test_in_fp16_the_regime_gate_stops_what_the_thresholds_let_through():
    assert (stops(11) == controller.GATES.index("regime")).all()


def test_fp32_opens_it_for_block_0_only():
    smallest = controller.recorded("steady", 24).groupby("layer").layernorm_ratio.min()
    assert (smallest < 1).tolist() == [True] + [False] * 11


def test_the_printed_algorithm_acts_at_five_precisions_only():
    raised = {precision: set(np.nonzero(stops(precision) == 6)[1]) for precision in range(11, 31)}
    assert {precision for precision, blocks in raised.items() if blocks} == {16, 17, 26, 27, 28}
    assert raised[16] == raised[17] == {0} and not (raised[26] | raised[27] | raised[28]) & {0}
    assert (controller.recorded("steady", 30).layernorm_ratio < 0.5).all()


def test_the_released_controller_leaves_block_0_alone_in_the_steady_run():
    assert set(controller.released("steady").layer) == set(range(3, 9))
    assert (len(controller.released("steady")), len(controller.released("spiking"))) == (8, 24)


def test_what_the_exercises_say_of_the_runs():
    rows = controller.first_step()
    change = controller.raised(rows, controller.CAP)
    fall, lower = 1 - change.after / change.before, change.reduction / rows.risk
    assert (
        fall[0] > 0.5
        and lower[0] == pytest.approx(1 / 7, rel=0.1)
        and rows.variance_1[0] == pytest.approx(0.006, rel=0.1)
    )
    assert (
        fall[1:].between(0.0005, 0.0045).all()
        and rows.loc[1:, ["variance_1", "variance_2"]].stack().between(2, 13).all()
    )
    halved = theory.layernorm_factor(0.01, 1e-2) / theory.layernorm_factor(0.01, 1e-5)
    assert halved == pytest.approx(1 - 0.47, abs=0.005)
    whole = controller.recorded("steady")
    assert np.maximum(whole.variance_1, whole.variance_2).min() == pytest.approx(0.005, rel=0.05)
    ratio = whole.groupby("layer").layernorm_ratio.min()
    assert 30 < ratio[0] < 40 and (ratio[1:] > 17_000).all()
    assert (stops(24) != 6).all()  # fp32: nothing is raised


def counted(readout: str) -> dict[str, int]:
    """How many inspections ended at each gate, as a readout of the playground tells."""
    told = readout.split("inspections of a block: ")[1]
    return {gate: int(re.search(rf"{re.escape(gate)}: (\d+)", told)[1]) for gate in controller.STOPS}


def test_the_stops_of_the_tour_show_what_the_notebook_says():
    recorded, free, fp32, finer = (counted(controller.tour(stop)[1]) for stop in controller.TOUR)
    regime, total = "ρ_LN ≥ 1", sum(recorded.values())
    assert recorded["G < τ_G"] + recorded["φ < τ_φ"] > 0.9 * total  # hardly any block passes both
    assert free[regime] == total
    assert fp32[regime] == 11 * total / 12 and fp32["at its target"] == total / 12  # block 0
    assert [each["raised"] > 0 for each in (recorded, free, fp32, finer)] == [False, False, False, True]
