"""The recorded E5 runs that notebook 5 replays, with the columns that the policies read.

``python -m fragility_lessons.record RUN.parquet ...`` writes the asset from finished runs of policy ``none``.
``make reproduce`` leaves such runs in outputs/<profile>/e5.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fragility_lab.paths import RECORDED_RUNS
from fragility_lab.running.runs import METADATA_KEY

# fp64 as recorded, so that a replay decides as the run did. rho_LN is computed from variance, epsilon and width.
COLUMNS = [
    "step", "layer", "risk", "dominance", "transport", "magnitude", "layernorm_1_term", "layernorm_2_term",
    "variance_1", "variance_2", "epsilon_1", "d_model", "combined", "mismatch",
]  # fmt: skip


def freeze(runs: Sequence[Path], target: Path = RECORDED_RUNS) -> None:
    """Write the rows of all ``runs`` as one table with a column ``learning_rate``, and the records of the runs.

    Raises ValueError for a run of another policy than ``none``, because its actions changed its statistics.
    """
    frames, records = [], []
    for path in runs:
        record = json.loads(pq.read_schema(path).metadata[METADATA_KEY])
        specification = record["specification"]
        if specification["policy"] != "none":
            raise ValueError(
                f"a run to be replayed must be of policy none, got {specification['policy']!r} in {path.name}: "
                "choose a file called none-seed..."
            )
        rows = pd.read_parquet(path, columns=COLUMNS)
        frames.append(rows.assign(learning_rate=specification["setting"]["learning_rate"]))
        records.append(record)
    table = pa.Table.from_pandas(pd.concat(frames, ignore_index=True), preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, METADATA_KEY: json.dumps(records).encode()})
    # Bytes of equal significance lie side by side: a third less than plain zstd.
    pq.write_table(table, target, compression="zstd", use_dictionary=False, use_byte_stream_split=True)


@cache
def load(learning_rate: float, path: Path = RECORDED_RUNS) -> pd.DataFrame:
    """The rows of one recorded run, each step a ``window`` as in ``bgss.replay``; callers must not change them.

    Raises ValueError for a learning rate that was not recorded.
    """
    rows = pd.read_parquet(path)
    if learning_rate not in set(rows.learning_rate):
        known = ", ".join(f"{rate:g}" for rate in rows.learning_rate.unique())
        raise ValueError(f"runs are recorded at the learning rates {known}, got {learning_rate!r}: choose one of them")
    rows = rows[rows.learning_rate == learning_rate]
    return rows.assign(window=rows.step).reset_index(drop=True)


if __name__ == "__main__":
    freeze([Path(path) for path in sys.argv[1:]])
