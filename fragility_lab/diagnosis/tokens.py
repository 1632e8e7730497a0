"""The error by token: predicted and measured at each position, and windows that a few tokens decide.

One pass is one draw of all roundings. If a few tokens make most of a window's error, this error scatters from draw to
draw, measured or predicted. So both are means over realisations here (``explain.error_samples``). Predictions come from
passes whose errors have random signs. Measurements come from the pass that runs, and from others that round to nearest
on another grid.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from fragility_adjoint.explain.changed_choices import Competition, competition
from fragility_adjoint.explain.error_samples import ErrorSamples, scales
from fragility_core.models.paths import hidden_and_logits
from fragility_lab.measurement.comparison import by_token
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision

COLUMNS = {"hidden": "error", "kl": "kl", "logprob": "logprob", "flips": "kl"}  # of ``squares``, by target
LOGITS = 2**26  # of windows that share a draw: 256 MB a state
TOLD = 6  # tokens of the tail that a page names
TAIL = 10  # times the median of a window's tokens: a token above this belongs to the tail
FEW = 0.02  # share of a window's tokens; so few, or two, decide the window if they make half of its error

State = tuple[Tensor, Tensor]  # final hidden state (1, T, d_model) and logits (1, T, vocabulary)


def squares(moved: State, exact: State, tokens: Tensor) -> pd.DataFrame:
    """The differences of two passes over one window ``tokens`` (1, T), one row per position, in fp64.

    ``error`` is the squared relative error of the final hidden state; ``kl`` the Kullback-Leibler divergence of the
    next-token distribution from the exact one, in nats; ``logprob`` the squared change of the log probability of the
    text's next token, missing at the last position; ``changed`` is 1 where the most probable next token differs.
    """
    final, reference = moved[0][0].double(), exact[0][0].double()
    apart = (final - reference).square().sum(-1) / reference.square().sum(-1)
    at = by_token(moved[1], exact[1], tokens)
    change = functional.pad((at.logprob - at.exact_logprob).square(), (0, 1), value=torch.nan)
    columns = {"error": apart, "kl": at.kl[0], "logprob": change[0], "changed": at.changed[0].double()}
    return pd.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})


@dataclass(frozen=True)
class ErrorsByToken:
    """Means over realisations of the columns of ``squares``, one row per window and position.

    ``predicted`` is the mean over ``draws`` of errors with random signs. ``measured`` is the mean over ``passes``: the
    one that runs, and others on other grids; None without a reference. ``tokens`` has the windows (T,) by number, and
    ``competitions`` their next tokens.
    """

    tokens: dict[int, Tensor]
    predicted: pd.DataFrame
    measured: pd.DataFrame | None
    competitions: dict[int, Competition]
    draws: int
    passes: int

    @property
    def known(self) -> pd.DataFrame:
        """The measured table, or else the predicted one."""
        return self.predicted if self.measured is None else self.measured

    def summary(self, quantity: str) -> pd.DataFrame:
        """One row per window with finite errors: bulk and tail of ``quantity``, a column of ``squares``.

        ``tokens`` is the number of tokens; ``mean``, ``median`` and ``ninetieth`` (90 % quantile) are over them.
        ``in_tail`` counts the tokens above TAIL times the ``usual`` one, and ``share`` is their share of the sum.
        ``half`` is the least number of tokens that make half of the sum. ``few`` is True if they are few of many, and
        decide the window.
        ``predicted`` and ``predicted_median`` are mean and median of the predictions.
        """
        rows = []
        for (window, own), (_, drawn) in zip(self.known.groupby("window"), self.predicted.groupby("window")):
            values, expected = own[quantity].dropna().to_numpy(), drawn[quantity].dropna()
            if not len(values):  # the pass gave no finite numbers
                continue
            order = np.sort(values)[::-1]
            half = int(np.searchsorted(order.cumsum(), order.sum() / 2)) + 1
            few = bool(values.any()) and half <= max(2, FEW * len(values)) and 4 * half <= len(values)
            above = values[values > TAIL * usual(values)]
            rows.append(
                {"window": window, "mean": values.mean(), "median": np.median(values)}
                | {"ninetieth": np.quantile(values, 0.9), "in_tail": len(above)}
                | {"share": above.sum() / values.sum() if values.sum() else 0.0, "half": half, "tokens": len(values)}
                | {"few": few, "predicted": expected.mean()}
                | {"predicted_median": expected.median()}
            )
        return pd.DataFrame(rows)

    def tail(self, quantity: str, most: int) -> pd.DataFrame:
        """At most ``most`` tokens: those farthest above the ``usual`` one of their window, all above TAIL times it.

        The columns are ``window``, ``position``, ``token``, ``times`` (the usual one), ``value`` and ``predicted``.
        """
        known = self.known.assign(value=self.known[quantity], predicted=self.predicted[quantity])
        known["times"] = known.value / known.groupby("window").value.transform(usual)
        known["token"] = [int(self.tokens[row.window][row.position]) for row in known.itertuples()]
        columns = ["window", "position", "token", "times", "value", "predicted"]
        return known[known.times > TAIL].sort_values("times", ascending=False).head(most)[columns]


def usual(values: Any) -> float:
    """The median of ``values`` (N,) that are not negative; where that is 0, of those above 0, or NaN without any."""
    values = np.asarray(values)
    values = values[np.isfinite(values)]
    if not len(values):
        return np.nan
    return float(np.median(values)) or (float(np.median(values[values > 0])) if values.any() else np.nan)


def errors_by_token(
    low: LowPrecision, realisations: ErrorSamples, windows: Mapping[int, Tensor], draws: int, passes: int
) -> ErrorsByToken:  # fmt: skip
    """Predict and measure the error of ``low`` at each position of the ``windows`` (1, T) by number.

    The prediction is the mean over ``draws``. The measurement is the mean over ``passes`` realisations (``scales``), or
    fewer in a format of few numbers; with 0 passes nothing is measured. Raises the errors of ``ErrorSamples``, and
    ValueError without windows.
    """
    if not windows or draws < 1:
        raise ValueError(f"errors by token need windows and draws, got {len(windows)} and {draws}")
    grids = scales(low.format, passes)[1:] if passes else []
    stored: Callable = realisations.stored.round if realisations.stored else Tensor.float  # as the head stores logits
    predicted, measured, competitions = {}, {}, {}
    config = realisations.adjoint.model.config.get_text_config()
    largest = next(iter(windows.values())).shape[1] * config.vocab_size
    groups = batched(windows.items(), max(1, LOGITS // largest))
    for group in progress([dict(each) for each in groups], desc="errors by token"):

        def run(model: nn.Module, group: dict[int, Tensor] = group) -> dict[int, State]:
            states = {number: hidden_and_logits(model, window) for number, window in group.items()}
            return {number: (final, logits.float()) for number, (final, logits) in states.items()}

        exact = realisations.exact(run)
        moved = [realisations.draw(run) for _ in range(draws)]  # the errors of a weight are the same in all windows
        for number, window in group.items():
            drawn = [(final, stored(logits).float()) for final, logits in (each[number] for each in moved)]
            predicted[number] = mean([squares(each, exact[number], window) for each in drawn])
            logits = [each[number][1] for each in moved]
            competitions[number] = competition(exact[number][1], logits, realisations.stored)
        del moved
        if passes:
            with torch.no_grad(), low.running():
                found = [run(low.model), *(realisations.again(run, scale) for scale in grids)]
            for number, window in group.items():
                measured[number] = mean([squares(each[number], exact[number], window) for each in found])
    tokens = {number: window[0].cpu() for number, window in windows.items()}
    tables = by_window(predicted), by_window(measured) if passes else None
    return ErrorsByToken(tokens, *tables, competitions, draws, len(grids) + bool(passes))


def batched(values: Iterable, size: int) -> Iterator[tuple]:
    """``values`` in tuples of at most ``size`` (``itertools.batched`` of Python 3.12)."""
    values = iter(values)
    while some := tuple(islice(values, size)):
        yield some


def mean(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The mean of tables of the same rows."""
    return sum(tables[1:], tables[0]) / len(tables)


def by_window(tables: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """One table of ``tables`` by window, with the columns ``window`` and ``position``."""
    return pd.concat(tables, names=["window", "position"]).reset_index()
