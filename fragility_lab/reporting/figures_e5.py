"""The figures of E5: tidy DataFrame in, matplotlib Axes out, as in ``figures``."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, DASHED, canvas, finished, named, plain_log_ticks, style

POLICY_NAMES = {
    "none": "none", "static_global": "static", "random_same_budget": "random", "risk_only_same_budget": "risk only",
    "bgss": "BGSS (released)", "bgss_printed": "BGSS (printed)", "eps_bump": "eps bump",
}  # fmt: skip

OUTCOMES = {"onsets": "onsets", "final_mismatch": "error at the end", "max_mismatch": "largest error"}


@style()
def e5_outcomes(runs: pd.DataFrame) -> Axes:
    """Outcomes of every run: a panel a quantity, a row a policy, a point a seed, and a bar and number at the mean."""
    table = _with_policy_names(runs)
    policies = list(table.policy.cat.categories)
    size = (9.2, 0.5 * len(policies) + 1.3)
    figure, grid = plt.subplots(1, len(OUTCOMES), figsize=size, sharey=True, layout="constrained")
    for axes, (column, label) in zip(grid, OUTCOMES.items()):
        by_seed = table.pivot(index="policy", columns="seed", values=column).reindex(policies)
        axes.plot(by_seed, range(len(policies)), "o", color=COLOURS[0], alpha=0.45, markersize=6, markeredgewidth=0)
        means = by_seed.mean(axis=1)
        axes.scatter(means, range(len(policies)), marker="|", s=260, color="0.1", zorder=3)
        for row, mean in enumerate(means):
            named(axes, f"{mean:.3g}", (mean, row), (0, 9), fontsize="x-small", color="0.1")
        axes.set(xlabel=label, xscale="linear" if column == "onsets" else "log", xmargin=0.12)
        if column != "onsets":
            plain_log_ticks(axes.xaxis)
        axes.grid(axis="y", visible=False)
    grid[0].set_xlabel(f"{OUTCOMES['onsets']} (rises by {runs.onset_ratio.iloc[0]:g} times)")
    grid[0].set(yticks=range(len(policies)), yticklabels=policies, ylim=(len(policies) - 0.5, -0.7))
    figure.suptitle("E5: every seed (points) and the mean over seeds (bar, number)", fontsize="medium")
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
    count = shown.shape[1]
    size = (7.0, 1.25 * count + 1.0)
    figure, grid = plt.subplots(count, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    for axes, (name, course) in zip(grid.flat, shown.items()):
        axes.plot(course, color=COLOURS[0], linewidth=0.6, alpha=0.5)
        axes.plot(course.rolling(SMOOTHED, center=True, min_periods=1).median(), color=COLOURS[0])
        axes.set(yscale="log")
        axes.set_title(name, fontsize="medium", loc="left")
        plain_log_ticks(axes.yaxis)
        if compared:
            axes.axhline(1, **DASHED)
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel("error / error without a controller" if compared else "error", fontsize="medium")
    beside = "\nbelow 1 a controller helps" * compared
    title = f"E5: error over training (pale: each step; dark: median of {SMOOTHED} steps){beside}"
    figure.suptitle(title, fontsize="medium")
    return grid[0, 0]


@style()
def e5_looks(course: pd.DataFrame) -> Axes:
    """Forest plot of the claims about differences: one row a claim (rows of ``verdicts.by_look``), one scale.

    The unit is the standard deviation between seeds at the last look. Thin lines are the intervals of earlier looks.
    Grey is what would not matter. Claims without a smallest effect of interest have no row.
    """
    claims = list(course[course.smallest > 0].groupby("quantity", sort=False))
    axes = canvas(8.6, 0.62 * len(claims) + 1.5)
    for row, (_, looks) in enumerate(claims):
        last = looks.iloc[-1]
        scaled = (looks[["mean", "low", "high"]] - last.bound) / last.sd
        places = row + np.linspace(-0.3, 0.22, len(looks))
        axes.barh(row, 2 * last.smallest / last.sd, left=-last.smallest / last.sd, height=0.8, color="0.88", zorder=0)
        axes.hlines(places[:-1], scaled.low[:-1], scaled.high[:-1], color=COLOURS[0], linewidth=0.8, alpha=0.5)
        axes.hlines(places[-1:], scaled.low[-1:], scaled.high[-1:], color=COLOURS[0], linewidth=3)
        axes.plot(scaled["mean"], places, "o", color=COLOURS[0], markersize=2.5)
        axes.plot(scaled["mean"].iloc[-1], places[-1], "o", color=COLOURS[0], markersize=7)
        axes.text(1.01, row, last.verdict, transform=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.axvline(0, **DASHED)
    axes.set_yticks(range(len(claims)), [name for name, _ in claims], fontsize="small")
    axes.set(ylim=(len(claims) - 0.5, -0.6))
    axes.grid(axis="y", visible=False)
    title = f"{course.experiment.iloc[0]}: mean and interval after {course.runs.max()} seeds (thick), and before (thin)"
    return finished(axes, "difference, in standard deviations between seeds (grey: too small to matter)", None, title)


def _with_policy_names(table: pd.DataFrame) -> pd.DataFrame:
    """Policies by the names that figures use, in the order of ``POLICY_NAMES``; others follow, unchanged."""
    names = POLICY_NAMES | {name: name for name in table.policy if name not in POLICY_NAMES}
    present = [name for policy, name in names.items() if policy in set(table.policy)]
    return table.assign(policy=pd.Categorical(table.policy.map(names), present, ordered=True))
