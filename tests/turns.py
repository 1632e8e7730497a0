"""Cases at several depths: each at one of them, in turn, or with EVERY=yes at all."""

import os
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

EVERYTHING = bool(os.environ.get("EVERY"))
DEPTHS = (2, 40)


def in_turn(cases: Sequence[Any], depths: Sequence[int] = DEPTHS) -> list[tuple[int, Any]]:
    """Pairs of a depth and one of ``cases``, the first at the largest depth."""
    return [*product(depths, cases)] if EVERYTHING else [*zip(cycle(reversed(depths)), cases)]
