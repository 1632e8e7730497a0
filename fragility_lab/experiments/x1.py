"""X1: the adjoint predictor (``fragility_adjoint.predictor``) on the windows of E2 and E3; not in the paper.

Like the score, the predictor needs the low-precision pass alone: no full-precision weights, no second pass.
"""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_adjoint.predictor import Adjoint, Prediction, predict
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import SIGNALS
from fragility_core.theory import mismatch
from fragility_lab.experiments import rankings
from fragility_lab.experiments.agreement import by_run, signal_agreement
from fragility_lab.experiments.e2 import DerivedSpec, DerivedWorker, window_rows
from fragility_lab.experiments.e3 import WINDOW, by_block
from fragility_lab.experiments.realisations import moved
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.running.runs import RunStore
from fragility_lab.running.task import Advance
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.lowering import LowPrecision, as_format
from fragility_quantization.quantized import lower

SITE_COLUMNS = ["site", "layer", "block_output"]
OUTSIDE = -1  # the layer of what belongs to no block
REDRAWN = "redrawn_mismatch_"  # columns of the mismatch with other roundings, numbered from 0
COMPARED = ("adjoint", "one_probe", "combined", "no_transport")


@dataclass(frozen=True)
class EstimateSpec(DerivedSpec):
    """Estimates for the windows of one run of E2; raises ValueError for counts out of range."""

    experiment, unit = "X1", "token"

    probes: int = 1
    redraws: int = 0  # how often every window is measured again with other roundings

    def __post_init__(self):
        require_at_least(1, probes=self.probes)
        require_at_least(0, redraws=self.redraws)

    @property
    def size(self) -> int:
        return self.source.length * self.source.windows * (1 + self.redraws)


class Estimates(DerivedWorker[EstimateSpec]):
    """Computes the runs of X1; runs of one precision share the estimator."""

    def __init__(self, inputs: Inputs, store: RunStore, source: Path):
        super().__init__(inputs, store, source)
        self.estimator = cache(lambda *how, probes: Adjoint(_lowered(inputs.model, *how), probes=probes))
        self.redrawn = cache(lambda *how: _redrawn(inputs.model, *how))

    def run(self, spec: EstimateSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows, one per window and place: c^2 (mean over probes), and the window's prediction and mismatch.

        A place here is a ``site`` in a ``layer`` (-1 outside of blocks); a block's output is apart. ``one_probe`` is
        the prediction from the first probe alone; ``redrawn_mismatch_0`` and so on are mismatches with other roundings
        (``_redrawn``). Raises FileNotFoundError if E2's run is missing.
        """
        rows = self.source.require(spec.source)
        windows = window_rows(rows)
        frames = []
        for window in windows[~windows.overflow].itertuples():
            options = window.start, spec.probes, spec.redraws
            frame = self.once(spec, options, partial(self._estimated, spec, window.start))
            frames.append(frame.assign(window=window.window, mismatch=window.mismatch))
            advance(spec.source.length * (1 + spec.redraws))
        places = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        return places.assign(**spec.source.identity)

    def _estimated(self, spec: EstimateSpec, start: int) -> pd.DataFrame:
        """The places of the window that starts at token ``start``, and its mismatch in every redraw."""
        tokens = self.window(spec.source, start)
        estimator = self.estimator(spec.source.precision, spec.source.execution, probes=spec.probes)
        return _places(estimator(tokens)).assign(**self._measured_again(spec, tokens))

    @torch.no_grad()
    def _measured_again(self, spec: EstimateSpec, tokens: Tensor) -> dict[str, float]:
        """Mismatch of one window in every redraw."""
        measured = {}
        for number in range(spec.redraws):
            model, low = self.redrawn(spec.source.precision, spec.source.execution, number)
            with low.running():
                hidden = final_hidden(low.model, tokens)
            measured[f"{REDRAWN}{number}"] = mismatch(hidden, final_hidden(model, tokens)).item()
        return measured


def _redrawn(model: nn.Module, precision: str, execution: str, number: int) -> tuple[nn.Module, LowPrecision]:
    """The fp32 model with all weights moved by about half a unit roundoff of themselves, and the same model lowered.

    The moved model computes nearly the same function, but rounds everything differently: to nearest, as in E2.
    """
    other = moved(model, as_format(precision).unit_roundoff / 2, number)
    return other, _lowered(other, precision, execution)


def _lowered(model: nn.Module, precision: str, execution: str) -> LowPrecision:
    """``model`` lowered, with the attention of E2's low-precision pass."""
    low = lower(model, precision, execution)
    set_attention(low.model, OBSERVED_EAGER)
    return low


def _places(prediction: Prediction) -> pd.DataFrame:
    """c^2 of one window summed over the kernels and weights of each site, mean over probes."""
    rows = prediction.contributions
    probes = rows.probe.max() + 1
    filled = rows.assign(layer=rows.layer.fillna(OUTSIDE), c2=rows.c2.fillna(np.inf))  # pandas skips a NaN
    c2 = filled.groupby(SITE_COLUMNS, sort=False).c2.sum() / probes
    one_probe = predict(rows[rows.probe == 0], prediction.windows)
    (window,) = prediction.windows.itertuples()
    return c2.reset_index().assign(
        predicted=window.predicted, standard_error=window.standard_error, one_probe=one_probe.predicted.item(),
        final_norm=window.norm,
    )  # fmt: skip


# --- Views of the rows ------------------------------------------------------------------------


def window_table(estimates: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per window: the signals of E2's rows ``runs``, and the prediction as the signal ``adjoint``.

    ``ratio`` is the prediction over the mismatch. Windows that overflowed have neither.
    """
    redrawn = [name for name in estimates if name.startswith(REDRAWN)]
    columns = ["predicted", "standard_error", "one_probe", *redrawn]
    predictions = estimates.groupby(WINDOW, sort=False)[columns].first().rename(columns={"predicted": "adjoint"})
    windows = window_rows(runs)[[*WINDOW, "overflow", "mismatch", *SIGNALS]]
    table = windows.merge(predictions.reset_index(), on=WINDOW, how="left")
    return table.assign(ratio=table.adjoint / table.mismatch)


def run_table(windows: pd.DataFrame) -> pd.DataFrame:
    """One row per run: agreement of prediction and score with the mismatch. Overflows are left out and counted."""
    return by_run(windows, _run_agreement)


def _run_agreement(kept: pd.DataFrame) -> dict[str, float]:
    row = {"mean_ratio": kept.ratio.mean()}
    for signal in COMPARED:
        row |= signal_agreement(kept, signal)
    return row | _noise(kept)


def _noise(windows: pd.DataFrame) -> dict[str, float]:
    """The part of chance in a mismatch, from several draws of its roundings: the mismatch itself and the redrawn ones.

    ``between_draws`` is the mean Pearson correlation of two draws. Its root, the ``ceiling``, is the correlation of the
    exact expectation with one draw (Spearman 1904). ``adjoint_with_each`` is the correlation of the prediction with one
    draw, mean over draws. ``adjoint_with_mean`` is its correlation with the mean of the draws, which is less noisy.
    """
    names = ["mismatch", *(name for name in windows if name.startswith(REDRAWN))]
    draws = windows[names].replace(np.inf, np.nan).dropna()
    if len(draws) < 3 or len(names) < 2:
        return {}
    between = np.corrcoef(draws.T)[np.triu_indices(len(names), 1)].mean()
    adjoint = windows.adjoint[draws.index]
    return {
        "between_draws": between,
        "ceiling": max(between, 0) ** 0.5,
        "adjoint_with_each": draws.corrwith(adjoint).mean(),
        "adjoint_with_mean": draws.mean(axis=1).corr(adjoint),
    }


def site_shares(estimates: pd.DataFrame) -> pd.DataFrame:
    """Share of the error variance of each site (columns), mean over windows, by precision and length.

    Windows whose prediction is not finite are left out.
    """
    by = ["precision", "length"]
    known = estimates[np.isfinite(estimates.predicted)]
    c2 = known.groupby([*WINDOW, "site"]).c2.sum().unstack("site", fill_value=0.0)
    return c2.div(c2.sum(axis=1), axis=0).groupby(by).mean()


def _ranked_blocks(estimates: pd.DataFrame, patches: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """The windows of ``patches``, and rankings of their blocks by name: (W, L), and (R, W, L) for ``realisations``."""
    place = [*WINDOW, "layer"]
    inside = estimates[(estimates.layer != OUTSIDE) & ~estimates.block_output]  # a patched block rounds its output too
    rows = patches.merge(inside.groupby(place).c2.sum().reset_index(), on=place).sort_values(place)
    scores = dict(zip(("adjoint", "score", "single", "realisations"), by_block(rows, "c2", "risk", "exact_reduction")))
    return rows[rows.layer == 0][WINDOW].reset_index(drop=True), scores


def _alike(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's correlation along the last axis; NaN if effects are not finite."""
    return rankings.agreement(first, second)["spearman"]


def ranking_table(estimates: pd.DataFrame, patches: pd.DataFrame) -> pd.DataFrame:
    """One row per window: agreement of score and prediction with patching on the ranks of its blocks.

    ``patches`` are rows of E3 in which every window was also patched under stochastic rounding. ``average`` compares
    with the mean effect of the realisations, ``single`` with the effect in rounding to nearest. ``e3.run_table``
    averages over the windows of each run.
    """
    table, scores = _ranked_blocks(estimates, patches)
    oracles = {"average": scores["realisations"].mean(0), "single": scores["single"]}
    for proxy in ("adjoint", "score"):
        for oracle, exact in oracles.items():
            table[f"{proxy}_{oracle}"] = _alike(scores[proxy], exact)
    return table


def realisation_table(estimates: pd.DataFrame, patches: pd.DataFrame) -> pd.DataFrame:
    """Spearman's correlation with means of effects over 1, 2, 4 ... realisations; a row per window, count and ranking.

    Realisations are split into disjoint groups of the count, and the correlations of all groups are averaged.
    ``ranked_by`` is "adjoint", "score" or "measurement", the average of another group. A ranking that beats
    "measurement" is worth more than measuring equally often once more.
    """
    windows, scores = _ranked_blocks(estimates, patches)
    realisations = scores["realisations"]
    tables, count = [], 1
    while count <= len(realisations):
        whole = realisations[: len(realisations) // count * count]
        averages = whole.reshape(-1, count, *whole.shape[1:]).mean(1)  # (groups, W, L)
        spearman = {proxy: _alike(scores[proxy], averages).mean(0) for proxy in ("adjoint", "score")}
        first, second = np.triu_indices(len(averages), 1)
        if len(first):
            spearman["measurement"] = _alike(averages[first], averages[second]).mean(0)
        table = windows.assign(realisations=count, **spearman)
        tables.append(table.melt([*WINDOW, "realisations"], list(spearman), "ranked_by", "spearman"))
        count *= 2
    return pd.concat(tables, ignore_index=True)


def summary(runs: pd.DataFrame, rankings: pd.DataFrame) -> pd.DataFrame:
    """The tables of E2 and E3 with the prediction beside the score: means over runs.

    ``runs`` is ``run_table``, ``rankings`` holds the means of ``ranking_table`` over the windows of each run. ``above``
    counts the runs in which the prediction agrees better than the score, of those whose windows do not all overflow.
    """
    pairs = [
        *((f"E2: {measure.capitalize()} with the mismatch", runs[f"adjoint_{measure}"], runs[f"combined_{measure}"])
          for measure in ("pearson", "spearman", "retrieval")),
        ("E3: Spearman with the effect in one rounding", rankings.adjoint_single, rankings.score_single),
        ("E3: Spearman with the effect averaged over roundings", rankings.adjoint_average, rankings.score_average),
    ]  # fmt: skip
    return pd.DataFrame(
        [
            {"quantity": name, "adjoint": adjoint.mean(), "adjoint_sd": adjoint.std(), "score": score.mean(),
             "score_sd": score.std(), "above": int((adjoint > score).sum()), "runs": int(adjoint.notna().sum())}
            for name, adjoint, score in pairs
        ]
    )  # fmt: skip
