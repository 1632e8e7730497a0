"""Measures a gap: passes in fp32 and in the recipe's numbers, and the prediction, for the tokens of a log."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_adjoint.predictor.targets import Target, get_target
from fragility_core.models.padding import context_length
from fragility_engines.comparison.gap import Gap
from fragility_engines.logs import tops
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.suspect import log_sum, logits
from fragility_lab.running.environment import progress
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe, get_recipe

MANY, SURE = 8, np.log(0.01)  # tokens, and a log-probability: no engine that works has 0 at so many below it
ENOUGH, MOST = 1000, 8  # tokens times probes, and probes: the more tokens, the less probes scatter
ROWS = 32  # of logits whose entropy is taken at once
FINE = 2**-8  # unit roundoff of bf16: slopes at both ends of such errors differ by a few percent, in twice the time
Seen = Callable[[int, Tensor, Tensor], None]  # takes a sequence's number, its logits, and log_sum of them


class AtPositions:
    """The output of the target "logprob" at the positions ``chosen``; 0 is the second token of a window."""

    def __init__(self) -> None:
        self.whole, self.chosen = get_target("logprob"), torch.tensor([0])

    def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return self.whole.output(model, tokens)[:, self.chosen.to(tokens.device)]

    @property
    def target(self) -> Target:
        """The target with this output."""
        return replace(self.whole, output=self)


@dataclass(frozen=True)
class Outputs:
    """Outputs of a pass for the tokens after the first of a window, or for some of them (N,).

    ``logprobs`` (N,) are log-probabilities of the text's tokens, and ``asked`` (N, K) those of other tokens. ``best``
    (N,) are the most probable tokens. ``expected`` (N,) is a drawn token's mean log-probability: minus the entropy.
    """

    logprobs: np.ndarray
    best: np.ndarray
    asked: np.ndarray
    expected: np.ndarray

    def at(self, rows: np.ndarray) -> "Outputs":
        """The outputs at these ``rows`` alone."""
        return Outputs(self.logprobs[rows], self.best[rows], self.asked[rows], self.expected[rows])


@torch.no_grad()
def outputs(
    model: nn.Module, tokens: Tensor, asked: np.ndarray, seen: Callable[[Tensor, Tensor], None] | None = None
) -> Outputs:
    """The outputs of one window (T,), with the log-probabilities of the tokens ``asked`` (T - 1, K), in fp64.

    Logits (T, V) are shown to ``seen`` with their ``log_sum`` (T,).
    """
    z = logits(model, tokens)
    norm = log_sum(z)
    if seen is not None:
        seen(z, norm)
    z, norm = z[:-1], norm[:-1, None]
    places = torch.from_numpy(asked).to(z.device)
    own, others = (
        (z.gather(-1, index).double() - norm).cpu().numpy()
        for index in (tokens[1:, None].to(z.device), places.clamp(min=0))
    )
    drawn = torch.cat([(part.softmax(-1) * part).sum(-1) for part in z.split(ROWS)]).double() - norm[:, 0]
    known = np.where(asked == tops.NONE, np.nan, others)
    return Outputs(own[:, 0], z.argmax(-1).cpu().numpy(), known, drawn.cpu().numpy())


@dataclass(frozen=True)
class Pair:
    """The log of a sequence beside that ``other`` of the same tokens, if there is one; rows ``known`` (N,) count."""

    number: int
    each: Scored
    other: Scored | None
    known: np.ndarray

    def unscored(self, rows: pd.DataFrame) -> int:
        """The number of ``rows`` where a log has 0 but the fp32 model's log-probability is below SURE."""
        zero = (rows.exact + rows.change == 0) | ((rows.exact == 0) & (self.other is not None))
        return int((zero & (rows.fp32 < SURE)).sum())

    def rows(self, fp32: Outputs, low: Outputs, asked: np.ndarray, values: np.ndarray) -> pd.DataFrame:
        """The rows of ``Gap.tokens`` for outputs of the ``known`` rows, and the ``values`` of the tops ``asked``."""
        at, rounding = self.known + 1, low.logprobs - fp32.logprobs
        asked, values = asked[self.known], values[self.known]
        exact, emulated, best, reference = fp32.logprobs, rounding, fp32.best, fp32.asked
        if self.other is not None:
            others, given = (x[self.known] for x in tops.table(self.other))
            exact, emulated = self.other.logprobs[at], np.zeros(len(at))
            best, reference = tops.most_probable(others, given), tops.aligned(asked, others, given)
        return pd.DataFrame({
            "sequence": self.number, "position": at, "token": self.each.tokens[at], "fp32": fp32.logprobs,
            "expected": fp32.expected, "rounding": rounding, "exact": exact,
            "change": self.each.logprobs[at] - exact, "emulated": emulated,
            "kl": tops.divergence(reference, values), "kl_rounding": tops.divergence(fp32.asked, low.asked),
            "flip": tops.differs(best, tops.most_probable(asked, values)),
            "flip_rounding": np.where((asked != tops.NONE).any(1), tops.differs(fp32.best, low.best), np.nan),
        })  # fmt: skip


class Yardstick:
    """The effect of a ``recipe`` on a ``model``: predicted, and in an emulated pass."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, probes: int, seed: int):
        self.model, self.device = model, next(model.parameters()).device
        self.low, self.positions = lower(model, recipe), AtPositions()
        fine = recipe.plain and recipe.kernels.unit_roundoff <= FINE
        how = "low" if fine else "both"
        self.adjoint = Adjoint(self.low, model, probes, seed, self.positions.target, gradients=how)

    def predict(self, each: Scored, rows: np.ndarray) -> Prediction:
        """The prediction for the scored ``rows`` of a sequence."""
        self.positions.chosen = torch.from_numpy(rows)
        return self.adjoint(torch.from_numpy(each.tokens).to(self.device)[None])

    def rows(self, pair: Pair, seen: Seen | None) -> pd.DataFrame:
        """The rows of ``Gap.tokens`` for a sequence, whose fp32 logits are shown to ``seen``."""
        tokens = torch.from_numpy(pair.each.tokens).to(self.device)
        asked, values = tops.table(pair.each)
        shown = None if seen is None else partial(seen, pair.number)
        fp32 = outputs(self.model, tokens, asked, shown).at(pair.known)
        with self.low.running():
            low = outputs(self.low.model, tokens, asked).at(pair.known)
        return pair.rows(fp32, low, asked, values)


def measure(
    model: PreTrainedModel, sequences: Sequence[Scored], recipe: str | Recipe = "bf16", probes: int | None = None,
    seed: int = 0, reference: Sequence[Scored] | None = None, seen: Seen | None = None,
) -> Gap:  # fmt: skip
    """The gap of ``sequences``, as an engine scored them, from the fp32 ``model``, beside what ``recipe`` must give.

    A ``reference`` is another engine's log of the same tokens, which also runs the recipe. The roundings of weights are
    then the same on both sides, and those of kernels count twice. Without ``probes`` for each sequence, a log of fewer
    tokens has more, MOST at most. The fp32 logits of each sequence are shown to ``seen``.

    Raises ValueError for sequences that do not fit the model or the reference, for zeros where a log was to have no
    number, if all sequences overflow, and the errors of
    ``lower`` and ``Adjoint``.
    """
    require_fitting(model.config, sequences)
    chosen, every = get_recipe(recipe), paired(sequences, reference)
    pairs = once(every)
    probes = min(MOST, -(-ENOUGH // sum(len(pair.known) for pair in pairs))) if probes is None else probes
    yardstick, two = Yardstick(model, chosen, probes, seed), reference is not None
    rows, totals, shares, predictions, unscored = [], [], [], [], [0]
    for pair in progress(pairs, desc="predicting and measuring", leave=False, disable=None):  # in a terminal alone
        prediction = yardstick.predict(pair.each, pair.known)
        predictions.append(prediction)
        square, by_site = expected(prediction, twice=two)
        table, count = yardstick.rows(pair, seen), len(pair.known)
        unscored.append(pair.unscored(table))
        observed, emulated = ((table[column] ** 2).mean() for column in ("change", "rounding"))
        if two and (single := expected(prediction, twice=False)[0]):
            emulated *= square / single
        totals.append({
            "sequence": pair.number, "tokens": count, "observed": observed, "predicted": square, "emulated": emulated,
        })  # fmt: skip
        if np.isfinite(square):
            rows.append(table)
            shares.append(by_site * count)
    if sum(unscored) >= MANY:
        raise ValueError(
            f"a log-probability of 0 must be that of a sure token, got it at {sum(unscored)} tokens that are not "
            "for the model: an engine writes it where it scores none, so write null there"
        )
    if not rows:
        place = predictions[0].windows.overflow.item()
        raise ValueError(
            f"a gap needs a sequence that stays in range, but in {chosen.name} all overflow, first in {place}: "
            "make diagnose says what mends this, and RECIPE=bf16 has a wider range"
        )
    sites = pd.concat(shares, axis=1).sum(axis=1).sort_values(ascending=False)
    inside, repeated = tuple(each for each in predictions if each.finite), len(every) - len(pairs)
    table, by_sequence = pd.concat(rows, ignore_index=True), pd.DataFrame(totals)
    return Gap(chosen, table, by_sequence, sites / sites.sum(), inside, two, repeated)


def expected(prediction: Prediction, twice: bool) -> tuple[float, pd.Series]:
    """The predicted mean squared change of a window's log-probabilities, whole and by kind of site.

    If ``twice``, it is the change between two runs of the recipe: kernels' roundings count twice, those of weights not.
    """
    rows, window = prediction.contributions, prediction.windows.iloc[0]
    weights = 2.0 * rows.kind.eq("kernel") if twice else 1.0
    squares = rows.c2 * weights / (window.norm**2 * (rows.probe.max() + 1))
    whole = float(squares.sum()) if np.isfinite(window.predicted) else np.nan
    return whole, squares.groupby(rows.site).sum()


def paired(sequences: Sequence[Scored], reference: Sequence[Scored] | None) -> list[Pair]:
    """Each of the ``sequences`` beside its counterpart in ``reference``, with the rows of outputs that both score.

    Raises ValueError if their tokens differ, and if no row is scored by both.
    """
    if reference is None:
        scored = [np.flatnonzero(np.isfinite(each.logprobs[1:])) for each in sequences]
        return [Pair(number, each, None, rows) for number, (each, rows) in enumerate(zip(sequences, scored))]
    for number, each in enumerate(sequences):
        if number >= len(reference) or not np.array_equal(each.tokens, reference[number].tokens):
            raise ValueError(
                f"both logs must have the same tokens in the same order, got others in sequence {number}: write both "
                "from one list of texts"
            )
    if len(reference) > len(sequences):
        raise ValueError(
            f"both logs must have the same sequences, got {len(sequences)} and, of AGAINST, {len(reference)}: write "
            "both from one list of texts"
        )
    found = []
    for number, (each, other) in enumerate(zip(sequences, reference, strict=True)):
        rows = np.flatnonzero(np.isfinite(each.logprobs[1:]) & np.isfinite(other.logprobs[1:]))
        if not len(rows):
            raise ValueError(f"both logs must score a token in common, got none in sequence {number}")
        found.append(Pair(number, each, other, rows))
    return found


def once(pairs: Sequence[Pair]) -> list[Pair]:
    """The ``pairs``, in which a token with the same tokens before it counts once; pairs without such rows are dropped.

    Repeated tokens have the same roundings: answers to one prompt share the prompt, and a log may repeat a text.
    """
    seen: set[bytes] = set()
    found = []
    for pair in pairs:
        sha, ways = hashlib.sha256(), []
        for token in pair.each.tokens.tolist():
            sha.update(token.to_bytes(8, "little"))
            ways.append(sha.digest())
        own = pair.known[[ways[row + 1] not in seen for row in pair.known]]
        seen |= {ways[row + 1] for row in own}
        found += [replace(pair, known=own)] if len(own) else []
    return found


def require_fitting(config: PreTrainedConfig, sequences: Sequence[Scored]) -> None:
    """Raises ValueError for tokens outside of the vocabulary of ``config``, and sequences beyond its context."""
    config, context = config.get_text_config(), context_length(config)
    for number, each in enumerate(sequences):
        largest = max([each.tokens.max(), *(token for top in each.tops if top for token in top)])
        if largest >= config.vocab_size:
            raise ValueError(
                f"tokens must be below the model's vocabulary of {config.vocab_size}, got {largest} in "
                f"sequence {number}: is this the log of another model?"
            )
        if len(each.tokens) > context:
            raise ValueError(f"a sequence must fit the context, {context} tokens, got {len(each.tokens)} in {number}")
