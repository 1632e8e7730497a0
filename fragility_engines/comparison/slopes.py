"""One test for each suspect: does the gap lie along what the suspect does to the tokens?

Rounding scatters over the tokens without regard to what a suspect would do to each of them. So a slope along that
direction is known far more accurately than a root mean square, and shows changes below the noise of rounding.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.models.paths import block_of, block_paths
from fragility_engines.comparison.gap import LESS, MORE, Gap
from fragility_engines.comparison.signs import begin_rows
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.catalogue import PLACE, places
from fragility_engines.suspects.numbers import Number, numbers
from fragility_engines.suspects.rotary import cut
from fragility_engines.suspects.sampling import penalties, sampling, shards
from fragility_engines.suspects.stale import Checkpoint
from fragility_engines.suspects.structure import around, in_one_block, runs, structure
from fragility_engines.suspects.suspect import Suspect, Window, read, scores
from fragility_engines.suspects.windows import packed
from fragility_lab.running.environment import progress

Directed = Callable[[Gap, Suspect], np.ndarray]  # the direction of a suspect over the tokens of a gap

FEWEST = 4  # tokens of which a slope is known
CHUNK = 32  # tokens of a sequence whose errors may depend on each other
CHANCE = 1e-6  # that rounding gives a slope which counts as certain: some twenty suspects are tested
DOUBT = 1e-3  # that rounding alone keeps a setting, which the engine has, below half of its size
EXPLAINED = 0.5  # share of the gap beyond rounding that a suspect must explain to be named as its cause
ALONG, BLOCKWISE = 0.02, 3  # share of a gap, and suspects at most, that are then tried in each block by itself
OFF = 0.1  # how far from 1 the size of a setting may be that the engine has
INSIDE = 0.3  # the same for a place, a branch: what is wrong in it is only like leaving it out
EXACT = 0.95  # the same for the right logits, read otherwise
SCREENED = 128  # consecutive tokens of each of two sequences, over which suspects are tried first, and places
ALIKE = 0.5  # of the largest excess of such tokens in a sequence: the first that have it are taken
LIKELY = 10  # suspects at most that are tried over both; the others over the first of them alone
BEST = 3  # suspects that are then tested over all tokens


@dataclass(frozen=True)
class Slope:
    """The part of a gap that lies along the direction of one ``suspect``.

    ``size`` is 1 if the engine does what the suspect does, and 0 if it does not. An emulated pass, which has the same
    rounded weights, is subtracted first. ``error`` is the standard error of ``size``, from ``units`` chunks of tokens.
    ``share`` is the share of the squared gap that vanishes if this size along the direction is subtracted. ``whole`` is
    the RMS of the gap over the RMS of the direction and the predicted rounding together. Between ``two`` engines the
    size is -1 if the reference does what the suspect does; ``owner`` names the engine that does. If only some tokens
    are compared, ``where`` says in words which.
    """

    suspect: Suspect
    size: float
    error: float
    share: float
    units: int
    two: bool = False
    owner: str = ""
    whole: float = np.nan
    where: str = ""

    @property
    def least(self) -> float:
        """The size from which on the suspect would be noticed, by Student's distribution; infinite for one unit."""
        return float(stats.t.isf(CHANCE, self.units - 1)) * self.error if self.units > 1 else np.inf

    @property
    def certain(self) -> bool:
        """True if the slope is not rounding."""
        return abs(self.size) > self.least and self.share > 0

    @property
    def as_tested(self) -> bool:
        """True if the engine may do what the suspect does: a setting needs size 1, nearly, and a number any size.

        For a suspect that rounds, the engine may draw other roundings: the slope is then small, while the whole gap is
        as large as predicted. Places are tried only if the gap is more than rounding, so each of them may be the cause.
        """
        size = abs(self.size) if self.two else self.size
        if self.suspect.rounds:
            return self.certain and size > 0 and LESS < self.whole < MORE
        return self.suspect.place or (self.certain and (self.suspect.slope or 0.5 < size < 1.5))

    @property
    def full(self) -> bool:
        """True if a setting has size 1 up to its error, so that the engine does it, and not only something like it."""
        free = self.suspect.slope or self.suspect.place or self.suspect.rounds or self.suspect.in_log
        return free or abs(abs(self.size) - 1) < max(OFF, 3 * self.error)

    def undecided(self, times: float) -> bool:
        """True if ``times`` as many tokens may make this slope certain; for places always."""
        if self.suspect.place:
            return True
        units = int(self.units * times)
        if units < 2 or not self.share > 0:
            return False
        least = float(stats.t.isf(CHANCE, units - 1)) * self.error / times**0.5
        doubt = float(stats.t.isf(DOUBT, max(self.units - 1, 1))) * self.error
        if self.units > 1 and not self.suspect.rounds and abs(self.size) + doubt < 0.5:
            return False  # the engine does not do it
        return least < (self.size + self.error if self.suspect.rounds else 1.5)

    @property
    def needed(self) -> float:
        """The share of the gap beyond rounding that this suspect must explain to be named as its cause."""
        if self.suspect.same_pass and not self.suspect.slope:  # nothing but rounding stays
            return EXACT
        if self.suspect.rounds:  # its size says the rest
            return 0.0
        return INSIDE if self.suspect.place else EXPLAINED


def slope_of(change: np.ndarray, direction: np.ndarray, chunks: np.ndarray) -> tuple[float, float]:
    """The slope of ``change`` along ``direction`` through 0, and its squared standard error, with ``chunks`` as units.

    All are (N,), and ``chunks`` are small integers. The error is that of White (1980, doi:10.2307/1912934), for sums
    over chunks.
    """
    norm = (direction**2).sum()
    slope = (change * direction).sum() / norm
    sums = np.bincount(chunks, (change - slope * direction) * direction)
    return float(slope), float((sums**2).sum() / norm**2)


class Directions:
    """Changes of the log-probabilities of ``sequences`` in fp32 by the suspects ``tried``; each pass is run once.

    A suspect that only reads the ``model``'s logits in another way needs no pass of its own if ``see`` gets the logits.
    If there is an ``other`` checkpoint, the engine may have loaded weights from it.
    """

    def __init__(
        self, model: PreTrainedModel, sequences: Sequence[Scored], tried: Sequence[Suspect] = (),
        other: Checkpoint | None = None,
    ):  # fmt: skip
        self.model, self.sequences, self.other = model, sequences, other
        self.tried = [*tried, *(other.suspects() if other else ())]
        self.scores: dict[tuple[Suspect, int], np.ndarray] = {}
        self._made: dict[Hashable, list[Suspect]] = {}

    def made(self, key: Hashable, make: Callable[[], Iterable[Suspect]]) -> list[Suspect]:
        """What ``make`` gives when the ``key`` is first asked for: the like, made again, would be run again."""
        if key not in self._made:
            self._made[key] = [*make()]
        return self._made[key]

    @cached_property
    def structure(self) -> list[Suspect]:
        """The suspects of what all blocks have in common, and of what sampling does to logits."""
        return [*structure(self.model), *sampling(), *shards()]

    def packed(self, gap: Gap) -> list[Suspect]:
        """The suspects of packed rows, in which sequences see those before them; ``gap`` tells where rows begin."""
        return packed(self.model, [len(each.tokens) for each in self.sequences], begin_rows(gap))

    def in_one_block(self, found: Sequence[Slope]) -> list[Suspect]:
        """The suspects of single blocks, of kinds that in all blocks explain a part of the gap, by slopes ``found``."""
        along = [each.suspect.name for each in found if each.certain and each.share > ALONG][:BLOCKWISE]
        every = partial(in_one_block, self.model)
        made = (self.made((path, *along), partial(every, path, along)) for path in block_paths(self.model))
        return [*chain.from_iterable(made)]

    def around(self, found: Sequence[Slope], rank: int = 0) -> list[Suspect]:
        """The suspects of one block: the block whose place in ``found`` explains most, or the next ones by ``rank``."""
        places = [each.suspect.name.removeprefix(PLACE) for each in ranked(found) if each.suspect.place]
        blocks = dict.fromkeys(block[0] for place in places if (block := block_of(place)))
        made = (self.made(("around", path), partial(around, self.model, path)) for path in [*blocks][rank : rank + 1])
        return [*chain.from_iterable(made)]

    @cached_property
    def runs(self) -> list[Suspect]:
        """The suspects of whole blocks."""
        return [*runs(self.model)]

    @cached_property
    def places(self) -> list[Suspect]:
        """The suspects of one place in the model."""
        return places(self.model)

    @cached_property
    def numbers(self) -> list[Number]:
        """The numbers of the model whose value may be fitted."""
        found = numbers(self.model, max(len(each.tokens) for each in self.sequences))
        return [*([self.other.difference] if self.other else []), *found, *penalties()]

    def see(self, number: int, z: Tensor, norm: Tensor) -> None:
        """Read the logits ``z`` (T, V) of a sequence, whose ``log_sum`` is ``norm`` (T,)."""
        tokens = torch.from_numpy(self.sequences[number].tokens)
        for suspect in self.tried:
            if suspect.same_pass:
                self.scores[suspect, number] = read(z, tokens, suspect, norm).cpu().numpy()

    def __call__(self, gap: Gap, suspect: Suspect) -> np.ndarray:
        """The change of each token of ``gap`` (N,) by ``suspect``; NaN where it scores none."""
        positions = gap.tokens.groupby("sequence", sort=False).position
        self.run(suspect, positions.max())
        found = [self.scores[suspect, number][own.to_numpy() - 1] for number, own in positions]
        return np.concatenate(found) - gap.tokens.fp32.to_numpy()

    def run(self, suspect: Suspect, lengths: pd.Series) -> None:
        """Store log-probabilities under ``suspect``: at least ``lengths`` of them for each sequence, by its number.

        They begin with the second token. Sequences are ``cut`` behind the last: later tokens change nothing before.
        """
        device, windows = next(self.model.parameters()).device, {}
        for number, last in lengths.items():
            if len(self.scores.get((suspect, number), ())) < last:
                each = self.sequences[number]
                first = int(np.flatnonzero(np.isfinite(each.logprobs[1:]))[0]) + 1
                count = suspect.before[number] if suspect.before else 0
                before = [torch.from_numpy(one.tokens).to(device) for one in self.sequences[number - count : number]]
                tokens = torch.from_numpy(cut(self.model, each.tokens, last + 1)).to(device)
                windows[number] = Window(tokens, first, before)
        for number, found in zip(windows, scores(self.model, [*windows.values()], suspect) if windows else ()):
            self.scores[suspect, number] = found.cpu().numpy()


def slope(gap: Gap, suspect: Suspect, along: np.ndarray) -> Slope:
    """The slope of ``gap`` along the direction (N,) of a ``suspect``.

    Any fault makes probable tokens less probable. This part of the gap, linear in the log-probability, does not tell
    causes apart. It counts only for suspects that read the right logits in another way.
    """
    numbers = gap.tokens[["change", "emulated", "sequence", "position"]].to_numpy(float)  # exact up to 2**53
    known, square = np.isfinite(along), float((numbers[:, 0] ** 2).sum())
    (change, emulated, sequence, position), along = numbers[known].T, along[known]
    if len(along) < FEWEST:  # a line and a slope fit any
        return Slope(suspect, 0.0, np.inf, 0.0, 1, gap.two)
    names, chunks = np.unique(sequence * 10**6 + position // CHUNK, return_inverse=True)
    columns = np.stack([along, change - emulated, change, emulated], 1)
    own, *changes = (columns if suspect.same_pass else beside_line(columns, gap.tokens.fp32.to_numpy()[known])).T
    if not (own.any() and square):
        return Slope(suspect, 0.0, np.inf, 0.0, 1, gap.two)
    (size, error), *apart = (slope_of(each, own, chunks) for each in changes)
    # An emulated pass like the engine leaves next to nothing: such a difference is not so sure as it looks.
    error = max(error, sum(each for _, each in apart) / 4)
    if "router" in gap.sites:  # a token at a tie goes to other experts, by rounding and by a suspect alike
        heavy = chunks == np.bincount(chunks, own**2).argmax()
        rest, doubt = slope_of(changes[0][~heavy], own[~heavy], chunks[~heavy]) if own[~heavy].any() else (0.0, 0.0)
        error = max(error, doubt, (size - rest) ** 2 / 4)
    explained = float((change**2).sum() - ((change - size * along) ** 2).sum())
    whole = ((change**2).mean() / ((along**2).mean() + gap.predicted**2)) ** 0.5
    return Slope(suspect, size, error**0.5, explained / square, len(names), gap.two, whole=whole)


def beside_line(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The columns of ``values`` (N, K) less their best lines in ``at`` (N,)."""
    line = np.stack([np.ones(len(at)), at], 1)
    return values - line @ np.linalg.lstsq(line, values, rcond=None)[0]


def slopes(gap: Gap, tried: Iterable[Suspect], directed: Directed) -> list[Slope]:
    """The ``slope`` of every suspect that is ``tried``, those that explain most first."""
    bar = progress([*tried], desc="trying suspects", leave=False, disable=None)  # in a terminal alone
    return ranked(slope(gap, suspect, directed(gap, suspect)) for suspect in bar)


def ranked(found: Iterable[Slope]) -> list[Slope]:
    """Slopes ``found``, sorted: slopes that may be the cause come first, then those that explain more of the gap."""
    return sorted(found, key=lambda each: (each.as_tested, each.share), reverse=True)


def owned(gap: Gap, found: Slope, along: np.ndarray, names: Sequence[str]) -> Slope:
    """``found`` with its owner, the one of the two engines with these ``names`` that does what the suspect does.

    The owner is the engine whose own gap from the fp32 model goes with the direction (N,) ``along``: at full size for a
    setting, and more than the other engine's gap for a number or a place. If the owner does the opposite of a setting,
    the suspect explains nothing.
    """
    if found.suspect.in_log:  # the numbers of the log themselves were rounded
        return replace(found, owner=names[int(found.size < 0)])
    sides = [slope(side, found.suspect, along) for side in gap.sides]
    whole = [side.as_tested and side.certain for side in sides]
    if found.suspect.slope or found.suspect.place:
        return replace(found, owner=names[int(abs(sides[1].size) > abs(sides[0].size))])
    owner = int(whole[1] if whole[0] != whole[1] else abs(sides[1].size) > abs(sides[0].size))
    if owner != int(found.size < 0):  # that engine does the opposite, such as an adapter merged twice
        return replace(found, share=0.0)
    return replace(found, owner=names[owner])


def screened(gap: Gap) -> Gap:
    """SCREENED tokens of each of the two sequences whose observed square is largest beside the predicted one.

    There are further sequences until they have two CHUNKs of tokens. A window of attention or the scaling of RoPE
    may leave the first tokens as they are. So the tokens are the first that follow each other and have ALIKE of the
    largest excess in their sequence.
    """
    excess = (gap.known.observed / gap.known.predicted).sort_values(ascending=False)
    chosen = gap.known.loc[excess.index]
    count = max(2, int((chosen.tokens.cumsum() < 2 * CHUNK).sum()) + 1)
    rows = gap.only([int(number) for number in chosen.sequence[:count]]).tokens.groupby("sequence")
    return replace(gap, tokens=pd.concat([largest(own, gap.predicted) for _, own in rows]))


def largest(rows: pd.DataFrame, predicted: float) -> pd.DataFrame:
    """The tokens of ``screened`` among the ``rows`` of one sequence; ``predicted`` is an RMS change."""
    blocks = [own for _, own in rows.groupby((rows.position - rows.position.min()) // SCREENED)]
    blocks = [own for own in blocks if len(own) >= CHUNK] or blocks[:1]
    excess = [(own.change**2).mean() / ((own.rounding**2).mean() + predicted**2) for own in blocks]
    return blocks[int(np.argmax(np.array(excess) >= ALIKE * max(excess)))]


def likely(gap: Gap, part: Gap, tried: Sequence[Suspect], directed: Directed) -> list[Slope]:
    """The slopes over ``part`` of the LIKELY suspects that explain most of its sequence with the largest gap.

    If sequences are shorter than CHUNK tokens, several are taken. Suspects that stay undecided even with all tokens of
    ``gap`` are left out.
    """
    first = part.only(part.loudest)
    times = len(gap.tokens) / len(first.tokens)
    some = [each.suspect for each in slopes(first, tried, directed) if each.undecided(times)]
    return slopes(part, some[:LIKELY], directed)


def tested(gap: Gap, part: Gap, tried: Sequence[Suspect], directed: Directed) -> list[Slope]:
    """The slopes of ``likely`` suspects; over all tokens of ``gap`` those of BEST that these could decide."""
    some = likely(gap, part, tried, directed)
    best = [each for each in some if each.undecided(len(gap.tokens) / len(part.tokens))][:BEST]
    return [*slopes(gap, [each.suspect for each in best], directed), *(each for each in some if each not in best)]
