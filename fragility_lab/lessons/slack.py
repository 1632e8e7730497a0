"""Pictures of how loose a bound is: its slack, bound over observed error, and where it is given away."""

import numpy as np
import pandas as pd

from fragility_lab.reporting.figures import Axes


def histogram(axes: Axes, slack: pd.Series, title: str) -> None:
    """Count the draws by ``slack`` from 1, a sharp bound, to 1000 or more on a logarithmic axis; dashed the median."""
    axes.hist(np.log10(slack).clip(upper=3), bins=np.linspace(0, 3, 31), color="C0")
    axes.axvline(0, color="C3", linewidth=2)
    axes.axvline(np.log10(slack.median()), color="0.2", linestyle="--", linewidth=1)
    axes.set(
        xlim=(-0.1, 3), xticks=[0, 1, 2, 3], xticklabels=["1", "10", "100", "≥ 1000"], xlabel="bound / observed error",
        title=title,
    )  # fmt: skip


def given_away(axes: Axes, ladder: pd.DataFrame) -> None:
    """The mean factor of each column of ``ladder`` over the one before, a bar each."""
    factors = np.exp(np.log(ladder).diff(axis=1).mean().iloc[1:])
    axes.barh(range(len(factors)), factors, color="C0", height=0.45)
    for place, (name, factor) in enumerate(factors.items()):
        axes.text(0.05, place - 0.3, f"{name}: × {factor:.2g}", fontsize="small")
    axes.set(
        yticks=[], ylim=(len(factors) - 0.6, -0.7), xlim=(0, None), xlabel="factor (mean)",
        title="what each step gives away",
    )  # fmt: skip


def describe(slack: pd.Series, draws: str) -> str:
    """In how many ``draws`` (what they are, in words) the bound holds, and how loose it is."""
    return (
        f"the bound holds in {(slack >= 1).sum()} of {len(slack)} {draws}; "
        f"bound / observed: smallest {slack.min():.2g}, median {slack.median():.2g}, largest {slack.max():.2g}"
    )
