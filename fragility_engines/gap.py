"""The gap between an engine's log-probabilities and those of the fp32 model, beside what rounding alone must give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_adjoint.predictor.targets import Target, get_target
from fragility_engines.logs import Scored
from fragility_engines.suspects import logprobs
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe, get_recipe

CLIPPED = np.log(2)  # reinforcement learning clips ratios of probabilities outside of [1/2, 2], or of a narrower range
NOTHING = 1e-12  # times the predicted square: as good as no change


@dataclass(frozen=True)
class Gap:
    """An engine's log-probabilities beside those of a reference, and beside a prediction for ``recipe``.

    ``tokens`` has one row for each token that the engine scored, in sequences that do not overflow: its ``sequence``,
    ``position`` and ``token``;
    ``exact``, its log-probability in the reference; ``change``, the engine's minus this one; and ``emulated``, the same
    for an emulated pass by the recipe. ``sequences`` has one row for each: its number of scored ``tokens``, and the
    ``observed`` and ``predicted`` mean squared change. ``sites`` has the share of the predicted square by kind of site.
    """

    recipe: Recipe
    tokens: pd.DataFrame
    sequences: pd.DataFrame
    sites: pd.Series

    @property
    def known(self) -> pd.DataFrame:
        """The rows of ``sequences`` that have a finite prediction."""
        return self.sequences[np.isfinite(self.sequences.predicted)]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Observed over predicted RMS, geometric mean over sequences, and its 95 % interval (NaN for one sequence).

        The interval is Student's for the logarithm of the ratio: errors have heavy tails, and one sequence may have
        most of the square.
        """
        square = (self.known.observed / self.known.predicted).clip(lower=NOTHING)
        logs = np.log(square.to_numpy()) / 2
        mean, count = logs.mean(), len(logs)
        half = stats.t.ppf(0.975, count - 1) * logs.std(ddof=1) / count**0.5 if count > 1 else np.nan
        return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))

    @property
    def predicted(self) -> float:
        """The predicted RMS change, in nats."""
        return float(np.average(self.known.predicted, weights=self.known.tokens) ** 0.5)

    def divergences(self, column: str = "change") -> dict[str, float]:
        """Numbers of a ``column`` of changes x of the tokens' log-probabilities, in nats where they have a unit.

        ``rms`` and ``mean``; ``k1``, the mean of -x, and ``k3``, that of exp(x) - 1 - x, which estimate KL(reference ||
        engine) where tokens are drawn from the reference (Schulman 2020, joschu.net/blog/kl-approx.html) and compare
        two gaps on any other text; ``clipped``, the share of tokens whose ratio of probabilities leaves [1/2, 2].
        """
        x = self.tokens[column].to_numpy()
        return {
            "rms": float(np.sqrt(np.mean(x**2))), "mean": float(x.mean()), "k1": float(-x.mean()),
            "k3": float(np.mean(np.expm1(x) - x)), "clipped": float(np.mean(np.abs(x) > CLIPPED)),
        }  # fmt: skip


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


def measure(
    model: PreTrainedModel, sequences: Sequence[Scored], recipe: str | Recipe = "bf16", probes: int = 2, seed: int = 0,
    reference: Sequence[Scored] | None = None,
) -> Gap:  # fmt: skip
    """The gap of ``sequences``, as an engine scored them, from the fp32 ``model``, beside what ``recipe`` must give.

    A ``reference`` is another engine's log of the same tokens, which also runs the recipe. The roundings of weights are
    then the same on both sides, and those of kernels count twice. Raises ValueError for sequences that do not fit the
    model or the reference, or that all overflow, and the errors of ``lower`` and ``Adjoint``.
    """
    require_fitting(model.config, sequences)
    chosen, device = get_recipe(recipe), next(model.parameters()).device
    low, positions = lower(model, chosen), AtPositions()
    adjoint = Adjoint(low, model, probes, seed, positions.target, gradients="both")
    rows, totals, shares, overflows = [], [], [], []
    for number, each in enumerate(sequences):
        tokens = torch.from_numpy(each.tokens).to(device)
        other = None if reference is None else of_reference(each, reference, number)
        known = np.isfinite(each.logprobs[1:]) & (True if other is None else np.isfinite(other[1:]))
        if not known.any():
            raise ValueError(f"both logs must score a token in common, got none in sequence {number}")
        exact = (logprobs(model, tokens).cpu().numpy() if other is None else other[1:])[known]
        emulated = np.zeros_like(exact)
        if other is None:
            with low.running():
                emulated = logprobs(low.model, tokens).cpu().numpy()[known] - exact
        change, at = each.logprobs[1:][known] - exact, np.flatnonzero(known) + 1
        positions.chosen = torch.from_numpy(at - 1)
        prediction = adjoint(tokens[None])
        square, by_site = expected(prediction, twice=other is not None)
        overflows.append(prediction.windows.overflow.item())
        totals.append({"sequence": number, "tokens": len(at), "observed": (change**2).mean(), "predicted": square})
        if not np.isfinite(square):
            continue
        columns = {"sequence": number, "position": at, "token": each.tokens[at], "exact": exact, "change": change}
        rows.append(pd.DataFrame(columns | {"emulated": emulated}))
        shares.append(by_site * len(at))
    if not rows:
        raise ValueError(
            f"a gap needs a sequence that stays in range, but in {chosen.name} all overflow, first in {overflows[0]}: "
            "make diagnose says what mends this, and RECIPE=bf16 has a wider range"
        )
    sites = pd.concat(shares, axis=1).sum(axis=1).sort_values(ascending=False)
    return Gap(chosen, pd.concat(rows, ignore_index=True), pd.DataFrame(totals), sites / sites.sum())


def expected(prediction: Prediction, twice: bool) -> tuple[float, pd.Series]:
    """The predicted mean squared change of a window's log-probabilities, whole and by kind of site.

    If ``twice``, it is the change between two runs of the recipe: kernels' roundings count twice, those of weights not.
    """
    rows, window = prediction.contributions, prediction.windows.iloc[0]
    weights = 2.0 * rows.kind.eq("kernel") if twice else 1.0
    squares = rows.c2 * weights / (window.norm**2 * (rows.probe.max() + 1))
    whole = float(squares.sum()) if np.isfinite(window.predicted) else np.nan
    return whole, squares.groupby(rows.site).sum()


def of_reference(each: Scored, reference: Sequence[Scored], number: int) -> np.ndarray:
    """The log-probabilities of the ``reference`` for the sequence ``each``. Raises ValueError for other tokens."""
    if number >= len(reference) or not np.array_equal(each.tokens, reference[number].tokens):
        raise ValueError(
            f"both logs must have the same tokens in the same order, got others in sequence {number}: write both from "
            "one list of texts"
        )
    return reference[number].logprobs


def require_fitting(config: PreTrainedConfig, sequences: Sequence[Scored]) -> None:
    """Raises ValueError for tokens outside of the vocabulary of ``config``, and sequences beyond its context."""
    config = config.get_text_config()
    context = getattr(config, "max_position_embeddings", np.inf)
    for number, each in enumerate(sequences):
        if each.tokens.max() >= config.vocab_size:
            raise ValueError(
                f"tokens must be below the model's vocabulary of {config.vocab_size}, got {each.tokens.max()} in "
                f"sequence {number}: is this the log of another model?"
            )
        if len(each.tokens) > context:
            raise ValueError(f"a sequence must fit the context, {context} tokens, got {len(each.tokens)} in {number}")
