"""Runs: what determines one, and where its result is kept.

A run is a pure function of its specification. Results are one Parquet file per run, written
atomically, so that a rerun skips what is finished and an interrupted one goes on from there.
"""

import hashlib
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fragility_core.arithmetic.formats import get_format
from fragility_core.surrogates import LAYERNORM_TERMS, Estimator
from fragility_core.surrogates.transport import TRANSPORTS

METADATA_KEY = b"fragility"


class Specification(ABC):
    """Everything that the numbers of a run depend on; its kinds are frozen dataclasses.

    ``size`` is the run's work in multiples of ``unit``, for progress and for sharing runs out.
    """

    device: str
    unit: ClassVar[str]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the specification."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for people, unique within one experiment."""

    @property
    @abstractmethod
    def size(self) -> int:
        """See the class."""


@dataclass(frozen=True)
class RunSpec(Specification):
    """One run of E2; raises ValueError for values outside the choices."""

    unit = "token"

    model: str
    data: str
    precision: str
    length: int  # tokens a window
    seed: int
    windows: int
    batch: int  # windows computed at once; changes results by rounding noise only
    device: str
    execution: str  # "native" or "emulated"
    layernorm: str = "release"
    transport: str = "release"
    inputs: str = ""  # digest of the weights and the token stream

    def __post_init__(self):
        get_format(self.precision)
        for name in ("length", "windows", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        choices = {"layernorm": LAYERNORM_TERMS, "transport": TRANSPORTS, "execution": ("native", "emulated")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def estimator(self) -> Estimator:
        """The reading of the score that this run uses."""
        return Estimator(self.layernorm, self.transport)

    @property
    def label(self) -> str:
        return f"{self.precision}-T{self.length}-seed{self.seed}"

    @property
    def size(self) -> int:
        return self.windows * self.length


@dataclass(frozen=True)
class DerivedSpec(Specification):
    """A run on windows of one run of E2, its ``source``."""

    source: RunSpec

    @property
    def device(self) -> str:
        return self.source.device

    @property
    def label(self) -> str:
        return self.source.label


IDENTITY = ("precision", "length", "seed")  # columns that tell the runs of one grid apart


class RunStore:
    """Finished runs in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, spec: Specification) -> Path:
        return self.folder / f"{spec.label}-{spec.digest}.parquet"

    def load(self, spec: Specification) -> pd.DataFrame | None:
        """The finished run of ``spec``, or None. An unreadable file counts as unfinished."""
        path = self.path(spec)
        if not path.exists():
            return None
        try:
            return pd.read_parquet(path)
        except (OSError, pa.ArrowInvalid) as cause:
            warnings.warn(f"{path.name} cannot be read and is computed again ({cause})", stacklevel=2)
            return None

    def require(self, spec: Specification) -> pd.DataFrame:
        """The finished run of ``spec``, one of E2's; raises FileNotFoundError where there is none."""
        rows = self.load(spec)
        if rows is None:
            raise FileNotFoundError(
                f"E2's run {spec.label} must be there, but is not in {self.folder}: run e2_predictor first"
            )
        return rows

    def rows(self, specs: Iterable[Specification]) -> pd.DataFrame:
        """The rows of finished runs, one run after another."""
        return pd.concat([self.load(spec) for spec in specs], ignore_index=True)

    def metadata(self, spec: Specification) -> dict:
        """What was recorded with the run: specification, versions, device, wall time."""
        return json.loads(pq.read_schema(self.path(spec)).metadata[METADATA_KEY])

    def records(self, specs: Iterable[Specification]) -> pd.DataFrame:
        """One row per finished run: its label as ``run``, and every entry of its metadata under its innermost name."""
        table = pd.json_normalize([{"run": spec.label} | self.metadata(spec) for spec in specs])
        table.columns = table.columns.str.split(".").str[-1]
        return table.loc[:, ~table.columns.duplicated()]

    def save(self, spec: Specification, frame: pd.DataFrame, metadata: dict) -> None:
        """Write ``frame`` with its specification; the file appears complete or not at all."""
        table = pa.Table.from_pandas(frame, preserve_index=False)
        record = json.dumps({"specification": asdict(spec), **metadata}).encode()
        table = table.replace_schema_metadata({**table.schema.metadata, METADATA_KEY: record})
        path = self.path(spec)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            pq.write_table(table, partial, compression="zstd")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def window_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per window from rows per window and block: the columns that do not vary over blocks."""
    return runs[runs.layer == 0].drop(columns="layer")


def spec_columns(spec: Specification) -> dict:
    """The identity of a run as constant columns."""
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in IDENTITY}
