"""Runs: the specification that determines a run, and the store that keeps its result.

A run is a pure function of its specification. Each result is one Parquet file, written atomically. A second call
skips the finished runs, so that an interrupted experiment continues where it stopped.
"""

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fragility_lab.running.environment import NUMERICAL, code_digest, keeps_stale, versions
from fragility_lab.running.files import write_whole

METADATA_KEY = b"fragility"


class Specification(ABC):
    """Everything that the numbers of a run depend on; subclasses are frozen dataclasses.

    ``experiment`` is the name shown with the progress, and ``unit`` the unit that progress counts. Runs that are
    ``paired`` are compared step by step, so that they must be computed with equal numbers of threads.
    """

    device: str
    experiment: ClassVar[str]
    unit: ClassVar[str]
    paired: ClassVar[bool] = False

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the specification."""
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()[:12]

    def content(self) -> dict[str, Any]:
        """The fields, as JSON gives them back."""
        made: Any = self  # of a subclass, which is a dataclass
        return json.loads(json.dumps(asdict(made)))

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for people, unique within one experiment."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The work of the run in multiples of ``unit``."""

    @property
    def group(self) -> Hashable:
        """Runs of equal groups share work and are computed by one process; by default each is alone."""
        return self.digest

    def provenance(self) -> dict:
        """The versions and the code that compute this run here."""
        return {"versions": versions(), "code": code_digest(type(self))}

    def is_current(self, record: dict) -> bool:
        """True if ``record`` has the ``provenance`` of this code and these versions, so that its numbers hold here."""
        then, now = record.get("versions", {}), versions()
        return record.get("code") == code_digest(type(self)) and all(then.get(name) == now[name] for name in NUMERICAL)


UNREADABLE = (OSError, ValueError, LookupError, TypeError, pa.ArrowException)  # what damaged files raise
CHECKSUM = "checksum"  # the digest of a run's rows and of its record, in the record


class RunStore:
    """Finished runs in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, spec: Specification) -> Path:
        """The file of the run, whether it exists or not."""
        return self.folder / f"{spec.label}-{spec.digest}.parquet"

    def load(self, spec: Specification) -> pd.DataFrame | None:
        """The rows of the finished run of ``spec``, or None if the run has to be computed.

        It has to be computed if there is no file, and, with a warning, if the file cannot be read, has a wrong checksum
        or holds another specification. A stale run (``is_stale``) has to be computed again, too, unless stale runs are
        kept.
        """
        path = self.path(spec)
        if not path.exists():
            return None
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            record, rows = _record(table.schema), table.to_pandas()
            older = CHECKSUM not in record and record.get("code") != code_digest(type(spec))  # code without checksums
            if not older and record.get(CHECKSUM) != checksum(rows, record):
                raise ValueError("its rows and its record are not those that were written")
        except UNREADABLE as cause:
            warnings.warn(f"{path.name} cannot be read and is computed again ({cause})", stacklevel=2)
            return None
        if record.get("specification") != spec.content():
            warnings.warn(
                f"{path.name} must hold the run that its name says, but holds another one and is computed again",
                stacklevel=2,
            )
            return None
        return rows if spec.is_current(record) or keeps_stale() else None

    def is_stale(self, spec: Specification) -> bool:
        """True if the run of ``spec`` is finished, but was computed by other code or other versions of packages."""
        try:
            record = self.metadata(spec)
        except UNREADABLE:
            return False
        return record.get("specification") == spec.content() and not spec.is_current(record)

    def require(self, spec: Specification) -> pd.DataFrame:
        """The rows of the finished run of ``spec``; raises FileNotFoundError if ``load`` returns None."""
        rows = self.load(spec)
        if rows is None:
            raise FileNotFoundError(
                f"the run {spec.label} of {spec.experiment} must be in {self.folder}, but is missing or stale: "
                f"run the notebook of {spec.experiment} first"
            )
        return rows

    def rows(self, specs: Iterable[Specification]) -> pd.DataFrame:
        """The rows of finished runs, one run after another."""
        return pd.concat([self.require(spec) for spec in specs], ignore_index=True)

    def metadata(self, spec: Specification) -> dict:
        """The record of the run: specification, versions, code, device, threads, seconds, attention."""
        record = _record(pq.read_schema(self.path(spec)))
        return {name: value for name, value in record.items() if name != CHECKSUM}

    def records(self, specs: Iterable[Specification]) -> pd.DataFrame:
        """One row per finished run: its label as ``run``, and its metadata by innermost names, the first of each."""
        table = pd.json_normalize([{"run": spec.label} | self.metadata(spec) for spec in specs])
        table.columns = table.columns.str.split(".").str[-1]
        return table.loc[:, ~table.columns.duplicated()]

    def save(self, spec: Specification, frame: pd.DataFrame, metadata: dict) -> None:
        """Write ``frame`` with its specification and provenance; the file appears complete or not at all."""
        table = pa.Table.from_pandas(frame, preserve_index=False)
        record = json.loads(json.dumps({"specification": spec.content()} | spec.provenance() | metadata))
        record[CHECKSUM] = checksum(table.to_pandas(), record)
        table = table.replace_schema_metadata({**table.schema.metadata, METADATA_KEY: json.dumps(record).encode()})
        with pa.BufferOutputStream() as stream:
            pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
            write_whole(self.path(spec), stream.getvalue())


def checksum(rows: pd.DataFrame, record: dict) -> str:
    """Sixteen hexadecimal digits that identify names, types and entries of ``rows``, and the rest of ``record``."""
    said = {name: value for name, value in record.items() if name != CHECKSUM}
    sha = hashlib.sha256(json.dumps([said, [*rows.dtypes.astype(str).items()]], sort_keys=True).encode())
    sha.update(pd.util.hash_pandas_object(rows, index=False).to_numpy().tobytes())
    return sha.hexdigest()[:16]


def _record(schema: pa.Schema) -> dict:
    return json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
