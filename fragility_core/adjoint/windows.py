"""One window of an estimate: its tokens, the positions that count, and the sign vectors of its probes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The window with a ``number``: its ``tokens`` (1, T), its ``scope``, and the ``seed`` of its signs.

    The scope (T, 1) is 1 where positions count, else 0; or it is 1.0.
    """

    number: int
    tokens: Tensor
    scope: Tensor
    seed: int

    def counted(self, output: Tensor) -> Tensor:
        """The scope for the positions of an ``output`` (1, T or less, ...), on its device."""
        return (self.scope[: output.shape[1]] if self.scope.ndim else self.scope).to(output.device)

    def signs(self, output: Tensor, probes: int) -> Tensor:
        """Random signs (P, 1, T or less, ...) for an ``output``, 0 outside of the scope."""
        counted, generator = self.counted(output), torch.Generator(output.device).manual_seed(self.seed)
        return torch.stack([random_signs(output, generator) * counted for _ in range(probes)])


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent random signs, +1 and -1, of the shape of ``like``."""
    signs = torch.randint(2, like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return signs.mul_(2).sub_(1)
