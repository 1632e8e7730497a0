"""The error by token: what is predicted and measured at each position, and whether a few tokens decide a window.

One pass is one draw of all roundings. Where a few tokens make most of a window's error, its number scatters from draw
to draw, measured or predicted. So both are means over realisations here: predicted are passes whose errors have random
signs, measured are passes that round to nearest on another grid, the first of them the pass that runs
(``adjoint.realisations``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.adjoint import Adjoint
from fragility_core.adjoint.realisations import Realisations, scales
from fragility_core.arithmetic.lowering import LowPrecision
from fragility_core.models.tree import hidden_and_logits
from fragility_lab.running.environment import progress

QUANTITIES = {"hidden": "error", "kl": "kl", "logprob": "logprob", "flips": "changed"}  # columns, by target
CHUNK = 2**23  # logits that are compared at once: 64 MB in fp64
TAIL = 10  # times the median of a window's tokens, from which on a token belongs to the tail
FEW = 0.02  # of the tokens of a window, or the first two, that make half of the error where they decide it

State = tuple[Tensor, Tensor]  # final hidden state (1, T, d_model) and logits (1, T, vocabulary)


def squares(moved: State, exact: State, tokens: Tensor) -> pd.DataFrame:
    """What two passes over one window ``tokens`` (1, T) differ by, one row per position, in fp64.

    ``error`` is the squared relative error of the final hidden state; ``kl`` the Kullback-Leibler divergence of the
    next-token distribution from the exact one, in nats; ``logprob`` the squared change of the log probability of the
    text's next token, missing at the last position; ``changed`` is 1 where the most probable next token differs.
    """
    final, reference = moved[0][0].double(), exact[0][0].double()
    apart = (final - reference).square().sum(-1) / reference.square().sum(-1)
    following = torch.cat([tokens[0, 1:], tokens[0, :1]])[:, None].to(exact[1].device)
    rows = max(1, CHUNK // exact[1].shape[-1])
    parts = [_of_logits(*each) for each in zip(moved[1][0].split(rows), exact[1][0].split(rows), following.split(rows))]
    kl, logprob, changed = (torch.cat(values).cpu().numpy() for values in zip(*parts))
    table = pd.DataFrame({"error": apart.cpu().numpy(), "kl": kl, "logprob": logprob, "changed": changed})
    table.loc[len(table) - 1, "logprob"] = np.nan
    return table


def _of_logits(moved: Tensor, exact: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL, squared change of the log probability of the token ``following`` (T, 1), and changed choices, each (T,)."""
    p, q = (torch.log_softmax(z.double(), -1) for z in (exact, moved))
    change = (q - p).gather(-1, following)[:, 0]
    return (p.exp() * (p - q)).sum(-1), change.square(), (exact.argmax(-1) != moved.argmax(-1)).double()


@dataclass(frozen=True)
class ErrorsByToken:
    """Means over realisations of the columns of ``squares``, one row per window and position.

    ``predicted`` are those of ``draws`` errors of random signs, ``measured`` of ``passes`` on other grids, ``once`` of
    the one pass that runs; the last two are None without a reference. ``tokens`` (B, T) are the windows' own.
    """

    tokens: Tensor
    predicted: pd.DataFrame
    measured: pd.DataFrame | None
    once: pd.DataFrame | None
    draws: int
    passes: int

    @property
    def known(self) -> pd.DataFrame:
        """The measured table, or else the predicted one."""
        return self.predicted if self.measured is None else self.measured

    def summary(self, quantity: str) -> pd.DataFrame:
        """One row per window: bulk and tail of ``quantity``, a column of ``squares``.

        ``mean``, ``median`` and ``ninetieth`` are those of the tokens; ``in_tail`` counts tokens above TAIL times
        the median, and ``share`` is their share of the sum; ``half`` is the least number of tokens that make half of it,
        and ``few`` says whether so few decide the window. ``predicted`` and ``predicted_median`` are the predictions.
        """
        rows = []
        for (window, own), (_, drawn) in zip(self.known.groupby("window"), self.predicted.groupby("window")):
            values, expected = own[quantity].dropna().to_numpy(), drawn[quantity].dropna()
            order = np.sort(values)[::-1]
            half = int(np.searchsorted(order.cumsum(), order.sum() / 2)) + 1
            above = values[values > TAIL * np.median(values)]
            rows.append(
                {"window": window, "mean": values.mean(), "median": np.median(values)}
                | {"ninetieth": np.quantile(values, 0.9), "in_tail": len(above)}
                | {"share": above.sum() / values.sum() if values.sum() else 0.0, "half": half}
                | {"few": half <= max(2, FEW * len(values)), "predicted": expected.mean()}
                | {"predicted_median": expected.median()}
            )
        return pd.DataFrame(rows)

    def tail(self, quantity: str, most: int) -> pd.DataFrame:
        """The ``most`` tokens farthest above the median of their window, among those above TAIL times it.

        The columns are ``window``, ``position``, ``token``, ``times`` (the median), ``value`` and ``predicted``.
        """
        known = self.known.assign(value=self.known[quantity], predicted=self.predicted[quantity])
        known["times"] = known.value / known.groupby("window").value.transform("median")
        known["token"] = self.tokens.flatten().tolist()
        columns = ["window", "position", "token", "times", "value", "predicted"]
        return known[known.times > TAIL].sort_values("times", ascending=False).head(most)[columns]


def errors_by_token(
    low: LowPrecision, model: PreTrainedModel, tokens: Tensor, draws: int, passes: int, referenced: bool = True
) -> ErrorsByToken:  # fmt: skip
    """Predicts and measures the error of ``low`` at each position of the windows ``tokens`` (B, T).

    Predicted is the mean over ``draws``, measured over as many as ``passes`` realisations (``scales``), and only if
    ``referenced``. Raises the errors of ``Realisations``.
    """
    realisations = Realisations(Adjoint(low, model, target="flips", gradients="fp32"))
    grids = scales(low.format, passes) if referenced else []
    predicted, measured, once = [], [], []
    for window in progress(tokens.split(1), desc="errors by token"):

        def run(model: PreTrainedModel, window: Tensor = window) -> State:
            final, logits = hidden_and_logits(model, window)
            return final, logits.float()

        exact = realisations.exact(run)
        predicted.append(mean([squares(realisations.draw(run, head=True), exact, window) for _ in range(draws)]))
        found = [squares(realisations.again(run, scale), exact, window) for scale in grids]
        measured += [mean(found)] if found else []
        once += found[:1]
    return ErrorsByToken(
        tokens.cpu(), by_window(predicted), by_window(measured) if measured else None,
        by_window(once) if once else None, draws, len(grids),
    )  # fmt: skip


def mean(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The mean of tables of the same rows."""
    return sum(tables[1:], tables[0]) / len(tables)


def by_window(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table of ``tables``, one a window, with the columns ``window`` and ``position``."""
    return pd.concat([*tables], keys=range(len(tables)), names=["window", "position"]).reset_index()
