"""The tests that take long: ``slow.txt`` names them, ``make test`` leaves them out, and ``make test-all`` runs them.

``python tests/slow.py RESULTS.xml`` writes the list again, from the times that pytest wrote with ``--junitxml``.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_name("slow.txt")
SHARE = 0.1  # of the time of all tests, for those that are not slow


def listed() -> frozenset[str]:
    """The functions in the list, as pytest names them: file and function."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def function(node: str) -> str:
    """The function of the test ``node``, without its parameters."""
    return node.partition("[")[0]


def mark(items: Sequence) -> None:
    """Mark the tests among ``items`` of pytest whose functions are in the list."""
    names = listed()
    for item in items:
        if function(item.nodeid) in names:
            item.add_marker("slow")


def times(results: Path) -> dict[str, list[float]]:
    """The seconds of every test in a file of results, by function."""
    found = defaultdict(list)
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{function(case.get('name', ''))}"
        found[name].append(float(case.get("time", 0)))
    return dict(found)


def slow(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The functions whose tests take longest on average: as many as leave SHARE of the time to the others."""
    left, found = sum(map(sum, seconds.values())), []
    limit = SHARE * left
    for name in sorted(seconds, key=lambda name: sum(seconds[name]) / len(seconds[name]), reverse=True):
        if left <= limit:
            break
        found.append(name)
        left -= sum(seconds[name])
    return sorted(found)


if __name__ == "__main__":
    names = slow(times(Path(sys.argv[1])))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"tests/slow.txt: {len(names)} functions")
