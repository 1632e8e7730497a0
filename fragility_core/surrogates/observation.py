"""Observations: the measurements of monitored passes over a batch of windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from fragility_core.models.padding import Group, padded
from fragility_core.surrogates.scoring import Estimator, Scores, score


@dataclass(frozen=True)
class Observation:
    """Measurements of one monitored pass over a batch of windows.

    ``layers`` has one row per window and block, ``windows`` one row per window, both in order. ``hidden`` is the
    final hidden state (B, T, d_model) after the final norm, on the device. ``unit_roundoff`` is that of the format.
    """

    layers: pd.DataFrame
    windows: pd.DataFrame
    hidden: Tensor
    unit_roundoff: float

    def scores(self, estimator: Estimator = Estimator()) -> Scores:
        """Risk of every block, and signals of every window (``scoring.score``)."""
        return score(self.layers, self.windows, self.unit_roundoff, estimator)


def joined(groups: Sequence[Group], seen: Sequence[Observation], length: int) -> Observation:
    """One observation of padded windows (B, T), T = ``length``, from one per group; ``hidden`` is 0 at padding."""
    layers, windows = (in_order(groups, tables) for tables in zip(*((each.layers, each.windows) for each in seen)))
    hidden = padded(groups, [each.hidden for each in seen], length)
    return Observation(layers, windows, hidden, seen[0].unit_roundoff)


def in_order(groups: Sequence[Group], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table ordered by ``window``, from one table per group, in which windows are numbered within the group."""
    own = [table.assign(window=np.take(group.windows, table.window)) for group, table in zip(groups, tables)]
    return pd.concat(own).sort_values("window", kind="stable", ignore_index=True)
