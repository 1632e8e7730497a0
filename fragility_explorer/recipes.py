"""The data of the picture for X2: recipes, predicted and measured, and the layers of each."""

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
        models.append(known | {"diagonal": True, "x": ["predicted"], "y": ["measured", "ratio"]} | found)
    ringed = "Recipes with a ring were measured layer by layer, too."
    return described(models, WORDS, point="recipe", points="recipes", blocks="layer", axes=AXES, ringed=ringed)


def _layers(tables: Tables) -> dict[str, Any]:
    """By recipe: the names of its layers, and the predicted and measured KL of each."""
    rows = tables.get("x2_layers")
    if rows is None:
        return {}
    series = {"layer_predicted": "predicted", "layer_measured": "measured"}
    return {
        recipe: {"labels": of.layer.tolist(), "blocks": {name: rounded(of[key]) for name, key in series.items()}}
        for recipe, of in rows.groupby("recipe", sort=False)
    }


def _within(rows: pd.DataFrame) -> dict[str, Any]:
    """How near the predictions of each quantity are to its measurements."""
    told = []
    for quantity, of in rows.groupby("quantity", sort=False):
        off = (of.ratio - 1).abs()
        near, nearly = (off < 0.1).sum(), of.ratio.between(0.5, 2).sum()
        median = number(of.ratio.median(), ".2f")
        told.append([quantity, f"{near} of {len(of)}", f"{nearly} of {len(of)}", median])
    head = ["quantity", "recipes within 10 %", "recipes within a factor of two", "median of predicted over measured"]
    return {"head": head, "rows": told, "caption": "How near the predictions are"}
