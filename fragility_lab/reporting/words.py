"""Numbers in words."""

import pandas as pd

from fragility_lab.reporting.tables import number


def duration(seconds: float) -> str:
    """``seconds`` in words, such as "4 min 18 s"."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """``share`` in percent, with three significant digits."""
    return number(100 * share, "#.3g").removesuffix(".") + ("\N{NO-BREAK SPACE}%" if pd.notna(share) else "")


def quantity(count: float, unit: str = "B") -> str:
    """``count`` of ``unit`` with a decimal prefix, such as "1.6 MB"; "0" for zero."""
    for power, prefix in ((9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g}\N{NO-BREAK SPACE}{prefix}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}{unit}" if count else "0"
