"""The data of the pictures for X2: recipes and their layers, predicted and measured; and rivals' plans beside ours."""

from typing import Any

import pandas as pd

from fragility_explorer.passes import described
from fragility_explorer.tables import NAMES, chosen_by, columns, committed, rounded
from fragility_explorer.words import VALUES
from fragility_lab.reporting.tables import Tables, number

NUMBERS = ("predicted", "measured", "ratio", "low", "high")
WORDS = {
    "predicted": "predicted", "measured": "measured", "low": "95 % interval of the ratio, from", "high": "to",
    "layer_predicted": "its share of the predicted KL", "layer_measured": "KL with this layer alone quantized",
}  # fmt: skip
AXES = {name: {"log": 1, "alike": "quantity"} for name in ("predicted", "measured")}

NO_LAYERS = "On this model no recipe was measured layer by layer."
BETTER = {"ours": "ours is better", "rival": "the rival's is better", "same": "the same KL", "open": "undecided"}
PLANS = {
    "rival_kl": "KL of the rival's plan", "ours": "KL of our plan", "oracle": "KL of the oracle's plan",
    "random": "KL of random plans",
}  # fmt: skip
INTERVAL = {"difference_low": "95 % interval of it, from", "difference_high": "to"}
LOG = {"log": 1, "alike": "kl"}


def x2() -> dict[str, Any]:
    """X2: predicted against measured KL, log-probability, changed tokens and length of each recipe."""
    models = []
    for profile, tables in committed("x2_recipes").items():
        rows = pd.concat([tables[name] for name in ("x2_recipes", "x2_flips") if name in tables], ignore_index=True)
        rows["quantity"] = rows.quantity.map(VALUES)
        rows = rows[rows.measured > 0]
        found = chosen_by(rows, ["quantity"], whole=False)
        found["columns"] |= columns(rows, NUMBERS)
        layers = _layers(tables)
        in_kl = [recipe if quantity == VALUES["kl"] else "" for recipe, quantity in zip(rows.recipe, rows.quantity)]
        details = {place: layers[recipe] for place, recipe in enumerate(in_kl) if recipe in layers}
        known = {"name": NAMES[profile], "claims": _within(rows), "names": rows.recipe.tolist(), "details": details}
        known |= {"note": "" if layers else NO_LAYERS}
        models.append(known | {"diagonal": True, "x": ["predicted"], "y": ["measured", "ratio"]} | found)
    ringed = "Recipes with a ring were measured layer by layer, too."
    return described(models, WORDS, point="recipe", points="recipes", blocks="layer", axes=AXES, ringed=ringed)


def _layers(tables: Tables) -> dict[str, Any]:
    """The names of layers, and the predicted and measured KL of each, by recipe."""
    rows = tables.get("x2_layers")
    if rows is None:
        return {}
    series = {"layer_predicted": "predicted", "layer_measured": "measured"}
    return {
        recipe: {"labels": of.layer.tolist(), "blocks": {name: rounded(of[key]) for name, key in series.items()}}
        for recipe, of in rows.groupby("recipe", sort=False)
    }


def _within(rows: pd.DataFrame) -> dict[str, Any]:
    """Counts of the predictions of each quantity that are near its measurements."""
    told = []
    for quantity, of in rows.groupby("quantity", sort=False):
        off = (of.ratio - 1).abs()
        near, nearly = (off < 0.1).sum(), of.ratio.between(0.5, 2).sum()
        median = number(of.ratio.median(), ".2f")
        told.append([quantity, f"{near} of {len(of)}", f"{nearly} of {len(of)}", median])
    head = ["quantity", "recipes within 10 %", "recipes within a factor of two", "median of predicted over measured"]
    return {"head": head, "rows": told, "caption": "How near the predictions are"}


def rivals() -> dict[str, Any]:
    """X2's rivals: the measured KL of each library's plans, beside that of our plans at the same bits."""
    models = []
    for profile, tables in committed("x2_rivals").items():
        rows = tables["x2_rivals"].assign(library=lambda rows: rows.ladder + ", " + rows.rival)
        rows["outcome"] = rows.better.map(BETTER)
        found = chosen_by(rows, ["library", "outcome"])
        found["choices"][1]["first"] = None
        found["columns"] |= columns(rows, ("bits", *PLANS, "predicted", "difference", *INTERVAL))
        names = [f"{bits:.2f} bits" for bits in rows.bits]
        known = {"name": NAMES[profile], "claims": _wins(rows), "names": names, "diagonal": True}
        models.append(known | {"x": ["rival_kl", "oracle", "random", "bits"], "y": ["ours", "rival_kl"]} | found)
    words = PLANS | INTERVAL | {
        "predicted": "our plan, predicted", "difference": "ours less the rival's",
        "library": "library and its method", "outcome": "outcome",
    }  # fmt: skip
    return described(models, words, point="plan", points="plans", axes=dict.fromkeys(PLANS, LOG))


def _wins(rows: pd.DataFrame) -> dict[str, Any]:
    """Counts of each outcome in BETTER, by library."""
    counts = pd.crosstab(rows.library, rows.better).reindex(columns=[*BETTER], fill_value=0)
    told = [[library, *map(str, of)] for library, of in zip(counts.index, counts.to_numpy())]
    total = f"Ours is better at {counts.ours.sum()} of {len(rows)} budgets, the rival's at {counts.rival.sum()}"
    return {"head": ["library and its method", *BETTER.values()], "rows": told, "caption": total}
