"""Changed choices: most probable next tokens that rounding changes, and the length until greedy decoding departs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.predictor.targets import logits
from fragility_numerics.formats import NumberFormat

TOP_K = 32  # tokens that may take the first place


@dataclass(frozen=True)
class Competition:
    """Values among which the largest is chosen, and their errors.

    ``exact`` (..., k) has the values, in the order in which ``argmax`` takes the first of equals. ``changes``
    (draws, ..., k) has realised errors of them. Values are compared as they are ``stored``, if that is given.
    """

    exact: Tensor
    changes: Tensor
    stored: NumberFormat | None = None

    def probabilities(self, scale: float = 1.0) -> Tensor:
        """The share of draws (...) in which another value is the largest.

        ``scale`` multiplies the errors. For a plan, which removes some errors, ``scale`` is the root of the share of
        contributions to the target "flips" that remain.
        """
        moved = self.exact + scale * self.changes
        moved = moved if self.stored is None else self.stored.round(moved).float()
        return (moved.argmax(-1) != self.exact.argmax(-1)).float().mean(0)

    def share(self, scale: float = 1.0) -> float:
        """The mean of ``probabilities``: the share of choices that changes."""
        return float(self.probabilities(scale).double().mean())


def next_tokens(
    realisations: ErrorSamples, tokens: Tensor, draws: int, exact: Tensor | None = None
) -> Competition:  # fmt: skip
    """The competition for the next token at every position of ``tokens`` (B, T), among the TOP_K largest logits.

    ``exact`` (B, T, vocabulary) are the logits without errors, if known. Raises ValueError for no ``draws``.
    """
    if draws < 1:
        raise ValueError(f"draws, the realisations of the errors, must be at least 1, got {draws}")

    def run(model) -> Tensor:
        return logits(model, tokens)  # (B, T, vocabulary)

    exact = realisations.exact(run) if exact is None else exact.float()
    return competition(exact, (realisations.draw(run) for _ in range(draws)), realisations.stored)


def competition(exact: Tensor, drawn: Iterable[Tensor], stored: NumberFormat | None) -> Competition:
    """The competition among the TOP_K largest of the ``exact`` logits (..., vocabulary), from ``drawn`` logits."""
    order = exact.topk(min(TOP_K, exact.shape[-1]), -1).indices.sort(-1).values
    exact = exact.gather(-1, order)  # (..., k)
    return Competition(exact, torch.stack([logits.gather(-1, order) - exact for logits in drawn]), stored)


def expected_length(changes: Tensor) -> Tensor:
    """The expected number of tokens before the first change, from the probability (..., T) of each to change.

    It is the sum over t of the probability that none of the first t changes, and so T at most; changes at different
    positions are taken as independent.
    """
    return (1 - changes).cumprod(-1).sum(-1)
