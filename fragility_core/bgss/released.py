"""The release's controller, and two policies that share its budget (protocol section 6).

The controller acts at steps whose signal is high among the earlier signals. It chooses the layers of highest
priority and multiplies their epsilon.
"""

import math
import random
from abc import abstractmethod
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pandas as pd

from fragility_core.bgss.policy import Policy, window_columns
from fragility_core.bgss.state import Action, Limits, State, raise_epsilons

SEED_OFFSET = 1009  # the random policy's generator has the run's seed plus this


@dataclass(frozen=True, kw_only=True)
class Released(Policy):
    """Base of three policies: trigger, budget, cooldown and update.

    The parameters have the names of the release's configuration, without the prefixes.
    """

    epsilon_max: float = 1e-2
    warmup_steps: int = 24
    trigger_quantile: float = 0.8
    max_total_actions: int = 24
    max_actions_per_step: int = 2
    max_actions_per_layer: int = 6
    cooldown_steps: int = 10
    epsilon_multiplier: float = 4.0
    update_headroom_weight: float = 0.75
    update_repetition_penalty: float = 0.6
    unit_roundoff: float = 2.0**-11  # of the monitored pass, fp16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("epsilon_max", self.base_epsilon < self.epsilon_max < math.inf, "be above base_epsilon, finite")
        for name in ("trigger_quantile", "update_headroom_weight"):
            self._require(name, 0 <= getattr(self, name) <= 1, "lie between 0 and 1")
        self._require("epsilon_multiplier", 1 < self.epsilon_multiplier < math.inf, "be above 1 and finite")
        self._require("unit_roundoff", 0 < self.unit_roundoff < 1, "lie strictly between 0 and 1")
        counts = ("warmup_steps", "max_total_actions", "max_actions_per_step", "max_actions_per_layer")
        for name in (*counts, "cooldown_steps", "update_repetition_penalty"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "be at least 0 and finite")

    @property
    def limits(self) -> Limits:
        return Limits(
            actions=self.max_total_actions, per_step=self.max_actions_per_step, per_layer=self.max_actions_per_layer,
            epsilon_min=self.base_epsilon, epsilon_max=self.epsilon_max,
        )  # fmt: skip

    @property
    def first_step(self) -> float:
        return self.warmup_steps

    def decide(self, state: State, rows: pd.DataFrame, signal: float) -> tuple[Action, ...]:
        if not self.triggered(state, signal):
            return ()
        risk, dominance, ratio, transport = window_columns(
            rows, state.layers, "risk", "dominance", "layernorm_ratio", "transport"
        )
        scaled = self.unit_roundoff * risk  # u G
        with np.errstate(over="ignore", invalid="ignore"):  # a layer of nonfinite priority is no candidate
            priority = self.priority(state, scaled, dominance, ratio)
        candidates = np.flatnonzero(state.available & np.isfinite(priority))
        ranked = candidates[np.lexsort((-transport[candidates], -scaled[candidates], -priority[candidates]))]
        chosen = self.choose(state, ranked, int(min(state.allowance, len(ranked))))
        return raise_epsilons(state, chosen, self.updated(state), priority, len(ranked), self.cooldown_steps)

    def triggered(self, state: State, signal: float) -> bool:
        """True if the warm-up is over and the signal reaches the quantile of its earlier finite values."""
        if state.step < self.warmup_steps or not state.signals or not math.isfinite(signal):
            return False
        return bool(signal >= np.quantile(state.signals, self.trigger_quantile))

    def headroom(self, state: State) -> np.ndarray:
        """h = (eps_max - eps) / (eps_max - eps_base) of every block, 1 at the base and 0 at the cap."""
        return (self.epsilon_max - np.array(state.epsilon)) / (self.epsilon_max - self.base_epsilon)

    def updated(self, state: State) -> np.ndarray:
        """min(eps_max, eps [1 + (r - 1) ((1 - w) + w h) / (1 + p n)]) of every block."""
        weight = (1 - self.update_headroom_weight) + self.update_headroom_weight * self.headroom(state)
        penalty = 1 + self.update_repetition_penalty * np.array(state.action_counts)
        multiplier = 1 + (self.epsilon_multiplier - 1) * weight / penalty
        return np.minimum(self.epsilon_max, np.array(state.epsilon) * multiplier)

    def discounted(self, state: State, score: np.ndarray) -> np.ndarray:
        """score (1/2 + h/2) / sqrt(1 + n), which is lower for layers that were raised before."""
        # This order of operations gives the recorded priorities to the last bit.
        return score * (0.5 + 0.5 * self.headroom(state)) * (1 / np.sqrt(1 + np.array(state.action_counts)))

    @abstractmethod
    def priority(self, state: State, scaled: np.ndarray, dominance: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """The priority of every block from u G, phi and rho_LN, each (layers,)."""

    def choose(self, state: State, ranked: np.ndarray, count: int) -> np.ndarray:
        """``count`` of the candidate layers. ``ranked`` has them by (priority, u G, transport), largest first."""
        return ranked[:count]


@dataclass(frozen=True, kw_only=True)
class ReleasedBGSS(Released):
    """The layers of largest u G (1 + b phi)(1 + rho_LN), discounted. The release has no gates."""

    name = "bgss"

    ln_bonus_weight: float = 1.0  # b

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("ln_bonus_weight", 0 <= self.ln_bonus_weight < math.inf, "be at least 0 and finite")

    def priority(self, state: State, scaled: np.ndarray, dominance: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        return self.discounted(state, scaled * (1 + self.ln_bonus_weight * dominance) * (1 + ratio))


@dataclass(frozen=True, kw_only=True)
class RiskOnlySameBudget(Released):
    """The layers of largest u G, discounted. The paper has this policy, the release does not."""

    name = "risk_only_same_budget"

    def priority(self, state: State, scaled: np.ndarray, dominance: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        return self.discounted(state, scaled)


@dataclass(frozen=True, kw_only=True)
class RandomSameBudget(Released):
    """Layers drawn at random from the candidates, and raised in layer order."""

    name = "random_same_budget"

    def priority(self, state: State, scaled: np.ndarray, dominance: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        return scaled  # the release records it; the choice does not use it

    def choose(self, state: State, ranked: np.ndarray, count: int) -> np.ndarray:
        # Every step that acts draws once, so the actions tell how far the generator has come.
        generator = random.Random(state.seed + SEED_OFFSET)
        for _, step in groupby(state.actions, key=lambda action: action.step):
            first, *others = step
            generator.sample(range(first.candidates), 1 + len(others))
        return np.sort(ranked)[sorted(generator.sample(range(len(ranked)), count))]
