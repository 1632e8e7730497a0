"""The insides of transformers by which a model gets what no checkpoint holds."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fragility_numerics.internals import require

PRIVATE = {
    "transformers.PreTrainedModel._init_weights": "fills the buffers that no checkpoint holds",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": "tensors of a checkpoint that no model needs",
}
require(PRIVATE)


def is_ignored(model: nn.Module, name: str) -> bool:
    """True if ``from_pretrained`` takes no notice of a tensor called ``name`` that ``model`` does not have."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


@torch.no_grad()
def fill_buffers(model: Any, device_of: Callable[[str], torch.device]) -> None:
    """Compute the buffers of a model of transformers on "meta" that no checkpoint holds, as ``from_pretrained`` does.

    ``device_of`` gives the device of a buffer by its path. Raises ValueError for a floating buffer that the model's own
    class leaves empty.
    """
    saved = model.state_dict().keys()
    unsaved = [(*path.rpartition("."), x) for path, x in model.named_buffers() if path not in saved]
    for owner, dot, name, x in unsaved:
        filling = torch.nan if x.is_floating_point() else 0
        empty = torch.full(x.shape, filling, dtype=x.dtype, device=device_of(owner + dot + name))
        model.get_submodule(owner).register_buffer(name, empty, persistent=False)
    for owner in {owner for owner, *_ in unsaved}:
        steps = owner.split(".") if owner else []
        above = [model.get_submodule(".".join(steps[:depth])) for depth in range(len(steps), -1, -1)]
        fill = next(m for m in above if hasattr(m, "_init_weights"))._init_weights
        for module in above:  # Falcon H1's model fills those of its blocks
            fill(module)
            if not any(x.isnan().any() for x in above[0].buffers(recurse=False)):
                break
    for owner, dot, name, _ in unsaved:
        if getattr(model.get_submodule(owner), name).isnan().any():
            raise ValueError(
                f"a class must fill its buffers, but {type(model).__name__} leaves {owner}{dot}{name} empty"
            )
