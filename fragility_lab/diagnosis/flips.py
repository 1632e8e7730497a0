"""Choices that rounding changes: the next tokens of the windows, the experts, and greedy decoding."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy import optimize
from transformers import PreTrainedModel

from fragility_adjoint.explain.changed_choices import Competition
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.predictor import Prediction
from fragility_lab.diagnosis.tokens import ErrorsByToken
from fragility_lab.measurement.decoding import greedy, kept_length, predicted_length
from fragility_lab.measurement.routing import predicted_choices
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision

HORIZON = 64  # tokens that are decoded at most
DECODED = 2  # windows that are decoded at most: a token at a time takes longer than all else


@dataclass(frozen=True)
class Flips:
    """Changed choices as predicted from realised errors, and the length of equal greedy texts.

    ``competitions`` has the next tokens of each window, by its number. ``experts`` is the share of choices of experts
    that changes, None for a model without experts. Greedy decoding is expected to keep to the fp32 text for ``length``
    of ``horizon`` tokens, mean over windows. ``measured_length`` is the length that was measured, None if none was.
    """

    competitions: dict[int, Competition]
    experts: float | None
    horizon: int
    length: float
    measured_length: float | None

    def changed(self, scales: pd.Series | float = 1.0) -> pd.Series:
        """The share of next tokens that changes, by window, with errors times ``scales``; NaN for a missing scale."""
        by_window = scales if isinstance(scales, pd.Series) else dict.fromkeys(self.competitions, scales)
        shares = {
            window: known.share(by_window[window]) if np.isfinite(by_window[window]) else np.nan
            for window, known in self.competitions.items()
        }
        return pd.Series(shares, dtype=float)

    def with_plan(self, prediction: Prediction, planned: pd.Series | None) -> pd.Series | None:
        """The share ``changed`` by window, under a plan with the predicted error ``planned``; None without a plan."""
        if planned is None:
            return None
        shares = planned / prediction.windows.set_index("window").predicted
        return self.changed(shares**0.5 if prediction.target.squared else shares)

    def chance(self, texts: float) -> float:
        """The standard deviation by chance of the mean length of ``texts``, given as their number.

        Each token is taken to change with one probability, chosen to give the mean of predicted and measured length.
        """
        known = [self.length] if self.measured_length is None else [self.length, self.measured_length]
        steps, mean = np.arange(1, self.horizon + 1), np.mean(known)
        keeps = optimize.brentq(lambda keeps: (keeps**steps).sum() - mean, 0, 1)
        return float(np.sqrt(max(0, ((2 * steps - 1) * keeps**steps).sum() - mean**2) / texts))


def find(
    low: LowPrecision, model: PreTrainedModel, realisations: ErrorSamples, by_token: ErrorsByToken,
    routed: bool, measured: bool,
) -> Flips:  # fmt: skip
    """Predict the choices of ``low`` in the windows of ``by_token``, from as many draws of errors as that has.

    Greedy decoding writes the second half of the first DECODED windows anew, HORIZON tokens at most: in fp32, and in
    ``low`` if that is to be ``measured``. A ``routed`` model chooses experts.
    """
    windows = torch.stack([*by_token.tokens.values()]).to(next(model.parameters()).device)  # (B, T)
    count = min(HORIZON, windows.shape[1] // 2)
    prompts, draws = windows[:DECODED, :-count], by_token.draws
    groups = progress(windows.split(1) if routed else (), desc="choices of experts", disable=not routed)
    experts = [predicted_choices(realisations, window, draws).flatten() for window in groups]
    text = greedy(model, prompts, count)
    lengths = torch.cat([
        predicted_length(realisations, prompt, its, draws)
        for prompt, its in progress([*zip(prompts.split(1), text.split(1))], desc="lengths of equal texts")
    ])  # fmt: skip
    found = float(kept_length(low, prompts, text).float().mean()) if measured else None
    chosen = torch.cat(experts) if experts else torch.zeros(0)
    share = float(chosen.mean()) if len(chosen) else None
    return Flips(by_token.competitions, share, count, float(lengths.mean()), found)
