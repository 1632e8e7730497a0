"""The picture of committed results: its numbers are those of the tables, and of passes."""

import json
import re

import nbformat
import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from fragility_explorer import passes, tables, windows, words
from fragility_explorer.passes import RUN, shipped
from fragility_explorer.results import EXPERIMENTS, Results
from fragility_lab import paths
from fragility_lab.reporting.report import read_tables
from fragility_lab.running.execute import notebook_path

KEPT = {"E1": "e1_controlled_sweeps", "E2": "e2_predictor", "E3": "e3_patching", "E5": "e5_mitigation"}
KEPT |= {"E2 sinks": "e2_predictor", "E5 course": "e5_mitigation"}
KEPT |= {"E5 seeds": "e5_seeds", "X1": "x1_adjoint_predictor", "X2": "x2_recipes", "X2 rivals": "x2_rivals"}
KEPT |= {"X1 plans": "x1_adjoint_predictor", "X2 plans": "x2_recipes"}
KEPT |= {"E5 learning rates": "e5_learning_rate", "X3": "x3_engines", "X4": "x4_referees"}
MOST = 400_000  # characters that a notebook's file may grow by


def unpacked(column: list | dict) -> list:
    """A column as the script reads it."""
    if isinstance(column, dict) and "of" in column:
        return [None if whole is None else float(f"{whole}e{column['power']}") for whole in column["of"]]
    if isinstance(column, dict) and "counted" in column:
        return [place % column["counted"] for place in range(column["rows"])]
    if isinstance(column, dict):
        return [value for value, times in column["repeated"] for _ in range(times)]
    return column


def rows_of(model: dict) -> pd.DataFrame:
    """The points of a ``model`` with the values of its choices."""
    rows = pd.DataFrame({name: unpacked(column) for name, column in model["columns"].items()})
    for choice in model["choices"]:
        rows[choice["key"]] = [choice["values"][place] for place in rows[choice["key"]]]
    return rows


@pytest.fixture(scope="module")
def pictures():
    return {name: Results(name) for name in EXPERIMENTS}


def test_windows_are_those_of_the_tables(pictures):
    for experiment in ("E2", "X1"):
        models = pictures[experiment].data["models"]
        assert [model["name"] for model in models] == list(tables.NAMES.values())
        for model, profile in zip(models, tables.NAMES):
            table, rows = read_tables(profile)["x1_windows"], rows_of(model)
            assert len(rows) == len(table)
            assert rows.precision.tolist() == table.precision.tolist()
            assert rows.length.tolist() == [f"{length} tokens" for length in table.length]
            assert rows.overflow.astype(bool).tolist() == table.overflow.tolist()
            for name in ("mismatch", *model["x"]):
                finite = np.isfinite(table[name])
                near = 6e-5 if name in passes.PRECISE else 6e-3
                np.testing.assert_allclose(rows[name][finite].astype(float), table[name][finite], rtol=near)


def test_correlations_of_the_points_are_those_of_the_runs(pictures):
    """The script computes them from the points, and the table beside it has the published ones."""
    model = pictures["E2"].data["models"][0]
    runs, points = read_tables("embedded")["e2_runs"], rows_of(model).groupby(list(RUN), sort=False)
    assert len(runs) == len(points)
    for (_, run), (_, of) in zip(runs.groupby(list(RUN), sort=True), sorted(points, key=lambda each: each[0])):
        assert len(of) == run.windows.item()
    for run in runs.itertuples():
        of = points.get_group((run.precision, f"{run.length} tokens", f"seed {run.seed}"))
        assert np.corrcoef(of.combined, of.mismatch)[0, 1] == pytest.approx(run.combined_pearson, abs=5e-4)
        assert spearmanr(of.combined, of.mismatch).statistic == pytest.approx(run.combined_spearman, abs=1e-3)
        place = "|".join(
            str(choice["values"].index(value))
            for choice, value in zip(model["choices"], (run.precision, f"{run.length} tokens", f"seed {run.seed}"))
        )
        first = model["summaries"][place]["rows"][0]
        assert first[:2] == ["the paper's score", f"{run.combined_pearson:.3f}"]
    assert model["summaries"]["||"]["rows"][0][1] == f"{runs.combined_pearson.mean():.3f}"


def test_correlations_of_sinks_are_those_of_their_points(pictures):
    for model, profile in zip(pictures["E2 sinks"].data["models"], tables.NAMES, strict=True):
        table, points = read_tables(profile)["sinks_signals"], rows_of(model)
        keys = table.set_index(["precision", "length", "half", "signal"])
        assert len(model["summaries"]) == table.groupby(["precision", "length", "half"]).ngroups
        for places, summary in model["summaries"].items():
            setting = [c["values"][int(at)] for c, at in zip(model["choices"], places.split("|"), strict=True)]
            of = points[(points[[c["key"] for c in model["choices"]]] == setting).all(axis=1) & (points.overflow == 0)]
            for name, (_, told, spearman) in zip(summary["keys"], summary["rows"], strict=True):
                row = keys.loc[(setting[0], int(setting[1].split()[0]), setting[2].split()[0], name)]
                assert len(of) == row.windows
                x, y = of[name].astype(float), of.mismatch_mean.astype(float)
                assert np.corrcoef(x, y)[0, 1] == pytest.approx(row.pearson, abs=1e-3)
                assert told == f"{row.pearson:.2f} ({row.low:.2f} to {row.high:.2f})".replace("-", "−")
                assert spearman == f"{row.spearman:.2f}".replace("-", "−")
        assert [row[0] for row in model["claims"]["rows"]][:1] == ["bf16, 128 tokens"]


def test_verdicts_are_those_of_the_tables(pictures):
    for experiment, name in (("E2", "e2_claims"), ("E3", "e3_claims")):
        for model, profile in zip(pictures[experiment].data["models"], tables.NAMES):
            table = read_tables(profile)[name]
            judged = table[table.claim.notna()]
            assert [row[0] for row in model["claims"]["rows"]] == judged.claim.tolist()
            assert [row[-1] for row in model["claims"]["rows"]] == judged.verdict.tolist()


def test_blocks_of_e3_rank_as_its_table_says(pictures):
    for profile, model in zip(windows.CHECKPOINTS, pictures["E3"].data["models"]):
        table = read_tables(profile)["e3_windows"]
        assert len(model["details"]) == len(table)
        found = [
            spearmanr(blocks["risk"], blocks["effect"]).statistic
            for blocks in (model["details"][place]["blocks"] for place in range(len(table)))
        ]
        # E2 computes several windows at once, so that its scores are rounded otherwise: neighbours may change places.
        assert np.abs(np.array(found) - table.spearman).max() < 0.03


@pytest.mark.parametrize("model", windows.CHECKPOINTS)
def test_what_is_shipped_is_computed_again(model):
    known = shipped(model)["inside"]
    table = read_tables(model)["x1_windows"].set_index([*RUN, "window"]).mismatch
    assert len(known) == 36
    for row in known:
        assert row["mismatch"] == pytest.approx(table[*(row[name] for name in (*RUN, "window"))], rel=1e-5)
        assert sum(row["share"]) < 1 and {len(digits) for digits in row["tokens"]} == {windows.TOKENS}
    row = known[0]
    again = windows.Inside(model, row["precision"]).of(row["length"], row["seed"], row["window"])
    for name in ("mismatch", "error", *windows.TERMS, "share"):
        off = np.abs(np.divide(again[name], row[name]) - 1)
        assert np.median(off) < 0.05 and off.max() < 0.3, name  # another CPU rounds otherwise
    steps = np.array(
        [[abs(int(a, 36) - int(b, 36)) for a, b in zip(*rows)] for rows in zip(again["tokens"], row["tokens"])]
    )
    assert steps.mean() < 1


def test_texts_are_those_of_the_windows():
    known, (asked, inputs) = shipped("texts"), windows.grid("embedded")
    assert {len(starts) for starts in known["starts"].values()} == {asked.windows}
    for key, spelled in known["texts"].items():
        length, seed, window = map(int, key.split())
        start = known["starts"][f"{length} {seed}"][window]
        begins = known["begins"][str(start)]
        assert "".join(spelled).startswith(begins[:20]) and window in windows.chosen()[length, seed]
        assert inputs.tokenizer.decode(inputs.window(start, windows.TOKENS)).startswith(begins)


def test_digits_keep_errors_within_an_eighth():
    errors = np.geomspace(tables.LOWEST, tables.HIGHEST, 500)
    ratio = tables.HIGHEST / tables.LOWEST
    read = [tables.LOWEST * ratio ** (int(digit, 36) / 35) for digit in windows.digits(errors)]
    assert np.abs(np.array(read) / errors - 1).max() < 0.15
    assert windows.digits(np.array([1e-9, 7.0])) == "0z"


def test_recipes_and_seeds_are_those_of_the_tables(pictures):
    rows = rows_of(pictures["X2"].data["models"][0])
    table = read_tables("embedded")["x2_recipes"].query("quantity == 'kl'")
    kl = rows[rows.quantity == "KL a token"]
    np.testing.assert_allclose(kl.predicted, table.predicted, rtol=6e-4)
    within = ((table.ratio - 1).abs() < 0.1).sum()
    assert pictures["X2"].data["models"][0]["claims"]["rows"][0][1] == f"{within} of {len(table)}"
    seeds = rows_of(pictures["E5 seeds"].data["models"][0])
    onsets = read_tables("embedded")["e5_seeds"].query("policy == 'bgss'").onsets
    assert seeds[seeds.outcome == "onsets"]["BGSS (released)"].tolist() == onsets.tolist()
    actions = read_tables("embedded")["e5_actions"]
    raised = [detail["blocks"]["raised"] for detail in pictures["E5"].data["models"][0]["details"].values()]
    assert sum(map(sum, raised)) == len(actions)


def test_plans_are_those_of_the_tables(pictures):
    models = dict(zip(tables.NAMES, pictures["X1 plans"].data["models"]))
    for profile, model in models.items():
        table, rows = read_tables(profile)["x1_plans"], rows_of(model)
        np.testing.assert_allclose(rows.measured.astype(float), table.measured, rtol=6e-4)
        assert model["names"] == table.label.tolist()
        run = ["precision", "length", "seed"]
        none = table[table.budget == 0].set_index(run).measured
        ours = table.query("unit == 'blocks' and budget == 2 and chosen_by == 'adjoint'").set_index(run).measured
        assert model["claims"]["head"][1] == "2 blocks"
        assert model["claims"]["rows"][0][:2] == ["backward passes", f"{(ours / none).mean():.2f}"]
    for model, profile in zip(pictures["X2 plans"].data["models"], tables.NAMES):
        table, rows = read_tables(profile)["x2_plans"], rows_of(model)
        np.testing.assert_allclose(rows.measured.astype(float), table.measured, rtol=6e-4)
        pairs = table.iloc[::2].measured.to_numpy(), table.iloc[1::2].measured.to_numpy()
        better = sum(int(row[1].split(" of ")[0]) for row in model["claims"]["rows"])
        assert better == (pairs[0] < pairs[1]).sum()


def test_cases_of_x3_are_those_of_its_table(pictures):
    for model, profile in zip(pictures["X3"].data["models"], ("embedded", "embedded-llama", "smollm2-135m")):
        table, rows = read_tables(profile)["x3_engines"].query("rms > 0"), rows_of(model)
        assert model["names"] == table.engine.tolist() and len(table) > 45  # without RoPE, six fewer
        np.testing.assert_allclose(rows.measured, table.rms, rtol=6e-4)
        np.testing.assert_allclose(rows.measured / rows.predicted, table.ratio, rtol=2e-3)
        assert (rows.kind == "harmless").tolist() == table.harmless.tolist()
        assert rows.cause.str.removeprefix("cause: ").tolist() == table.cause.fillna("none named").tolist()
        right = [int(row[1].split(" of ")[0]) for row in model["claims"]["rows"]]
        assert sum(right) == read_tables(profile)["x3_engines"].right.sum()


def test_engines_rivals_and_rates_are_those_of_their_tables(pictures):
    table = read_tables("embedded-llama")["x4_referees"].query("quantity == 'kl' and predicted.notna()")
    rows = rows_of(pictures["X4"].data["models"][0]).query("quantity == 'KL a token'")
    np.testing.assert_allclose(rows.measured, table.measured, rtol=6e-4)
    np.testing.assert_allclose(rows.predicted, table.predicted, rtol=6e-4)
    for model, profile in zip(pictures["X2 rivals"].data["models"], ("embedded", "embedded-llama")):
        table, rows = read_tables(profile)["x2_rivals"], rows_of(model)
        np.testing.assert_allclose(rows.ours - rows.rival_kl, table.difference, atol=2e-4 * table.rival_kl.max())
        assert rows.library.tolist() == (table.ladder + ", " + table.rival).tolist()
        counts = np.array([[int(text) for text in row[1:]] for row in model["claims"]["rows"]])
        assert counts.sum() == len(table) and counts[:, 0].sum() == (table.better == "ours").sum()
    (model,) = pictures["E5 course"].data["models"]
    table, rows = read_tables("embedded")["e5_course"], rows_of(model)
    none, bgss = (rows[rows.policy == name].reset_index(drop=True) for name in ("none", "BGSS (released)"))
    np.testing.assert_allclose(bgss.mismatch, table.bgss, rtol=1e-3)
    np.testing.assert_allclose(bgss.times, table.bgss / table.none, rtol=1e-3)
    assert bgss.step.tolist() == table.step.tolist() and (none.times == 1).all()
    runs = read_tables("embedded")["e5_runs"].query("seed == 0").set_index("policy")
    np.testing.assert_allclose(table[[*runs.index]].mean(), runs.mean_mismatch, rtol=1e-5)
    np.testing.assert_allclose(table[[*runs.index]].max(), runs.max_mismatch, rtol=1e-5)
    (model,) = pictures["E5 learning rates"].data["models"]
    table, rows = read_tables("embedded")["e5_learning_rates"], rows_of(model)
    np.testing.assert_allclose(rows.onsets, table.onsets, rtol=1e-3)
    assert rows.learning_rate.tolist() == table.learning_rate.tolist()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_notebook_begins_with_it(pictures, experiment):
    """Before the parameters, as committed, small, and the same as it would be now."""
    cells = nbformat.read(notebook_path(KEPT[experiment]), as_version=4).cells
    (place,) = (i for i, cell in enumerate(cells) if f"\n{cell.source}".endswith(f'\nResults("{experiment}")'))
    shown = [cell.source for cell in cells[2:] if "Results(" in cell.source]
    parameters = next(i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    assert 2 <= place < 2 + len(shown) < parameters and cells[1].source.startswith("## The committed results")
    assert cells[2 + len(shown)].source.startswith("## Run it yourself")
    stored = cells[place].outputs[0].data["text/html"]
    assert len(json.dumps(stored)) < MOST
    assert stored == pictures[experiment].html, "the tables have changed: `make notebooks` and commit"


def test_every_checkpoint_can_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "OUTPUTS", tmp_path)
    for experiment in EXPERIMENTS:
        assert "No committed results are here." in Results(experiment).html


def test_columns_and_signals_are_in_words():
    rows = pd.DataFrame({"combined_pearson": [0.1], "adjoint_sd": [0.2], "policy": ["bgss"], "no_such_column": ["x"]})
    shown = words.table(rows)
    assert list(shown) == ["Pearson, the paper's score", "sd, backward passes", "policy", "no such column"]
    assert shown.policy.item() == "BGSS (released)" and list(rows) != list(shown)
    by_signal = pd.DataFrame({"pearson": [0.1]}, index=pd.Index(["no_transport"], name="signal"))
    assert words.table(by_signal).index.tolist() == ["the score without transport"]


def test_a_smoke_run_judges_no_claim():
    compared = read_tables("embedded")["e2_claims"].astype(object).fillna("")
    shown = words.verdicts(compared, "smoke")
    judged = shown.verdict[compared.claim.to_numpy() != ""]
    assert len(judged) == 7 and judged.str.endswith(words.SMOKE).all()
    assert not words.verdicts(compared, "embedded").verdict.str.contains(words.SMOKE).any()
    assert not re.search("combined|no_transport", " ".join(shown.index))


def test_x1_of_a_real_model_has_its_error_by_kind_of_kernel(pictures):
    for model, profile in zip(pictures["X1"].data["models"], tables.NAMES):
        if profile in windows.CHECKPOINTS:
            assert all("by" not in detail for detail in model["details"].values())
            continue
        sites = read_tables(profile)["x1_sites"].set_index(["precision", "length"])
        for place, row in enumerate(read_tables(profile)["x1_windows"].itertuples()):
            if (row.precision, row.length) in sites.index:
                shares = model["details"][place]["blocks"]["kinds"]
                np.testing.assert_allclose(shares, sites.loc[(row.precision, row.length)], rtol=6e-3)
                assert sum(shares) == pytest.approx(1, abs=0.01)


def test_an_experiment_that_is_none_is_refused():
    with pytest.raises(ValueError, match="an experiment must be one of E1, E2, .*, got 'E4'"):
        Results("E4")
