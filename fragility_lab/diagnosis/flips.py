"""What rounding changes among choices: the next tokens of the windows, the experts, and greedy decoding."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.adjoint import Adjoint, Prediction
from fragility_core.adjoint.flips import Competition, next_tokens
from fragility_core.adjoint.realisations import Realisations
from fragility_core.arithmetic.lowering import LowPrecision
from fragility_lab.diagnosis.decoding import agreed, greedy, predicted_length
from fragility_lab.diagnosis.routing import predicted_choices
from fragility_lab.running.environment import progress

HORIZON = 64  # tokens that are decoded at most


@dataclass(frozen=True)
class Flips:
    """What is predicted from realised errors, and what greedy decoding did.

    ``competitions`` has the next tokens of each window, by its number. ``experts`` is the share of choices of experts
    that changes, None without any. Greedy decoding is expected to keep to fp32 for ``length`` of ``horizon`` tokens,
    mean over windows, and did so for ``measured_length``, which is None if it was not measured.
    """

    competitions: dict[int, Competition]
    experts: float | None
    horizon: int
    length: float
    measured_length: float | None

    def changed(self, scales: pd.Series | float = 1.0) -> pd.Series:
        """The share of next tokens that changes, by window, with all errors times ``scales``; missing ones are NaN."""
        by_window = scales if isinstance(scales, pd.Series) else dict.fromkeys(self.competitions, scales)
        shares = {
            window: known.share(by_window[window]) if np.isfinite(by_window[window]) else np.nan
            for window, known in self.competitions.items()
        }
        return pd.Series(shares, dtype=float)

    def with_plan(self, prediction: Prediction, planned: pd.Series | None) -> pd.Series | None:
        """``changed`` with a plan, by which the ``prediction`` is ``planned``, by window; None without a plan."""
        if planned is None:
            return None
        shares = planned / prediction.windows.set_index("window").predicted
        return self.changed(shares**0.5 if prediction.target.squared else shares)


def find(
    low: LowPrecision, model: PreTrainedModel, tokens: Tensor, prediction: Prediction, draws: int, measured: bool
) -> Flips:  # fmt: skip
    """The choices of ``low`` over windows ``tokens`` (B, T), from ``draws`` of its errors; decoding is ``measured``.

    The second half of each window, HORIZON tokens at most, is decoded anew after what precedes it. Windows that
    overflow, as the ``prediction`` says, are left out.
    """
    realisations = Realisations(Adjoint(low, model, target="flips", gradients="fp32"))
    count = min(HORIZON, tokens.shape[1] // 2)
    finite = np.flatnonzero(prediction.windows.overflow.eq(""))
    competitions, experts, lengths, found = {}, [], [], []
    for number in progress(finite, desc="changed choices"):
        window = tokens[number : number + 1]
        competitions[int(number)] = next_tokens(realisations, window, draws)
        if prediction.contributions.site.eq("router").any():
            experts.append(predicted_choices(realisations, window, draws).flatten())
        prompt = window[:, :-count]
        text = greedy(model, prompt, count)
        lengths.append(float(predicted_length(realisations, prompt, text, draws)))
        if measured:
            found.append(int(agreed(text, greedy(low.model, prompt, count, low))))
    chosen = torch.cat(experts) if experts else torch.zeros(0)
    return Flips(
        competitions, float(chosen.mean()) if len(chosen) else None, count,
        float(np.mean(lengths)) if lengths else np.nan, float(np.mean(found)) if found else None,
    )  # fmt: skip
