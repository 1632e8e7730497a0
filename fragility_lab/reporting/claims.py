"""The numbers of the paper's experiments, and its claims about them: ``fragility_lab/assets/report/claims.csv``.

The table has one row per number (protocol section 7). Column ``values`` says how a run's tables give the same number.
"""

from dataclasses import dataclass

import pandas as pd

from fragility_lab.paths import ASSETS

# E1, measured on the authors' release in double precision.
E1_RELEASE = {
    "attention_pearson": 0.9999987469948455,
    "attention_spearman": 1.0,
    "layernorm_pearson": 0.9378063378674619,
    "layernorm_spearman": 1.0,
    "residual_max_gap": 4.91093565467291,
}


@dataclass(frozen=True)
class Quantity:
    """One number of the paper, its computation from a run's tables, and the paper's claim about it, if there is one.

    ``values`` is a pandas expression over the table called ``table``; it gives one value per run. A table with a column
    ``policy`` first gets one row per seed (``verdicts.by_seed``). ``paper`` is (mean, standard deviation or None), or
    (runs, all runs) for ``counted`` quantities. ``test`` is a key of ``verdicts.TESTS``: it compares the mean with
    ``bound``, a number or an expression over the same table. ``smallest``, also one of these, is the smallest effect of
    interest: a mean that is nearer to the bound makes no difference that matters. ``digits`` is the format of the
    numbers. Quantities that are not ``sampled`` (E1: the same in every run) have no interval.
    """

    experiment: str
    name: str
    table: str
    values: str
    paper: tuple[float, float | None] | None = None
    claim: str = ""
    test: str = ""
    bound: str = "0"
    smallest: str = "0"
    digits: str = ".3f"
    counted: bool = False
    sampled: bool = True


def read() -> tuple[Quantity, ...]:
    """The rows of the table of claims."""
    table = pd.read_csv(ASSETS / "report" / "claims.csv", dtype=str, keep_default_na=False)
    return tuple(_quantity(**row) for row in table.to_dict("records"))


def _quantity(paper: str, paper_sd: str, paper_runs: str, bound: str, smallest: str, **texts: str) -> Quantity:
    second = paper_sd or paper_runs
    numbers = (float(paper), float(second) if second else None) if paper else None
    sampled = texts["experiment"] != "E1"
    compared = {"bound": bound or "0", "smallest": smallest or "0"}
    return Quantity(paper=numbers, **compared, counted=paper_runs != "", sampled=sampled, **texts)


QUANTITIES = read()
E1, E2, E3, E5, E5_SCARCE = (
    tuple(quantity for quantity in QUANTITIES if quantity.experiment == name)
    for name in ("E1", "E2", "E3", "E5", "E5, six actions")
)
