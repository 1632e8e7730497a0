"""Columns and values of tables in words, the same in every notebook and picture: ``assets/words.yaml``."""

import re

import pandas as pd
import yaml

from fragility_lab.paths import ASSETS
from fragility_lab.reporting.figures_e5 import POLICY_NAMES
from fragility_lab.reporting.tables import brief

KNOWN: dict[str, dict[str, str]] = yaml.safe_load((ASSETS / "words.yaml").read_text(encoding="utf-8"))
SIGNALS, MEASURES = KNOWN["signals"], KNOWN["measures"]
VALUES = SIGNALS | POLICY_NAMES | KNOWN["values"]
ERROR = {"error": "standard error", "sd": "sd"}
SMOKE = "a smoke run judges no claim"


def in_words(name: object) -> str:
    """The column ``name`` in words; one that is not known loses its underscores."""
    known = KNOWN["columns"] | SIGNALS | MEASURES
    of, _, what = str(name).rpartition("_")
    if name in known or not of or what not in MEASURES | ERROR:
        return known.get(str(name)) or VALUES.get(str(name), str(name).replace("_", " "))
    return f"{(MEASURES | ERROR)[what]}, {in_words(of)}"


def _value(value: object) -> object:
    return VALUES.get(value, value) if isinstance(value, str) else value


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` with columns, names of signals and names of policies in words."""
    rows = rows.rename(columns=in_words, index=_value)
    for axis in (rows.index, rows.columns):
        axis.names = [name and in_words(name) for name in axis.names]
    return rows.apply(lambda column: column.map(_value) if column.dtype in ("object", "str") else column)


def verdicts(compared: pd.DataFrame, profile: str) -> pd.DataFrame:
    """The claims of ``compared`` beside this run, in columns that fit. A smoke run judges no claim, and says so."""
    rows = brief(compared).drop(columns=["difference", "remark"])
    remarks = [SMOKE] * len(rows) if profile == "smoke" else brief(compared).remark.fillna("")
    told = zip(rows.verdict.fillna(""), remarks)
    rows["verdict"] = [f"{verdict}: {remark}" if verdict and remark else verdict for verdict, remark in told]
    return rows.rename(lambda name: re.sub(r"\b(combined|no_transport)\b", lambda found: SIGNALS[found[0]], name))
