"""The paper's tables, with the paper's numbers beside this run's."""

from pathlib import Path

import pandas as pd

from fragility_core.experiments.agreement import spread
from fragility_core.published import E2_PAPER, E2_PAPER_COUNTS


def e2_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean ± sd over runs and 95 % bootstrap interval of every E2 quantity, the paper's beside it."""
    rows = []
    for quantity, (mean, sd) in E2_PAPER.items():
        measured = spread(runs[quantity])
        rows.append(
            {"quantity": quantity, "paper": mean, "paper_sd": sd, **measured, "difference": measured["mean"] - mean}
        )
    return pd.DataFrame(rows).set_index("quantity")


def e2_counts(runs: pd.DataFrame) -> pd.DataFrame:
    """In how many runs each claim of the paper holds, and whether it holds in most of them here."""
    holds = {
        "combined correlates positively (Pearson)": runs.combined_pearson > 0,
        "transport improves Pearson": runs.delta_pearson > 0,
        "transport improves retrieval": runs.delta_retrieval > 0,
    }
    rows = [
        {"claim": claim, "paper": f"{n}/{total}", "here": f"{int(holds[claim].sum())}/{len(runs)}",
         "majority here": bool(holds[claim].mean() > 0.5)}
        for claim, (n, total) in E2_PAPER_COUNTS.items()
    ]  # fmt: skip
    return pd.DataFrame(rows).set_index("claim")


def save_table(table: pd.DataFrame, folder: Path, name: str) -> pd.DataFrame:
    """Write ``table`` as CSV with six significant digits and return it."""
    table.to_csv(folder / f"{name}.csv", float_format="%.6g", index=table.index.name is not None)
    return table
