"""Pictures of the slack of a bound (bound over observed error) and of the steps of a proof that cause it."""

import numpy as np
import pandas as pd

from fragility_lab.reporting.figures import Axes


def histogram(axes: Axes, slack: pd.Series, title: str) -> None:
    """A histogram of ``slack`` from 1, a sharp bound, to 1000 and more, logarithmic. A dashed line marks the median."""
    axes.hist(np.log10(slack).clip(upper=3), bins=np.linspace(0, 3, 31), color="C0")
    axes.axvline(0, color="C3", linewidth=2)
    axes.axvline(np.log10(slack.median()), color="0.2", linestyle="--", linewidth=1)
    axes.set(
        xlim=(-0.1, 3), xticks=[0, 1, 2, 3], xticklabels=["1", "10", "100", "≥ 1000"], xlabel="bound / observed error",
        title=title,
    )  # fmt: skip


def given_away(axes: Axes, ladder: pd.DataFrame) -> None:
    """A bar for each column of ``ladder`` but the first: its geometric mean factor over the column before."""
    factors = np.exp(np.log(ladder).diff(axis=1).mean().iloc[1:])
    axes.barh(range(len(factors)), factors, color="C0", height=0.45)
    for place, (name, factor) in enumerate(factors.items()):
        axes.text(0.05, place - 0.3, f"{name}: × {factor:.2g}", fontsize="small")
    axes.set(
        yticks=[], ylim=(len(factors) - 0.6, -0.7), xlim=(0, None), xlabel="factor (mean)", ylabel="step",
        title="what each step of the proof loses",
    )  # fmt: skip


def describe(slack: pd.Series, draws: str) -> str:
    """A line on how often the bound holds and how loose it is; ``draws`` is the plural noun for what was drawn."""
    return (
        f"the bound holds in {(slack >= 1).sum()} of {len(slack)} {draws}; "
        f"bound / observed: smallest {slack.min():.2g}, median {slack.median():.2g}, largest {slack.max():.2g}"
    )
