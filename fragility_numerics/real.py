"""The type of real numbers that the formulas of ``theory`` take and give entry by entry."""

from typing import Any, TypeAlias

Real: TypeAlias = Any  # a float, a NumPy array, a Series or a tensor, in any mixture: no type of Python's has them all
