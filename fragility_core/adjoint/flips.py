"""How many most probable next tokens change, from the predicted standard deviation of logit differences."""

import torch
from torch import Tensor

from fragility_core.adjoint.estimator import Prediction, predict
from fragility_core.arithmetic.recipes import Stored

RIVALS = 10  # tokens that may take the first place
DRAWS = 64


def deviations(prediction: Prediction) -> list[float]:
    """The standard deviation, by window, of the ``prediction`` for the target "margin", but for the last rounding.

    Rounding keeps the order of logits. It makes ties of them at most, which ``changed_share`` resolves.
    """
    rows = prediction.contributions
    last = (rows.site == "head") & (rows.kind == "kernel")
    return predict(rows[~last], prediction.windows).predicted.tolist()


def changed_share(logits: Tensor, deviation: float, stored: Stored | None = None, seed: int = 0) -> float:
    """The expected share of positions of fp32 ``logits`` (..., vocabulary) whose largest entry is another one.

    The RIVALS largest logits get independent normal errors, such that the difference of two has the standard
    ``deviation``. Then they are rounded as they are ``stored``, and of equal ones the first counts, as in ``argmax``.
    For two tokens in fp32 the share is Phi(-margin / deviation). ``seed`` draws the DRAWS errors of each position.
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    order = logits.topk(min(RIVALS, logits.shape[-1]), -1).indices.flatten(0, -2).sort(-1).values
    rivals = logits.float().flatten(0, -2).gather(-1, order)  # (N, k) in the order of the vocabulary
    first, changed = rivals.argmax(-1), 0.0
    for _ in range(DRAWS):
        moved = rivals + torch.randn(rivals.shape, generator=generator, device=logits.device) * (deviation / 2**0.5)
        moved = moved if stored is None else stored.round(moved).float()
        changed += float((moved.argmax(-1) != first).float().mean()) / DRAWS
    return changed
