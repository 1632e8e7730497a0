"""The score and the mismatch of a model's windows in one call."""

from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from fragility_core.models.padding import as_windows
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.scoring import Estimator, Scores, score
from fragility_numerics.formats import NumberFormat
from fragility_numerics.lowering import lower

BATCH = 2048  # tokens of a pass, at most, but for one window


@torch.no_grad()
def observe(
    model: PreTrainedModel, tokens: Any, format: str | NumberFormat = "bf16", estimator: Estimator = Estimator(),
    execution: str = "auto",
) -> Scores:  # fmt: skip
    """The score of the fp32 ``model`` in ``format`` over ``tokens``, beside the measured mismatch.

    ``tokens`` are windows (B, T) of token ids in any form of ``padding.as_windows``. ``windows`` of the result has one
    row per window: the signals, of which ``combined`` is the score, and the ``mismatch`` of the final hidden states
    with those in fp32. ``layers`` has one row per window and block: statistics, terms and ``risk``.

    Raises the errors of ``as_windows``, ``lowering.lower`` and ``Monitor``.
    """
    windows, mask = as_windows(tokens, model)
    low = lower(model, format, execution)
    monitor = Monitor(low, power_iteration=getattr(estimator, "transport", None) == "power_iteration")
    step = max(1, BATCH // windows.shape[1])
    seen = []
    for first in range(0, len(windows), step):
        batch, own = windows[first : first + step], None if mask is None else mask[first : first + step]
        found = monitor(batch, final_hidden(model, batch, own), attention_mask=own)
        seen.append([table.assign(window=table.window + first) for table in (found.layers, found.windows)])
    layers, by_window = (pd.concat(tables, ignore_index=True) for tables in zip(*seen))
    return score(layers, by_window, low.format.unit_roundoff, estimator)
