"""Controller runs that the release recorded, under this project's names."""

from dataclasses import fields

import pandas as pd

from fragility_core.bgss import Policy, get_policy, policy_class
from fragility_numerics.formats import get_format

RELEASED = ("random_same_budget", "risk_only_same_budget", "bgss")  # controllers whose runs are recorded
# The release's fields, and the columns of ``surrogates.score`` that they are.
LAYER_FIELDS = {
    "step": "window", "layer": "layer", "risk_score": "risk", "ln_dominance": "dominance",
    "rho_ln": "layernorm_ratio", "residual_transport_surrogate": "transport", "layer_epsilon": "epsilon_1",
}  # fmt: skip
STEP_FIELDS = {"step": "window", "combined_scaled": "combined"}


def policy_from_config(name: str, config: dict) -> Policy:
    """The policy ``name`` with the parameters of a run that the release recorded.

    Raises ValueError for a variant of the controller that is not known here, KeyError for a missing
    parameter.
    """
    for key, known in (("monitor_interval", 1), ("random_candidate_scope", "all_layers")):
        if config[key] != known:
            raise ValueError(f"{key} must be {known!r}, got {config[key]!r}: such a record cannot be replayed")
    given = {key.removeprefix("controller_").removeprefix("bgss_"): value for key, value in config.items()}
    given["unit_roundoff"] = get_format(config["target_precision"]).unit_roundoff
    return get_policy(name, **{field.name: given[field.name] for field in fields(policy_class(name))})


def recorded_rows(run: dict) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Layer rows and window rows of a run that the release recorded, under this project's names."""
    layers, windows = (
        pd.DataFrame({ours: [float(row[theirs]) for row in run[part]] for theirs, ours in names.items()})
        for part, names in (("layers", LAYER_FIELDS), ("steps", STEP_FIELDS))
    )
    return layers.astype({"window": int, "layer": int}), windows.astype({"window": int})
