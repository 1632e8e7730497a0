"""A controller of LayerNorm's epsilon for a training loop of one's own (Algorithm 1 (`alg:bgss`))."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedModel

from fragility_core.bgss import get_policy, policy_class
from fragility_core.bgss.state import State, advance
from fragility_core.models.blocks import blocks
from fragility_core.models.padding import as_windows, require_loaded
from fragility_core.models.paths import evaluating
from fragility_core.surrogates.scoring import Estimator, Scores
from fragility_core.surrogates.shadow import Shadow
from fragility_numerics.formats import NumberFormat
from fragility_numerics.lowering import lower


class Controller:
    """Raises the epsilons of a model in training by a policy, from one low-precision pass a step.

    ``state`` says what it has done; ``bgss.action_table(controller.state)`` lists it. To resume a run, set the one
    that was saved, and the model has its epsilons. ``shadow`` is the model's copy in low precision.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str = "bgss", format: str | NumberFormat = "bf16",
        estimator: Estimator = Estimator(), execution: str = "auto", seed: int = 0, **parameters: float,
    ):  # fmt: skip
        """``model`` is the fp32 model that is trained, with a norm before each sublayer.

        ``policy`` is one of POLICIES by name, with its ``parameters``; epsilon begins at that of the model's norms.
        ``seed`` is for policies that draw. Raises TypeError if ``model`` is no model of transformers, has unknown
        blocks, or lacks a norm before each sublayer, and raises the errors of ``get_policy`` and ``lowering.lower``.
        """
        require_loaded(model)
        found = blocks(model)
        first = found[0].norm_1
        if first is None or any(None in (block.norm_1, block.norm_2) for block in found):
            raise TypeError("a controller needs a norm before each sublayer, got a block without: use a pre-norm model")
        if len(epsilons := {norm.eps for block in found for norm in (block.norm_1, block.norm_2) if norm}) > 1:
            raise ValueError(f"a policy begins with one epsilon for all norms, got {sorted(epsilons)}: make them equal")
        low = lower(model, format, execution)
        low.model.eval()
        known = {field.name for field in fields(policy_class(policy))}
        given = {"base_epsilon": first.eps, "unit_roundoff": low.format.unit_roundoff}
        self.policy = get_policy(policy, **{k: v for k, v in given.items() if k in known} | parameters)
        self.model, self.shadow = model, Shadow(model, low, estimator)
        self.state = self.policy.start(len(found), seed)

    @property
    def state(self) -> State:
        """The state of the policy; that of another model raises ValueError."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state.layers != (depth := len(self.shadow.monitor.blocks)):
            raise ValueError(f"a state must be of the model's {depth} blocks, got one of {state.layers}")
        self._state = state
        self.shadow.set_epsilons(state.epsilon)

    def step(self, tokens: Any) -> Scores:
        """Observe one window ``tokens`` (1, T) after an optimizer step, decide, and set the epsilons of the next step.

        Tokens come in any form of ``padding.as_windows``, without padding, whose errors are raised. Raises ValueError
        for more than one window: a policy decides on the blocks of one. Processes that train one model (DDP) must all
        give the same window, or their epsilons part.
        """
        window, mask = as_windows(tokens, self.model)
        if len(window) != 1:
            raise ValueError(f"a controller observes one window (1, T) a step, got {len(window)}: give one")
        if mask is not None and not mask.all():
            raise ValueError("a controller observes a window without padding, got a mask with 0: leave padding away")
        with evaluating(self.model):
            scores = self.shadow.observe(window)
        signal = float(scores.windows.combined.iloc[0])
        actions = self.policy.decide(self.state, scores.layers, signal)
        self.state = advance(self.state, signal, actions)
        return scores
