"""Signs of what makes a gap: what its excess looks like, in numbers and in words."""

from dataclasses import replace
from typing import Any

import numpy as np

from fragility_engines.comparison.gap import MORE, Gap

START, END = 16, 64  # tokens at the beginning and at the end of sequences
LOUD = 2.0  # times MORE: a change that begins at a position, or with a token
GAIN = 1.0  # nats a token: no number that is a little off makes a text so much more probable
OTHERS, SHOWN = 0.5, 4  # of the change of a sequence, as that of another one; sentences
CHANCE, FOLLOWS = 4.0, 0.1  # standard errors; of a log that follows the text's tokens, where 1 is all of it
FEW = 0.02  # of the tokens make half of the square


def patterns(gap: Gap) -> dict[str, Any]:
    """Numbers that tell kinds of excess apart, in units of the predicted RMS unless said otherwise.

    ``start`` and ``end`` are the RMS over the first START and the last END scored tokens of the sequences; ``mean`` is
    the mean change; ``gain`` the same in nats; ``few`` the share of tokens that make half of the square; ``largest``
    the share of the square that one sequence makes, relative to an equal share; ``begins`` the position from which on
    the change is more than rounding, where it is none before; 0 where it is not so. ``ends`` is the one from which on
    it is rounding, where it is more before. ``read`` and ``scored`` are the ids
    of a token that ``begins_with`` and ``stands_at`` find, or None. ``rows`` is what ``rows_of_others`` finds,
    and ``number`` what ``stands_for_none`` does.
    """
    tokens, unit = gap.tokens, gap.predicted
    by = tokens.groupby("sequence")
    squares = np.sort(tokens.change.to_numpy() ** 2)[::-1]
    half = int(np.searchsorted(squares.cumsum(), squares.sum() / 2)) + 1
    sums = by.change.apply(lambda x: (x**2).mean())

    def size(rows) -> float:
        return float((rows.change**2).mean() ** 0.5 / unit)

    return {
        "start": size(by.head(START)), "end": size(by.tail(END)), "mean": float(tokens.change.mean() / unit),
        "gain": float(tokens.change.mean()), "few": half / len(squares),
        "largest": float(sums.max() / sums.mean()) if squares.any() else 1.0, "begins": begins(gap),
        "ends": ends(gap),
        "read": begins_with(gap), "scored": stands_at(gap), "rows": rows_of_others(gap),
        "drawn": of_drawn(gap), "number": stands_for_none(gap),
    }  # fmt: skip


def begins(gap: Gap) -> int:
    """The last position before which the change of ``gap`` is rounding, if it is much more from there on; or 0.

    It must be more in most sequences by themselves: one that goes wrong somewhere tells nothing about positions.
    """
    tokens, limit = gap.tokens, MORE**2 * scale_of(gap)
    squares = tokens[["change", "rounding"]].pow(2)
    by = squares.groupby(tokens.position).sum()
    sums = by.cumsum()
    after = by.sum() - sums
    calm = [at for at in by.index[START:-START] if sums.change[at] < limit * sums.rounding[at]]
    loud = [at for at in calm if after.change[at] > LOUD**2 * limit * after.rounding[at]]
    if not loud:
        return 0
    own = squares[tokens.position > loud[-1]].groupby(tokens.sequence).sum()
    most = (own.change > LOUD**2 * limit * own.rounding).mean() > 0.5
    return int(loud[-1]) + 1 if most else 0


def ends(gap: Gap) -> int:
    """The first position from which on the change of ``gap`` is rounding, if it is much more before it; or 0."""
    last = int(gap.tokens.position.max())
    found = begins(replace(gap, tokens=gap.tokens.assign(position=last - gap.tokens.position)))
    return last - found + 1 if found else 0


def described(found: dict[str, Any]) -> list[str]:
    """Sentences on the causes that ``patterns`` point to; empty if they point to none."""
    if found["drawn"] and not found["rows"]:  # another text's log does not follow the tokens either
        text = (
            "The log does not follow the tokens of the text, and has on average what tokens have that the model draws"
        )
        return [f"{text}: these are the log-probabilities of tokens that the engine drew, not of the text's."]
    if found["number"] is not None:  # at single tokens, which tell nothing about positions
        text = f"Most of the square is where the log has {found['number']:g}, at several tokens"
        return [f"{text}: an engine writes it where it scores none, or clamps, so write null there and compare again."]
    texts = []
    if found["ends"]:
        text = f"The change is rounding from position {found['ends']} of the sequences on, and more before it"
        texts.append(f"{text}: there ends a prompt, a chunk of it, or what another process computed.")
    elif found["start"] > 2 * found["end"]:
        texts.append("The change is largest at the start of sequences: BOS, padding, or the template.")
    if found["end"] > 1.5 * found["start"] and found["end"] > MORE:
        texts.append("The change grows with the position: RoPE, a window of attention, or the cache.")
    if found["begins"] and found["read"] is None:
        text = f"The change is rounding up to position {found['begins'] - 1} of the sequences, and more after it"
        texts.append(f"{text}: there ends a prefix or block of the cache, a chunk of the prompt, or a window.")
    if found["read"] is not None:
        text = f"The change is rounding until token {found['read']} is read, and more after it"
        texts.append(f"{text}: look at its row of the embedding, and at added tokens whose rows were not loaded.")
    if found["scored"] is not None:
        text = f"Most of the square is where token {found['scored']} is scored"
        texts.append(f"{text}: look at its row of the head, and at a bias or ban on its logit.")
    if found["gain"] > GAIN:
        text = (
            f"The engine finds the tokens more probable than what it is held against, by {found['gain']:.2g} nats each"
        )
        texts.append(f"{text}: the log has other tokens than those that were scored, or this is another model.")
    elif abs(found["mean"]) > 0.5 and abs(found["mean"]) > 0.2 * max(found["start"], found["end"]):
        texts.append("All log-probabilities move the same way: a temperature, scale or softcap, or worse weights.")
    if found["few"] < FEW and found["scored"] is None:
        share = f"{found['few']:.1%} of the tokens"
        texts.append(f"{share} make half of the square: routing, near-ties, or an attention sink.")
    for one, other in [*found["rows"].items()][:SHOWN]:
        texts.append(
            f"The log-probabilities of sequence {one} (from 0) are those of sequence {other}: look at the order."
        )
    if found["largest"] > 3 and not found["rows"]:
        texts.append("One sequence has most of the change: another template, or a truncation.")
    return texts


def of_drawn(gap: Gap) -> bool:
    """True if the log of ``gap`` is beyond doubt not that of the text's tokens, but may be that of drawn ones.

    It then has minus the entropy on average, wherever the text's tokens are more or less probable than that.
    """
    if gap.two or "expected" not in gap.tokens or len(gap.tokens) < END:
        return False
    tokens = gap.tokens
    log, own = (value - tokens.expected for value in (tokens.exact + tokens.change, tokens.fp32))
    follows = (log * own).sum() / (own**2).sum()
    error = (((log - follows * own) * own) ** 2).sum() ** 0.5 / (own**2).sum()
    return bool(abs(follows) < max(FOLLOWS, CHANCE * error) < 0.5 and abs(log.mean()) < CHANCE * log.sem())


def begin_rows(gap: Gap) -> list[int]:
    """The sequences that may be the first of a packed row: 0, and those whose own change is nearly rounding."""
    calm = gap.known.observed < LOUD**2 * gap.known[["predicted", "emulated"]].max(axis=1)
    return sorted({0, *map(int, gap.known.sequence[calm])})


def rows_of_others(gap: Gap) -> dict[int, int]:
    """Sequences whose log-probabilities are those of another one, as of a batch in another order, and that one."""
    rows = dict([*gap.tokens.groupby("sequence")])
    found = {}
    for number, own in rows.items():
        log = (own.exact + own.change).to_numpy()
        left = {other: rms(log, each.exact.to_numpy()) for other, each in rows.items() if len(each) > START}
        nearest = min(left, key=left.__getitem__, default=number)
        if nearest != number and left[nearest] < OTHERS * left[number]:
            found[number] = nearest
    return found


def rms(one: np.ndarray, other: np.ndarray) -> float:
    """The root mean square difference of the first values that both have."""
    count = min(len(one), len(other))
    return float(((one[:count] - other[:count]) ** 2).mean() ** 0.5)


def begins_with(gap: Gap) -> int | None:
    """The token until which the change of ``gap`` is rounding, if it is much more once the token is read; or None.

    It must be so in each of several sequences, and not at one position of all: the position is another sign. Of such
    tokens it is the one that parts the changes best into small and large ones, as normal ones of two variances.
    """
    tokens = gap.tokens.sort_values(["sequence", "position"], ignore_index=True)
    squares = (tokens[["change", "rounding"]] ** 2).assign(count=1)
    own = squares.groupby(tokens.sequence)
    first = tokens[~tokens.duplicated(["sequence", "token"])]
    behind = (own.transform("sum") - own.cumsum()).loc[first.index]
    after = behind.groupby(first.token).sum()
    before, limit = squares.sum() - after, MORE**2 * scale_of(gap)
    loud = behind.change > LOUD**2 * limit * behind.rounding
    soon = own.cumsum().groupby(tokens.sequence).shift(-START).fillna(own.transform("sum"))
    near = (soon - own.cumsum()).loc[first.index]  # a wrong row is felt at once
    loud &= near.change > LOUD**2 * limit * near.rounding
    told = loud | (behind["count"] < START)
    fits = told.groupby(first.token).all() & (loud.groupby(first.token).sum() > 1) & (before["count"] >= START)
    fits &= (before.change < limit * before.rounding) & (first.groupby("token").position.nunique() > 1)
    parts = (each[fits] for each in (before, after))
    worth = sum(each["count"] * np.log(each.change / each.rounding) for each in parts)
    return int(worth.idxmin()) if fits.any() else None


def stands_at(gap: Gap) -> int | None:
    """The token whose places have most of the squared change of ``gap``, and mostly large changes; None if no token."""
    squares = gap.tokens.change**2
    by = squares.groupby(gap.tokens.token)
    token = by.sum().idxmax()
    own = by.get_group(token)
    limit = LOUD**2 * MORE**2 * gap.predicted**2
    alone = own.median() > limit > squares.drop(own.index).median()
    return int(token) if alone and len(own) > 1 and own.sum() > squares.sum() / 2 else None


def stands_for_none(gap: Gap) -> float | None:
    """The number that stands in the log at several tokens which have most of the squared change of ``gap``, or None."""
    squares, log = gap.tokens.change**2, (gap.tokens.exact + gap.tokens.change).round(6)
    number = squares.groupby(log).sum().idxmax()
    own, limit = squares[log == number], LOUD**2 * MORE**2 * gap.predicted**2
    most = own.sum() > squares.sum() / 2 and own.nlargest(2).min() > limit  # not one token, and a number beside it
    some = gap.tokens.token[own.index].nunique() > 1 and len(own) < len(log) / 2
    return float(number) + 0.0 if most and some else None


def scale_of(gap: Gap) -> float:
    """The square of the prediction over the mean square of the emulated pass; 1 where both agree."""
    return gap.predicted**2 * len(gap.tokens) / (gap.tokens.rounding**2).sum()
