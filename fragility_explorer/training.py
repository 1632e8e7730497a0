"""The data of the pictures for E5: what each policy achieved in each seed, step by step, and learning rates."""

from typing import Any

import pandas as pd

from fragility_explorer.passes import described
from fragility_explorer.tables import chosen_by, claims, columns, committed
from fragility_lab.reporting.figures_e5 import POLICY_NAMES
from fragility_lab.reporting.tables import Tables, number

OUTCOMES = ("onsets", "final_mismatch", "max_mismatch", "mean_mismatch", "final_loss", "peak_ratio")
AXES = {name: {"log": 1} for name in ("final_mismatch", "max_mismatch", "mean_mismatch", "peak_ratio")}
LIMITS = {"e5_seeds": ("the paper's limits", "E5"), "e5_scarce_seeds": ("six actions a run", "E5, six actions")}
WORDS = {"raised": "times that ε was raised", "first": "step of the first raise", "seed": "seed"}
STEPS = {"step": "training step", "times": "mismatch over that without a controller"}

DIFFERENCES = ". Numbers: the first policy minus the second, mean ± standard deviation over seeds"


def policies() -> dict[str, Any]:
    """E5's three seeds: what each policy achieved in a seed, and when it raised ε in which blocks."""
    models = []
    for tables in committed("e5_runs", "e5_actions", "e5_claims").values():
        runs = tables["e5_runs"]
        found = chosen_by(runs, ["seed"])
        found["columns"] |= columns(runs, (*OUTCOMES, "actions", "protected_layer_steps"))
        names = [POLICY_NAMES.get(policy, policy) for policy in runs.policy]
        details = {place: raised for place, row in enumerate(runs.itertuples()) if (raised := _raised(tables, row))}
        across = ["mean_mismatch", "max_mismatch", "final_mismatch", "peak_ratio"]
        judged = claims(tables["e5_claims"], DIFFERENCES)
        known = {"name": "E5, three seeds", "claims": judged, "names": names, "details": details}
        models.append(known | {"x": across, "y": ["onsets", "final_mismatch", "max_mismatch", "final_loss"]} | found)
    ringed = "Policies with a ring raised ε. Choose one, and see in which blocks."
    return described(models, WORDS, point="policy", points="policies", axes=AXES, ringed=ringed)


def course() -> dict[str, Any]:
    """E5's first seed step by step: the mismatch under each policy, and its ratio to that without a controller."""
    models = []
    for tables in committed("e5_course").values():
        table = tables["e5_course"].set_index("step")
        ratios = table.div(table["none"], axis=0)
        rows = pd.concat({"mismatch": table.unstack(), "times": ratios.unstack()}, axis=1)
        rows = rows.rename_axis(["policy", "step"]).reset_index().replace({"policy": POLICY_NAMES})
        found = chosen_by(rows, ["policy"], whole=False)
        found["choices"][0]["first"] = found["choices"][0]["values"].index(POLICY_NAMES["bgss"])
        found["columns"] |= columns(rows, ("step", "mismatch", "times"))
        known = {"name": "E5, step by step", "line": True, "names": [f"step {step}" for step in rows.step]}
        told = [[POLICY_NAMES[name], number(of.mean(), ".3g"), number(of.max(), ".3g")] for name, of in table.items()]
        head, caption = ["policy", "mean mismatch", "largest mismatch"], "Seed 0 under each policy"
        known["claims"] = {"head": head, "rows": told, "caption": caption}
        models.append(known | {"x": ["step"], "y": ["mismatch", "times"]} | found)
    axes = {"mismatch": {"log": 1}, "times": {"log": 1}}
    return described(models, STEPS, of="experiment", point="step", points="steps", axes=axes)


def _raised(tables: Tables, run: Any) -> dict[str, Any]:
    """Counts of the times that the ``run`` raised ε in each block, and the first step; empty if it never did."""
    rows = tables["e5_actions"]
    mine = rows[(rows.policy == run.policy) & (rows.seed == run.seed)]
    if mine.empty:
        return {}
    blocks = range(int(rows.layer.max()) + 1)
    steps = mine.groupby("layer").step
    first = [None if pd.isna(step) else int(step) for step in steps.min().reindex(blocks)]
    return {"blocks": {"raised": steps.size().reindex(blocks, fill_value=0).tolist(), "first": first}}


def seeds() -> dict[str, Any]:
    """E5 over many seeds: each seed under two policies, which are paired."""
    models = []
    for tables in committed(*LIMITS, "e5_seeds_claims").values():
        judged = tables["e5_seeds_claims"]
        for name, (limits, experiment) in LIMITS.items():
            told = claims(judged[judged.experiment == experiment], DIFFERENCES)
            models.append({"name": limits, "claims": told} | _paired(tables[name]))
    return described(models, {"outcome": "outcome"}, of="limits", point="seed", points="seeds", axes={})


def _paired(runs: pd.DataFrame) -> dict[str, Any]:
    """One point for each outcome and seed, with a column for each policy; and means over seeds."""
    outcomes = [name for name in OUTCOMES if name in runs]
    wide = {name: runs.pivot(index="seed", columns="policy", values=name) for name in outcomes}
    rows = pd.concat(wide, names=["outcome"]).reset_index()
    present = [policy for policy in POLICY_NAMES if policy in rows]
    named = rows.rename(columns={policy: POLICY_NAMES[policy] for policy in present})
    found = chosen_by(named, ["outcome"], whole=False)
    order = [POLICY_NAMES[policy] for policy in present]
    found["columns"] |= columns(named, order)
    means = {str(place): _means(wide[name][present], order) for place, name in enumerate(outcomes)}
    names = [f"seed {seed}" for seed in rows.seed]
    shown = {"x": order[-2::-1] + order[-1:], "y": order[::-1], "diagonal": True}
    return found | shown | {"names": names, "summaries": means}


def _means(of_policies: pd.DataFrame, names: list[str]) -> dict[str, Any]:
    """The mean and standard deviation over seeds of each policy, by its name in ``names``."""
    rows = zip(names, of_policies.mean(), of_policies.std())
    told = [[name, number(mean, ".3g"), number(sd, ".2g")] for name, mean, sd in rows]
    return {"head": ["policy", "mean", "sd"], "keys": names, "rows": told, "caption": f"Over {len(of_policies)} seeds"}


def rates() -> dict[str, Any]:
    """E5's choice of a learning rate: what the trigger and the training did at each, without a controller."""
    models = []
    for tables in committed("e5_learning_rates").values():
        rows = tables["e5_learning_rates"]
        counted = rows[["fires_as_in_the_paper", "loss_falls", "ended"]].to_numpy()
        told = [
            [f"{row.learning_rate:g}", *(f"{n} of {row.runs}" for n in of)]
            for row, of in zip(rows.itertuples(), counted)
        ]
        head = ["learning rate", "runs that fire as in the paper", "runs whose loss falls", "runs that ended early"]
        y = ["onsets", "fires", "max_mismatch", "final_loss", "ratio"]
        known: dict[str, Any] = {"name": "E5, learning rates", "line": True}
        known |= {"claims": {"head": head, "rows": told, "caption": "What the runs did"}}
        known |= {"names": [f"learning rate {rate:g}" for rate in rows.learning_rate]}
        models.append(
            known | {"x": ["learning_rate"], "y": y, "choices": [], "columns": columns(rows, ["learning_rate", *y])}
        )
    words = {
        "learning_rate": "learning rate", "fires": "steps at which the trigger fires, mean", "onsets": "onsets, mean",
        "ratio": "onset ratio for the wanted onsets",
    }  # fmt: skip
    axes = AXES | {"learning_rate": {"log": 1}}
    return described(models, words, of="experiment", point="rate", points="rates", axes=axes)
