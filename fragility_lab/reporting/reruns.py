"""Two sets of results side by side, and the verdicts that change with CPU, seed, model or state of the code."""

import argparse
import sys
from collections.abc import Mapping

import pandas as pd

from fragility_lab import paths
from fragility_lab.reporting import tables
from fragility_lab.reporting.verdicts import NOT_RUN

CLAIM = ["experiment", "claim"]


def read_claims(results: str) -> pd.DataFrame:
    """The table of claims in ``outputs/<results>`` (``verdicts.compare``); raises ValueError if there is none."""
    path = paths.OUTPUTS / results / "tables" / "claims.csv"
    if not results or not path.is_file():
        known = sorted(found.parts[-3] for found in paths.OUTPUTS.glob("*/tables/claims.csv"))
        raise ValueError(
            f"two folders of results with a report are compared, got {results!r}, which has none: make one with "
            f"`make reproduce RESULTS=name`, or name one of these: {', '.join(known) or '(none)'}"
        )
    return tables.read_table(path)


def judged(comparison: pd.DataFrame) -> pd.DataFrame:
    """The measurement ("here") and the "verdict" of every claim that was judged, by experiment and claim."""
    claims = comparison[comparison.claim.notna() & (comparison.verdict != NOT_RUN)]
    return tables.shown(claims).set_index(CLAIM)[["here", "verdict"]] if len(claims) else pd.DataFrame()


def side_by_side(comparisons: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The claims that all ``comparisons`` judged; columns are pairs of a comparison's name and "here" or "verdict".

    Raises ValueError if there is no such claim.
    """
    both = pd.concat({name: judged(comparison) for name, comparison in comparisons.items()}, axis=1, join="inner")
    if both.empty:
        raise ValueError(f"results that are compared must have judged the same claims, got none for {[*comparisons]}")
    return both


def differing(both: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``side_by_side`` with different verdicts."""
    verdicts = both.xs("verdict", axis=1, level=1)
    return both[verdicts.nunique(axis=1) > 1]


def main(first: str, second: str) -> None:
    if not second:
        raise ValueError("results are compared with those of another folder, got none: make reruns WITH=embedded-amx")
    if first == second:
        raise ValueError(f"two different folders of results are compared, got {first!r} twice")
    both = side_by_side({results: read_claims(results) for results in (first, second)})
    others = differing(both)
    alike = len(both) - len(others)
    print(f"{alike} of {len(both)} claims have the same verdict in outputs/{first} and outputs/{second}")
    if len(others):
        others = others.set_axis([f"{name} ({results})" for results, name in others], axis=1)
        print(others.reset_index().to_string(index=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.reporting.reruns", description=__doc__)
    parser.add_argument("first", help="a folder of outputs")
    parser.add_argument("second", help="another one")
    given = parser.parse_args()
    try:
        main(given.first, given.second)
    except ValueError as error:
        sys.exit(f"error: {error}")
