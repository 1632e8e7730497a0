"""E2: does the score of one low-precision pass predict the mismatch? (protocol section 5)"""

from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from fragility_core.arithmetic.emulation import lower
from fragility_core.arithmetic.formats import get_format
from fragility_core.models.architectures import blocks
from fragility_core.models.tree import final_hidden
from fragility_core.surrogates import SIGNALS, score
from fragility_core.surrogates.monitor import Monitor
from fragility_lab.experiments.pool import Advance, complete
from fragility_lab.experiments.runs import RunSpec, RunStore, spec_columns
from fragility_lab.inputs.loading import Inputs, load, require_values
from fragility_lab.inputs.text import select_windows

LEAST = 3  # windows


@dataclass(frozen=True)
class Grid:
    """The runs of one E2 experiment."""

    model: str
    data: str
    precisions: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    windows: int
    batch_tokens: int = 2048
    layernorm: str = "release"
    transport: str = "release"


def load_inputs(grid: Grid, device: str | None = None) -> Inputs:
    """Load and check everything a grid needs, before any work (see ``inputs.load``).

    Raises TypeError for a model whose blocks are not known, ValueError for numbers out of range.
    """
    require_values(precisions=grid.precisions, lengths=grid.lengths, seeds=grid.seeds)
    if grid.windows < LEAST:
        raise ValueError(f"a correlation needs at least {LEAST} windows, got {grid.windows}")
    if grid.batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {grid.batch_tokens}")
    inputs = load(grid.model, grid.data, grid.precisions, grid.lengths, grid.windows, device)
    blocks(inputs.model)
    return inputs


def specifications(grid: Grid, inputs: Inputs) -> list[RunSpec]:
    """One specification per run; runs that share the fp32 reference follow one another."""
    return [
        RunSpec(
            model=grid.model,
            data=grid.data,
            precision=precision,
            length=length,
            seed=seed,
            windows=grid.windows,
            batch=max(1, grid.batch_tokens // length),
            device=inputs.device.type,
            execution=inputs.execution(precision),
            layernorm=grid.layernorm,
            transport=grid.transport,
            inputs=inputs.digest,
        )
        for length, seed, precision in product(grid.lengths, grid.seeds, grid.precisions)
    ]


class Passes:
    """Computes the runs of a grid, sharing what they have in common (a ``pool.Worker``).

    bf16 and fp16 share the fp32 hidden states of a window, all runs of a precision its model.
    """

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        self.model = inputs.model
        self.record = {"attention": inputs.attention}
        self._monitors: dict[tuple, Monitor] = {}
        self._hidden: dict[int, Tensor] = {}
        self._selection: tuple | None = None

    def monitor(self, spec: RunSpec) -> Monitor:
        """The monitor of the model in the precision of ``spec``."""
        key = (spec.precision, spec.execution, spec.transport)
        if key not in self._monitors:
            low = lower(self.model, spec.precision, spec.execution)
            self._monitors[key] = Monitor(low, power_iteration=spec.transport == "power_iteration")
        return self._monitors[key]

    @torch.no_grad()
    def reference(self, spec: RunSpec, first: int, tokens: Tensor) -> Tensor:
        """fp32 hidden states (B, T, d_model) of the windows of ``spec`` from ``first`` on.

        Those of one selection of windows are kept until another selection is asked for.
        """
        selection = (spec.length, spec.seed)
        if selection != self._selection:
            self._selection, self._hidden = selection, {}
        if first not in self._hidden:
            self._hidden[first] = final_hidden(self.model, tokens)
        return self._hidden[first]

    def run(self, spec: RunSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows, one per window and block: statistics, terms, risk, and the window's signals.

        A window with a nonfinite statistic or mismatch is flagged in ``overflow``, never left out.
        """
        starts, tokens = select_windows(self.inputs.stream, spec.length, spec.windows, spec.seed)
        monitor = self.monitor(spec)
        unit_roundoff = get_format(spec.precision).unit_roundoff
        frames = []
        for first in range(0, spec.windows, spec.batch):
            batch = tokens[first : first + spec.batch].to(self.inputs.device)
            reference = self.reference(spec, first, batch)
            observed = monitor(batch, reference)
            layers, windows = score(observed.layers, observed.windows, unit_roundoff, spec.estimator)
            frame = layers.merge(windows, on="window")
            frames.append(frame.assign(window=frame.window + first))
            advance(batch.numel())
        rows = pd.concat(frames, ignore_index=True)
        finite = torch.tensor(rows.drop(columns="window").to_numpy(dtype="float64")).isfinite().all(-1)
        rows["overflow"] = (~pd.Series(finite.numpy())).groupby(rows.window).transform("any")
        rows.insert(0, "start", rows.window.map(dict(enumerate(starts))))
        return rows.assign(**spec_columns(spec))


def run_grid(grid: Grid, inputs: Inputs, folder: Path, workers: int = 1) -> pd.DataFrame:
    """All runs of ``grid``, those already finished in ``folder`` not computed again.

    ``workers`` processes share them out, 0 being one a CPU core (see ``pool.complete``). Raises ValueError
    where finished runs were computed before a signal was added.
    """
    specs = specifications(grid, inputs)
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: (spec.length, spec.seed))]
    rows = complete(groups, RunStore(folder), partial(Passes, inputs), inputs.device, workers, "E2")
    lacking = [signal for signal in SIGNALS if signal not in rows or rows[signal][~rows.overflow].isna().any()]
    if lacking:
        raise ValueError(
            f"every run must have all signals, but finished ones lack {', '.join(lacking)}: "
            f"remove {folder} to compute them again"
        )
    return rows


def records(grid: Grid, inputs: Inputs, folder: Path) -> pd.DataFrame:
    """What was recorded with each finished run of ``grid``: execution, device, versions, wall time."""
    return RunStore(folder).records(specifications(grid, inputs))
