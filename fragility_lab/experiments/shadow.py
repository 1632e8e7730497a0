"""Training with an fp32 master and a monitored low-precision shadow (protocol section 6).

The master trains as ever. After each step its weights are copied to the shadow, whose monitored pass
over the same batch is compared with the master's own pass: the mismatch is what rounding alone does.
"""

import copy
import math
from contextlib import AbstractContextManager, nullcontext

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from fragility_core.arithmetic.lowering import lower
from fragility_core.models.architectures import Block, blocks
from fragility_core.models.tree import final_hidden
from fragility_core.surrogates import Estimator, score
from fragility_core.surrogates.monitor import Monitor, window_losses


def set_epsilons(model_blocks: list[Block], epsilons: tuple[float, ...]) -> None:
    """One epsilon per block, shared by its two norms."""
    for block, epsilon in zip(model_blocks, epsilons, strict=True):
        block.norm_1.eps = block.norm_2.eps = epsilon


def fuse_activations(model: PreTrainedModel) -> PreTrainedModel:
    """Replace GPT-2's gelu_new, eight kernels, by the same function in one (a fifth of a training step)."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def warmed_up(rate: float, step: int, warmup_steps: int) -> float:
    """Learning rate at ``step`` (from 0) after a linear warm-up over ``warmup_steps``."""
    return rate * min(1.0, (step + 1) / max(1, warmup_steps))


def repeatable_attention(device: torch.device) -> AbstractContextManager:
    """Attention whose gradients are the same in every run: a GPU's fused kernels add them up in no fixed order."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


class ShadowTraining:
    """A language model in training, and its shadow in ``precision``.

    The master starts as a copy of ``model``, in fp32, with the checkpoint's dropout active while it trains;
    the shadow and the reference pass are in eval mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        precision: str,
        execution: str = "auto",
        estimator: Estimator = Estimator(),
        weight_decay: float = 0.0,
        clip: float = 1.0,
    ):
        # The shadow keeps the activation that the library ships: there, every kernel rounds.
        self.master = fuse_activations(copy.deepcopy(model)).eval().requires_grad_(True)
        self.low = lower(model.eval(), precision, execution)
        self.monitor = Monitor(self.low, power_iteration=estimator.transport == "power_iteration")
        self.estimator, self.clip = estimator, clip
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=0.0, weight_decay=weight_decay, fused=True)
        self.blocks = [blocks(self.master), self.monitor.blocks]

    def set_epsilons(self, epsilons: tuple[float, ...]) -> None:
        """LayerNorm's epsilon of every block, in the master and the shadow alike."""
        for model_blocks in self.blocks:
            set_epsilons(model_blocks, epsilons)

    def train_step(self, tokens: Tensor, learning_rate: float) -> tuple[float, float]:
        """One optimizer step on ``tokens`` (B, T); the loss in nats per token and the gradient's norm.

        Where one of them is not finite, the weights stay as they are.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.master.train()
        with repeatable_attention(tokens.device):
            loss = window_losses(self.master(tokens, use_cache=False).logits, tokens).mean()
            loss.backward()
        norm = clip_grad_norm_(self.master.parameters(), self.clip)
        self.master.eval()
        measured = torch.stack([loss.detach(), norm]).tolist()
        if all(map(math.isfinite, measured)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return tuple(measured)

    @torch.no_grad()
    def observe(self, tokens: Tensor) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Scored block rows and window rows (``surrogates.score``) of the shadow's pass over ``tokens`` (B, T).

        The window rows hold the ``mismatch`` with the master in eval mode under the same epsilons, and
        the shadow's ``loss``.
        """
        for ours, masters in zip(self.low.model.parameters(), self.master.parameters()):
            ours.copy_(self.low.format.round(masters))
        self.monitor.follow()
        reference = final_hidden(self.master, tokens)
        seen = self.monitor(tokens, reference, loss=True)
        return score(seen.layers, seen.windows, self.low.format.unit_roundoff, self.estimator)

    def state(self) -> dict:
        """What the next steps depend on, beside the epsilons and torch's random generators."""
        return {
            "master": self.master.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "subspaces": self.monitor.weight_statistics.subspaces,
        }

    def load_state(self, state: dict) -> None:
        """Go on from ``state``."""
        self.master.load_state_dict(state["master"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.monitor.weight_statistics.subspaces = state["subspaces"]
