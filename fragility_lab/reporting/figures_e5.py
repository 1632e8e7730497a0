"""The figures of E5: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, plain_log_ticks, style

POLICY_NAMES = {
    "none": "none", "static_global": "static", "random_same_budget": "random", "risk_only_same_budget": "risk only",
    "bgss": "BGSS (released)", "bgss_printed": "BGSS (printed)", "eps_bump": "eps bump",
}  # fmt: skip


OUTCOMES = {"onsets": "onsets", "final_mismatch": "final mismatch", "max_mismatch": "largest mismatch"}


@style()
def e5_outcomes(runs: pd.DataFrame) -> Axes:
    """Outcomes of every run: one panel a quantity, a point a seed, seeds joined across policies, a bar at the mean."""
    table = _with_policy_names(runs)
    policies = list(table.policy.cat.categories)
    figure, grid = plt.subplots(
        1, len(OUTCOMES), figsize=(8.4, 0.42 * len(policies) + 1.3), sharey=True, layout="constrained"
    )
    for axes, (column, label) in zip(grid, OUTCOMES.items()):
        by_seed = table.pivot(index="policy", columns="seed", values=column).reindex(policies)
        axes.plot(by_seed, range(len(policies)), "o-", linewidth=0.6, markersize=5)
        axes.scatter(by_seed.mean(axis=1), range(len(policies)), marker="|", s=300, color="0.1", zorder=3)
        axes.set(xlabel=label, xscale="linear" if column == "onsets" else "log")
    grid[0].set_xlabel(f"onsets (ratio {runs.onset_ratio.iloc[0]:g})")
    grid[0].set_yticks(range(len(policies)), policies)
    grid[0].invert_yaxis()
    figure.suptitle("E5: every seed (a line) and the mean over seeds (bar)", fontsize="medium")
    return grid[0]


SMOOTHED = 15  # steps of the running median


@style()
def e5_course(steps: pd.DataFrame) -> Axes:
    """Mismatch over that under policy ``none`` at the same step: one panel a policy, geometric mean over seeds.

    The dark line is the running median over 15 steps. If ``none`` is the only policy, its mismatch itself is shown.
    """
    logs = _with_policy_names(steps).assign(mismatch=lambda table: np.log(table.mismatch))
    by_policy = logs.groupby(["policy", "step"], observed=True).mismatch.mean().unstack("policy")
    others = [name for name in by_policy if name != "none"]
    compared = "none" in by_policy and bool(others)
    shown = np.exp(by_policy[others].sub(by_policy["none"], axis=0) if compared else by_policy)
    columns = min(3, len(shown.columns))
    rows = -(-len(shown.columns) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.6 * columns + 0.6, 1.9 * rows + 0.7), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (name, course) in zip(grid.flat, shown.items()):
        axes.plot(course, color=COLOURS[0], linewidth=0.6, alpha=0.5)
        axes.plot(course.rolling(SMOOTHED, center=True, min_periods=1).median(), color=COLOURS[0])
        axes.set(yscale="log")
        axes.set_title(name, fontsize="medium")
        plain_log_ticks(axes.yaxis)
        if compared:
            axes.axhline(1, **DASHED)
    for number in range(len(shown.columns), grid.size):
        grid.flat[number].set_visible(False)
        grid.flat[number - columns].tick_params(labelbottom=True)  # the last panel of its column
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel("mismatch over that of none" if compared else "mismatch", fontsize="medium")
    figure.suptitle("E5: mismatch over training", fontsize="medium")
    return grid[0, 0]


@style()
def e5_looks(course: pd.DataFrame) -> Axes:
    """Mean and interval of each claim over the number of seeds; one panel a claim (rows of ``verdicts.by_look``)."""
    panels = list(course.groupby("quantity", sort=False))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.1 * columns, 2.1 * rows + 0.4), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (name, looks) in zip(grid.flat, panels):
        around = looks[["low", "high"]].sub(looks["mean"], axis=0).abs().to_numpy().T
        last = looks.iloc[-1]
        axes.errorbar(looks.runs, looks["mean"], yerr=around, fmt="o", markersize=4, capsize=3, color=COLOURS[0])
        axes.axhline(last.bound, **DASHED)
        if last.smallest > 0:
            axes.axhspan(last.bound - last.smallest, last.bound + last.smallest, color="0.9", zorder=0)
        axes.set(xlim=(0, course.runs.max() + course.runs.min()), xticks=sorted(course.runs.unique()))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set_title("\n".join(textwrap.wrap(name, 34)), fontsize="small")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("number of seeds", fontsize="medium")
    figure.supylabel("mean over seeds, with interval", fontsize="medium")
    figure.suptitle(f"{course.experiment.iloc[0]}: mean and interval at each look", fontsize="medium")
    return grid[0, 0]


def _with_policy_names(table: pd.DataFrame) -> pd.DataFrame:
    """Policies by the names that figures use, in the order of ``POLICY_NAMES``; others follow, unchanged."""
    names = POLICY_NAMES | {name: name for name in table.policy if name not in POLICY_NAMES}
    present = [name for policy, name in names.items() if policy in set(table.policy)]
    return table.assign(policy=pd.Categorical(table.policy.map(names), present, ordered=True))
