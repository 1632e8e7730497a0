"""A score test of all scales of a model at once: which layer has all of its weights too large, or too small?

The derivative of a log-probability by the scale of a layer is the layer's output times the gradient there. So one
backward pass, in which the gap weighs the log-probabilities, gives for every scale the sum over tokens of the gap times
the derivative: the score of Rao (1948, doi:10.1017/S0305004100023987). Passes with random signs give its variance for a
gap that is rounding. Only the scales that stand out are then tried as suspects.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.paths import forward_hook
from fragility_engines.comparison.gap import MORE, SURE, Gap, beyond, left
from fragility_engines.comparison.slopes import Directions, Slope, slope
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.rotary import cut
from fragility_engines.suspects.scales import Scale, part_of, scales
from fragility_engines.suspects.suspect import logits

TOKENS, SEQUENCES = 256, 4  # that the test takes, if the log has so many: enough to tell scales apart
DRAWS = 16  # of random signs, of which each sequence of a pass gives one; 8 are too few to rank scales in a large gap
STANDS_OUT = 6.0  # standard deviations of a score; what does so by chance costs a pass, and is not named
TRIED = 3  # scales that stand out most
LEAST = 0.1  # share of the gap that a scale must explain to be named: a fault of a third of what rounding does
CLOSE, FITS = 0.05, 4  # how far from 1 a slope may be for its factor to be right, and passes at most until it is
FACTORS = (0.5, 2.0)  # of the scale of a layer at most; what is as far off, or further, is a matter of its branch
SAME = 0.01  # of their scores: two scales of which only the product matters, as of queries and keys


def scored(gap: Gap, directed: Directions) -> list[Slope]:
    """The slopes of ``gap`` along scales that explain it, each with its fitted factor; the best explanation first."""
    part, fit = some(gap), between if gap.two else fitted
    tried = outstanding(directed.model, part, directed.sequences)
    likely = [each for each in tried if along(part, *each, directed).share > LEAST / 2]
    found = [fit(gap, *each, directed) for each in likely]
    sure = [each for each in found if each is not None and each.certain and explains(gap, each)]
    return sorted(sure, key=lambda each: each.share, reverse=True)


def between(gap: Gap, scale: Scale, factor: float, directed: Directions) -> Slope | None:
    """The slope of a ``gap`` between two engines along ``scale``, at the factor that the one with more of it has."""
    side = max(gap.sides, key=lambda each: abs(along(each, scale, factor, directed).size))
    own = along(side, scale, factor, directed)
    found = fitted(side, scale, 1 + (factor - 1) * own.size, directed)
    return None if found is None else slope(gap, found.suspect, directed(gap, found.suspect))


def along(gap: Gap, scale: Scale, factor: float, directed: Directions) -> Slope:
    """The slope of ``gap`` along a ``scale`` that is ``factor`` times its own."""
    suspect = scale.at(factor)
    return slope(gap, suspect, directed(gap, suspect))


def fitted(gap: Gap, scale: Scale, factor: float, directed: Directions) -> Slope | None:
    """The slope of ``gap`` along ``scale`` at the factor where it is 1, from ``factor`` on; None if it is 1 nowhere."""
    for _ in range(FITS):
        found = along(gap, scale, factor, directed)
        if abs(found.size - 1) < CLOSE:
            return found
        factor = 1 + (factor - 1) * found.size
        if not FACTORS[0] <= factor <= FACTORS[1]:
            return None
    return None


def explains(gap: Gap, found: Slope) -> bool:
    """True if what ``found`` leaves of ``gap`` is rounding, as it is where the engine has just this scale."""
    ratio = gap.ratio[0]
    return found.share > LEAST and (found.share > SURE * beyond(ratio) or left(ratio, found.share) < MORE)


def some(gap: Gap) -> Gap:
    """``gap`` over the SEQUENCES with the largest excess, TOKENS in all; over more where these are shorter."""
    excess = (gap.known.observed / gap.known.predicted).sort_values(ascending=False)
    each = -(-TOKENS // min(SEQUENCES, len(excess)))
    counts = gap.known.tokens[excess.index].clip(upper=each).cumsum()
    chosen = [int(number) for number in gap.known.sequence[excess.index[: int((counts < TOKENS).sum()) + 1]]]
    rows = gap.only(chosen).tokens
    return replace(gap, tokens=rows[rows.groupby("sequence").cumcount() < each])


def outstanding(model: PreTrainedModel, gap: Gap, sequences: Sequence[Scored]) -> list[tuple[Scale, float]]:
    """The scales of ``model`` whose score stands out most, and the factor that the score says, within FACTORS.

    Two scales of which only the product matters are one, with both names.
    """
    change = (gap.tokens.change - gap.tokens.emulated).to_numpy()
    draws = -(-DRAWS // gap.tokens.sequence.nunique())
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(change), draws))
    known = scales(model)
    paths = [scale.layers[0] for scale in known if len(scale.layers) == 1]
    by_layer = scores(model, gap, sequences, paths, np.column_stack([change, signs]))
    row = {path: at for at, path in enumerate(paths)}
    by_sequence = np.stack([by_layer[:, [row[path] for path in scale.layers]].sum(1) for scale in known])
    table = np.column_stack([by_sequence[..., 0].sum(1), by_sequence[..., 1:].reshape(len(known), -1)])
    # of the score of a change of 1 at random: sequences are independent, and their variances add up
    variance = (by_sequence[..., 1:] ** 2).mean(2).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        size, score = table[:, 0] / variance, table[:, 0] / (variance * (change**2).mean()) ** 0.5
    order = [int(at) for at in np.argsort(-np.nan_to_num(np.abs(score))) if abs(score[at]) > STANDS_OUT]
    found: list[list[int]] = []
    for at in order:
        own = next((group for group in found if alike(table[group[0]], table[at])), None)
        if own is not None:
            own.append(at)
        elif len(found) < TRIED:
            found.append([at])
    factors = np.clip(1 + size, *FACTORS)
    return [(joined([known[at] for at in group]), float(factors[group[0]])) for group in found]


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two rows of scores are equal up to rounding."""
    return bool(np.linalg.norm(one - other) < SAME * np.linalg.norm(one))


def joined(same: Sequence[Scale]) -> Scale:
    """The first of scales that are the ``same``, with the names of all, and with what to look at for most of them."""
    mend = max((scale.mend for scale in same), key=len)
    return replace(same[0], name=" or ".join(sorted(scale.name for scale in same)), mend=mend)


def scores(
    model: PreTrainedModel, gap: Gap, sequences: Sequence[Scored], paths: Sequence[str], weights: np.ndarray
) -> np.ndarray:
    """The derivatives of sums of log-probabilities with ``weights`` by the scale of each part at ``paths``.

    Weights are (N, K) for the N tokens of ``gap``, and the result is (sequences of ``gap``, paths, K).
    """
    sums = torch.zeros(gap.tokens.sequence.nunique(), len(paths), weights.shape[1], dtype=torch.float64)
    at = column = 0

    def record(row: int, part: Callable[[Tensor], Tensor], layer: nn.Module, args: tuple, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if not output.requires_grad:
            with torch.enable_grad():
                output = output.requires_grad_() * 1  # no leaf: a model may change it in place
        own = part(output.detach())

        def add(gradient: Tensor) -> None:
            sums[at, row, column] += torch.dot(gradient.flatten(), own.flatten()).cpu()

        output.register_hook(add)
        return output

    with ExitStack() as stack, torch.enable_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
        for row, path in enumerate(paths):
            layer, part = part_of(model, path)
            stack.callback(forward_hook(layer, partial(record, row, part)).remove)
        for number, rows in gap.tokens.groupby("sequence"):
            logprobs = differentiable(model, sequences[int(number)].tokens, rows.position.to_numpy())
            own = torch.from_numpy(weights[gap.tokens.sequence == number]).to(logprobs)
            for column in range(own.shape[1]):
                logprobs.backward(own[:, column], retain_graph=column + 1 < own.shape[1])
            at += 1
    return sums.numpy()


def differentiable(model: PreTrainedModel, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
    """Log-probabilities of the ``tokens`` (T,) of a sequence at ``positions`` (N,), with their graph."""
    seen = torch.from_numpy(cut(model, tokens, positions.max() + 1)).to(next(model.parameters()).device)
    at = torch.tensor(positions, device=seen.device)
    z = logits(model, seen)[at - 1]
    return torch.log_softmax(z, -1).gather(-1, seen[at, None])[:, 0]
