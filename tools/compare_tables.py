"""Compare the tables of two folders of results: ``python tools/compare_tables.py OLD NEW``.

Both folders (such as ``outputs/embedded`` of two commits) are made on one machine, since CPUs round differently. Each
CSV file gets one line: identical, equal except for what is recorded with a run, or different with the largest
difference. The exit status is 1 where a table is different or is in one folder only.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

RECORDED = {  # columns of times, code and machine: they differ from run to run
    "seconds", "code", "device_name", "threads", "python", "torch", "transformers", "datasets", "tokenizers", "numpy",
    "scipy", "pandas", "platform",
}  # fmt: skip
RENAMED = {"rests_until": "cooldown_until"}  # columns, old name to new


def compare(old: Path, new: Path) -> tuple[bool, str]:
    """Whether two tables agree, and how."""
    if not (old.exists() and new.exists()):
        return False, f"only in {(old if old.exists() else new).parent}"
    if old.read_bytes() == new.read_bytes():
        return True, "identical"
    before, after = pd.read_csv(old), pd.read_csv(new)
    renamed = {name: RENAMED[name] for name in before if RENAMED.get(name) in after}
    before = before.rename(columns=renamed)
    if [*before] != [*after] or len(before) != len(after):
        return False, f"DIFFERENT: {len(before)} rows of {', '.join(before)}; {len(after)} rows of {', '.join(after)}"
    changed = [name for name in before if not before[name].equals(after[name])]
    differing = [name for name in changed if name not in RECORDED]
    if differing:
        return False, "DIFFERENT: " + "; ".join(largest_difference(before[name], after[name]) for name in differing)
    notes = [f"the name of {name}" for name in renamed.values()]
    return True, "equal but for " + ", ".join([*changed, *notes] or ["layout"])


def largest_difference(before: pd.Series, after: pd.Series) -> str:
    """The largest absolute difference of a column of numbers, or its first pair of values that differ."""
    if pd.api.types.is_numeric_dtype(before) and pd.api.types.is_numeric_dtype(after):
        return f"{before.name} by at most {(before.astype(float) - after.astype(float)).abs().max():.3g}"
    row = int((before.fillna("") != after.fillna("")).argmax())
    return f"{before.name} {before[row]!r} is now {after[row]!r}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args(arguments)
    names = sorted({path.relative_to(folder) for folder in (given.old, given.new) for path in folder.rglob("*.csv")})
    found = {name: compare(given.old / name, given.new / name) for name in names}
    for name, (_, text) in found.items():
        print(f"{name}: {text}")
    agreeing = sum(agree for agree, _ in found.values())
    print(f"{agreeing} of {len(found)} tables agree")
    sys.exit(0 if found and agreeing == len(found) else 1)


if __name__ == "__main__":
    main()
