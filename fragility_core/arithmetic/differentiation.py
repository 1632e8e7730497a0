"""Whether derivatives are asked for: ways of computing that autograd cannot follow must then not be taken."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def differentiated(x: Tensor) -> bool:
    """Whether what is made of ``x`` may be differentiated: backward, forward, or in a transform of ``torch.func``."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
