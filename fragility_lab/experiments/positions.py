"""Positions in a window at which errors arise and end, and the agreement of signals with its second half's mismatch.

``python -m fragility_lab.experiments.positions --model MODEL --data TEXT --results FOLDER`` leaves two tables in
``outputs/FOLDER/tables``. ``sinks_positions`` has two shares by position: that of kernels in the predicted squared
error, and that of final states in the measured one. ``sinks_middle`` has the correlation of signals with the mismatch
of second halves of windows, in which the text goes on and no sink counts. All windows are from the half of the text on
which ``travel`` was not chosen (``sinks``).
"""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_adjoint.predictor.estimator import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.theory import mismatch
from fragility_lab.experiments.sinks import RESAMPLES, correlation, starts
from fragility_lab.inputs.loading import Inputs, load, require_at_least
from fragility_lab.measurement.travel import StreamNorms, stream_norms
from fragility_lab.paths import output_folder
from fragility_lab.reporting.tables import save_table
from fragility_lab.running.environment import progress
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

GROUPS = ("0", "1 to 3", "4 to 15", "16 and later")  # of positions
FIRST = (0, 1, 4, 16)  # position of each group
ATTENTION = ("projection", "scores", "softmax", "context", "attention")  # sites
SIGNALS = ("combined", "norm_only", "travel", "norm_only_counted", "travel_counted")


class PositionSquares:
    """Squares of an estimate's errors times gradients, summed by place and position (T,), over windows and probes."""

    def __init__(self, estimate: Adjoint, length: int):
        self.length = length
        self.found: dict[int, Tensor] = {}
        self.recorder = estimate.recorder
        self.recorder.observer = self.observe

    def observe(self, place: int, products: Tensor) -> None:
        """Add ``products`` of a kernel, (P, ..., T, d), or of an activation, (P, T d).

        Results without positions are left out.
        """
        if products.ndim == 2 and products.shape[1] % self.length == 0:
            products = products.unflatten(1, (self.length, -1))
        if self.recorder.numbered[place].kind == "kernel" and products.ndim > 2 and products.shape[-2] == self.length:
            squares = products.float().square().sum(-1).reshape(-1, self.length).sum(0).cpu()
            self.found[place] = self.found.get(place, torch.zeros(())) + squares

    def by_site(self, places: pd.DataFrame) -> dict[str, np.ndarray]:
        """Sums (T,) of "attention" and of "other" kernels, from the ``site`` of each of ``places``, by its number."""
        total = {"attention": np.zeros(self.length), "other": np.zeros(self.length)}
        for place, squares in self.found.items():
            total["attention" if places.site[place] in ATTENTION else "other"] += squares.double().numpy()
        return total


def grouped(by_position: np.ndarray) -> list[float]:
    """The share of each of GROUPS in the sum of ``by_position`` (T,)."""
    return (
        np.add.reduceat(by_position, [first for first in FIRST if first < len(by_position)]) / by_position.sum()
    ).tolist()


def position_rows(inputs: Inputs, low: LowPrecision, windows: Tensor) -> pd.DataFrame:
    """One row per group of positions, for ``windows`` (B, T) that do not overflow.

    ``tokens`` is the group's share of the positions. ``attention`` and ``other`` are the shares of kernels at these
    positions in the predicted squared error of the final states; over all groups both add up to 1. ``measured`` is the
    share of final states at these positions in the measured squared error, mean over windows.
    """
    estimate = Adjoint(low, inputs.model, gradients="low")
    squares, places, measured = PositionSquares(estimate, windows.shape[1]), None, []
    for window in progress(windows, desc="positions"):
        found = estimate(window[None])
        places = found.contributions.drop_duplicates("place").set_index("place")
        with torch.no_grad(), low.running():
            apart = final_hidden(low.model, window[None])
        apart = (apart.float() - final_hidden(inputs.model, window[None]))[0].detach().double().square().sum(-1)
        measured.append(grouped(apart.cpu().numpy()))
    sums = squares.by_site(places)
    whole = sum(values.sum() for values in sums.values())
    columns = {name: np.array(grouped(values)) * values.sum() / whole for name, values in sums.items()}
    tokens = grouped(np.ones(windows.shape[1]))
    return pd.DataFrame({"positions": GROUPS, "tokens": tokens, **columns, "measured": np.mean(measured, axis=0)})


@torch.no_grad()
def middle_rows(inputs: Inputs, low: LowPrecision, windows: Tensor) -> Iterator[dict[str, float]]:
    """The signals of each of ``windows`` (B, 2 T), and the mismatch of its last T positions.

    The signals ``*_counted`` are taken over these positions, other signals over the whole window.
    """
    monitor, half = Monitor(low), windows.shape[1] // 2
    for tokens in progress(windows[:, None], desc="middle"):
        exact = final_hidden(inputs.model, tokens)
        observed = monitor(tokens, exact)
        scored = score(observed.layers, observed.windows, low.format.unit_roundoff)[1].iloc[0]
        norms = stream_norms(low, tokens)
        counted = StreamNorms(*(x[..., half:] for x in norms))
        states = observed.hidden[:, half:].float()
        yield {
            "combined": scored.combined, "norm_only": scored.norm_only,
            "travel": norms.travel(low.format.unit_roundoff).item(),
            "norm_only_counted": 1 / torch.linalg.vector_norm(states).item(),
            "travel_counted": counted.travel(low.format.unit_roundoff).item(),
            "mismatch": mismatch(states, exact[:, half:]).item(),
        }  # fmt: skip


def correlations(windows: pd.DataFrame) -> pd.DataFrame:
    """Pearson's correlation of each signal with the mismatch, and the middle 95 % over RESAMPLES draws of windows."""
    own = windows[np.isfinite(windows.mismatch)]
    draws = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    rows = [
        {"signal": signal, "windows": len(own), **correlation(own[signal].to_numpy(), own.mismatch.to_numpy(), draws)}
        for signal in SIGNALS
    ]
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fragility_lab.experiments.positions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--results", default="embedded")
    parser.add_argument("--length", type=int, default=128, help="tokens that count")
    parser.add_argument("--windows", type=int, default=48, help="with a middle; a quarter of them by position")
    given = parser.parse_args(arguments)
    require_at_least(FIRST[-1] + 1, length=given.length)
    inputs = load(given.model, given.data, [2 * given.length], 3)
    low = lower(inputs.model, "bf16", inputs.execution("bf16"))

    def drawn(length: int, count: int) -> Tensor:
        chosen = starts(inputs, length, "second", count)
        return torch.stack([inputs.window(start, length) for start in chosen]).to(inputs.device)

    positions = position_rows(inputs, low, drawn(given.length, max(3, given.windows // 4)))
    middle = correlations(pd.DataFrame(middle_rows(inputs, low, drawn(2 * given.length, given.windows))))
    folder = output_folder(given.results, "tables")
    for name, table in (("sinks_positions", positions), ("sinks_middle", middle)):
        save_table(table, folder, name)
        print(table.to_string(index=False))


if __name__ == "__main__":
    main()
