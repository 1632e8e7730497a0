"""The verdict on a gap, in a line, and the search for its cause."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy import stats

from fragility_engines.comparison.fitting import fitted, heated
from fragility_engines.comparison.gap import ENOUGH, LESS, MORE, SURE, Gap, beyond, left, pooled
from fragility_engines.comparison.grid import grids
from fragility_engines.comparison.scoring import scored
from fragility_engines.comparison.signs import GAIN, LOUD, begins
from fragility_engines.comparison.slopes import Directions, Slope, likely, ranked, screened, slope, slopes, tested
from fragility_engines.suspects.catalogue import TEMPERED
from fragility_engines.suspects.recipes import recipes

SHOWN = 8  # sequences in the line
LARGER = 1.1  # times the predicted change: a recipe that adds half of what rounding does gives 1.12
SAME = 1e-5  # times the predicted change: no engine that rounds is so near
APPOSED = re.compile(r"(, \S+ times its own)\b")  # a number beside a name
CODE = re.compile(r"\w+[_.]|\w+ of all blocks")  # a name in the model, which has its own case
BETWEEN_COMMAS = r"\1,"
ALIKE = 1.05  # times what the cause leaves of a gap: another that leaves less is as good
WHOLE = 0.955  # share for a way to read logits: a temperature has 0.95 of what a softcap does
STAYS = 3.0  # times the predicted change: a cause that leaves more of a gap is not all of it, whatever its share
HUGE, AGREES = 20.0, 2.0  # times the predicted change: no rounding, where the emulated pass has less than the second
PLACED = 64  # tokens: over fewer the best of many places explains much by chance
NEAR = 3  # blocks whose own mistakes are tried, those of the likeliest places: the first may only be like another one
CLEAR = 0.8  # share beside SURE for a number, whose slope bends, and for one place; less is only like the gap

KINDS = {
    "rounding": "rounding explains it",
    "more": "more than rounding",
    "less": "less than this recipe must give",
    "few": "too few tokens to say",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of ``kind``, one of KINDS; ``cause`` is the suspect that explains the gap, if one does.

    ``alike`` is the name of another suspect that explains as much. ``needed`` is the number of sequences of this length
    that would decide; it is known only for the kind "few". ``far`` are the sequences that are more than rounding by
    themselves, while others are not. ``fused`` is the ratio to the prediction for fused attention, if rounding explains
    the gap only with eager attention. If the prediction fails, ``emulated`` is the ratio of an emulated pass to it, and
    other ratios are to the emulated pass. ``unchanged`` counts the sequences without any change.
    """

    kind: str
    ratio: tuple[float, float, float]
    cause: Slope | None = None
    needed: int | None = None
    alike: str = ""
    far: Sequence[int] = ()
    fused: tuple[float, float, float] | None = None
    emulated: float | None = None
    unchanged: int = 0

    @property
    def partial(self) -> bool:
        """True if the cause leaves more than rounding: the engine does something similar, or something else as well."""
        cause = self.cause
        if cause is None or cause.suspect.in_log or cause.suspect.rounds or cause.where:
            return False
        stays = left(self.ratio[0], cause.share)
        return not cause.full or stays > STAYS or (stays > MORE and cause.share < CLEAR * beyond(self.ratio[0]))

    @property
    def title(self) -> str:
        """The kind in words, with the condition under which it holds."""
        return KINDS[self.kind] + " if the engine's attention is eager" * (self.fused is not None)

    @property
    def line(self) -> str:
        """The verdict in a line."""
        value, low, high = self.ratio
        interval = "one sequence, no interval" if np.isnan(low) else f"95 %: {low:.2f} to {high:.2f}"
        beside = "the predicted one" if self.emulated is None else "that of an emulated pass"
        text = f"{self.title}: the gap is {value:.2f} times {beside} ({interval})"
        if self.emulated is not None:
            text += f"; the prediction fails here, as that pass is {self.emulated:.2f} times the predicted one"
        if self.fused is not None:
            text += (
                f"; it is {self.fused[0]:.2f} times that of fused attention, which keeps scores and probabilities wider"
            )
        if self.kind == "few":
            text += f"; about {self.needed} sequences of this length would decide" if self.needed else ""
        if self.far:
            which = f"sequence{'s' * (len(self.far) > 1)} {' and '.join(map(str, self.far))} (counted from 0)"
            text += f"; more than rounding by itself: {which}"
        if self.unchanged:
            text += f"; no number differs in {self.unchanged} of the sequences, which do not count"
        if self.kind == "less" and value > SAME:
            text += "; something runs in a wider format than the recipe says"
        elif self.kind == "less":
            text += "; no number differs: it is the same engine or log, or it computes in fp32"
        return text + self.named

    @property
    def named(self) -> str:
        """The end of the line, which names the cause; empty where there is none."""
        if self.cause is None:
            return ""
        suspect, share = self.cause.suspect, f"{self.cause.share:.0%}"
        name = suspect.name + f" in {self.cause.owner}" * bool(self.cause.owner)
        begins = f". {name[0] if CODE.match(name) else name[0].upper()}{APPOSED.sub(BETWEEN_COMMAS, name)[1:]}"
        if self.partial:
            text = f". No suspect explains all of it. Most like it, with {share}, is {name}"
        elif suspect.rounds:
            text = f". It looks like {name}, which must give {1 / self.cause.whole:.2f} times this gap; "
            text += f"{share} of the gap follow that recipe's own rounding"
        elif suspect.in_log:
            text = f"{begins} is seen in its numbers, and alone explains {share} of it"
        else:
            text = f"{begins} explains {share} of it" + f" {self.cause.where}" * bool(self.cause.where)
        if self.alike and not self.partial:
            text += f", and so does {self.alike}"
        return f"{text}: look at {suspect.mend}"


def judge(gap: Gap, found: Sequence[Slope] = ()) -> Verdict:
    """The verdict on ``gap``, with the slopes ``found`` of suspects, those that explain most first.

    A suspect that is certain makes a gap more than rounding, however small the gap is. Raises ValueError for a gap that
    is not finite.
    """
    if not np.isfinite(gap.tokens.change).all():
        raise ValueError("log-probabilities must be finite, got NaN or infinities: leave these tokens out")
    verdict = judged(gap, found)
    verdict = replace(verdict, unchanged=gap.unchanged if gap.unchanged < len(gap.known) else 0)
    return replace(verdict, emulated=gap.emulated_ratio[0]) if gap.fails else verdict


def judged(gap: Gap, found: Sequence[Slope]) -> Verdict:
    """The verdict of ``judge``, without the field ``emulated``, which tells whether the prediction fails."""
    value, low, high = ratio = gap.ratio
    rest, gains = beyond(value), gap.tokens.change.mean() > GAIN
    named = [each for each in found if each.as_tested and (each.suspect.in_log or each.share > each.needed * rest)]
    named = [each for each in named if not (each.suspect.slope and gains)]
    own = [each for each in found if each.where]
    cause = max([each for each in named if not each.where] or own, key=lambda each: each.share, default=None)
    emulated = gap.emulated_ratio[0]
    alone = low > MORE or (value > HUGE and not gap.fails and emulated < AGREES)
    if "router" in gap.sites and not gap.fails and emulated > MORE:  # changed experts, which no prediction knows of
        alone = alone and gap.beside("emulated")[1] > MORE
    if alone or cause is not None or gap.far:
        far = () if alone else gap.far[:SHOWN]
        return Verdict("more", ratio, cause, far=far, alike=as_good(cause, named))
    if high < LESS:
        return Verdict("less", ratio)
    if np.isnan(low):
        return Verdict("few", ratio, needed=max(4, len(gap.known) + 1, int(4 * ENOUGH / gap.known.tokens.mean())))
    if (value <= MORE and high < MORE**2) and (value >= LESS and low > LESS**2):
        return Verdict("rounding", ratio)
    limit = MORE if value > MORE or high >= MORE**2 else LESS
    distance = max(abs(value - limit), 0.05 * limit)
    # Of many sequences, whose interval is not as wide for the same scatter as that of few (Student).
    half = np.log(high / low) / stats.t.ppf(0.975, max(pooled(gap.known.tokens).max(), 1)) * value
    enough = int(np.ceil(len(gap.known) * (half / distance) ** 2))
    return Verdict("few", ratio, needed=max(enough, len(gap.known)) + 1)


def as_good(cause: Slope | None, named: Sequence[Slope]) -> str:
    """The name of the best suspect in ``named`` that leaves as little of the gap as ``cause``; "" if there is none."""
    if cause is None or cause.suspect.in_log or not cause.full:
        return ""
    most = ALIKE * (1 - cause.share)
    others = [each for each in named if each.full and each is not cause and 1 - each.share < most]
    return max(others, key=lambda each: each.share).suspect.name if others else ""


def search(gap: Gap, directed: Directions) -> tuple[list[Slope], list[Slope]]:
    """The slopes of the suspects of ``directed``; and if none explains most of a gap beyond rounding, of further ones.

    Suspects that change a number a little may be below the noise, and are tested over all tokens of ``gap``, as are
    suspects that need no pass. Of the others only the best over the ``screened`` part are tested over all tokens. A
    temperature that explains some of a gap is fitted. If no suspect explains SURE of the rest, packed rows are tried,
    then what all blocks have in common, then numbers are fitted. If the cause is still missing, or explains less,
    recipes are tried for a gap LARGER than rounding, and the scales of layers for any gap. If these do not explain
    CLEAR of it, whole blocks are tried. Unless a block explains SURE of it, places are tried over the part: leaving out
    a block looks much like leaving out its attention.
    """
    part = screened(gap)
    whole = [suspect for suspect in directed.tried if suspect.slope or suspect.same_pass]
    others = [suspect for suspect in directed.tried if suspect not in whole]
    found = ranked([*grids(gap), *slopes(gap, whole, directed), *tested(gap, part, others, directed)])
    further: list[Slope] = []
    if gap.ratio[0] > MORE and any(hot(each) and each.share > each.needed for each in found):
        further = heated(gap, part, directed)
        if judge(gap, further).cause is not None:  # the exact one replaces slopes along temperature
            found = [each for each in found if not hot(each)]
    if unexplained(gap, [*found, *further], SURE):
        further += slopes(gap, directed.packed(gap), directed)
    if unexplained(gap, [*found, *further], SURE):
        further += tested(gap, part, directed.structure, directed)
    if unexplained(gap, [*found, *further], SURE):
        further += tested(gap, part, directed.in_one_block(further), directed)
    if unexplained(gap, [*found, *further], SURE):
        further += fitted(gap, part, directed)
    if undecided(gap, [*found, *further]) and gap.ratio[0] > LARGER:
        known = directed.made(gap.recipe.name, partial(recipes, directed.model, gap.recipe))
        further += tested(gap, part, known, directed)
    if undecided(gap, [*found, *further]):
        further += scored(gap, directed)
    if judge(gap).kind == "more" and unexplained(gap, [*found, *further], CLEAR):
        further += tested(gap, part, directed.runs, directed)
        if len(part.tokens) >= PLACED and unexplained(gap, [*found, *further], SURE):
            further += likely(part, part, directed.places, directed)
            for rank in range(NEAR):
                if unexplained(gap, [*found, *further], SURE):
                    further += tested(gap, part, directed.around(further, rank), directed)
    if judge(gap, [*found, *further]).cause is None:
        further += first_tokens(gap, directed) or some_sequences(gap, directed)
    return found, ranked(further)


def hot(found: Slope) -> bool:
    """True if the suspect of a slope that was ``found`` is a small change of the temperature."""
    return found.suspect.name == TEMPERED


def first_tokens(gap: Gap, directed: Directions) -> list[Slope]:
    """The slope along another checkpoint over tokens before a position, or from one on, if the engine had it there.

    Empty otherwise. Such an engine got new weights while it ran; the other tokens have keys and values of both.
    """
    if directed.other is None:
        return []
    suspect = next(directed.other.suspects())
    along = directed(gap, suspect)
    rest = replace(gap, tokens=gap.tokens.assign(change=gap.tokens.change - along))
    end, start, position = begins(rest), begins(gap), gap.tokens.position.to_numpy()
    for words, some in ((f"before position {end}", position < end), (f"from position {start} on", position >= start)):
        squares = (gap.tokens[["change", "rounding"]][some] ** 2).sum()
        if some.all() or not some.any() or squares.change < LOUD**2 * squares.rounding:
            continue
        found = slope(replace(gap, tokens=gap.tokens[some]), suspect, along[some])
        if found.as_tested:
            return [replace(found, where=words)]
    return []


def some_sequences(gap: Gap, directed: Directions) -> list[Slope]:
    """The cause of the gap in the sequences of ``gap`` that are more than rounding by themselves, if others are not.

    Empty if no cause is found.
    """
    if not 0 < len(gap.far) < len(gap.known):
        return []
    some = gap.of(gap.far)
    verdict = judge(some, [each for part in search(some, directed) for each in part])
    return [] if verdict.cause is None or verdict.partial else [replace(verdict.cause, where="in these")]


def undecided(gap: Gap, found: Sequence[Slope]) -> bool:
    """True if no suspect in ``found`` is the cause of ``gap``, or if the cause explains less than SURE of the rest."""
    return judge(gap, found).cause is None or unexplained(gap, found, SURE)


def unexplained(gap: Gap, found: Sequence[Slope], share: float) -> bool:
    """True if ``gap`` or a slope is more than rounding, and no slope in ``found`` explains this ``share`` of it.
    Suspects that read the same logits are exact: a linear one, such as a temperature, needs CLEAR, others WHOLE.
    """
    verdict = judge(gap, found)
    if verdict.kind != "more" or verdict.cause is None:
        return verdict.kind == "more" or (verdict.kind == "few" and any(each.certain for each in found))
    if verdict.cause.suspect.same_pass:
        share = min(share, CLEAR) if verdict.cause.suspect.slope else max(share, WHOLE)
    return not verdict.cause.full or verdict.cause.share <= share * beyond(verdict.ratio[0])
