"""The text rows of a local file, read directly: no path is taken for an address or a pattern, and nothing is cached."""

import codecs
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fragility_lab.inputs.names import EMBEDDED, PACKED, named_as_path, not_found, shortened
from fragility_lab.paths import EVALUATION_TEXT, TRAINING_TEXT

EMBEDDED_TEXTS = {
    EMBEDDED: [EVALUATION_TEXT],
    "embedded:training": [TRAINING_TEXT],
    "embedded:held-back": [EVALUATION_TEXT, TRAINING_TEXT],  # all text that the checkpoints were not trained on
}
SMALL = 2**26  # bytes of a text that is read in a second
MARKS = {codecs.BOM_UTF8: "UTF-8 with a mark", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def require_text(data: str) -> None:
    """Raises OSError or ValueError for ``data`` that ``text.load_rows`` refuses, as far as a glance at it tells."""
    suffix = Path(data).suffix
    if data in EMBEDDED_TEXTS:
        return
    if data.startswith(EMBEDDED):
        raise ValueError(f"the embedded texts are {', '.join(EMBEDDED_TEXTS)}, got {shortened(data)}")
    if os.path.isfile(data):
        if suffix not in READERS:
            raise ValueError(f"a text file must end in one of {', '.join(READERS)}, got {data!r}: rename or convert it")
        if os.path.getsize(data) == 0:
            raise ValueError(f"data must hold text, but {data} is empty: point DATA= at another file")
        if suffix != ".parquet":
            require_utf8(data)
    elif suffix in READERS or not os.path.isdir(data):
        if suffix not in READERS and (data.count(":") > 2 or "::" in data):
            raise ValueError(f"a text of the hub is name[:config[:split]], got {data!r}")
        if suffix in READERS or named_as_path(data.partition(":")[0]):
            other = "a folder" if os.path.isdir(data) else "no file: a pipe cannot be read twice"
            what = f"it is {other}" if os.path.exists(data) else "there is no such file"
            raise not_found("text", data, FileNotFoundError(what))


def local_rows(file: str) -> list[str]:
    """The rows of ``file``, one of READERS by its suffix.

    Raises ValueError if it is in another encoding than UTF-8, or has no column ``text`` of strings.
    """
    suffix = Path(file).suffix
    try:
        columns = READERS[suffix](Path(file))
    except UnicodeDecodeError as cause:
        how = "convert it, for example with iconv -f LATIN1 -t UTF-8"
        raise ValueError(
            f"a text must be in UTF-8, but {file} is not ({cause.reason} at byte {cause.start}): {how}"
        ) from cause
    except (ValueError, KeyError, pa.ArrowException, RecursionError, OverflowError) as cause:
        said = " ".join(str(cause).split())
        raise ValueError(f"{file} must be readable as {suffix}, got {type(cause).__name__}: {said}") from cause
    if "text" not in columns:
        raise ValueError(f'data must have a column "text", {file!r} has {", ".join(map(str, columns))}')
    rows = [row for row in columns["text"] if row is not None]
    if strange := [row for row in rows if not isinstance(row, str)]:
        raise ValueError(f'the column "text" of {file!r} must hold strings, got {type(strange[0]).__name__}')
    return rows


def paragraphs(file: Path) -> list[str]:
    """The paragraphs of a text in UTF-8, divided at blank lines."""
    return [row for row in file.read_text(encoding="utf-8").split("\n\n") if row.strip("\n")]


def require_utf8(file: str) -> None:
    """Raises ValueError for a text ``file`` in another encoding or with a byte order mark, which would be text."""
    with open(file, "rb") as opened:
        begins = opened.read(8)
    if begins.startswith(PACKED):
        raise ValueError(f"a text must be in UTF-8, but {file} is compressed: unpack it")
    if found := next((name for mark, name in MARKS.items() if begins.startswith(mark)), ""):
        raise ValueError(
            f"a text must be in UTF-8 without a byte order mark, but {file} is in {found}: convert it, with "
            + ("iconv -f UTF-16 -t UTF-8" if found == "UTF-16" else r"sed '1s/^\xEF\xBB\xBF//'")
        )


Columns = dict[str, list]


def _lines(file: Path) -> Columns:
    return {"text": file.read_text(encoding="utf-8").removesuffix("\n").split("\n")}


def _json_lines(file: Path) -> Columns:
    return _columns([_parsed(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()])


def _json(file: Path) -> Columns:
    """The rows of JSON: a list of objects, an object of lists, or lines of objects."""
    content = file.read_text(encoding="utf-8")
    try:
        found = _parsed(content)
    except json.JSONDecodeError:
        if content.lstrip().startswith("{"):
            return _json_lines(file)
        raise
    if isinstance(found, dict):
        return found if found and all(isinstance(values, list) for values in found.values()) else _columns([found])
    return _columns(found)


def _parsed(content: str):
    found = json.loads(content)
    json.dumps(found, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    return found


def _columns(rows: list) -> Columns:
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) and row for row in rows)):
        raise ValueError('rows must be objects such as {"text": "words"}')
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _csv(file: Path) -> Columns:
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):  # a first row that is too long
        try:  # NA and null are words
            frame = pd.read_csv(file, encoding="utf-8", keep_default_na=False, na_values=[""], index_col=False)
        except pd.errors.ParserWarning as error:
            raise ValueError("rows must have as many columns as the header: put words with commas in quotes") from error
    return {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in frame}


def _parquet(file: Path) -> Columns:
    with pq.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        return {name: opened.read(["text"])["text"].to_pylist() if name == "text" else [] for name in names}


READERS: dict[str, Callable[[Path], Columns]] = {
    ".txt": _lines, ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip
