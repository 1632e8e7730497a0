"""Linear layers as transformers ships them: ``nn.Linear``, GPT-2's ``Conv1D``, fused or separate."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Projection(NamedTuple):
    """Linear layers that read one input, taken together; or some output ``features`` of one layer."""

    modules: tuple[nn.Module, ...]
    features: slice | Tensor = slice(None)

    @property
    def weight(self) -> Tensor:
        """The weight matrix, (out, in) of ``nn.Linear`` or (in, out) of ``Conv1D``."""
        axis = 1 if isinstance(self.modules[0], Conv1D) else 0
        weights = [module.weight.detach() for module in self.modules]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights, axis)
        return whole[:, self.features] if axis else whole[self.features]

    def of(self, output: Tensor) -> Tensor:
        """The projection's part of the ``output`` (..., out) of its module."""
        return output[..., self.features]
