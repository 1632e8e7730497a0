"""The verdict on a gap, in a line, and what its excess looks like."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fragility_engines.comparison.fitting import SURE, fitted
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.slopes import BEST, Directions, Slope, likely, ranked, screened, slopes

# Observed over predicted RMS. Harmless variations of kernels, and the prediction's own error, stay within these.
MORE, LESS = 1.25, 0.8
SHOWN = 8  # sequences in the line
START, END = 16, 64  # tokens at the beginning and at the end of sequences
GAIN = 1.0  # nats a token: no number that is a little off makes a text so much more probable
FEW = 0.02  # of the tokens make half of the square
CLEAR = 0.8  # share beside SURE for a number, whose slope bends, and for one place among many

KINDS = {
    "rounding": "rounding explains it",
    "more": "more than rounding",
    "less": "less than this recipe must give",
    "few": "too few tokens to say",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of ``kind``, one of KINDS; ``cause`` is the suspect that explains the gap, if one does.

    ``needed`` is the number of sequences of this length that would decide; it is known only for the kind "few". ``far``
    are the sequences that are more than rounding by themselves, where others are not. ``fused`` is the ratio beside the
    prediction for fused attention, where rounding explains the gap if attention is eager alone.
    """

    kind: str
    ratio: tuple[float, float, float]
    cause: Slope | None = None
    needed: int | None = None
    far: Sequence[int] = ()
    fused: tuple[float, float, float] | None = None

    @property
    def beyond(self) -> float:
        """The share of the squared gap that rounding does not explain."""
        return 1 - 1 / max(self.ratio[0], 1.0) ** 2

    @property
    def title(self) -> str:
        """The kind in words, with the condition under which it holds."""
        return KINDS[self.kind] + " if the engine's attention is eager" * (self.fused is not None)

    @property
    def line(self) -> str:
        """The verdict in a line."""
        value, low, high = self.ratio
        interval = "one sequence, no interval" if np.isnan(low) else f"95 %: {low:.2f} to {high:.2f}"
        text = f"{self.title}: the gap is {value:.2f} times the predicted one ({interval})"
        if self.fused is not None:
            text += (
                f"; it is {self.fused[0]:.2f} times that of fused attention, which keeps scores and probabilities wider"
            )
        if self.kind == "few":
            text += f"; about {self.needed} sequences of this length would decide" if self.needed else ""
        if self.far:
            text += f"; more than rounding by itself: sequence {', '.join(map(str, self.far))} of the log, from 0"
        if self.kind == "less":
            text += "; something runs in a wider format than the recipe says"
        if self.cause is not None:
            suspect = self.cause.suspect
            name = suspect.name[0].upper() + suspect.name[1:] + f" in {self.cause.owner}" * bool(self.cause.owner)
            text += f". {name} explains {self.cause.share:.0%} of it: look at {suspect.mend}"
        return text


def judge(gap: Gap, found: Sequence[Slope] = ()) -> Verdict:
    """The verdict on ``gap``, with the slopes ``found`` of suspects, those that explain most first.

    A suspect that is certain makes a gap more than rounding, however small the gap is.
    """
    value, low, high = ratio = gap.ratio
    beyond, gains = Verdict("more", ratio).beyond, gap.tokens.change.mean() > GAIN
    named = [each for each in found if each.as_tested and each.share > each.needed * beyond]
    named = [each for each in named if not (each.suspect.slope and gains)]
    cause = max(named, key=lambda each: each.share, default=None)
    if low > MORE or cause is not None or gap.far:
        return Verdict("more", ratio, cause, far=() if low > MORE else gap.far[:SHOWN])
    if high < LESS:
        return Verdict("less", ratio)
    if np.isnan(low):
        return Verdict("few", ratio, needed=4)
    if (value <= MORE and high < MORE**2) and (value >= LESS and low > LESS**2):
        return Verdict("rounding", ratio)
    limit = MORE if value > MORE or high >= MORE**2 else LESS
    distance = max(abs(value - limit), 0.05 * limit)
    return Verdict("few", ratio, needed=int(np.ceil(len(gap.known) * ((high - low) / 2 / distance) ** 2)) + 1)


def patterns(gap: Gap) -> dict[str, float]:
    """Numbers that tell kinds of excess apart, in units of the predicted RMS unless said otherwise.

    ``start`` and ``end`` are the RMS over the first START and the last END scored tokens of the sequences; ``mean`` is
    the mean change; ``gain`` the same in nats; ``few`` the share of tokens that make half of the square; ``largest``
    the share of the square that one sequence makes, relative to an equal share.
    """
    tokens, unit = gap.tokens, gap.predicted
    by = tokens.groupby("sequence")
    squares = np.sort(tokens.change.to_numpy() ** 2)[::-1]
    half = int(np.searchsorted(squares.cumsum(), squares.sum() / 2)) + 1
    sums = by.change.apply(lambda x: (x**2).mean())

    def rms(rows) -> float:
        return float((rows.change**2).mean() ** 0.5 / unit)

    return {
        "start": rms(by.head(START)), "end": rms(by.tail(END)), "mean": float(tokens.change.mean() / unit),
        "gain": float(tokens.change.mean()), "few": half / len(squares),
        "largest": float(sums.max() / sums.mean()) if squares.any() else 1.0,
    }  # fmt: skip


def described(found: dict[str, float]) -> list[str]:
    """What ``patterns`` point to, in words; empty where they point to nothing."""
    texts = []
    if found["start"] > 2 * found["end"]:
        texts.append("The change is largest at the start of sequences: BOS, padding, or the template.")
    if found["end"] > 1.5 * found["start"] and found["end"] > MORE:
        texts.append("The change grows with the position: RoPE, a window of attention, or the cache.")
    if found["gain"] > GAIN:
        text = (
            f"The engine finds the tokens more probable than what it is held against, by {found['gain']:.2g} nats each"
        )
        texts.append(f"{text}: the log has other tokens than those that were scored, or this is another model.")
    elif abs(found["mean"]) > 0.5 and abs(found["mean"]) > 0.2 * max(found["start"], found["end"]):
        texts.append("All log-probabilities move the same way: a temperature, scale or softcap, or worse weights.")
    if found["few"] < FEW:
        share = f"{found['few']:.1%} of the tokens"
        texts.append(f"{share} make half of the square: routing, near-ties, or an attention sink.")
    if found["largest"] > 3:
        texts.append("One sequence has most of the change: another template, or a truncation.")
    return texts


def search(gap: Gap, directed: Directions) -> tuple[list[Slope], list[Slope]]:
    """The slopes of the suspects of ``directed``; and if none explains most of a gap beyond rounding, of further ones.

    Suspects that change a number a little may be below the noise, and are tested over all tokens of ``gap``, as are
    those that need no pass. Of the others only the BEST over its ``screened`` part that all tokens could decide are, as
    what they do is either there or not. Where none explains SURE of the rest, numbers are fitted; and where these do
    not explain CLEAR of it, places are tried over the part.
    """
    part = screened(gap)
    whole = [suspect for suspect in directed.tried if suspect.slope or suspect.same_pass]
    some = likely(gap, part, [suspect for suspect in directed.tried if suspect not in whole], directed)
    times = len(gap.tokens) / len(part.tokens)
    best = [each for each in some if each.undecided(times)][:BEST]
    decided = [each for each in some if each not in best]
    found = ranked([*slopes(gap, [*whole, *(each.suspect for each in best)], directed), *decided])
    further: list[Slope] = []
    if unexplained(gap, found, SURE):
        further = fitted(gap, part, directed)
    if unexplained(gap, [*found, *further], CLEAR):
        further += likely(part, part, directed.places, directed)
    return found, ranked(further)


def unexplained(gap: Gap, found: Sequence[Slope], share: float) -> bool:
    """True if ``gap`` is more than rounding, and no suspect that was ``found`` explains this ``share`` of the rest.

    Another temperature is exact at its size, as it reads the same logits: it needs CLEAR alone.
    """
    verdict = judge(gap, found)
    if verdict.kind != "more" or verdict.cause is None:
        return verdict.kind == "more"
    least = min(share, CLEAR) if verdict.cause.suspect.same_pass else share
    return verdict.cause.share <= least * verdict.beyond
