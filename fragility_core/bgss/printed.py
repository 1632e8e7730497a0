"""The two controllers that the paper prints: Algorithm 1 (`alg:bgss`) and Algorithm 2 (`alg:eps-bump`).

The two norms of a block share one epsilon. Both controllers therefore use the larger of the two variances:
sigma^2 d_model u = rho_LN eps, where rho_LN is the larger of the two ratios (Eq. (22) (`eq:alg-rho-ln`)).
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fragility_core import theory
from fragility_core.bgss.policy import Policy, columns, window_columns
from fragility_core.bgss.state import Action, Limits, State, raise_epsilons


@dataclass(frozen=True, kw_only=True)
class Printed(Policy):
    """Parameters that both printed policies share: the interval, the target ratio rho_* and the bounds of epsilon."""

    target_ratio: float
    monitor_interval: int = 1
    epsilon_min: float = 1e-5
    epsilon_max: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("target_ratio", 0 < self.target_ratio < 1, "lie strictly between 0 and 1")
        self._require("monitor_interval", self.monitor_interval >= 1, "be at least 1")
        self._require("epsilon_min", 0 < self.epsilon_min <= self.epsilon_max, "be positive and at most epsilon_max")
        self._require("epsilon_max", self.base_epsilon <= self.epsilon_max < math.inf, "be finite, not below the base")

    @property
    def limits(self) -> Limits:
        return Limits(epsilon_min=self.epsilon_min, epsilon_max=self.epsilon_max)

    def is_due(self, state: State) -> bool:
        """True if t mod m = 0. The paper counts its steps t from 1."""
        return (state.step + 1) % self.monitor_interval == 0

    def target(self, state: State, ratio: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
        """max(eps, clip(sigma^2 d_model u / rho_*, eps_min, eps_max)) of every block, (layers,).

        Eq. (23) (`eq:alg-eps-cand`) and Eq. (24) (`eq:alg-eps-update`). ``ratio`` is the rho_LN that was measured under
        ``epsilon``, each (layers,).
        """
        candidate = theory.epsilon_candidate(  # ratio times epsilon is sigma^2 d_model u already
            ratio * epsilon, 1, 1, target=self.target_ratio, epsilon_min=self.epsilon_min, epsilon_max=self.epsilon_max
        )
        return theory.epsilon_update(np.array(state.epsilon), candidate)


@dataclass(frozen=True, kw_only=True)
class PrintedBGSS(Printed):
    """Algorithm 1 (`alg:bgss`) as printed.

    The paper gives no values for the thresholds and the target ratio; ``choose_thresholds`` proposes some. The
    budget B, the cooldown c and the bounds of epsilon default to the release's.
    """

    name = "bgss_printed"

    risk_threshold: float  # tau_G
    dominance_threshold: float  # tau_phi
    budget: int = 2  # B, actions a step
    cooldown: int = 10  # c, monitored steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("risk_threshold", 0 <= self.risk_threshold < math.inf, "be at least 0 and finite")
        self._require("dominance_threshold", 0 <= self.dominance_threshold <= 1, "lie between 0 and 1")
        for name in ("budget", "cooldown"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "be at least 0 and finite")

    @property
    def limits(self) -> Limits:
        return Limits(per_step=self.budget, epsilon_min=self.epsilon_min, epsilon_max=self.epsilon_max)

    def gates(self, state: State, rows: pd.DataFrame) -> pd.DataFrame:
        """Booleans, one row per block: the gates that it passes. Each gate is tested on its own.

        ``risk``: G >= tau_G. ``dominance``: phi >= tau_phi. ``regime``: rho_LN < 1. ``cooldown``: it is over.
        ``eligible``: all four. ``budget``: fewer than B eligible blocks have a larger G, or an equal G and a lower
        number. ``selected``: eligible and within the budget. ``raised``: selected, and the ``target`` epsilon is
        above the present one. A nonfinite value passes no gate that reads it. Raises ValueError as ``decide`` does.
        """
        risk, dominance, ratio, epsilon = window_columns(
            rows, state.layers, "risk", "dominance", "layernorm_ratio", "epsilon_1"
        )
        gates = {
            "risk": np.isfinite(risk) & (risk >= self.risk_threshold),
            "dominance": np.isfinite(dominance) & (dominance >= self.dominance_threshold),
            "regime": np.isfinite(ratio) & (ratio < 1),
            "cooldown": state.cooled_down,
        }
        eligible = np.logical_and.reduce(list(gates.values()))
        ranking = np.argsort(-risk, kind="stable")
        ahead = np.empty(state.layers, dtype=int)  # eligible blocks ranked before each
        ahead[ranking] = np.cumsum(eligible[ranking]) - eligible[ranking]
        target = self.target(state, ratio, epsilon)
        gates |= {"eligible": eligible, "budget": ahead < self.budget}
        gates["selected"] = gates["eligible"] & gates["budget"]
        gates["raised"] = gates["selected"] & (target > np.array(state.epsilon))
        return pd.DataFrame(gates | {"target": target})

    def decide(self, state: State, rows: pd.DataFrame, signal: float) -> tuple[Action, ...]:
        if not self.is_due(state):
            return ()
        gates, risk = self.gates(state, rows), rows["risk"].to_numpy()
        raised = np.flatnonzero(gates["raised"])
        ranked = raised[np.argsort(-risk[raised], kind="stable")]
        # The algorithm sets a counter to c and lowers it at every inspection: it is zero c inspections later.
        cooldown = self.cooldown * self.monitor_interval
        return raise_epsilons(state, ranked, gates["target"].to_numpy(), risk, gates["eligible"].sum(), cooldown)


@dataclass(frozen=True, kw_only=True)
class EpsilonBump(Printed):
    """Algorithm 2 (`alg:eps-bump`): every 5 steps, every block with rho_LN < 1, without a budget.

    ``decide`` takes the rows of one window or more, the algorithm's minibatch of 16 examples. The algorithm does not
    say which sigma^2 its gate reads, nor over what it takes the median. The reading here: sigma^2 of a window is the
    mean over its positions, and gate and candidate both use the median over windows. ``epsilon_max`` is 5e-3 or 1e-2
    in the paper.
    """

    name = "eps_bump"

    monitor_interval: int = 5
    epsilon_min: float = 1e-6

    def decide(self, state: State, rows: pd.DataFrame, signal: float) -> tuple[Action, ...]:
        """The actions of a step, as ``Policy.decide``, from the rows of one window or more."""
        if not self.is_due(state):
            return ()
        ratio, epsilon = np.median(columns(rows, state.layers, "layernorm_ratio", "epsilon_1"), axis=1)
        target, regime = self.target(state, ratio, epsilon), np.isfinite(ratio) & (ratio < 1)
        raised = np.flatnonzero(regime & (target > np.array(state.epsilon)))
        return raise_epsilons(state, raised, target, ratio, regime.sum())


def choose_thresholds(layers: pd.DataFrame, quantile: float = 0.5, **parameters: float) -> PrintedBGSS:
    """Algorithm 1 (`alg:bgss`) with thresholds from the rows that were monitored under policy ``none``.

    tau_G and tau_phi are the ``quantile`` of G and of phi over all steps and blocks. By default half of the
    layer-steps pass each of these two gates. rho_* is the median of the rho_LN below 1, so that half of the
    layer-steps that pass the regime gate would get a larger epsilon. It is 1/2 if no rho_LN is below 1. B, c and the
    bounds are the release's. ``parameters`` replace any of these. Rows with a nonfinite value do not count. Raises
    ValueError if no other row is there.
    """
    rows = layers[["risk", "dominance", "layernorm_ratio"]]
    rows = rows[np.isfinite(rows).all(axis=1)]
    if rows.empty:
        raise ValueError(f"thresholds need rows with finite risk, got {len(layers)} rows without: monitor again")
    ratios = rows.layernorm_ratio[rows.layernorm_ratio.between(0, 1, inclusive="neither")]
    chosen = {
        "risk_threshold": float(rows.risk.quantile(quantile)),
        "dominance_threshold": float(rows.dominance.quantile(quantile)),
        "target_ratio": float(ratios.median()) if len(ratios) else 0.5,
    }
    return PrintedBGSS(**chosen | parameters)  # type: ignore[arg-type]  # some fields are int
