"""README.md: short, its examples run, and its numbers are those of the committed tables."""

import re
from types import ModuleType

import torch
from test_docs import TABLES, generated

import fragility_adjoint
import fragility_core
from fragility_lab.paths import NOTEBOOKS, PROJECT
from fragility_lab.reporting import results

README = (PROJECT / "README.md").read_text(encoding="utf-8")


def test_length():
    assert len(README.splitlines()) <= 140


def test_every_notebook_is_listed():
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert f"(notebooks/{path.name})" in README


def test_every_folder_of_the_packages_is_on_the_map():
    map_of_code = README.partition("## Map of the code")[2].replace("\n", " ")
    for package in PROJECT.glob("fragility_*/"):
        if package.suffix:  # what pip leaves there
            continue
        assert f"    {package.name}/" in map_of_code
        for path in package.iterdir():
            assert not path.is_dir() or path.name.startswith("__") or f" {path.name}/" in map_of_code, path


def test_every_make_target_is_one():
    targets = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M)
    assert {"reproduce", "test", "diagnose"} <= set(named) <= {*targets}


def test_examples_run(monkeypatch, capsys):
    """One after the other, as a reader would paste them."""
    monkeypatch.chdir(PROJECT)
    names: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S):
        exec(code, names)
    said = capsys.readouterr().out
    predicted, measured = map(float, re.findall(r"([\d.]+)%", said))
    assert said.startswith("blocks ") and abs(predicted / measured - 1) < 0.15
    assert len(names["layers"]) == 12 * len(names["signals"]) == 48 and names["signals"].combined.gt(0).all()


def ran(package: ModuleType, **names) -> dict:
    """All names after the examples in the docstring of ``package``, in which every name that it offers is used."""
    code = "\n".join(line[4:] for line in package.__doc__.splitlines() if line.startswith("    "))
    with torch.no_grad():
        exec(code, names)
    assert set(package.__all__) < names.keys()
    return names


def test_examples_of_the_core_run(tiny_gpt2, tiny_tokens):
    names = ran(fragility_core, model=tiny_gpt2, tokens=tiny_tokens)
    assert names["state"].step == 1 and names["measured"].shape == (len(tiny_tokens),)


def test_examples_beyond_the_paper_run(tiny_gpt2, tiny_tokens):
    names = ran(fragility_adjoint, model=tiny_gpt2, tokens=tiny_tokens)
    assert names["known"].windows.predicted.gt(0).all()
    assert names["protected"].execution == names["wide"].execution == names["low"].execution


def test_findings_are_those_of_the_committed_tables():
    assert generated("findings.md.jinja", results.FINDINGS.search(README)[0])


def test_findings_say_what_the_tables_show():
    """The sentences around the numbers, which no template can change."""
    e2, e3, x1 = (TABLES[name] for name in ("e2_runs", "e3_runs", "x1_runs"))
    signals = TABLES["e2_signals"].set_index("signal")
    verdicts = TABLES["e5_claims"].set_index("quantity").verdict
    assert e2.combined_pearson.gt(0).all() and e3.spearman.gt(0).all()
    assert e2.delta_pearson.gt(0).mean() > 0.5 and signals.runs_above_combined.transport_only > 9
    assert (
        not verdicts[[name for name in verdicts.index if re.match("(Largest|Final).*BGSS − random", name)]]
        .eq("holds")
        .any()
    )
    assert x1.mean_ratio.between(0.95, 1.05).all() and x1.adjoint_pearson.mean() > e2.combined_pearson.mean()
