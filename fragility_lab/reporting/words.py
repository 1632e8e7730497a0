"""Numbers in words, for people."""

import pandas as pd

from fragility_lab.reporting.tables import number


def duration(seconds: float) -> str:
    """``seconds`` as people say it: "4 min 18 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """A share with three significant digits in percent."""
    return number(100 * share, "#.3g").removesuffix(".") + ("\N{NO-BREAK SPACE}%" if pd.notna(share) else "")


def quantity(count: float, unit: str = "B") -> str:
    """``count`` of ``unit`` with a decimal prefix: "1.6 MB"; "0" for none."""
    for power, prefix in ((9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g}\N{NO-BREAK SPACE}{prefix}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}{unit}" if count else "0"
