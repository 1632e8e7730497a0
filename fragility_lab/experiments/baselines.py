"""Other ways to choose blocks, to compare a plan with. All return block numbers in ascending order."""

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fragility_lab.inputs.loading import require_at_least

Blocks = tuple[int, ...]


def first(depth: int, count: int) -> Blocks:
    """The first ``count`` of ``depth`` blocks."""
    return tuple(range(min(count, depth)))


def last(depth: int, count: int) -> Blocks:
    """The last ``count`` of ``depth`` blocks."""
    return tuple(range(max(depth - count, 0), depth))


def drawn(depth: int, count: int, draws: int = 20, seed: int = 0) -> list[Blocks]:
    """``draws`` random choices of ``count`` of ``depth`` blocks."""
    require_at_least(0, seed=seed)
    generator = random.Random(seed)
    return [tuple(sorted(generator.sample(range(depth), count))) for _ in range(draws)]


def top(scores: ArrayLike, count: int) -> Blocks:
    """The ``count`` blocks with the largest ``scores`` (L,), such as the paper's risk or the effects of patching.

    Of equal scores the earlier block's counts as larger. Raises ValueError for scores that are NaN.
    """
    scores = np.asarray(scores, dtype=float)
    if np.isnan(scores).any():
        raise ValueError(f"scores of blocks must be numbers, got {scores.tolist()}: leave out windows that overflow")
    return tuple(sorted(np.argsort(-scores, kind="stable")[:count].tolist()))


def greedy(measure: Callable[[Sequence[Blocks]], Sequence[float]], depth: int, count: int) -> Blocks:
    """``count`` of ``depth`` blocks, added one by one: each time the block that makes ``measure`` smallest.

    ``measure`` gets all candidates of a step at once, and returns a number for each.
    """
    chosen: Blocks = ()
    for _ in range(min(count, depth)):
        candidates = [tuple(sorted((*chosen, b))) for b in range(depth) if b not in chosen]
        chosen = candidates[int(np.argmin(measure(candidates)))]
    return chosen
