"""The data of the picture for the study of sinks: signals against the mismatch, averaged over roundings."""

from typing import Any

import numpy as np
import pandas as pd

from fragility_explorer.passes import described
from fragility_explorer.tables import NAMES, chosen_by, committed, values
from fragility_lab.reporting.results import intervals
from fragility_lab.reporting.results_sinks import SETTING, SIGNALS
from fragility_lab.reporting.tables import number

UPWARDS = ("mismatch_mean", "mismatch", "worst_token")
TOLD = ("combined", "norm_only", "travel")
PLACE = "A window's number is the place of its first token in the text."
WORDS = {
    "half": "half of the text", "window": "window", "mismatch": "mismatch of one pass",
    "mismatch_mean": "mismatch, mean over roundings", "worst_token": "share of the worst token in the squared error",
}  # fmt: skip
AXES = {name: {"log": 1} for name in (*SIGNALS, "mismatch", "mismatch_mean")} | {"worst_token": {"percent": 1}}


def sinks() -> dict[str, Any]:
    """The paper's signals, and travel, against the mismatch of windows; the second half of a text judges travel."""
    models = []
    for profile, tables in committed("sinks_windows", "sinks_signals").items():
        rows = tables["sinks_windows"]
        found = chosen_by(rows, SETTING, whole=False)
        for choice in found["choices"]:
            if choice["key"] == "half":
                choice["first"] = choice["values"].index("second half")
        overflow = (~np.isfinite(rows.mismatch)).astype(int)
        found["columns"] |= {"window": rows.start.tolist(), "overflow": overflow.tolist()}
        found["columns"] |= {name: values(rows[name], 5) for name in (*UPWARDS, *SIGNALS)}
        models.append(
            {"name": NAMES[profile], "x": [*SIGNALS], "y": [*UPWARDS], "place": PLACE,
             "claims": judged(tables["sinks_signals"]),
             "summaries": correlations(tables["sinks_signals"], found["choices"]), **found}
        )  # fmt: skip
    return described(models, WORDS | SIGNALS, axes=AXES)


def judged(signals: pd.DataFrame) -> dict[str, Any]:
    """The table of three signals on the windows that judge, those of the second half."""
    rows = signals[signals.half == "second"]
    told = rows.assign(told=intervals(rows, "pearson")).pivot(
        index=["length", "precision"], columns="signal", values="told"
    )
    return {
        "head": ["windows", *(SIGNALS[name] for name in TOLD)],
        "rows": [[f"{kind}, {length} tokens", *row[[*TOLD]]] for (length, kind), row in told.iterrows()],
        "caption": "Second half of the text: Pearson with the mismatch, mean over roundings, and its 95 % interval",
    }


def correlations(signals: pd.DataFrame, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of correlations of each setting, by the places of its ``choices``."""
    found = {}
    for setting, rows in signals.groupby(SETTING):
        told = zip(choices, (setting[0], f"{setting[1]} tokens", f"{setting[2]} half"))
        places = "|".join(str(choice["values"].index(value)) for choice, value in told)
        rows = rows.set_index("signal").loc[[*SIGNALS]]
        found[places] = {
            "head": ["signal", "Pearson (95 %)", "Spearman"], "keys": [*SIGNALS],
            "rows": [
                [SIGNALS[name], pearson, number(spearman, ".2f")]
                for name, pearson, spearman in zip(rows.index, intervals(rows, "pearson"), rows.spearman)
            ],
            "caption": f"Correlation with the mismatch, mean over roundings, of {rows.windows.iloc[0]} windows",
        }  # fmt: skip
    return found
