"""The computation of the results that ``shipped`` reads.

``make shipped`` (``python -m fragility_lessons.shipping``) does it again, in about ten minutes on two CPU cores. With
names of explorers or lessons, such as ``controller``, it draws the pictures of these alone.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fragility_explorer import build
from fragility_lab.running.files import write_whole
from fragility_lessons import embedded
from fragility_lessons.constants import (
    CONSTANTS,
    a_priori_constants,
    bound_slack,
    constant_values,
    measure_constants,
    summarize_slack,
)
from fragility_lessons.explorers import Explorer, listed
from fragility_lessons.pictures import FORMATS
from fragility_lessons.shipped import FOLDER, KERNELS, PLANS, QUANTILES, READINGS, SITES, SUMMARY, TRANSPORT

# The largest dimensions in the sample (``kernel_samples``). A priori constants grow with the dimensions.
LARGEST = {"keys": 64, "head_width": 128, "features": 768}
WINDOWS, LENGTH = 4, 64
SHARES = 1001


def plan_views(windows: int = WINDOWS, length: int = LENGTH) -> list[dict]:
    """Both views of the explorer of plans for the embedded checkpoint (notebook 7), over a few windows."""
    model, tokens = build.embedded(windows, length)
    return [build.keeping(model, tokens), build.choosing(model, tokens)]


def kernel_constants_of(format: str) -> pd.DataFrame:
    """The constants of the emulated kernels in ``format``, measured and a priori, one row each (notebook 3)."""
    measured = constant_values(measure_constants(format, execution="emulated"))
    columns = {"measured": measured, "a priori": a_priori_constants(format, **LARGEST)}
    return pd.DataFrame(columns).loc[list(CONSTANTS)].rename_axis("constant").assign(format=format).reset_index()


def slack_of(format: str) -> pd.DataFrame:
    """``bound_slack`` of the emulated kernels with the a priori constants."""
    return bound_slack(format, execution="emulated", constants=a_priori_constants(format, **LARGEST))


def slack_quantiles(rows: pd.DataFrame) -> pd.DataFrame:
    """SHARES quantiles of the slack of each statement in ``rows``; infinite for draws without any error."""
    grouped = rows.groupby(["format", "statement"], sort=False).slack
    quantiles = grouped.quantile(np.linspace(0, 1, SHARES), interpolation="lower")
    return quantiles.rename_axis(["format", "statement", "share"]).reset_index()


def slack_tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """``slack_quantiles`` and ``summarize_slack`` of all formats, one format in memory at a time."""
    each = [(slack_quantiles(rows), summarize_slack(rows).reset_index()) for rows in map(slack_of, FORMATS)]
    quantiles, summaries = (pd.concat(tables, ignore_index=True) for tables in zip(*each))
    return quantiles, summaries


def write(folder: Path = FOLDER) -> None:
    """Compute everything and write it into ``folder``."""
    folder.mkdir(exist_ok=True)
    plans = json.dumps(plan_views(), ensure_ascii=False, separators=(",", ":"))
    write_whole(folder / PLANS.name, plans + "\n")
    embedded.sites().to_csv(folder / SITES.name, index=False, float_format="%.7g")
    embedded.matrix_readings().to_csv(folder / READINGS.name, float_format="%.7g")
    embedded.transport().to_csv(folder / TRANSPORT.name, float_format="%.7g")
    constants = pd.concat(map(kernel_constants_of, FORMATS), ignore_index=True)
    constants.to_csv(folder / KERNELS.name, index=False, float_format="%.7g")
    quantiles, summary = slack_tables()
    quantiles.to_parquet(folder / QUANTILES.name, compression="zstd", index=False)
    summary.to_csv(folder / SUMMARY.name, index=False, float_format="%.7g")


def draw(names: Sequence[str] = ()) -> None:
    """Draw the pictures of all explorers, or of those whose names begin with one of ``names``."""
    for name in listed():
        if not names or name.startswith(tuple(names)):
            Explorer(name).write()


if __name__ == "__main__":
    if not sys.argv[1:]:
        write()
    draw(sys.argv[1:])
