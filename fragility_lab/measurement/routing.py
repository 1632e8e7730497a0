"""Mixtures of experts: choices of experts that rounding changes, measured and predicted."""

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_core.models.configuration import text_config
from fragility_core.models.paths import final_hidden
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.nested import together

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # numbers in configurations


class ExpertChoices(TorchFunctionMode):
    """A context that records which experts are chosen for each of ``tokens`` tokens.

    ``experts`` has one tensor (tokens, k) per router, with ascending rows. Choices of groups of experts or of keys, and
    routers that take all experts, do not count: what is chosen from must be as many as the experts of ``config``.
    """

    def __init__(self, tokens: Tensor, config: PreTrainedConfig | None):
        super().__init__()
        self.shapes = (tokens.shape, (tokens.numel(),))
        known = [n for name in EXPERTS if isinstance(n := getattr(config, name, None), int)]
        idle = getattr(config, "zero_expert_num", 0) or 0  # experts that do nothing
        self.counts = {count + more for count in known for more in (0, 1, idle)}  # 1: a router may choose to skip
        self.experts: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "topk":
            chosen, (*shape, width) = result.indices, args[0].shape
            known = not self.counts or width in self.counts
            if known and chosen.shape[-1] < width and tuple(shape) in self.shapes:
                self.experts.append(chosen.flatten(0, -2).sort(-1).values)
        return result


def expert_choices(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """The experts (B T, k) that each router of ``model`` chooses for ``tokens`` (B, T) by ``torch.topk``.

    The list is empty for a model that makes no such choice, or whose routers take all experts.
    """
    with ExpertChoices(tokens, text_config(model)) as choices:
        final_hidden(model, tokens)
    return choices.experts


def differing(exact: list[Tensor], moved: list[Tensor], tokens: Tensor) -> Tensor:
    """Booleans (routers, B, T): True if two lists of ``expert_choices`` for ``tokens`` (B, T) differ there."""
    changed = [(a != b).any(-1).view(tokens.shape) for a, b in zip(exact, moved)]
    return torch.stack(together(changed)) if changed else torch.zeros(0, *tokens.shape, dtype=torch.bool)


@torch.no_grad()
def changed_choices(low: LowPrecision, reference: nn.Module, tokens: Tensor) -> Tensor:
    """Booleans (routers, B, T): True if ``low`` chooses other experts than the fp32 ``reference`` for ``tokens``."""
    with low.running():
        rounded = expert_choices(low.model, tokens)
    return differing(expert_choices(reference, tokens), rounded, tokens)


def predicted_choices(realisations: ErrorSamples, tokens: Tensor, draws: int) -> Tensor:
    """The share (routers, B, T) of ``draws`` of the errors that change the experts chosen for ``tokens`` (B, T)."""

    def run(model: nn.Module) -> list[Tensor]:
        return expert_choices(model, tokens)

    exact = realisations.exact(run)
    found = [differing(exact, realisations.draw(run), tokens).float() for _ in range(draws)]
    return torch.stack(found).mean(0)
