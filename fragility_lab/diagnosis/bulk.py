"""The page's part on single tokens: bulk and tail of each window, and the tokens that make the tail."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from fragility_lab.diagnosis.found import Diagnosis, made
from fragility_lab.diagnosis.means import nats
from fragility_lab.diagnosis.tokens import COLUMNS, TAIL, TOLD, ErrorsByToken, usual
from fragility_lab.reporting import figures_diagnosis
from fragility_lab.reporting.figures import uri
from fragility_lab.reporting.tables import number, percent

QUANTITIES = {
    "error": "the relative error of the final hidden state",
    "kl": "the KL divergence, in nats",
    "logprob": "the change of the log probability of the next token, in nats",
}
MANY = 24  # windows that a page lists


def size(column: str) -> Callable[[float], str]:
    """A function that writes a mean of squares: as a divergence, or as its root in the unit of ``column``."""
    return nats if column == "kl" else lambda square: (percent if column == "error" else nats)(np.sqrt(square))


def bulk(diagnosis: Diagnosis) -> dict | None:
    """``few``, the number of ``windows`` that a few tokens decide, and prediction over measurement of a median token.

    This ratio is None if the median token has no error. The result is None if a few tokens decide no window, if nothing
    was measured, and for the target "flips".
    """
    by_token, column = diagnosis.by_token, COLUMNS[target := diagnosis.request.measured_in]
    if by_token is None or by_token.measured is None or target == "flips":
        return None
    found = by_token.summary(column)
    if found.empty or not found.few.any():
        return None
    median, power = found["median"].mean(), 1.0 if column == "kl" else 0.5
    ratio = (found.predicted_median.mean() / median) ** power if median else None
    return {"few": int(found.few.sum()), "windows": len(found), "ratio": ratio}


def of_bulk(diagnosis: Diagnosis, known: dict) -> dict:
    """Values for the template: bulk and tail of the error by token."""
    by_token, column = made(diagnosis.by_token), COLUMNS[diagnosis.request.measured_in]
    write, summary, tail = size(column), by_token.summary(column), by_token.tail(column, TOLD)
    rows = [
        [
            str(row.window), write(row.mean), write(row.predicted), write(row.median), write(row.ninetieth),
            f"{row.in_tail} ({percent(row.share)})", f"{row.half} of {row.tokens}",
        ]
        for row in summary.head(MANY).itertuples()
    ]  # fmt: skip
    return {
        "measures": QUANTITIES[column],
        "rows": rows,
        "more": max(0, len(summary) - MANY),
        "few": int(summary.few.sum()) if len(summary) else 0,
        "tail": [
            [
                f"{row.window}, {row.position}", diagnosis.text(row.token), f"{number(row.times, '.0f')} times",
                write(row.value), write(row.predicted), str(made(diagnosis.origins)[row.Index]),
            ]
            for row in tail.itertuples()
        ],
        "times": TAIL,
        "what": "KL" if column == "kl" else "squared error",
        "images": {"positions": uri(figures_diagnosis.positions(points(by_token, column), column))},
    }  # fmt: skip


def points(by_token: ErrorsByToken, column: str) -> pd.DataFrame:
    """One row per token: its position, predicted and ``known`` size, and whether it is ``in_tail``."""
    power = 1.0 if column == "kl" else 0.5
    known = by_token.known[["window", "position"]].assign(known=by_token.known[column] ** power)
    known["predicted"] = by_token.predicted[column] ** power
    median = by_token.known.groupby("window")[column].transform(usual)
    return known.assign(in_tail=by_token.known[column] > TAIL * median).dropna()
