"""Recorded runs fed through a policy again."""

from collections.abc import Iterator

import pandas as pd

from fragility_core.bgss.ledger import State, action_table, advance
from fragility_core.bgss.policy import Policy


def trajectory(policy: Policy, layers: pd.DataFrame, windows: pd.DataFrame, seed: int = 0) -> Iterator[State]:
    """The state at each recorded step, and the one after the last.

    ``layers`` and ``windows`` are those of ``surrogates.score``, one window per step, in order. The
    rows stay as recorded: their statistics do not answer to the policy's own actions.
    """
    state = policy.start(layers["layer"].nunique(), seed)
    yield state
    signals = windows.set_index("window")["combined"]
    for window, rows in layers.groupby("window", sort=False):
        state = advance(state, signals[window], policy.decide(state, rows, signals[window]))
        yield state


def replay(policy: Policy, layers: pd.DataFrame, windows: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The actions that ``policy`` takes on recorded rows, as ``ledger.action_table`` gives them."""
    *_, last = trajectory(policy, layers, windows, seed)
    return action_table(last)
