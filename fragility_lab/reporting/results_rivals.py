"""Numbers of X2's rivals for docs/results.md, from the tables ``x2_rivals*`` of both trained models."""

import numpy as np
import pandas as pd

from fragility_lab.reporting.tables import Tables

ORACLE, OURS = "oracle", "ours"  # values of the column "method" (``fragility_peers.tasks``)
ORDER = (OURS, "same", "open", "rival")  # the values of ``better``
WHO = ("ours", "rival", "oracle")
LOST = ["ladder", "bits", "layers", "rival", "ours", "oracle", "rival_additive", "ours_additive"]


def by_rival(tables: Tables) -> pd.DataFrame:
    """One row per ladder and rival: ratios of KL over the budgets (geometric means), ranking and costs."""
    costs = tables["x2_rivals_costs"].set_index(["ladder", "method"])
    spearman = tables["x2_rivals_ranking"].groupby(["ladder", "method"]).spearman.min()
    rows = []
    for (ladder, rival), group in tables["x2_rivals"].groupby(["ladder", "rival"], sort=False):
        counts = group.better.value_counts()
        row: dict[str, object] = {"ladder": f"{ladder}, {rival}", "worst": (group.ours / group.oracle).max()}
        row["counts"] = " / ".join(str(counts.get(name, 0)) for name in ORDER)
        for name in ("rival_kl", "oracle", "random"):
            row[name] = float(np.exp(np.log(group.ours / group[name]).mean()))
        for who, method in zip(WHO, (OURS, rival, ORACLE)):
            row[f"spearman_{who}"] = spearman[ladder, method]
            row |= {f"{name}_{who}": costs[name][ladder, method] for name in ("seconds", "memory")}
        rows.append(row)
    return pd.DataFrame(rows)


def predicted(tables: Tables) -> pd.DataFrame:
    """One row per ladder: quantiles of our prediction over the measured KL, of single layers and of our plans."""
    rows = []
    layers = tables["x2_rivals_ranking"].query("method == @OURS")
    plans = tables["x2_rivals_plans"].query("chosen_by == @OURS")
    for ladder, group in plans.groupby("ladder", sort=False):
        ratio, alone = group.predicted / group.kl, layers[layers.ladder == ladder].iloc[0]
        row: dict[str, object] = {"ladder": ladder, "low": ratio.min(), "middle": ratio.median(), "high": ratio.max()}
        rows.append(row | {name: alone[name] for name in ("rung", "tenth", "median", "ninetieth")})
    return pd.DataFrame(rows)


def lost(tables: Tables) -> pd.DataFrame:
    """One row per budget at which the library's plan is better: KL of the plans, and sums over their units alone."""
    plans, rows = tables["x2_rivals_plans"], []
    for row in tables["x2_rivals"].query("better == 'rival'").itertuples():
        here = plans[(plans.ladder == row.ladder) & (plans.rival == row.rival) & (plans.budget == row.budget)]
        by = here.drop_duplicates("chosen_by").set_index("chosen_by")
        found = {"ladder": f"{row.ladder}, {row.rival}", "bits": row.bits, "oracle": by.kl[ORACLE]}
        for who, name in (("rival", row.rival), ("ours", OURS)):
            found |= {who: by.kl[name], f"{who}_additive": by.additive[name]}
        rows.append(found | {"layers": sum(a != b for a, b in zip(by.choice[row.rival], by.choice[OURS]))})
    return pd.DataFrame(rows, columns=LOST)


def values(tables: Tables, second: Tables) -> dict[str, object]:
    """Values for the template: both tables for both models, and counts over all budgets of both."""
    every = pd.concat([tables["x2_rivals"], second["x2_rivals"]])
    refused = pd.concat([t["x2_rivals_refused"] for t in (tables, second)]).drop_duplicates(ignore_index=True)
    return {
        "rivals": {"GPT-2": by_rival(tables), "Llama": by_rival(second)},
        "rivals_predicted": {"GPT-2": predicted(tables), "Llama": predicted(second)},
        "rivals_lost": {"GPT-2": lost(tables), "Llama": lost(second)},
        "rivals_at_most": int((every.ours <= every.rival_kl * (1 + 1e-6)).sum()),
        "rivals_oracle": float((every.ours / every.oracle).max()),
        "rivals_near_oracle": int((every.ours <= 1.02 * every.oracle).sum()),
        "rivals_counts": {name: int((every.better == name).sum()) for name in ORDER},
        "rivals_budgets": len(every),
        "rivals_refused": refused.assign(said=[" ".join(text.split()) for text in refused.said]),
    }
