"""Tables as files, and tables and numbers as text: the paper's beside a run's."""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from fragility_lab.running.files import write_whole
from fragility_lab.running.provenance import record

Tables = Mapping[str, pd.DataFrame]  # of one set of results, by name
AS_THEY_ARE = ["experiment", "quantity", "verdict", "claim", "tested", "remark"]
NAMES = ("run", "code", "inputs", "model", "data")  # columns of text, whatever it looks like
BRIEF = ["paper", "here", "difference", "interval", "runs", "tested", "verdict", "remark"]


def save_table(table: pd.DataFrame, folder: Path, name: str) -> pd.DataFrame:
    """Write ``table`` as ``<name>.csv`` with six significant digits, note its origin, and return it."""
    write_whole(folder / f"{name}.csv", table.to_csv(float_format="%.6g", index=any(table.index.names)))
    record(folder, name)
    return table


def read_table(path: Path) -> pd.DataFrame:
    """The table that ``save_table`` wrote to ``path``. Names stay text: a digest such as 470e90816521 is no number."""
    return pd.read_csv(path, dtype=dict.fromkeys(NAMES, str))


def number(value, digits: str = "") -> str:
    """``value`` in the format ``digits``, with a true minus sign and short exponents; "–" for None and NaN."""
    if isinstance(value, str):
        return value
    if value is None or pd.isna(value):
        return "–"
    text = format(value, digits)
    text = re.sub(r"^[+-]?(0(\.0+)?)(e\+00)?$", r"\1", text)  # zero has no sign
    text = re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", text).replace("%", "\N{NO-BREAK SPACE}%")
    return f"−{text[1:]}" if text.startswith("-") else text


def duration(seconds: float) -> str:
    """``seconds`` in words, such as "4 min 18 s"."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """``share`` in percent, with three significant digits."""
    return number(100 * share, "#.3g").removesuffix(".") + ("\N{NO-BREAK SPACE}%" if pd.notna(share) else "")


def quantity(count: float, unit: str = "B") -> str:
    """``count`` of ``unit`` with a decimal prefix, such as "1.6 MB"; "0" for zero."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g}\N{NO-BREAK SPACE}{prefix}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}{unit}" if count else "0"


def spread_text(mean: float, sd: float | None, digits: str) -> str:
    """Mean ± standard deviation, or the mean alone if there is no deviation."""
    if sd is None or pd.isna(sd):
        return number(mean, digits)
    return f"{number(mean, digits)} ± {number(sd, '.2e' if digits.endswith('e') else digits)}"


def policy_summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds of every policy's results, policies in their given order."""
    quantities = ["onsets", "final_mismatch", "max_mismatch", "mean_mismatch", "actions", "protected_layer_steps"]
    summary = runs.groupby("policy", sort=False)[quantities].agg(["mean", "std"])
    summary.columns = [name if kind == "mean" else f"{name}_sd" for name, kind in summary.columns]
    return summary


def cells(rows: pd.DataFrame, columns: list[tuple[str, str, str]]) -> list[list[str]]:
    """The texts of a table whose ``columns`` are (name, label, digits); standard deviations are in ``<name>_sd``."""
    return [
        [spread_text(row[name], row.get(f"{name}_sd"), digits) for name, _, digits in columns]
        for row in rows.to_dict("records")
    ]


def shown(comparison: pd.DataFrame) -> pd.DataFrame:
    """The table of ``verdicts.compare`` as text, with counts such as "17 of 18"."""
    return pd.DataFrame([_shown(row) for row in comparison.itertuples()])


def _shown(row) -> dict[str, str]:
    if pd.notna(row.paper_runs):  # a count of runs
        paper, here = (
            f"{round(share * runs)} of {runs:.0f}" if runs else "–"
            for share, runs in ((row.paper, row.paper_runs), (row.mean, row.runs))
        )
        difference, digits = f"{number(100 * row.difference, '+.0f')} points", ".0%"
    else:
        digits = row.digits
        paper, here = spread_text(row.paper, row.paper_sd, digits), spread_text(row.mean, row.sd, digits)
        difference = number(row.difference, f"+{digits}")
    sampled = row.sampled and row.runs > 0
    interval = f"{number(row.low, digits)} to {number(row.high, digits)}"
    texts = {
        "paper": paper,
        "here": here,
        "difference": "–" if pd.isna(row.difference) else difference,
        "interval": interval if sampled and pd.notna(row.low) else "–",
        "runs": number(row.runs) if sampled else "–",
    }
    return texts | {name: getattr(row, name) for name in AS_THEY_ARE}


def brief(comparison: pd.DataFrame) -> pd.DataFrame:
    """``shown`` by quantity, with the test of the claim in place of its wording."""
    return shown(comparison).set_index("quantity")[BRIEF]
