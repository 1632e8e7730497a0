"""The paper's tables, with the paper's numbers beside this run's."""

from pathlib import Path

import pandas as pd

from fragility_core.experiments.agreement import spread
from fragility_core.published import E2_PAPER, E2_PAPER_COUNTS, E3_PAPER, E5_PAPER, E5_PAPER_COUNTS


def e2_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean ± sd over runs and 95 % bootstrap interval of every E2 quantity, the paper's beside it."""
    return _summary(runs, E2_PAPER)


def e3_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """The same of every E3 quantity."""
    return _summary(runs, E3_PAPER)


def _summary(runs: pd.DataFrame, published: dict[str, tuple[float, float | None]]) -> pd.DataFrame:
    rows = []
    for quantity, (mean, sd) in published.items():
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


def e5_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean ± sd over seeds and bootstrap interval of every E5 quantity that the paper gives, the paper's beside it."""
    rows = []
    for policy, quantities in E5_PAPER.items():
        for quantity, (mean, sd) in quantities.items():
            measured = spread(runs.loc[runs.policy == policy, quantity])
            difference = measured["mean"] - mean
            rows.append(
                {
                    "policy": policy,
                    "quantity": quantity,
                    "paper": mean,
                    "paper_sd": sd,
                    **measured,
                    "difference": difference,
                }
            )
    return pd.DataFrame(rows).set_index(["policy", "quantity"])


def e5_counts(runs: pd.DataFrame) -> pd.DataFrame:
    """In how many seeds BGSS's largest mismatch is below that of risk-only, the paper's count beside it."""
    largest = runs.pivot(index="seed", columns="policy", values="max_mismatch")
    holds = largest.bgss < largest.risk_only_same_budget
    ((claim, (count, total)),) = E5_PAPER_COUNTS.items()
    row = {"claim": claim, "paper": f"{count}/{total}", "here": f"{int(holds.sum())}/{len(holds)}",
           "majority here": bool(holds.mean() > 0.5)}  # fmt: skip
    return pd.DataFrame([row]).set_index("claim")


def save_table(table: pd.DataFrame, folder: Path, name: str) -> pd.DataFrame:
    """Write ``table`` as CSV with six significant digits and return it."""
    table.to_csv(folder / f"{name}.csv", float_format="%.6g", index=any(table.index.names))
    return table
