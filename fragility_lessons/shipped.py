"""Results that lessons show and that no slider changes, as shipped in ``fragility_lab/assets/lessons``.

``shipping`` computes them. This module loads neither transformers nor a model, so that the lessons start at once.
"""

import json
from functools import cache

import pandas as pd

from fragility_lab.paths import ASSETS

FOLDER = ASSETS / "lessons"
PLANS, KERNELS = FOLDER / "plans.json", FOLDER / "kernel_constants.csv"
QUANTILES, SUMMARY = FOLDER / "slack.parquet", FOLDER / "slack_summary.csv"
SITES, READINGS = FOLDER / "layernorms.csv", FOLDER / "layernorm_readings.csv"
TRANSPORT = FOLDER / "transport.csv"


@cache
def views() -> list[dict]:
    """``shipping.plan_views`` as shipped."""
    return json.loads(PLANS.read_text(encoding="utf-8"))


@cache
def constants() -> pd.DataFrame:
    """``shipping.kernel_constants_of`` all formats as shipped."""
    return pd.read_csv(KERNELS)


@cache
def slack_quantiles() -> pd.DataFrame:
    """``shipping.slack_quantiles`` of all formats as shipped."""
    return pd.read_parquet(QUANTILES)


@cache
def slack_summary() -> pd.DataFrame:
    """``summarize_slack`` of all formats as shipped, by statement, format and execution."""
    return pd.read_csv(SUMMARY)


@cache
def sites() -> pd.DataFrame:
    """``embedded.sites`` as shipped: the variance at every LayerNorm of the embedded checkpoint."""
    return pd.read_csv(SITES)


@cache
def readings() -> pd.DataFrame:
    """``embedded.matrix_readings`` as shipped: M_LN of every block, by row and with the mean variance."""
    return pd.read_csv(READINGS, index_col="block")


@cache
def transport() -> pd.DataFrame:
    """``embedded.transport`` as shipped: gains of every block, and how far an error grows behind it."""
    return pd.read_csv(TRANSPORT, index_col="layer")
