"""E3: does the score name the blocks whose rounding matters? (protocol section 5)

E3 reads the runs of E2: the windows of highest mismatch of each run, and the risk of their blocks. Patching a block
measures the effect of its rounding on the mismatch (``fragility_core.surrogates.patching``).
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.patching import Patching, patch_effects
from fragility_lab.experiments import rankings
from fragility_lab.experiments.e2 import IDENTITY, DerivedSpec, DerivedWorker, RunSpec, window_rows
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.running.runs import RunStore
from fragility_lab.running.task import Advance
from fragility_numerics.lowering import lower

REALISATION = "stochastic_reduction_"  # columns of the effects under stochastic rounding, numbered from 0
WINDOW = [*IDENTITY, "window"]


@dataclass(frozen=True)
class PatchSpec(DerivedSpec):
    """One run of E3; raises ValueError for counts out of range."""

    experiment, unit = "E3", "token"

    windows: int = 8
    noisy_windows: int = 1  # how many of the windows are also patched under stochastic rounding
    realisations: int = 2

    def __post_init__(self):
        if not 1 <= self.windows <= self.source.windows:
            raise ValueError(f"windows must be between 1 and E2's {self.source.windows}, got {self.windows}")
        if not 0 <= self.noisy_windows <= self.windows:
            raise ValueError(f"noisy_windows must be between 0 and windows, got {self.noisy_windows} of {self.windows}")
        require_at_least(1, realisations=self.realisations)

    @property
    def size(self) -> int:
        return self.source.length * (self.windows + self.noisy_windows * self.realisations)


class Patches(DerivedWorker[PatchSpec]):
    """Computes the runs of E3; runs of one precision share its model."""

    def __init__(self, inputs: Inputs, store: RunStore, source: Path):
        super().__init__(inputs, store, source)
        self.patching = cache(lambda *how: Patching(inputs.model, lower(inputs.model, *how)))

    def run(self, spec: PatchSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows per window and block: effects of patching, the score's risk, and their ranks.

        The windows are those of highest mismatch without an overflow, highest first, ties by window. Raises
        FileNotFoundError where E2's run is missing.
        """
        rows = self.source.require(spec.source)
        windows = window_rows(rows).query("not overflow").sort_values(["mismatch", "window"], ascending=[False, True])
        frames = []
        for place, window in enumerate(windows.head(spec.windows).itertuples()):
            realisations = spec.realisations if place < spec.noisy_windows else 0
            start = window.start
            effects = self.once(spec, (start, realisations), partial(self._effects, spec.source, start, realisations))
            frames.append(effects.assign(window=window.window, place=place, source_mismatch=window.mismatch))
            advance(spec.source.length * (1 + realisations))
        if not frames:
            return pd.DataFrame()
        effects = pd.concat(frames, ignore_index=True)
        effects["recompute_gap"] = (effects.base_mismatch - effects.source_mismatch).abs()
        scores = rows[["window", "layer", "risk", "dominance", "combined"]]
        return ranked(effects.merge(scores, on=["window", "layer"])).assign(**spec.source.identity)

    @torch.no_grad()
    def _effects(self, source: RunSpec, start: int, realisations: int) -> pd.DataFrame:
        """Effects of patching every block of one window: to nearest, and in ``realisations`` of stochastic rounding."""
        tokens = self.window(source, start)
        reference = final_hidden(self.inputs.model, tokens)
        patching = self.patching(source.precision, source.execution)
        effects = patch_effects(patching(tokens), reference).drop(columns="window")
        for number in range(realisations):
            # Two windows rounded with the same random bits would have correlated errors.
            patched = patching.stochastic(start * realisations + number)(tokens)
            effects[f"{REALISATION}{number}"] = patch_effects(patched, reference).exact_reduction
        return effects


def ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` with the ranks of each window's blocks by the score and by the exact effect; the largest has rank 1."""
    columns = {"proxy_rank": "risk", "exact_rank": "exact_reduction"}
    by_window = rows.groupby("window", sort=False)
    return rows.assign(**{name: by_window[of].rank(ascending=False) for name, of in columns.items()})


# --- Views of the rows ------------------------------------------------------------------------


def by_block(rows: pd.DataFrame, *columns: str) -> list[np.ndarray]:
    """The ``columns`` as matrices (W, L), windows by blocks, and the effects of all realisations (R, W, L)."""
    depth = rows.layer.nunique()
    noisy = rows.filter(like=REALISATION).to_numpy().T
    matrices = [rows[name].to_numpy().reshape(-1, depth) for name in columns]
    return [*matrices, noisy.reshape(len(noisy), len(rows) // depth, depth)]


def window_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per window: agreement of its blocks' ranks by score and by exact effect; the noise floor if measured.

    ``rankings.noise_floor`` defines the noise floor. Raises ValueError if there are no rows because every window
    overflowed.
    """
    if rows.empty:
        raise ValueError("E3 needs windows with a finite mismatch, got none: every window of E2's runs overflowed")
    windows = rows[rows.layer == 0][[*WINDOW, "base_mismatch", "recompute_gap"]].reset_index(drop=True)
    risk, exact, realisations = by_block(rows, "risk", "exact_reduction")
    floor = rankings.noise_floor(realisations, exact) if len(realisations) else {}
    return windows.assign(layers=rows.layer.nunique(), **rankings.agreement(risk, exact), **floor)


def run_table(windows: pd.DataFrame) -> pd.DataFrame:
    """Means over the windows of each run, one row per run, and the number of ``windows`` patched."""
    by_run = windows.groupby(list(IDENTITY), sort=True)
    return by_run.mean().drop(columns="window").assign(windows=by_run.size()).reset_index()


def measured_twice(windows: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``window_table`` with a noise floor. Runs of several seeds may share a window; it is there once."""
    return windows.dropna(subset="noise_floor").drop_duplicates(["precision", "length", "base_mismatch"])


def rank_counts(rows: pd.DataFrame) -> pd.DataFrame:
    """Counts of blocks by their rank by the score and their rank by the exact effect; ties split evenly."""
    depth = rows.layer.nunique()
    counts = np.zeros((depth, depth))
    known = rows[["proxy_rank", "exact_rank"]].dropna()
    for proxy, exact in product((np.floor, np.ceil), repeat=2):
        np.add.at(counts, (proxy(known.proxy_rank).astype(int) - 1, exact(known.exact_rank).astype(int) - 1), 0.25)
    labels = range(1, depth + 1)
    return pd.DataFrame(counts, pd.Index(labels, name="proxy_rank"), pd.Index(labels, name="exact_rank"))
