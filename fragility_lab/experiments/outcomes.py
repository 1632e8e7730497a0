"""Results of the policies of E5: events and others, from the rows of its runs (protocol section 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fragility_core import theory
from fragility_core.bgss import Policy, advance, trajectory
from fragility_core.bgss.printed import PrintedBGSS
from fragility_core.bgss.released import Released
from fragility_lab.inputs.loading import require_at_least

RUN = ["policy", "seed"]
STEP_COLUMNS = [
    *RUN, "step", "learning_rate", "loss", "gradient_norm", "shadow_loss", "mismatch", "combined", "no_transport",
    "attention_only", "layernorm_only", "remainder_only", "raw", "final_norm", "event",
]  # fmt: skip
ACTION_COLUMNS = [
    *RUN, "step", "layer", "epsilon", "new_epsilon", "priority", "risk", "dominance", "layernorm_ratio", "transport",
]  # fmt: skip


# --- Events in the series of mismatches and losses of a run ----------------------------------------


@dataclass(frozen=True)
class SpikeRule:
    """The rule by which a value of a series is a spike. Raises ValueError for parameters out of range."""

    ratio: float = 1.22  # a spike is above this times the median of the last ``recent`` finite values
    recent: int = 12
    warmup: int = 24  # number of finite values before the first spike
    separation: int = 16  # a later spike within this many steps belongs to the same event

    def __post_init__(self):
        if not self.ratio > 0:
            raise ValueError(f"ratio must be positive, got {self.ratio}")
        require_at_least(1, recent=self.recent, warmup=self.warmup, separation=self.separation)


def relative_to_recent(values: np.ndarray, rule: SpikeRule) -> np.ndarray:
    """Each of ``values`` (steps,) divided by the median of the last finite values before it. NaN in the warm-up."""
    series = pd.Series(values, dtype="float64")
    medians = series[np.isfinite(series)].rolling(rule.recent, min_periods=1).median()[rule.warmup - 1 :]
    return (series / medians.reindex(series.index).ffill().shift()).to_numpy()


def onsets(values: np.ndarray, rule: SpikeRule = SpikeRule()) -> list[int]:
    """Steps at which an event begins: spikes at least ``separation`` steps after the previous onset."""
    return _separated(np.flatnonzero(relative_to_recent(values, rule) > rule.ratio), rule.separation)


def _separated(spikes: np.ndarray, separation: int) -> list[int]:
    steps: list[int] = []
    for step in spikes:
        if not steps or step - steps[-1] >= separation:
            steps.append(int(step))
    return steps


# --- Views of the rows ------------------------------------------------------------------------


def step_rows(rows: pd.DataFrame, base_epsilon: float) -> pd.DataFrame:
    """One row per run and step, with the numbers of ``protected`` blocks and of ``actions`` decided there.

    A block is protected if its epsilon is above ``base_epsilon``. Quantities that a run did not observe, since it had
    ended, are NaN.
    """
    counts = rows.assign(protected=rows.epsilon > base_epsilon, actions=rows.new_epsilon.notna())
    counts = counts.groupby([*RUN, "step"], sort=False)[["protected", "actions"]].sum().reset_index()
    return rows[rows.layer == 0].reindex(columns=STEP_COLUMNS).merge(counts, on=[*RUN, "step"])


def course(steps: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The mismatch at every step of the runs of one ``seed``, a column a policy; NaN from where a run had ended."""
    mine = steps[steps.seed == seed]
    return mine.pivot(index="step", columns="policy", values="mismatch")[mine.policy.unique()].rename_axis(columns=None)


def action_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per action, in the order of runs and steps, with the quantities that decided it."""
    return rows[rows.new_epsilon.notna()][ACTION_COLUMNS].reset_index(drop=True)


def run_summary(steps: pd.DataFrame, rule: SpikeRule = SpikeRule()) -> pd.DataFrame:
    """One row per run: events, mismatch, budget spent, and how the run ended.

    ``onsets`` counts the mismatch onsets under ``rule`` and a nonfinite end, ``onsets_release_ratio`` the same under
    the release's rule. ``peak_ratio`` is the largest ratio of a mismatch to the median of those just before.
    ``loss_spikes`` is diagnostic.
    """
    table = []
    for (policy, seed), run in steps.groupby(RUN, sort=False):
        mismatch, ended = run.mismatch.to_numpy(), run.event.iloc[-1]
        finite = mismatch[np.isfinite(mismatch)]
        starts = onsets(mismatch, rule)
        end = {len(run) - 1} if ended else set()  # one event, even if the end is an onset
        table.append(
            {
                "policy": policy,
                "seed": seed,
                "steps": len(run),
                "onset_ratio": rule.ratio,
                "onsets": len(end.union(starts)),
                "onsets_release_ratio": len(end.union(onsets(mismatch))),
                "first_onset": starts[0] if starts else -1,
                "final_mismatch": finite[-1] if len(finite) else np.nan,
                "max_mismatch": mismatch.max(),
                "peak_ratio": np.nanmax(relative_to_recent(mismatch, rule), initial=0.0),
                "mean_mismatch": finite.mean() if len(finite) else np.nan,
                "final_loss": run.shadow_loss.iloc[-1],
                "loss_spikes": len(onsets(run.shadow_loss.to_numpy(), SpikeRule(ratio=1.2))),
                "actions": int(run.actions.sum()),
                "protected_layer_steps": int(run.protected.sum()),
                "ended": ended,
            }
        )
    return pd.DataFrame(table)


def chosen_ratio(steps: pd.DataFrame, target: float = 12.0) -> float:
    """The spike ratio at which the mean number of onsets of policy ``none`` over runs is nearest to ``target``.

    Ratios are tried from 1 in steps of 0.005. Of several equally near ratios the largest is returned. It is the
    release's ratio if the mismatch of ``none`` never rises above the median of the values before.
    """
    rule, relative, peak = SpikeRule(), _relative_under_none(steps), peak_ratio(steps)
    if peak <= 1:
        return rule.ratio
    grid = np.arange(1, peak + 0.005, 0.005)
    counts = [[len(_separated(np.flatnonzero(r > ratio), rule.separation)) for r in relative] for ratio in grid]
    distance = np.abs(np.mean(counts, axis=1) - target)
    return round(float(grid[np.flatnonzero(distance == distance.min())[-1]]), 3)


def peak_ratio(steps: pd.DataFrame) -> float:
    """The largest ratio of a mismatch to the median of those just before, under policy ``none``."""
    return max(np.nanmax(ratios, initial=0.0) for ratios in _relative_under_none(steps))


def _relative_under_none(steps: pd.DataFrame) -> list[np.ndarray]:
    runs = steps[steps.policy == "none"].groupby("seed").mismatch
    return [relative_to_recent(run.to_numpy(), SpikeRule()) for _, run in runs]


def firing_steps(policy: Released, signals: np.ndarray) -> list[int]:
    """Steps at which the trigger of ``policy`` fires on the ``signals`` (steps,) of a run without actions."""
    state, fired = policy.start(layers=1), []
    for signal in signals:
        fired += [state.step] * policy.triggered(state, signal)
        state = advance(state, signal)
    return fired


def regime(steps: pd.DataFrame, policy: Released, layers: int) -> dict[str, float]:
    """Numbers that show if runs of ``none`` give ``policy`` the occasions that the controllers have in the paper.

    ``steps`` are rows of ``step_rows``; ``layers`` is the number of blocks. Counts of runs: the trigger fires at each
    of the first steps, up to a round over all blocks; the loss falls; the run ended early. Means over runs: firing
    steps and onsets at the release's ratio.
    """
    first, window = policy.warmup_steps, 8
    needed = set(range(first, first - (-layers // policy.max_actions_per_step)))
    found = []
    for _, run in steps.groupby("seed", sort=False):
        fired = firing_steps(policy, run.combined.to_numpy())
        early = run.loss[first - window : first + window].mean()
        found.append(
            {
                "fires": len(fired), "onsets": len(onsets(run.mismatch.to_numpy())),
                "fires_as_in_the_paper": needed <= {*fired}, "loss_falls": run.loss[-2 * window :].mean() < early,
                "ended": run.event.iloc[-1] != "", "final_loss": run.loss[-2 * window :].mean(),
                "max_mismatch": run.mismatch.max(),
            }
        )  # fmt: skip
    counted = ["fires_as_in_the_paper", "loss_falls", "ended"]
    table = pd.DataFrame(found)
    return {"runs": len(table)} | table[counted].sum().to_dict() | table.drop(columns=counted).mean().to_dict()


def ledger(policy: Released, layers: int, steps: int) -> dict[str, object]:
    """Numbers that the limits of ``policy`` force in ``steps`` on ``layers`` blocks (``theory.forced_budget``)."""
    limits = layers, policy.max_actions_per_step, policy.cooldown_steps, policy.max_total_actions
    forced = theory.forced_protection(*limits)
    count = theory.protected_layer_steps(layers, policy.max_actions_per_step, policy.warmup_steps, steps)
    return {
        "actions": policy.max_total_actions,
        "protection forced": forced,
        "final epsilon forced": theory.forced_epsilon(*limits),
        "protected layer-steps if forced": count if forced else None,
    }


def ledgers(policies: Sequence[Policy], layers: int, steps: int) -> pd.DataFrame:
    """``ledger`` of the last of ``policies`` that has one, and of that policy with half an action for each block."""
    held = [policy for policy in policies if isinstance(policy, Released)][-1:]
    fewer = [replace(policy, max_total_actions=layers // 2) for policy in held]
    return pd.DataFrame([ledger(policy, layers, steps) for policy in held + fewer])


def gate_rates(policy: PrintedBGSS, rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the layer-steps of each run that each gate of the printed algorithm lets through.

    ``rows`` must be those of the policy's own runs, so that the epsilons are the ones that the policy set.
    """
    table = []
    for (name, seed), run in rows[rows.event == ""].groupby(RUN, sort=False):
        layers = run.assign(window=run.step)
        windows = run[run.layer == 0].assign(window=run.step)
        states = trajectory(policy, layers, windows, seed)
        gates = [policy.gates(state, step) for state, (_, step) in zip(states, layers.groupby("window", sort=False))]
        passed = pd.concat(gates).select_dtypes(bool).mean()
        table.append({"policy": name, "seed": seed, "layer_steps": len(run)} | passed.to_dict())
    return pd.DataFrame(table)
