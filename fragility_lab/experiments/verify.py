"""Compute a sample of the committed results again: ``make verify``, with SEED= for another sample.

E1 is computed whole. One run each of E2, E3, X1 and E5 is drawn, computed by the committed profile in an empty folder,
and compared with its row of the committed tables.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pandas as pd
import torch

from fragility_lab.experiments import agreement, e1, e2, e3, e5, outcomes, x1
from fragility_lab.paths import OUTPUTS, require_project
from fragility_lab.reporting.report import read_tables
from fragility_lab.running.engine import complete
from fragility_lab.running.execute import defaults, notebook_path, parameters

PROFILE = "embedded"
DIGITS = 1e-5  # relative; committed tables have six digits
NOISE = 0.05  # by which another CPU, whose kernels round otherwise, may move a mean mismatch


def settings(notebook: str) -> dict:
    """The values of the committed profile for ``notebook``, completed by the notebook's defaults."""
    return defaults(notebook_path(notebook)) | parameters(notebook, PROFILE, ())


def first_sweeps() -> Iterator[tuple[str, pd.DataFrame]]:
    """E1, whole."""
    for name, table in e1.sweeps().items():
        yield f"e1_{name}", table


def passes(chosen: random.Random, folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """One run of E2 with windows of the shortest length, and those of E3 and X1 on it."""
    given = settings("e2_predictor")
    format, seed = chosen.choice(given["precisions"]), chosen.choice(given["seeds"])
    axes = ((format,), (min(given["lengths"]),), (seed,), given["windows"], given["batch_tokens"])
    grid = e2.Grid(given["model"], given["data"], *axes)
    inputs = e2.load_inputs(grid)
    sources = e2.specifications(grid, inputs)
    rows = complete(e2.MonitoredPasses, sources, inputs, folder / "e2")
    yield "e2_runs", agreement.agreement_by_run(e2.window_rows(rows))

    given = settings("e3_patching")
    wanted = {"windows": given["patched_windows"], "noisy_windows": given["noisy_windows"]}
    specs = e3.PatchSpec.of(sources, realisations=given["realisations"], **wanted)
    patched = complete(e3.Patches, specs, inputs, folder / "e3", source=folder / "e2")
    yield "e3_runs", e3.run_table(e3.window_table(patched))

    given = settings("x1_adjoint_predictor")
    asked = x1.EstimateSpec.of(sources, probes=given["probes"], redraws=given["redraws"])
    estimates = complete(x1.Estimates, asked, inputs, folder / "x1", source=folder / "e2")
    yield "x1_windows", x1.window_table(estimates, rows)


def training(chosen: random.Random, folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """One run of E5, under policy ``none``."""
    given = settings("e5_seeds")
    names = [field.name for field in fields(e5.TrainingSetting) if field.name in given]
    setting = e5.TrainingSetting(**{name: given[name] for name in names})
    inputs = e5.load_inputs(setting)
    policies = e5.policies(["none"], setting, inputs)
    seed = chosen.randrange(max(given["looks"]))
    rows = complete(e5.Mitigation, e5.specifications(setting, policies, [seed], inputs), inputs, folder / "e5")
    steps = outcomes.step_rows(rows, policies[0].base_epsilon)
    yield "e5_seeds", outcomes.run_summary(steps, outcomes.SpikeRule(given["onset_ratio"]))


IDENTITY = ("precision", "length", "seed", "window", "policy", "margin", "value_scale", "epsilon", "rho")


def beside(committed: pd.DataFrame, computed: pd.DataFrame) -> pd.DataFrame:
    """The numbers of ``computed`` (columns "computed") and of the same rows of ``committed``, one row per number.

    Raises ValueError if ``committed`` lacks a row.
    """
    keys = [name for name in IDENTITY if name in computed and name in committed]
    shared = computed.columns.intersection(committed.columns).difference([*keys, "seconds"])
    numbers = [name for name in shared if pd.api.types.is_numeric_dtype(computed[name])]
    both = computed[[*keys, *numbers]].round(12).merge(committed.round(12), on=keys, suffixes=("", "_committed"))
    if len(both) != len(computed):
        raise ValueError(f"every row that was computed must be committed, got {len(both)} of {len(computed)} rows")
    pairs = [
        pd.DataFrame({"column": name, "computed": both[name], "committed": both[f"{name}_committed"]})
        for name in numbers
    ]
    both = dict.fromkeys(("computed", "committed"), float)
    return pd.concat(pairs, ignore_index=True).dropna(subset=[*both], how="all").astype(both)


def judged(name: str, pairs: pd.DataFrame) -> tuple[str, bool]:
    """A line about the table ``name``, and True if its numbers are the committed ones up to another CPU's noise."""
    gap = (pairs.computed - pairs.committed).abs()
    same = gap <= DIGITS * pairs.committed.abs() + 1e-12
    if len(pairs) and same.all():
        return f"{name}: all {len(pairs)} numbers are the committed ones", True
    means = pairs[pairs.column.str.contains("mismatch")].groupby("column")[["computed", "committed"]].mean()
    off = (means.computed / means.committed - 1).abs().max() if len(means) else float("inf")
    return (
        f"{name}: {same.sum()} of {len(pairs)} numbers are the committed ones; mean mismatches differ by {off:.1%}",
        bool(off < NOISE) and not gap.isna().any(),
    )


def main(seed: int) -> int:
    """Print a line per table. The status is 1 if a number is not the committed one up to another CPU's noise."""
    require_project()
    if seed < 0:  # Python's generator takes -1 as 1
        raise SystemExit(f"SEED must be at least 0, got {seed}")
    torch.set_num_threads(1)  # as many as the committed runs had: other threads add up in another order
    chosen, alike = random.Random(seed), []
    committed = read_tables(PROFILE)
    with tempfile.TemporaryDirectory() as folder:
        for part in (first_sweeps(), passes(chosen, Path(folder)), training(chosen, Path(folder))):
            for name, table in part:
                said, same = judged(name, beside(committed[name], table))
                print(said, flush=True)
                alike.append(same)
    if not all(alike):
        print(f"committed: {OUTPUTS / PROFILE / 'tables'}; another kind of CPU moves mismatches by rounding noise")
    return 0 if all(alike) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m fragility_lab.experiments.verify", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the runs that are computed again")
    sys.exit(main(parser.parse_args().seed))
