"""X1: the calibrated predictor (``fragility_core.adjoint``) on the windows of E2 and E3; not in the paper.

Like the score, the predictor needs the low-precision pass alone: no full-precision weights, no second pass.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_core.adjoint import Adjoint, Prediction, predict
from fragility_core.arithmetic.attention import OBSERVED_EAGER, set_attention
from fragility_core.arithmetic.formats import get_format
from fragility_core.arithmetic.lowering import LowPrecision, lower
from fragility_core.models.tree import final_hidden
from fragility_core.surrogates import SIGNALS
from fragility_core.theory import mismatch
from fragility_lab.experiments import rankings
from fragility_lab.experiments.agreement import signal_agreement
from fragility_lab.experiments.e2 import IDENTITY, DerivedSpec, window_rows
from fragility_lab.experiments.e3 import REALISATION, WINDOW
from fragility_lab.experiments.pool import Advance, Worker
from fragility_lab.experiments.runs import RunStore
from fragility_lab.inputs.loading import Inputs

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
        if self.probes < 1:
            raise ValueError(f"probes must be at least 1, got {self.probes}")
        if self.redraws < 0:
            raise ValueError(f"redraws must be at least 0, got {self.redraws}")

    @property
    def size(self) -> int:
        return self.source.length * self.source.windows * (1 + self.redraws)


class Estimates(Worker):
    """Computes the runs of X1; runs of one precision share the estimator."""

    def __init__(self, inputs: Inputs, store: RunStore, source: Path):
        """``source`` is the folder of E2's runs."""
        super().__init__(inputs, store)
        self.source = RunStore(source)
        self._estimators: dict[tuple, Adjoint] = {}
        self._redrawn: dict[tuple, tuple[nn.Module, LowPrecision]] = {}

    def estimator(self, spec: EstimateSpec) -> Adjoint:
        """The estimator for the precision and probes of ``spec``, with the attention of E2's low-precision pass."""
        key = (spec.source.precision, spec.source.execution, spec.probes)
        if key not in self._estimators:
            self._estimators[key] = Adjoint(_lowered(self.inputs.model, *key[:2]), probes=spec.probes)
        return self._estimators[key]

    def redrawn(self, precision: str, execution: str, number: int) -> tuple[nn.Module, LowPrecision]:
        """The fp32 model with all weights moved by about half a unit roundoff of themselves, and lowered.

        What it computes hardly differs, but everything in it is rounded anew: to nearest, as in E2.
        """
        key = precision, execution, number
        if key not in self._redrawn:
            model = copy.deepcopy(self.inputs.model)
            generator = torch.Generator(self.inputs.device).manual_seed(number)
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator, device=weight.device)
                weight.data *= 1 + get_format(precision).unit_roundoff / 2 * noise
            self._redrawn[key] = model, _lowered(model, precision, execution)
        return self._redrawn[key]

    def run(self, spec: EstimateSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows, one per window and place: its c^2 (mean over probes), and the window's prediction and mismatch.

        Places are told apart by ``site``, ``layer`` (-1 outside of blocks) and whether they are a block's output.
        ``one_probe`` is the prediction from the first probe alone, ``redrawn_mismatch_0`` ... the mismatch with other
        roundings (``redrawn``). Raises FileNotFoundError where E2's run is not there.
        """
        rows = self.source.require(spec.source)
        windows = window_rows(rows)
        estimator = self.estimator(spec)
        frames = []
        for window in windows[~windows.overflow].itertuples():
            tokens = self.inputs.stream[None, window.start : window.start + spec.source.length].to(self.inputs.device)
            frame = _places(estimator(tokens)).assign(window=window.window, mismatch=window.mismatch)
            frames.append(frame.assign(**self._measured_again(spec, tokens)))
            advance(spec.source.length * (1 + spec.redraws))
        places = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        return places.assign(**spec.source.identity)

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


def _lowered(model: nn.Module, precision: str, execution: str) -> LowPrecision:
    """``model`` lowered, with the attention of E2's low-precision pass."""
    low = lower(model, precision, execution)
    set_attention(low.model, OBSERVED_EAGER)
    return low


def _places(prediction: Prediction) -> pd.DataFrame:
    """c^2 of one window summed over the kernels and weights of each place, mean over probes."""
    kernels = prediction.kernels
    probes = kernels.probe.max() + 1
    filled = kernels.assign(layer=kernels.layer.fillna(OUTSIDE), c2=kernels.c2.fillna(np.inf))  # pandas skips a NaN
    c2 = filled.groupby(SITE_COLUMNS, sort=False).c2.sum() / probes
    one_probe = predict(kernels[kernels.probe == 0], prediction.windows)
    (window,) = prediction.windows.itertuples()
    return c2.reset_index().assign(
        predicted=window.predicted, standard_error=window.standard_error, one_probe=one_probe.predicted.item(),
        final_norm=window.final_norm,
    )  # fmt: skip


# --- Views of the rows ------------------------------------------------------------------------


def window_table(estimates: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per window: E2's signals from its rows ``runs``, and the prediction as signal ``adjoint``.

    ``ratio`` is the prediction over the mismatch; windows that overflowed have neither.
    """
    redrawn = [name for name in estimates if name.startswith(REDRAWN)]
    columns = ["predicted", "standard_error", "one_probe", *redrawn]
    predictions = estimates.groupby(WINDOW, sort=False)[columns].first().rename(columns={"predicted": "adjoint"})
    windows = window_rows(runs)[[*WINDOW, "overflow", "mismatch", *SIGNALS]]
    table = windows.merge(predictions.reset_index(), on=WINDOW, how="left")
    return table.assign(ratio=table.adjoint / table.mismatch)


def run_table(windows: pd.DataFrame) -> pd.DataFrame:
    """Agreement of the prediction and the score with the mismatch, one row per run; overflows left out and counted."""
    rows = []
    for identity, group in windows.groupby(list(IDENTITY), sort=True):
        kept = group[~group.overflow]
        row = {"windows": len(kept), "overflowed": len(group) - len(kept), "mean_ratio": kept.ratio.mean()}
        for signal in COMPARED:
            row |= signal_agreement(kept, signal)
        rows.append(dict(zip(IDENTITY, identity)) | row | _noise(kept))
    return pd.DataFrame(rows)


def _noise(windows: pd.DataFrame) -> dict[str, float]:
    """How much of the mismatch is the chance of its roundings, from draws of it: itself and the redrawn ones.

    ``between_draws`` is the mean Pearson between two of them. The exact expectation would have its root, the
    ``ceiling``, with any one (Spearman 1904). ``adjoint_with_each`` is what the prediction has with one, mean over
    draws, ``adjoint_with_mean`` with their mean, which has less of the noise.
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


def layer_contributions(estimates: pd.DataFrame) -> pd.DataFrame:
    """c^2 of every block of every window, that of the block's output left out: a patched block keeps its rounding."""
    inside = estimates[(estimates.layer != OUTSIDE) & ~estimates.block_output]
    return inside.groupby([*WINDOW, "layer"]).c2.sum().reset_index()


def _ranked_blocks(estimates: pd.DataFrame, patches: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """The windows of ``patches``, and by name what ranks their blocks, (W, L), or (R, W, L) for ``realisations``."""
    rows = patches.merge(layer_contributions(estimates), on=[*WINDOW, "layer"]).sort_values([*WINDOW, "layer"])
    columns = {"adjoint": "c2", "score": "risk", "single": "exact_reduction"}
    scores = {name: rows[column].to_numpy().reshape(-1, rows.layer.nunique()) for name, column in columns.items()}
    noisy = rows.filter(like=REALISATION).to_numpy().T
    scores["realisations"] = noisy.reshape(len(noisy), *scores["single"].shape)
    return rows[rows.layer == 0][WINDOW].reset_index(drop=True), scores


def _alike(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman along the last axis; NaN where an overflow left effects that are not finite."""
    return rankings.agreement(first, second)["spearman"]


def ranking_table(estimates: pd.DataFrame, patches: pd.DataFrame) -> pd.DataFrame:
    """How alike score and prediction rank the blocks of each window as patching them does, one row per window.

    ``e3.run_table`` averages over the windows of each run.

    ``patches`` are rows of E3 in which every window was patched under stochastic rounding too:
    ``average`` compares with the mean effect of its realisations, ``single`` with rounding to nearest.
    """
    table, scores = _ranked_blocks(estimates, patches)
    oracles = {"average": scores["realisations"].mean(0), "single": scores["single"]}
    for proxy in ("adjoint", "score"):
        for oracle, exact in oracles.items():
            table[f"{proxy}_{oracle}"] = _alike(scores[proxy], exact)
    return table


def realisation_table(estimates: pd.DataFrame, patches: pd.DataFrame) -> pd.DataFrame:
    """Spearman with the effect averaged over 1, 2, 4 ... realisations, tidy, one row per window, count and proxy.

    The mean over all averages of so many realisations, no two of which share one. ``ranked_by`` is
    "adjoint", "score", or "measurement": another such average. What ranks better than that is worth
    more than measuring once more at the same cost.
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
    """What the prediction does to the tables of E2 and E3: means over runs beside the score's.

    ``runs`` are those of ``run_table``, ``rankings`` the means of ``ranking_table`` over the windows of each run;
    ``above`` counts the runs in which the prediction agrees better than the score.
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
             "score_sd": score.std(), "above": int((adjoint > score).sum()), "runs": len(adjoint)}
            for name, adjoint, score in pairs
        ]
    )  # fmt: skip
