"""How many most probable next tokens change, from the predicted standard deviation of logit differences."""

import torch
from torch import Tensor

RIVALS = 10  # tokens that may take the first place
DRAWS = 64


def changed_share(logits: Tensor, deviation: float, seed: int = 0) -> float:
    """The expected share of positions of ``logits`` (..., vocabulary) whose largest entry is another one.

    The logits of the RIVALS largest entries get independent normal errors, such that the difference of two has the
    standard deviation ``deviation``: the prediction for ``targets.TARGETS["margin"]``. For two tokens alone the share
    is Phi(-margin / deviation). ``seed`` draws the DRAWS errors of each position.
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    largest = logits.float().topk(min(RIVALS, logits.shape[-1]), -1).values.flatten(0, -2)  # (N, k)
    changed = 0.0
    for _ in range(DRAWS):
        errors = torch.randn(largest.shape, generator=generator, device=logits.device) * (deviation / 2**0.5)
        changed += float(((largest + errors).argmax(-1) != 0).float().mean()) / DRAWS
    return changed
