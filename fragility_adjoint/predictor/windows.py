"""Windows of an estimate: their tokens, the positions that count, and the sign vectors of their probes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fragility_core.models.padding import require_positions, require_tensor, spans


@dataclass(frozen=True)
class Window:
    """A window by its ``number``: its ``tokens`` (1, T), ``scope``, and the ``seed`` of its signs.

    The scope (1, T, 1) is 1 where positions count, else 0; or it is 1.0.
    """

    number: int
    tokens: Tensor
    scope: Tensor
    seed: int

    def counted(self, output: Tensor) -> Tensor:
        """The scope for the positions of an ``output`` (1, T or less, ...), on its device.

        Raises ValueError if no position of the output counts, and for an output without one position a token.
        """
        if not self.scope.ndim:
            return self.scope.to(output.device)
        length = self.tokens.shape[1]
        if output.shape[1] not in (length, length - 1):
            raise ValueError(
                f"counted chooses positions of a target that has one a token, {length} or {length - 1}, got "
                f"{output.shape[1]}: leave counted out, or take another target (logprob in place of loss)"
            )
        scope = self.scope[:, : output.shape[1]]
        if not bool(scope.any()):
            raise ValueError(
                f"counted must be True for a position of the target in every window, got none of {output.shape[1]} in "
                "some window: leave the window out"
            )
        return scope.to(output.device)

    def signs(self, output: Tensor, probes: int) -> Tensor:
        """Random signs (P, 1, T or less, ...) for an ``output``, 0 outside of the scope."""
        generator = torch.Generator(output.device).manual_seed(self.seed)
        signs = torch.stack([random_signs(output, generator) for _ in range(probes)])
        return signs.mul_(self.counted(output)) if self.scope.ndim else signs


def windows_of(
    tokens: Tensor, seed: int, seeds: Sequence[int] | None = None, counted: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> list[Window]:  # fmt: skip
    """The windows of ``tokens`` (B, T), without padding.

    ``seed`` is that of every window, unless each has one in ``seeds``. ``counted`` and ``attention_mask`` (B, T) are 1,
    or True, for the positions that count and that are no padding. Raises TypeError for what is no tensor, ValueError
    for windows without tokens, another number of ``seeds``, other masks, and for what ``spans`` refuses.
    """
    require_tensor(tokens)
    if tokens.ndim < 2 or not tokens.numel():
        raise ValueError(f"windows must hold tokens (B, T), got shape {tuple(tokens.shape)}")
    seeds = [seed] * len(tokens) if seeds is None else seeds
    if len(seeds) != len(tokens):
        raise ValueError(f"seeds must be one a window, {len(tokens)}, got {len(seeds)}")
    require_positions(tokens, counted=counted)
    everywhere = torch.ones((), device=tokens.device)
    inside = [(0, None)] * len(tokens) if attention_mask is None else spans(tokens, attention_mask)
    windows = []
    for number, (first, end) in enumerate(inside):
        own = slice(number, number + 1), slice(first, end)
        scope = everywhere if counted is None else counted[own][..., None].float()
        windows.append(Window(number, tokens[own], scope, seeds[number]))
    return windows


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent random signs, +1 and -1, of the shape of ``like``."""
    signs = torch.randint(2, like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return signs.mul_(2).sub_(1)
