"""Windows of an estimate: their tokens, the positions that count, and the sign vectors of their probes.

Several windows may share one pass. ``torch.func.vmap`` then runs the model over a batch of them, and in it a tensor
looks like that of one window. What rounds, and custom autograd functions, see through this. They get all windows as the
first dimension W, so that what a pass does once, it does for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby

import torch
from torch import Tensor

from fragility_adjoint.internals import batched, outside_of_vmap, unbatched, vmap_level
from fragility_core.models.padding import require_positions, spans
from fragility_core.numerics.nested import map_tensors, tensors


@dataclass(frozen=True)
class Windows:
    """Windows with successive ``numbers``: their ``tokens`` (W, T), ``scope``, and the ``seeds`` of their signs.

    The scope (W, T, 1) is 1 where positions count, else 0; or it is 1.0.
    """

    numbers: range
    tokens: Tensor
    scope: Tensor
    seeds: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def split(self, size: int) -> Iterator["Windows"]:
        """The windows in groups of at most ``size``."""
        for first in range(0, len(self), size):
            some = slice(first, first + size)
            scope = self.scope[some] if self.scope.ndim else self.scope
            yield Windows(self.numbers[some], self.tokens[some], scope, self.seeds[some])

    def unpadded(self, attention_mask: Tensor) -> Iterator["Windows"]:
        """The windows without padding, successive ones of one length together; raises the errors of ``spans``."""
        for (first, end), same in groupby(enumerate(spans(self.tokens, attention_mask)), key=lambda each: each[1]):
            numbers = [number for number, _ in same]
            some = slice(numbers[0], numbers[-1] + 1)
            scope = self.scope[some, first:end] if self.scope.ndim else self.scope
            yield Windows(self.numbers[some], self.tokens[some, first:end], scope, self.seeds[some])

    def counted(self, output: Tensor) -> Tensor:
        """The scope for the positions of an ``output`` (W, T or less, ...), on its device.

        Raises ValueError where no position of the output counts, and for an output that has not one a token.
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
        if not bool(scope.any(1).all()):
            raise ValueError(
                f"counted must be True for a position of the target in every window, got none of {output.shape[1]} in "
                "some window: leave the window out"
            )
        return scope.to(output.device)

    def signs(self, output: Tensor, probes: int) -> Tensor:
        """Random signs (P, W, T or less, ...) for an ``output``, 0 outside of the scope."""
        like, drawn = output[:1] if len(self) > 1 else output, []  # that of one window may lack its dimension
        for seed in self.seeds:
            generator = torch.Generator(output.device).manual_seed(seed)
            drawn.append(torch.stack([random_signs(like, generator) for _ in range(probes)]))
        return torch.cat(drawn, 1) * self.counted(output)


def windows_of(
    tokens: Tensor, seed: int, seeds: Sequence[int] | None = None, counted: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> list[Windows]:  # fmt: skip
    """The windows of ``tokens`` (B, T) without padding, successive ones of one length together.

    ``seed`` is that of every window, unless each has one in ``seeds``.
    ``counted`` and ``attention_mask`` (B, T) are 1, or True, for the positions that count and that are no padding.
    Raises ValueError for windows without tokens, for another number of ``seeds`` than of windows, and for masks of
    another shape or with other values.
    """
    if tokens.ndim < 2 or not tokens.numel():
        raise ValueError(f"windows must hold tokens (B, T), got shape {tuple(tokens.shape)}")
    seeds = [seed] * len(tokens) if seeds is None else seeds
    if len(seeds) != len(tokens):
        raise ValueError(f"seeds must be one a window, {len(tokens)}, got {len(seeds)}")
    require_positions(tokens, counted=counted)
    scope = torch.ones((), device=tokens.device) if counted is None else counted[..., None].float()
    windows = Windows(range(len(tokens)), tokens, scope, seeds)
    return [windows] if attention_mask is None else [*windows.unpadded(attention_mask)]


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent random signs, +1 and -1, of the shape of ``like``."""
    signs = torch.randint(2, like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return signs.mul_(2).sub_(1)


def in_common(*operands: Tensor | None) -> bool:
    """True if all windows have the same ``operands``, in the same memory."""
    if vmap_level() is None:
        return True
    every = [unbatched(x) for x in operands if x is not None]
    return all(len(x) == 1 or x.stride(0) == 0 for x in every)


def over_windows(function: Callable) -> Callable:
    """A function of tensors of one window, from one that takes and returns tensors (W, ...) where several share a pass.

    What all windows have in common comes as a view that repeats it, or as (1, ...) if nothing else comes. It may be
    returned as (1, ...).
    """

    @wraps(function)
    def for_any(*args, **kwargs):
        level = vmap_level()
        if level is None:
            return function(*args, **kwargs)
        given = map_tensors((args, kwargs), unbatched)
        with outside_of_vmap():
            windows = max(map(len, tensors(given)))
            args, kwargs = map_tensors(given, lambda x: x.expand(windows, *x.shape[1:]))
            return map_tensors(function(*args, **kwargs), lambda x: batched(x, level))

    return for_any
