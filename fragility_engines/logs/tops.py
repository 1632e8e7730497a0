"""Results from the most probable tokens of each position: a bound on KL, and changes of the most probable token."""

from collections.abc import Sequence

import numpy as np

from fragility_engines.logs.sequences import Scored

LEAST = 1e-6  # probability of all other tokens together, at least: below it log-probabilities are rounded too much
NONE = -1  # in the place of a token


def table(sequence: Scored) -> tuple[np.ndarray, np.ndarray]:
    """The most probable tokens of a ``sequence`` from its second position on, and their log-probabilities.

    Both are (T - 1, K), filled up with NONE and NaN. K is 0 if the log has none.
    """
    entries = [entry or {} for entry in sequence.tops[1:]] or [{}] * (len(sequence.tokens) - 1)
    width = max(map(len, entries))
    tokens, values = np.full((len(entries), width), NONE), np.full((len(entries), width), np.nan)
    for at, entry in enumerate(entries):
        tokens[at, : len(entry)], values[at, : len(entry)] = [*entry], [*entry.values()]
    return tokens, values


def aligned(tokens: np.ndarray, others: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The ``values`` (N, L) of the tokens ``others`` (N, L), at the places of ``tokens`` (N, K); NaN where missing."""
    found = np.full(tokens.shape, np.nan)
    for column, value in zip(others.T, values.T):
        same = (tokens == column[:, None]) & (tokens != NONE)
        found = np.where(same, value[:, None], found)
    return found


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) by position (N,), in nats, of log-probabilities (N, K) of the same tokens, all others taken together.

    Tokens that are NaN in one count among the others. Putting tokens together can only make KL smaller, so this is a
    lower bound. NaN where no token is known.
    """
    known = np.isfinite(p) & np.isfinite(q)
    p, q = np.where(known, p, -np.inf), np.where(known, q, -np.inf)
    rest_p, rest_q = (np.maximum(1 - np.exp(x).sum(1), LEAST) for x in (p, q))
    inside = np.where(known, np.exp(p) * (np.where(known, p, 0.0) - np.where(known, q, 0.0)), 0.0).sum(1)
    return np.where(known.any(1), inside + rest_p * np.log(rest_p / rest_q), np.nan)


def most_probable(tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The most probable of the ``tokens`` by ``values``, both (N, K), at each position (N,); NONE without one."""
    if not tokens.shape[1]:
        return np.full(len(tokens), NONE)
    best = np.where(np.isfinite(values), values, -np.inf).argmax(1)
    return np.take_along_axis(tokens, best[:, None], 1)[:, 0]


def differs(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> np.ndarray:
    """1.0 at positions where the most probable tokens differ, 0.0 where not, and NaN where one is NONE."""
    one, other = np.asarray(one), np.asarray(other)
    return np.where((one == NONE) | (other == NONE), np.nan, (one != other).astype(float))
