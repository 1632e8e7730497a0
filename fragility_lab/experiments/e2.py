"""E2: does the score of one low-precision pass predict the mismatch? (protocol section 5)"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

import pandas as pd
import torch
from torch import Tensor

from fragility_core.models.blocks import blocks
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import LAYERNORM_TERMS, Estimator, score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.transport import TRANSPORTS
from fragility_lab.inputs.loading import Inputs, load, require_at_least, require_values
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Advance, Run, Worker
from fragility_numerics.lowering import as_format, lower

T = TypeVar("T")
LEAST = 3  # windows of a correlation
IDENTITY = ("precision", "length", "seed")  # columns that tell the runs of one grid apart


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
    disjoint: bool = False  # whether no two seeds share a window


@dataclass(frozen=True)
class RunSpec(Specification):
    """One run of E2; raises ValueError for values outside the choices."""

    experiment, unit = "E2", "token"

    model: str
    data: str
    precision: str
    length: int  # tokens per window
    seed: int
    windows: int
    batch: int  # windows computed at once; changes results by rounding noise only
    device: str
    execution: str  # "native" or "emulated"
    layernorm: str = "release"
    transport: str = "release"
    inputs: str = ""  # digest of the weights, the token stream and what begins a window
    disjoint: bool = False

    def __post_init__(self):
        as_format(self.precision)
        require_at_least(1, length=self.length, windows=self.windows, batch=self.batch)
        require_at_least(0, seed=self.seed)
        choices = {"layernorm": LAYERNORM_TERMS, "transport": TRANSPORTS, "execution": ("native", "emulated")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def label(self) -> str:
        return f"{self.precision}-T{self.length}-seed{self.seed}"

    @property
    def size(self) -> int:
        return self.windows * self.length

    @property
    def group(self) -> Hashable:
        return self.length, self.seed

    @property
    def identity(self) -> dict:
        """The run's values of the columns ``IDENTITY``."""
        return {name: getattr(self, name) for name in IDENTITY}


@dataclass(frozen=True)
class DerivedSpec(Specification):
    """A run on windows of one run of E2, its ``source``."""

    source: RunSpec

    @classmethod
    def of(cls, sources: Sequence[RunSpec], **options) -> list[Self]:
        """One specification per run of E2, with the ``options`` of the class."""
        return [cls(source, **options) for source in sources]

    @property
    def device(self) -> str:  # type: ignore[override]  # read-only here, and everywhere, since specifications are frozen
        return self.source.device

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def group(self) -> Hashable:
        return self.source.precision, self.source.length  # runs of other seeds have windows in common with it


def load_inputs(grid: Grid, device: str | None = None) -> Inputs:
    """Load and check everything a grid needs, before any work (see ``inputs.loading.load``).

    Raises TypeError for a model whose blocks are not known, ValueError for numbers out of range.
    """
    require_values(precisions=grid.precisions, lengths=grid.lengths, seeds=grid.seeds)
    if grid.windows < LEAST:
        raise ValueError(f"a correlation needs at least {LEAST} windows, got {grid.windows}")
    require_at_least(1, batch_tokens=grid.batch_tokens)
    for precision in grid.precisions:
        as_format(precision)
    inputs = load(grid.model, grid.data, grid.lengths, grid.windows, device)
    for length in grid.lengths:
        inputs.windows(length, grid.windows, max(grid.seeds), grid.disjoint)
    blocks(inputs.model)
    return inputs


def specifications(grid: Grid, inputs: Inputs) -> list[RunSpec]:
    """One specification per run, in an order in which runs that share the fp32 reference follow one another."""
    given = {name: getattr(grid, name) for name in ("model", "data", "windows", "layernorm", "transport", "disjoint")}
    return [
        RunSpec(
            precision=precision,
            length=length,
            seed=seed,
            batch=max(1, grid.batch_tokens // length),
            device=inputs.device.type,
            execution=inputs.execution(precision),
            inputs=inputs.digest,
            **given,
        )
        for length, seed, precision in product(grid.lengths, grid.seeds, grid.precisions)
    ]


class SharingWorker(Worker[Run]):
    """Computes runs of which those of one group have results in common."""

    _group: Hashable = None

    def once(self, spec: Run, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of ``compute`` for the window and options ``key``, computed once for all runs of the spec's group.

        It is kept until another group follows.
        """
        if spec.group != self._group:
            self._group, self._common = spec.group, dict[Hashable, Any]()
        if key not in self._common:
            self._common[key] = compute()
        return self._common[key]


class MonitoredPasses(SharingWorker[RunSpec]):
    """Computes the runs of a grid. Formats share the fp32 states of a window, and runs of a format share its model."""

    def __init__(self, inputs: Inputs, store: RunStore):
        super().__init__(inputs, store)
        self.monitor = cache(
            lambda precision, execution, transport: Monitor(
                lower(inputs.model, precision, execution), power_iteration=transport == "power_iteration"
            )
        )

    def run(self, spec: RunSpec, advance: Advance) -> pd.DataFrame:
        """Tidy rows, one per window and block: statistics, terms, risk, and the window's signals.

        A window with a nonfinite statistic or mismatch is flagged in ``overflow``, never left out.
        """
        starts, tokens = self.inputs.windows(spec.length, spec.windows, spec.seed, spec.disjoint)
        monitor = self.monitor(spec.precision, spec.execution, spec.transport)
        unit_roundoff = as_format(spec.precision).unit_roundoff
        frames = []
        for first in range(0, spec.windows, spec.batch):
            batch = tokens[first : first + spec.batch].to(self.inputs.device)
            exact = torch.no_grad()(partial(final_hidden, self.inputs.model, batch))
            observed = monitor(batch, self.once(spec, first, exact))
            estimator = Estimator(spec.layernorm, spec.transport)
            layers, windows = score(observed.layers, observed.windows, unit_roundoff, estimator)
            frame = layers.merge(windows, on="window")
            frames.append(frame.assign(window=frame.window + first))
            advance(batch.numel())
        rows = pd.concat(frames, ignore_index=True)
        finite = torch.tensor(rows.drop(columns="window").to_numpy(dtype="float64")).isfinite().all(-1)
        rows["overflow"] = (~pd.Series(finite.numpy())).groupby(rows.window).transform("any")
        rows.insert(0, "start", rows.window.map(dict(enumerate(starts))))
        return rows.assign(**spec.identity)


class DerivedWorker(SharingWorker[Run]):
    """Computes runs on windows of E2's runs, which are in the folder ``source``.

    All seeds draw their windows from one text: of three times 96 windows of 1024 tokens, only 130 are distinct.
    """

    def __init__(self, inputs: Inputs, store: RunStore, source: Path):
        super().__init__(inputs, store)
        self.source = RunStore(source)

    def window(self, source: RunSpec, start: int) -> Tensor:
        """Tokens (1, T), on the device, of the window of ``source`` that starts at token ``start``."""
        return self.inputs.window(start, source.length)[None].to(self.inputs.device)


def window_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per window from rows per window and block: the columns that do not vary over blocks."""
    return runs[runs.layer == 0].drop(columns="layer")
