"""The data of the pictures for X3 and X4: cases that `make compare` judged, and engines that other people wrote."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fragility_explorer.passes import described
from fragility_explorer.tables import NAMES, chosen_by, columns, committed
from fragility_explorer.words import VALUES
from fragility_lab.reporting.tables import number

KINDS = {True: "harmless", False: "a fault"}
VERDICTS = {
    "rounding": "verdict: rounding", "more": "verdict: more than rounding", "less": "verdict: less than rounding",
    "few": "verdict: too few windows",
}  # fmt: skip
BOTH = {name: {"log": 1, "alike": "quantity"} for name in ("predicted", "measured", "emulated")}
INTERVAL = {"ratio": "observed over predicted", "low": "95 % interval of it, from", "high": "to"}


def of_models(name: str) -> dict[str, pd.DataFrame]:
    """The committed table ``name`` of each model that has it, by the model's name in words."""
    return {NAMES[profile]: tables[name] for profile, tables in committed(name).items()}


def x3() -> dict[str, Any]:
    """X3: predicted and observed change of log-probabilities of each harmless case and each fault, and the verdict."""
    models = []
    for name, rows in of_models("x3_engines").items():
        told = _right(rows)
        rows = rows[rows.rms > 0].reset_index(drop=True)
        rows = rows.assign(predicted=rows.rms / rows.ratio, measured=rows.rms, kind=rows.harmless.map(KINDS))
        rows["verdict"] = rows.verdict.map(VERDICTS)
        rows["cause"] = [f"cause: {cause}" for cause in rows.cause.fillna("none named")]
        found = chosen_by(rows, ["kind", "verdict", "cause"])
        for each in found["choices"]:
            each["first"] = None
        found["columns"] |= columns(rows, ("predicted", "measured", "ratio", "low", "high"))
        known = {"name": name, "claims": told, "names": rows.engine.tolist(), "diagonal": True}
        models.append(known | {"x": ["predicted"], "y": ["measured", "ratio"]} | found)
    words = INTERVAL | {
        "predicted": "RMS change of log-probability, predicted", "measured": "RMS change of log-probability, observed",
        "kind": "kind", "verdict": "verdict", "cause": "named cause",
    }  # fmt: skip
    return described(models, words, of="model", point="case", points="cases", axes=BOTH | {"ratio": {"log": 1}})


def _right(rows: pd.DataFrame) -> dict[str, Any]:
    """Counts of right verdicts and right causes, for the cases that the tests were designed on and for others."""
    told = []
    for (harmless, seen), of in rows.groupby(["harmless", "seen"], sort=False):
        has_cause = of[of.expected.notna()]
        causes = f"{has_cause.named.sum()} of {len(has_cause)}" if len(has_cause) else "–"
        kind = f"{'harmless' if harmless else 'faults'}, {'seen' if seen else 'not seen'}"
        told.append([kind, f"{of.right.sum()} of {len(of)}", causes])
    head = ["cases", "right verdicts", "right causes"]
    unchanged = (rows.rms == 0).sum()
    drawn = f" ({unchanged} changed nothing, and have no point)" * bool(unchanged)
    return {"head": head, "rows": told, "caption": f"{rows.right.sum()} of {len(rows)} verdicts are right{drawn}"}


def x4() -> dict[str, Any]:
    """X4: predicted, emulated and measured KL and log-probability of each engine and its recipe."""
    models = []
    for name, rows in of_models("x4_referees").items():
        rows = rows[rows.predicted.notna() & (rows.measured > 0)].reset_index(drop=True)
        rows["quantity"] = rows.quantity.map(VALUES)
        found = chosen_by(rows, ["quantity"], whole=False)
        found["columns"] |= columns(rows, ("predicted", "emulated", "measured", "ratio", "low", "high", "seconds"))
        known = {"name": name, "claims": _near(rows), "names": rows.engine.tolist(), "diagonal": True}
        models.append(known | {"x": ["predicted", "emulated"], "y": ["measured", "ratio"]} | found)
    words = {"low": "95 % interval of the ratio, from", "high": "to", "emulated": "emulated, one pass of ours"}
    return described(models, words, of="model", point="engine", points="engines", axes=BOTH)


def _near(rows: pd.DataFrame, quantities: Sequence[str] = (VALUES["kl"], VALUES["logprob"])) -> dict[str, Any]:
    """The distance of predictions and emulations of each quantity from the engines' own numbers."""
    told = []
    for quantity in quantities:
        of = rows[rows.quantity == quantity]
        near = ((of.ratio - 1).abs() < 0.1).sum(), ((of.emulated / of.measured - 1).abs() < 0.1).sum()
        told.append([quantity, *(f"{count} of {len(of)}" for count in near), number(of.ratio.median(), ".2f")])
    head = ["quantity", "predicted within 10 %", "emulated within 10 %", "median of predicted over measured"]
    return {"head": head, "rows": told, "caption": "How near the numbers are to the engines' own"}
