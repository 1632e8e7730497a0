"""Training with an fp32 master and a monitored low-precision shadow (protocol section 6).

The master trains as usual. After each step the shadow gets the master's weights. The shadow's monitored pass over the
same batch is compared with a pass of the master, so the mismatch is due to rounding alone.
"""

import copy
import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from fragility_core.surrogates import Estimator
from fragility_core.surrogates.monitor import window_losses
from fragility_core.surrogates.shadow import Shadow
from fragility_numerics.lowering import lower


def fuse_activations(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with one kernel for GPT-2's gelu_new in place of eight; the eight take a fifth of a training step."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
    return model


def warmed_up(rate: float, step: int, warmup_steps: int) -> float:
    """Learning rate at ``step``, counted from 0, with a linear warm-up over ``warmup_steps``."""
    return rate * min(1.0, (step + 1) / max(1, warmup_steps))


class ShadowTraining:
    """A language model in training, and its shadow in ``precision``.

    The master is an fp32 copy of ``model``. The checkpoint's dropout is active while it trains. The shadow, and the
    master's pass that it is compared with, are in eval mode.
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
        # The shadow keeps the library's activation: each of its kernels rounds.
        self.master = fuse_activations(copy.deepcopy(model)).eval().requires_grad_(True)
        self.shadow = Shadow(self.master, lower(model.eval(), precision, execution), estimator)
        self.clip = clip
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=0.0, weight_decay=weight_decay, fused=True)

    def train_step(self, tokens: Tensor, learning_rate: float) -> tuple[float, float]:
        """Take one optimizer step on ``tokens`` (B, T). Returns the loss in nats per token and the gradient's norm.

        If one of the two is not finite, the weights stay as they are.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.master.train()
        # A GPU's fused attention kernels sum in no fixed order.
        with sdpa_kernel(SDPBackend.MATH) if tokens.device.type == "cuda" else nullcontext():
            loss = window_losses(self.master(tokens, use_cache=False).logits, tokens).mean()
            loss.backward()
        norm = clip_grad_norm_(self.master.parameters(), self.clip)
        self.master.eval()
        measured = torch.stack([loss.detach(), norm]).tolist()
        if all(map(math.isfinite, measured)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return tuple(measured)

    def state(self) -> dict:
        """Everything that the next steps depend on, except the epsilons and torch's random generators."""
        return {
            "master": self.master.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "subspaces": self.shadow.monitor.weight_statistics.subspaces,
        }

    def load_state(self, state: dict) -> None:
        """Continue from ``state``."""
        self.master.load_state_dict(state["master"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.shadow.monitor.weight_statistics.subspaces = state["subspaces"]
