"""Agreement of signals with the mismatch: correlations and retrieval, by run and by signal."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from fragility_core.surrogates import DERIVED, LAYERNORM_TERMS, SIGNALS, Estimator, score
from fragility_core.surrogates.transport import TRANSPORTS
from fragility_lab.experiments import rankings
from fragility_lab.experiments.e2 import IDENTITY, window_rows
from fragility_numerics.lowering import as_format

MEASURES = ("pearson", "spearman", "retrieval")
RETRIEVED = 0.125  # share of the windows that count as the worst


def retrieval(signal: pd.Series, mismatch: pd.Series) -> float:
    """Share of the windows of highest mismatch that also have the highest signal; ties go by position."""
    return float(rankings.top_overlap(signal, mismatch, max(1, round(RETRIEVED * len(mismatch)))))


def signal_agreement(kept: pd.DataFrame, signal: str) -> dict[str, float]:
    """Pearson, Spearman and retrieval of the column ``signal`` against the mismatch of the windows ``kept``."""
    if len(kept) < 3:
        return {f"{signal}_{measure}": np.nan for measure in MEASURES}
    return {
        f"{signal}_pearson": stats.pearsonr(kept[signal], kept.mismatch).statistic,
        f"{signal}_spearman": stats.spearmanr(kept[signal], kept.mismatch).statistic,
        f"{signal}_retrieval": retrieval(kept[signal], kept.mismatch),
    }


def by_run(windows: pd.DataFrame, summary: Callable[[pd.DataFrame], dict]) -> pd.DataFrame:
    """One row per run in ``windows``: its columns ``IDENTITY``, and the ``summary`` of its windows.

    Windows that overflowed have no finite mismatch. They are left out and counted.
    """
    rows = []
    for identity, run in windows.groupby(list(IDENTITY), sort=True):
        kept = run[~run.overflow]
        counts = {"windows": len(kept), "overflowed": len(run) - len(kept)}
        rows.append(dict(zip(IDENTITY, identity)) | counts | summary(kept))
    return pd.DataFrame(rows)


def _run_agreement(kept: pd.DataFrame) -> dict[str, float]:
    row: dict[str, float] = {}
    for signal in SIGNALS:
        row |= signal_agreement(kept, signal)
    for measure in MEASURES:
        row[f"delta_{measure}"] = row[f"combined_{measure}"] - row[f"no_transport_{measure}"]
    return row | {"mean_mismatch": kept.mismatch.mean(), "mean_combined": kept.combined.mean()}


def agreement_by_run(windows: pd.DataFrame) -> pd.DataFrame:
    """Pearson, Spearman and retrieval of every signal against the mismatch (``by_run``)."""
    return by_run(windows, _run_agreement)


def agreement_by_signal(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per signal: means over the rows of ``agreement_by_run``, and how many runs it beats ``combined`` in."""
    means = [{"signal": signal} | {m: runs[f"{signal}_{m}"].mean() for m in MEASURES} for signal in SIGNALS]
    better = [int((runs[f"{signal}_pearson"] > runs.combined_pearson).sum()) for signal in SIGNALS]
    finite = int(runs.combined_pearson.notna().sum())  # not where too few windows are finite
    return pd.DataFrame(means).assign(runs_above_combined=better, runs=finite).set_index("signal")


def binned_trend(windows: pd.DataFrame, bins: int = 12) -> pd.DataFrame:
    """Means of ``combined`` and mismatch over bins with equally many windows, sorted by ``combined``."""
    kept = windows[~windows.overflow].sort_values("combined", kind="stable").reset_index(drop=True)
    groups = kept.groupby(kept.index * bins // len(kept))
    return groups.agg(
        combined=("combined", "mean"),
        mismatch=("mismatch", "mean"),
        windows=("mismatch", "size"),
    )


def trends(windows: pd.DataFrame) -> pd.DataFrame:
    """``binned_trend`` of each format by itself, and of all windows together as in the paper (precision "all")."""
    parts = [*windows.groupby("precision"), ("all", windows)]
    return pd.concat([binned_trend(part).assign(precision=name) for name, part in parts], ignore_index=True)


def named_worst(windows: pd.DataFrame, count: int = 3) -> pd.DataFrame:
    """``windows`` with a column ``name``: "bf16-1" for the largest mismatch in bf16, and so on to ``count``.

    Other windows have no name. A window that several seeds drew is named once.
    """
    finite = windows[~windows.overflow].sort_values("mismatch", ascending=False, kind="stable")
    distinct = finite.drop_duplicates(["precision", "length", "start"])
    rank = distinct.groupby("precision").cumcount() + 1
    names = (distinct.precision + "-" + rank.astype(str))[rank <= count]
    return windows.assign(name=names.reindex(windows.index, fill_value=""))


def compare_estimators(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean agreement over runs of the ``combined`` signal under every estimator of the score.

    ``rows`` are those of E2. Their statistics are used as they are; no model is run.
    """
    transports = [name for name in TRANSPORTS if name != "power_iteration" or "branch_jacobian_norm" in rows]
    table = []
    for layernorm, transport in product(LAYERNORM_TERMS, transports):
        signals = _rescored(rows, Estimator(layernorm, transport))
        runs = agreement_by_run(signals)
        table.append(
            {"layernorm": layernorm, "transport": transport}
            | {f"combined_{measure}": runs[f"combined_{measure}"].mean() for measure in MEASURES}
            | {"median_ratio": (signals.combined / signals.mismatch).median()}
        )
    return pd.DataFrame(table)


def _rescored(rows: pd.DataFrame, estimator: Estimator) -> pd.DataFrame:
    scored = []
    for (precision, *_), run in rows.groupby(list(IDENTITY), sort=True):
        windows = window_rows(run)[["window", "final_norm", "mismatch", "overflow", *IDENTITY]]
        statistics = run[[name for name in run if name not in DERIVED]].reset_index(drop=True)
        scored.append(score(statistics, windows, as_format(precision).unit_roundoff, estimator)[1])
    return pd.concat(scored, ignore_index=True)
