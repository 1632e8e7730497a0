"""Notebook 1: the bits of a number, a table of formats, and a picture of bits that needs no kernel.

A number is (-1)^sign · significand · 2^exponent. The leading bit of the significand is not stored: it is 1 for a normal
number, and 0 for a subnormal one.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
import torch

from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import template
from fragility_numerics.formats import Format, get_format

NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
ASSET = ASSETS / "bits"


class Widths(NamedTuple):
    """The number of bits of the exponent and of the fraction, and the exponent of the smallest normal number."""

    exponent: int
    fraction: int
    lowest: int


def widths(format: Format) -> Widths:
    """The parts of a format. The smallest normal number 2^(1 - bias) tells the bias 2^(width - 1) - 1."""
    lowest = round(math.log2(format.smallest_normal))
    return Widths(round(math.log2(2 - lowest)) + 1, format.significand - 1, lowest)


def described(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The formats called ``names``, as a browser rounds to them."""
    return {
        f.name: {"name": f.name, "largest": f.largest, "saturates": f.saturates, "u": f.unit_roundoff}
        | widths(f)._asdict()
        for f in map(get_format, names)
    }


def stored(x: float, format: Format) -> tuple[int, int, int]:
    """Sign, exponent field and fraction field of ``x`` rounded to a format."""
    value, parts = format.round(torch.tensor(x)).double().item(), widths(format)
    sign, size = int(math.copysign(1, value) < 0), abs(value)
    if math.isinf(size):
        return sign, 2**parts.exponent - 1, 0
    if size < format.smallest_normal:
        return sign, 0, round(size / 2.0 ** (parts.lowest - parts.fraction))
    significand, exponent = math.frexp(size)  # 0.5 <= significand < 1
    return sign, exponent - parts.lowest, round((2 * significand - 1) * 2**parts.fraction)


def pattern(x: float, format: Format) -> str:
    """The bits of ``x`` rounded to a format, as "sign exponent fraction"."""
    sign, exponent, fraction = stored(x, format)
    parts = widths(format)
    return f"{sign} {exponent:0{parts.exponent}b} {fraction:0{parts.fraction}b}"


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def formats_table() -> pd.DataFrame:
    """One row for each of NAMES: how its bits are spent, its range, and its unit roundoff."""
    rows = []
    for format in map(get_format, NAMES):
        parts = widths(format)
        row = {"bits": f"1+{parts.exponent}+{parts.fraction}", "t": format.significand}
        row |= {"unit roundoff u": "2" + str(-format.significand).translate(RAISED), "largest": f"{format.largest:.5g}"}
        rows.append(row | {"smallest normal": f"{format.smallest_normal:.2g}"})
    return pd.DataFrame(rows, index=list(NAMES))


class Bits:
    """The picture in which a reader types a number, chooses a format and flips bits; the value of a cell."""

    def __init__(self, x: float, format: str):
        self.x, self.format = x, format

    @property
    def html(self) -> str:
        """The component, to be placed once or several times on any page."""
        css, script = ((ASSET / f"bits.{kind}").read_text("utf-8") for kind in ("css", "js"))
        known = described(NAMES)
        data = json.dumps({"formats": [*known.values()], "x": self.x, "format": self.format})
        given = {"x": f"{self.x:g}", "format": self.format, "told": self.told()}
        return template("bits/component.html.jinja").render(css=css, script=script, data=data, **given)

    def told(self) -> str:
        """The stored bits and their value in words."""
        format = get_format(self.format)
        value = format.round(torch.tensor(self.x)).double().item()
        return f"bits {pattern(self.x, format)}, value {value:g}, relative error {abs(value - self.x) / self.x:.3g}."

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"{self.x:g} in {self.format}: {self.told()}"}
