"""What the policies of E5 achieved, from the rows of its runs (protocol section 6)."""

import numpy as np
import pandas as pd

from fragility_core.bgss import trajectory
from fragility_core.bgss.printed import PrintedBGSS
from fragility_lab.experiments.events import SpikeRule, onsets, ratio_of_rate, relative_to_recent

RUN = ["policy", "seed"]
STEP_COLUMNS = [
    *RUN, "step", "learning_rate", "loss", "gradient_norm", "shadow_loss", "mismatch", "combined", "no_transport",
    "attention_only", "layernorm_only", "remainder_only", "raw", "final_norm", "event",
]  # fmt: skip
ACTION_COLUMNS = [
    *RUN, "step", "layer", "epsilon", "new_epsilon", "priority", "risk", "dominance", "layernorm_ratio", "transport",
]  # fmt: skip
LOSS_SPIKE_RATIO = 1.2


def step_rows(rows: pd.DataFrame, base_epsilon: float) -> pd.DataFrame:
    """One row per run and step, with the numbers of ``protected`` blocks and of ``actions`` decided there.

    A block is protected where its epsilon is above ``base_epsilon``. Quantities that a run did not observe because it
    ended are NaN.
    """
    counts = rows.assign(protected=rows.epsilon > base_epsilon, actions=rows.new_epsilon.notna())
    counts = counts.groupby([*RUN, "step"], sort=False)[["protected", "actions"]].sum().reset_index()
    return rows[rows.layer == 0].reindex(columns=STEP_COLUMNS).merge(counts, on=[*RUN, "step"])


def action_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per action, in the order of runs and steps, with the quantities that decided it."""
    return rows[rows.new_epsilon.notna()][ACTION_COLUMNS].reset_index(drop=True)


def run_summary(steps: pd.DataFrame, rule: SpikeRule = SpikeRule()) -> pd.DataFrame:
    """One row per run: events, mismatch, budget spent, and how the run ended.

    ``onsets`` counts the mismatch onsets under ``rule`` and a nonfinite end. ``onsets_release_ratio`` does so under the
    release's rule. ``peak_ratio`` is the largest ratio of a mismatch to the median of those just before.
    ``loss_spikes`` is diagnostic.
    """
    table = []
    for (policy, seed), run in steps.groupby(RUN, sort=False):
        mismatch = run.mismatch.to_numpy()
        finite = mismatch[np.isfinite(mismatch)]
        starts = onsets(mismatch, rule)
        ended = run.event.iloc[-1]
        end = {len(run) - 1} if ended else set()  # one event, also where the end is an onset
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
                "loss_spikes": len(onsets(run.shadow_loss.to_numpy(), SpikeRule(ratio=LOSS_SPIKE_RATIO))),
                "actions": int(run.actions.sum()),
                "protected_layer_steps": int(run.protected.sum()),
                "ended": ended,
            }
        )
    return pd.DataFrame(table)


def policy_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds of every policy's results, policies in their given order."""
    quantities = ["onsets", "final_mismatch", "max_mismatch", "mean_mismatch", "actions", "protected_layer_steps"]
    summary = runs.groupby("policy", sort=False)[quantities].agg(["mean", "std"])
    summary.columns = [name if kind == "mean" else f"{name}_sd" for name, kind in summary.columns]
    return summary


def chosen_ratio(steps: pd.DataFrame, target: float = 12.0) -> float:
    """The spike ratio at which policy ``none`` has about ``target`` onsets per run (``events.ratio_of_rate``).

    It is the release's ratio where the mismatch of ``none`` never rises above the median of the values before.
    """
    runs = [run.mismatch.to_numpy() for _, run in steps[steps.policy == "none"].groupby("seed")]
    return ratio_of_rate(runs, target) if peak_ratio(steps) > 1 else SpikeRule().ratio


def peak_ratio(steps: pd.DataFrame) -> float:
    """The largest ratio of a mismatch to the median of those just before, under policy ``none``."""
    runs = steps[steps.policy == "none"].groupby("seed").mismatch
    return max(np.nanmax(relative_to_recent(run.to_numpy(), SpikeRule()), initial=0.0) for _, run in runs)


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
