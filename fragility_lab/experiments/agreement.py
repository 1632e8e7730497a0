"""How well signals predict the mismatch: correlations and retrieval, by run and by signal."""

from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from fragility_core.arithmetic.formats import get_format
from fragility_core.surrogates import DERIVED, LAYERNORM_TERMS, SIGNALS, Estimator, score
from fragility_core.surrogates.transport import TRANSPORTS
from fragility_lab.experiments import rankings
from fragility_lab.experiments.e2 import IDENTITY, window_rows

RETRIEVED = 0.125  # share of the windows that count as the worst


def retrieval(signal: pd.Series, mismatch: pd.Series) -> float:
    """Share of the windows of highest mismatch that also have the highest signal; ties go by position."""
    return float(rankings.top_overlap(signal, mismatch, max(1, round(RETRIEVED * len(mismatch)))))


def signal_agreement(kept: pd.DataFrame, signal: str) -> dict[str, float]:
    """Pearson, Spearman and retrieval of the column ``signal`` against the mismatch of the windows ``kept``."""
    enough = len(kept) > 2
    return {
        f"{signal}_pearson": stats.pearsonr(kept[signal], kept.mismatch).statistic if enough else np.nan,
        f"{signal}_spearman": stats.spearmanr(kept[signal], kept.mismatch).statistic if enough else np.nan,
        f"{signal}_retrieval": retrieval(kept[signal], kept.mismatch) if enough else np.nan,
    }


def run_agreement(windows: pd.DataFrame) -> pd.Series:
    """Pearson, Spearman and retrieval of every signal against the mismatch of one run's windows.

    Windows that overflowed have no finite mismatch. They are left out and counted.
    """
    kept = windows[~windows.overflow]
    row = {"windows": len(kept), "overflowed": len(windows) - len(kept)}
    for signal in SIGNALS:
        row |= signal_agreement(kept, signal)
    for measure in ("pearson", "spearman", "retrieval"):
        row[f"delta_{measure}"] = row[f"combined_{measure}"] - row[f"no_transport_{measure}"]
    row["mean_mismatch"] = kept.mismatch.mean()
    row["mean_combined"] = kept.combined.mean()
    return pd.Series(row)


def agreement_by_run(windows: pd.DataFrame) -> pd.DataFrame:
    """One row per run in ``windows``: ``run_agreement``."""
    rows = [
        dict(zip(IDENTITY, identity)) | run_agreement(group).to_dict()
        for identity, group in windows.groupby(list(IDENTITY), sort=True)
    ]
    table = pd.DataFrame(rows)
    return table.astype({"windows": int, "overflowed": int})


def agreement_by_signal(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per signal: means over the rows of ``agreement_by_run``, and in how many runs it beats ``combined``."""
    measures = ("pearson", "spearman", "retrieval")
    table = pd.DataFrame(
        [{"signal": signal} | {m: runs[f"{signal}_{m}"].mean() for m in measures} for signal in SIGNALS]
    )
    better = [int((runs[f"{signal}_pearson"] > runs.combined_pearson).sum()) for signal in SIGNALS]
    return table.assign(runs_above_combined=better, runs=len(runs)).set_index("signal")


def binned_trend(windows: pd.DataFrame, bins: int = 12) -> pd.DataFrame:
    """Means of ``combined`` and mismatch over bins of equal count, all windows sorted by ``combined``."""
    kept = windows[~windows.overflow].sort_values("combined", kind="stable").reset_index(drop=True)
    groups = kept.groupby(kept.index * bins // len(kept))
    return groups.agg(
        combined=("combined", "mean"),
        mismatch=("mismatch", "mean"),
        windows=("mismatch", "size"),
        precision=("precision", lambda names: ", ".join(sorted(set(names)))),
    )


def compare_estimators(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean agreement over runs of the ``combined`` signal under every estimator of the score.

    ``rows`` are those of E2. Their statistics are used as measured; no model is run.
    """
    transports = [name for name in TRANSPORTS if name != "power_iteration" or "branch_jacobian_norm" in rows]
    table = []
    for layernorm, transport in product(LAYERNORM_TERMS, transports):
        signals = _rescored(rows, Estimator(layernorm, transport))
        runs = agreement_by_run(signals)
        table.append(
            {"layernorm": layernorm, "transport": transport}
            | {name: runs[name].mean() for name in ("combined_pearson", "combined_spearman", "combined_retrieval")}
            | {"median_ratio": (signals.combined / signals.mismatch).median()}
        )
    return pd.DataFrame(table)


def _rescored(rows: pd.DataFrame, estimator: Estimator) -> pd.DataFrame:
    scored = []
    for (precision, *_), run in rows.groupby(list(IDENTITY), sort=True):
        windows = window_rows(run)[["window", "final_norm", "mismatch", "overflow", *IDENTITY]]
        statistics = run[[name for name in run if name not in DERIVED]].reset_index(drop=True)
        scored.append(score(statistics, windows, get_format(precision).unit_roundoff, estimator)[1])
    return pd.concat(scored, ignore_index=True)
