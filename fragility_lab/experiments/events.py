"""Events in a training run's series of mismatches and losses (protocol section 6)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SpikeRule:
    """When a value of a series is a spike. Raises ValueError for parameters out of range."""

    ratio: float = 1.22  # a spike is above this times the median of the last ``recent`` finite values
    recent: int = 12
    warmup: int = 24  # number of finite values before the first spike
    separation: int = 16  # a later spike within this many steps belongs to the same event

    def __post_init__(self):
        if not self.ratio > 0:
            raise ValueError(f"ratio must be positive, got {self.ratio}")
        for name in ("recent", "warmup", "separation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def relative_to_recent(values: np.ndarray, rule: SpikeRule) -> np.ndarray:
    """Each of ``values`` (steps,) divided by the median of the last finite values before it. NaN in the warm-up."""
    ratios = np.full(len(values), np.nan)
    finite: list[float] = []
    for step, value in enumerate(values):
        if len(finite) >= rule.warmup:
            ratios[step] = value / np.median(finite[-rule.recent :])
        if np.isfinite(value):
            finite.append(value)
    return ratios


def onsets(values: np.ndarray, rule: SpikeRule = SpikeRule()) -> list[int]:
    """Steps at which an event begins: spikes at least ``separation`` steps after the onset before."""
    return _separated(np.flatnonzero(relative_to_recent(values, rule) > rule.ratio), rule.separation)


def _separated(spikes: np.ndarray, separation: int) -> list[int]:
    steps: list[int] = []
    for step in spikes:
        if not steps or step - steps[-1] >= separation:
            steps.append(int(step))
    return steps


def ratio_of_rate(runs: list[np.ndarray], target: float, rule: SpikeRule = SpikeRule()) -> float:
    """The ratio at which the mean number of onsets over ``runs`` is nearest to ``target``.

    Ratios are tried from 1 in steps of 0.005. Of several equally near ratios the largest is returned. Raises
    ValueError if no ratio gives an onset.
    """
    relative = [relative_to_recent(values, rule) for values in runs]
    peak = max(np.nanmax(ratios, initial=1.0) for ratios in relative)
    if peak <= 1:
        raise ValueError("a value must be above the median of those before it, got none: use longer runs")
    grid = np.arange(1, peak + 0.005, 0.005)
    counts = [[len(_separated(np.flatnonzero(r > ratio), rule.separation)) for r in relative] for ratio in grid]
    distance = np.abs(np.mean(counts, axis=1) - target)
    return round(float(grid[np.flatnonzero(distance == distance.min())[-1]]), 3)
