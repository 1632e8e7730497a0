"""A low-precision copy that follows a model in training, so that every step can be scored."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.models.blocks import Block, blocks
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.scoring import Estimator, Scores
from fragility_numerics.lowering import LowPrecision, how_stored, require_no_autocast


def set_epsilons(model_blocks: Sequence[Block], epsilons: Sequence[float]) -> None:
    """Set one epsilon per block, for its norms before sublayers."""
    for block, epsilon in zip(model_blocks, epsilons, strict=True):
        for norm in filter(None, (block.norm_1, block.norm_2)):
            norm.eps = epsilon


class Shadow:
    """The copy ``low`` of the fp32 ``model``, which gets its weights before each observation (protocol section 6)."""

    def __init__(self, model: PreTrainedModel, low: LowPrecision, estimator: Estimator = Estimator()):
        """``low`` is ``model`` lowered, or a model with the same parameters. Raises the errors of ``Monitor``."""
        self.model, self.low, self.estimator = model, low, estimator
        self.monitor = Monitor(low, power_iteration=getattr(estimator, "transport", None) == "power_iteration")
        self.blocks = [blocks(model), self.monitor.blocks]
        self.storing = [*how_stored(model, low.format, low.weights_only).values()]
        self.layout = [(x.shape, x.dtype) for x in model.parameters()]

    def set_epsilons(self, epsilons: Sequence[float]) -> None:
        """Set LayerNorm's epsilon of every block, in the model and in the copy."""
        for model_blocks in self.blocks:
            set_epsilons(model_blocks, epsilons)

    @torch.no_grad()
    def observe(self, tokens: Tensor) -> Scores:
        """Scores of the copy's pass over ``tokens`` (B, T), with the weights that the model has now.

        The window rows have the copy's ``loss``, and its ``mismatch`` with the model, which must be in eval mode.
        Raises ValueError under autocast, and for a model whose blocks or parameters are others now.
        """
        require_no_autocast()
        inside = {block.module for block in self.blocks[0]} <= {*self.model.modules()}
        if not inside or [(x.shape, x.dtype) for x in self.model.parameters()] != self.layout:
            raise ValueError(
                "a shadow follows the blocks and parameters that its model had, but some were added, removed, tied, "
                "replaced or cast since: make another Controller or Shadow"
            )
        for ours, masters, storing in zip(self.low.model.parameters(), self.model.parameters(), self.storing):
            ours.copy_(storing(masters))
        self.monitor.follow()
        return self.monitor(tokens, final_hidden(self.model, tokens), loss=True).scores(self.estimator)
