"""Budgets in words."""

import math
import re
import reprlib

from fragility_quantization.recipes import Recipe

COUNTED = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
DIVERGENCE = re.compile(r"kl\s*(\d+(?:\.\d+)?(?:e-?\d+)?)", re.IGNORECASE)
UNITS = {"": "blocks", "block": "blocks", "site": "sites", "module": "modules", "byte": "bytes"}
BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
BRIEFLY = reprlib.Repr()  # in quotes, without the middle of what is long
BRIEFLY.maxstring = 120


def parse_budget(budget: str) -> tuple[float, str]:
    """Number and unit of a ``budget``: the arguments of ``Contributions.plan``, or a number of "bits" or of nats "kl".

    "2 blocks", "1 site", "6 modules" or "40 MB" are what is kept in fp32, and a bare number counts blocks; "5 bits" are
    those of a weight, "KL 0.01" is the largest KL. Raises ValueError for other words, and TypeError for no text.
    """
    if not isinstance(budget, str):
        raise TypeError(f'a budget is a text such as "2 blocks" or "5 bits", got {BRIEFLY.repr(budget)}')
    divergence = DIVERGENCE.fullmatch(budget.strip())
    found = divergence or COUNTED.fullmatch(budget.strip())
    unit = "?" if not found else "kl" if divergence else found[2].lower()
    amount = float(found[1]) * BYTES.get(unit, 1) if found else math.inf
    if math.isfinite(amount):
        if unit == "kl" or unit.removesuffix("s") == "bit":
            return amount, "kl" if unit == "kl" else "bits"
        if unit in BYTES:
            return int(amount), "bytes"
    if unit == "s" or unit.removesuffix("s") not in UNITS or not amount.is_integer():
        raise ValueError(
            'a budget is a number of blocks, sites or modules, or of bytes ("2 blocks", "40 MB"), to keep in fp32, '
            f'or bits a weight or KL in nats ("5 bits", "KL 0.01"), got {BRIEFLY.repr(budget)}'
        )
    return int(amount), UNITS[unit.removesuffix("s")]


def mixes_schemes(budget: str, recipe: Recipe) -> bool:
    """True if ``budget`` is for a choice of schemes beside ``recipe``, not for what is kept in fp32."""
    unit = parse_budget(budget)[1]
    return unit in ("bits", "kl") or (unit == "bytes" and recipe.linear.weights is not None)
