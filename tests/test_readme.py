"""What README.md claims exists: notebooks, and the way from each equation to its code and test."""

import importlib
import io
import re
import subprocess

import pandas as pd
import pytest

from fragility_lab.paths import NOTEBOOKS, PROJECT
from fragility_lab.reporting import reruns, tables

README = (PROJECT / "README.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `(fragility_core[\w.]+)` \| `(tests/\w+\.py)::(\w+)` \| (.+?) \|$", README, re.M)


def test_table_was_found():
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].removeprefix("fragility_core."))
def test_equation_leads_to_function_test_and_notebook(row):
    label, dotted, test_file, test_name, notebook = row
    module, name = dotted.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    label_words = re.sub(r"`", "", label).split(" (")[0]
    assert label_words in (function.__doc__ or ""), f"{dotted} does not cite {label_words!r}"
    source = (PROJECT / test_file).read_text()
    assert re.search(rf"^def {test_name}\(", source, re.M), f"no test {test_name} in {test_file}"
    assert name in source, f"{test_file} does not use {name}"
    assert notebook == "–" or (NOTEBOOKS / f"{notebook.strip('`')}.ipynb").is_file()


def test_every_notebook_is_listed():
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert f"notebooks/{path.name}" in README


def test_every_local_link_leads_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (PROJECT / target).exists(), target


def test_examples_run():
    """One after the other, as a reader would paste them."""
    names: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S):
        exec(code, names)
    assert names["low"].format.name == "fp16" and len(names["layers"]) == 12 * len(names["windows"])


def committed(path: str) -> pd.DataFrame:
    """A committed table as it is in the checkout's history: a rerun may have written other numbers over it."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=PROJECT, capture_output=True, text=True, check=False)
    return pd.read_csv(io.StringIO(shown.stdout) if shown.returncode == 0 else PROJECT / path)


def test_results_are_those_of_the_committed_tables():
    for experiment in ("e2", "e3"):
        claims = committed(f"outputs/embedded/tables/{experiment}_claims.csv")
        for row in tables.shown(claims.fillna({"verdict": "–"})).itertuples():
            assert f"| {row.quantity} | {row.paper} | {row.here} | {row.interval} | {row.verdict} |" in README
    for row in committed("outputs/embedded/tables/e2_signals.csv").itertuples():
        above = "–" if row.signal == "combined" else row.runs_above_combined
        assert f"| `{row.signal}` | {row.pearson:.3f} | {row.spearman:.3f} | {row.retrieval:.3f} | {above} |" in README
    runs = committed("outputs/embedded/tables/e5_runs.csv").groupby("policy").mean(numeric_only=True)
    columns = ["onsets", "onsets_release_ratio", "max_mismatch", "final_mismatch", "actions", "protected_layer_steps"]
    for policy, means in runs[columns].iterrows():
        formats = ("{:.1f}", "{:.1f}", "{:.3e}", "{:.3e}", "{:.1f}", "{:.0f}")
        assert f"| `{policy}` | {' | '.join(map(str.format, formats, means))} |" in README


def test_results_of_x1_are_those_of_the_committed_tables():
    runs, ranking = (committed(f"outputs/embedded/tables/x1_{name}.csv") for name in ("runs", "ranking"))
    for name, adjoint, score in (
        ("Pearson with the mismatch, mean", runs.adjoint_pearson, runs.combined_pearson),
        ("Spearman with the mismatch, mean", runs.adjoint_spearman, runs.combined_spearman),
        (
            "Spearman with the effect of patching a block, mean of 8 roundings",
            ranking.adjoint_average,
            ranking.score_average,
        ),
    ):
        assert f"| {name} | {adjoint.mean():.3f} | {score.mean():.3f} |" in README
    by_length = runs.groupby("length").mean(numeric_only=True)
    for column in ("between_draws", "ceiling", "adjoint_with_each"):
        assert ", ".join(f"{x:.2f}" for x in by_length[column]) in README, column
    for column in ("ceiling", "adjoint_with_each"):
        assert f"{runs[column].mean():.2f} on average" in README, column
    assert f"and {runs.adjoint_with_mean.mean():.2f} with their mean" in README
    ratios = f"{runs.mean_ratio.min():.3f} to {runs.mean_ratio.max():.3f}"
    assert f"| prediction over mismatch, mean of a run | {ratios} |" in README
    plans = (
        committed("outputs/embedded/tables/x1_protection.csv").set_index(["unit", "budget", "chosen_by"]).sort_index()
    )
    for budget in (2, 4):
        means = plans.measured_of_none["blocks", budget]
        choosers = ("adjoint", "score", "patching", "greedy", "first", "last", "random")
        assert f"| {budget} of 12 blocks | {' | '.join(f'{means[name]:.2f}' for name in choosers)} |" in README


def test_verdicts_of_another_cpu_are_those_of_the_committed_tables():
    names = ("embedded", "embedded-amx")
    both = reruns.side_by_side({name: committed(f"outputs/{name}/tables/claims.csv") for name in names})
    changed = reruns.differing(both)
    assert f"{len(both) - len(changed)} of the {len(both)} claims have the\nsame verdict" in README
    for claim, values in zip(changed.index, changed.values.tolist()):
        assert f"| {' | '.join([*claim, *values])} |" in README
