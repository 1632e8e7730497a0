"""Parts of the data behind the picture of committed results: models, choices, columns, claims."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from fragility_explorer.words import SIGNALS, in_words
from fragility_lab import paths
from fragility_lab.paths import ASSETS
from fragility_lab.reporting.report import read_tables
from fragility_lab.reporting.tables import Tables, number, shown

NAMES = {
    "embedded": "GPT-2, embedded, 3 M parameters", "embedded-llama": "Llama, embedded, 3 M parameters",
    "smollm2-135m": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M",
}  # fmt: skip
FOLDER = ASSETS / "results_explorer"
LOWEST, HIGHEST = 1e-4, 1.0  # of the scale of the errors of tokens, which is logarithmic
FORMATS = {"precision": "{}", "length": "{} tokens", "seed": "seed {}", "half": "{} half"}


def committed(*names: str) -> dict[str, Tables]:
    """The committed tables of every checkpoint that has all of ``names``, by the checkpoint's name."""
    found: dict[str, Tables] = {}
    for profile in NAMES:
        if all((paths.OUTPUTS / profile / "tables" / f"{name}.csv").is_file() for name in names):
            found[profile] = read_tables(profile)
    return found


def rounded(values: Iterable[float], places: int = 3) -> list[float]:
    """``values`` with the given number of significant digits; whole ones as integers, which are shorter."""
    short = (float(f"{value:.{places}g}") for value in values)
    return [int(value) if value.is_integer() else value for value in short]


def values(column: Iterable[Any], digits: int = 4) -> dict[str, Any]:
    """A column with at least ``digits`` significant digits, and None for numbers that are missing or not finite.

    Numbers are whole multiples ``of`` a ``power`` of ten, the shortest way to write many numbers of one size.
    """
    numbers = np.asarray([*column], dtype="float64")
    finite = numbers[np.isfinite(numbers) & (numbers != 0)]
    power = math.floor(math.log10(abs(finite).min())) + 1 - digits if len(finite) else 0
    whole = [round(value / 10.0**power) if math.isfinite(value) else None for value in numbers]
    return {"power": power, "of": whole}


def columns(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    """The columns ``names`` of ``rows`` that are there, as ``values``."""
    return {name: values(rows[name]) for name in names if name in rows}


def choice(rows: pd.DataFrame, key: str, whole: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of one value of the column ``key``, or all if ``whole``; and the column of each row's place in it.

    Rows of one value follow one another, so the column holds places and how often each is repeated.
    """
    possible = list(dict.fromkeys(rows[key]))
    named = {value: in_words(value) for value in possible if isinstance(value, str) and value.isidentifier()}
    told = [FORMATS.get(key, "{}").format(named.get(value, value)) for value in possible]
    places = [possible.index(value) for value in rows[key]]
    repeated = [[place, len([*group])] for place, group in groupby(places)]
    return {"key": key, "values": told, "first": 0, "whole": whole}, {"repeated": repeated}


def chosen_by(rows: pd.DataFrame, keys: Sequence[str], whole: bool = True) -> dict[str, Any]:
    """The choices of ``keys``, and the columns of places that belong to them."""
    found = {key: choice(rows, key, whole) for key in keys}
    return {"choices": [each for each, _ in found.values()], "columns": {key: of for key, (_, of) in found.items()}}


def claims(compared: pd.DataFrame, numbers: str = "") -> dict[str, Any] | None:
    """The table of the claims in ``compared``, a table of ``verdicts.compare``; None if there is none.

    ``numbers`` says what its numbers are.
    """
    rows = shown(compared[compared.claim.notna() & (compared.claim != "")])
    if rows.empty:
        return None
    told = [[row.claim, row.here, row.paper, row.verdict] for row in rows.itertuples()]
    verdicts = rows.verdict.value_counts()
    caption = "Of the paper's claims " + ", ".join(
        f"{count} {_verdict(verdict, count)}" for verdict, count in verdicts.items()
    )
    return {"head": ["claim", "here", "paper", "verdict"], "rows": told, "caption": caption + numbers}


def _verdict(verdict: str, count: int) -> str:
    """The ``verdict`` after a number, such as "3 hold" or "1 does not hold"."""
    plural = {"holds": "hold", "does not hold": "do not hold", "undecided": "are undecided"}
    single = {"undecided": "is undecided"}
    return (single if count == 1 else plural).get(verdict, verdict)


def signal_table(
    rows: pd.DataFrame, caption: str, measures: Sequence[str] = ("pearson", "spearman", "retrieval")
) -> dict[str, Any]:
    """The means over ``rows`` of ``agreement_by_run``: one row for each signal with its ``measures``."""
    keys = [name for name in SIGNALS if f"{name}_pearson" in rows and name != "delta"]
    told = [
        [SIGNALS[key], *(number(rows[f"{key}_{m}"].mean(), ".3f") for m in measures if f"{key}_{m}" in rows)]
        for key in keys
    ]
    return {"head": ["signal", *(in_words(m) for m in measures)], "rows": told, "keys": keys, "caption": caption}
