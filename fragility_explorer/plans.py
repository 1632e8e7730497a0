"""The data of the pictures for plans: what X1's and X2's leave, predicted and measured, by what chose them."""

from typing import Any

import numpy as np
import pandas as pd

from fragility_explorer.passes import LOG, RUN, described
from fragility_explorer.tables import NAMES, chosen_by, columns, committed
from fragility_lab.reporting.figures_x1 import CHOOSERS
from fragility_lab.reporting.tables import number

KINDS = {"none": "no plan", "each": "each choice of that many", "head and norms": "head and norms"}
COUNTS = {"blocks": "block", "sites": "site"}
BYTES = ("parameter_bytes", "activation_bytes", "flops")
CHANGED = {
    "changed_predicted": "share of changed tokens, predicted", "changed_measured": "share of changed tokens, measured",
}  # fmt: skip
KL = {"log": 1, "alike": "kl"}


def x1_plans() -> dict[str, Any]:
    """X1: the mismatch that each plan leaves, by run; plans keep blocks or kinds of sites in fp32."""
    models = []
    for profile, tables in committed("x1_plans").items():
        rows = tables["x1_plans"]
        budgets = [kept(unit, count) for unit, count in zip(rows.unit, rows.budget)]
        rows = rows.assign(kept=budgets, chosen_by=rows.chosen_by.map(CHOOSERS | KINDS))
        found = chosen_by(rows, [*RUN, "kept", "chosen_by"])
        for choice in found["choices"][3:]:
            choice["first"] = None
        found["columns"] |= columns(rows, ("predicted", "measured", *BYTES))
        known = {"name": NAMES[profile], "claims": _left(rows), "names": rows.label.tolist(), "diagonal": True}
        models.append(known | {"x": ["predicted", *BYTES], "y": ["measured", "predicted"]} | found)
    words = {"kept": "kept in fp32", "predicted": "predicted mismatch", "measured": "measured mismatch"}
    return described(models, words, point="plan", points="plans", axes=dict.fromkeys(("predicted", "measured"), LOG))


def kept(unit: str, count: int) -> str:
    """The parts that a plan of ``count`` of a ``unit`` keeps in fp32, in words."""
    return f"{count} {COUNTS[unit]}{'s' * (count > 1)}" if count else "nothing"


def _left(rows: pd.DataFrame) -> dict[str, Any]:
    """The measured mismatch under plans that keep each number of parts, relative to no plan, as means over runs."""
    none = rows[rows.budget == 0].set_index([*RUN]).measured
    share = rows.measured / pd.MultiIndex.from_frame(rows[[*RUN]]).map(none)
    table = share.groupby([rows.chosen_by, rows.kept], sort=False).mean().unstack()
    table = table.drop(index=KINDS["none"], columns="nothing")
    told = [[by, *(number(value, ".2f") for value in of)] for by, of in zip(table.index, table.to_numpy())]
    caption = "Mismatch that stays, of that without a plan: means over runs and plans, by what chose them"
    return {"head": ["chosen by", *table], "rows": told, "caption": caption}


def x2_plans() -> dict[str, Any]:
    """X2: the KL of plans that give each layer one of several schemes, by prediction and by chance."""
    models = []
    for profile, tables in committed("x2_plans").items():
        rows = tables["x2_plans"].assign(schemes=lambda rows: rows.schemes.str.replace(" ", ", "))
        found = chosen_by(rows, ["schemes", "chosen_by"])
        found["choices"][1]["first"] = None
        found["columns"] |= columns(rows, ("bits", "predicted", "measured", "ratio", "low", "high", *CHANGED))
        names = [f"{bits:.2f} bits" for bits in rows.bits]
        known = {"name": NAMES[profile], "claims": _better(rows), "names": names}
        models.append(known | {"x": ["bits", "predicted"], "y": ["measured", "predicted", *CHANGED]} | found)
    words = CHANGED | {
        "schemes": "schemes of a layer", "predicted": "predicted KL", "measured": "measured KL",
        "low": "95 % interval of the ratio, from", "high": "to",
    }  # fmt: skip
    return described(models, words, point="plan", points="plans", axes=dict.fromkeys(("predicted", "measured"), KL))


def _better(rows: pd.DataFrame) -> dict[str, Any]:
    """Counts of the budgets at which the predicted plan has a smaller measured KL than a random one, by ladder."""
    told = []
    for schemes, of in rows.groupby("schemes", sort=False):
        ours, chance = (of[of.chosen_by == by].measured.to_numpy() for by in ("prediction", "chance"))
        ratios = (ours / chance)[ours != chance]  # the smallest and the largest budget leave one plan
        told.append([schemes, f"{(ratios < 1).sum()} of {len(ratios)}", number(np.median(ratios), ".2f")])
    head = ["schemes", "budgets at which the prediction's plan is better", "median of its KL over that of chance"]
    return {
        "head": head,
        "rows": told,
        "caption": "Plans by prediction and by chance with about as many bits, measured",
    }
