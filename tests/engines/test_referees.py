"""Engines that other people wrote: asked in a process of their own, beside predictions and emulations."""

import copy
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_suspects import LLAMA
from tiny import random_model, random_tokens, tiny_inputs
from transformers import LlamaConfig

from fragility_engines.referees import figures
from fragility_engines.referees.judged import Court, last_error, untied
from fragility_engines.referees.known import REFEREES, Referee
from fragility_engines.referees.runs import Referees, RefereeSpec, asked, get_referee, versions
from fragility_engines.referees.worker import RUNNERS, carry_out, installed
from fragility_exports.plan import Plan
from fragility_lab.running.engine import complete
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import ENGINES

WINDOWS = random_tokens(3, 24, seed=3, smallest=3)


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.fixture
def court(model, tmp_path):
    return Court(model, None, WINDOWS, tmp_path, Path(sys.executable), probes=2)


def test_every_referee_has_a_recipe_and_an_engine():
    assert len({each.name for each in REFEREES}) == len(REFEREES) > 12
    assert {each.engine for each in REFEREES} == set(RUNNERS)
    assert set(ENGINES) <= {each.plan.format.partition("+")[0] for each in REFEREES}


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory):
    """The rows of an engine by its name; each is asked once."""
    court = Court(model, None, WINDOWS, tmp_path_factory.mktemp("court"), Path(sys.executable), probes=2)
    return cache(lambda name: court.rows(get_referee(name)))


@pytest.mark.parametrize("name", ["torch bf16", "torch int8"])
def test_an_engine_is_what_its_recipe_says(rows, name):
    kl, logprob, changed = rows(name)
    assert (kl["quantity"], logprob["quantity"], changed["quantity"]) == ("kl", "logprob", "changed")
    assert 0.7 < kl["emulated"] / kl["measured"] < 1.4 and 0.6 < kl["ratio"] < 1.7
    assert 0.8 < logprob["emulated"] / logprob["measured"] < 1.25 and 0.7 < logprob["ratio"] < 1.4
    assert "predicted" not in changed and 0 <= changed["measured"] < 0.5
    assert kl["version"] == torch.__version__.partition("+")[0] or kl["version"] == torch.__version__
    assert kl["seconds"] > 0 and kl["windows"] == 3


def test_an_engine_that_cannot_compute_says_why(court):
    absent = Referee("torch", "bf16", Plan("bf16"))
    court.folder.joinpath("config.json").write_text('{"model_type": "nonesuch"}')
    (row,) = court.rows(absent)
    assert row["quantity"] == "kl" and "nonesuch" in row["refused"] and "measured" not in row


def test_an_engine_that_leaves_layers_as_they_are_is_refused(tiny_gpt2, tmp_path):
    court = Court(tiny_gpt2, None, WINDOWS, tmp_path, Path(sys.executable))
    (row,) = court.rows(get_referee("torch int8"))
    assert row["refused"] == "torch int8 quantizes nn.Linear alone, and this model has Conv1D in its blocks"


def test_the_answer_of_an_engine_is_its_logits(court):
    """A window has the logits that the runner gives for its tokens."""
    referee = get_referee("torch bf16")
    with court.ask(referee) as answer:
        found = np.stack([np.load(path) for path in answer.logits])
        files = answer.logits
    own = copy.deepcopy(court.model).bfloat16()(WINDOWS, use_cache=False).logits.float().detach().numpy()
    assert found.shape == (3, 24, court.model.config.vocab_size) and not files[0].exists()
    np.testing.assert_allclose(found, own, atol=0.1 * np.abs(own).max())


def test_the_worker_answers_by_files(court, tmp_path):
    answer = tmp_path / "answer"
    answer.mkdir()
    task = {
        "engine": "torch", "kind": "bf16", "model": str(court.folder), "work": str(tmp_path), "answer": str(answer),
        "windows": WINDOWS.tolist(),
    }  # fmt: skip
    assert carry_out(task)["seconds"] > 0
    assert sorted(path.name for path in answer.iterdir()) == ["logits-0.npy", "logits-1.npy", "logits-2.npy"]


def test_an_untied_copy_computes_the_same_and_is_rounded_apart(model):
    tied = random_model(LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True}))
    made = untied(tied)
    with torch.no_grad():
        assert torch.equal(made(WINDOWS).logits, tied(WINDOWS).logits)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight is made.model.embed_tokens.weight
    low = lower(made, "torchao-int8-w").model
    assert torch.equal(low.model.embed_tokens.weight, tied.model.embed_tokens.weight)
    assert not torch.equal(low.lm_head.weight, tied.lm_head.weight)


@pytest.mark.parametrize("recipe", ENGINES.values(), ids=ENGINES.keys())
def test_recipes_of_engines_round_the_ends_that_they_name(recipe, model):
    low = lower(model, recipe.name)
    chosen = low.recipe.layers
    assert ("lm_head" in chosen) and ("model.embed_tokens" in chosen) == bool(recipe.embedding)
    rounded = not torch.equal(low.model.model.embed_tokens.weight.float(), model.model.embed_tokens.weight)
    assert rounded == bool(recipe.embedding)
    assert not torch.equal(low.model.lm_head.weight.float(), model.lm_head.weight)


def test_the_last_error_is_the_line_that_names_one():
    said = "Traceback (most recent call last):\n  File x\nValueError: no such kind\n\twith a tail\n"
    assert (
        last_error(said) == "ValueError: no such kind" and last_error("killed\n") == "killed" and last_error("") == ""
    )


def test_engines_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr("fragility_engines.referees.runs.versions", lambda python: {"torch": "2.13.0"})
    there, missing = asked(["torch bf16", "openvino int8"])
    assert there == {"torch bf16": "2.13.0"} and missing == ["openvino int8"]
    with pytest.raises(ValueError, match="a referee must be one of ctranslate2 float32, .*, got 'vllm'"):
        asked(["vllm"])


def test_versions_are_those_of_the_environment(tmp_path):
    """Another Python is asked in a process of its own: here one by another name."""
    assert installed(["torch", "nonesuch"]) == {"torch": torch.__version__}
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    assert versions(other) == versions(Path(sys.executable))


def test_runs_are_kept(model, tmp_path, monkeypatch):
    """A second call takes the finished run, without the engine."""
    monkeypatch.setattr("fragility_engines.referees.runs.environment", lambda: Path(sys.executable))
    inputs = tiny_inputs(model)
    spec = RefereeSpec("torch int8", "1", "tiny", "drawn", inputs.digest, "cpu", 2, 16, ("kl",), probes=1)
    first = complete(Referees, [spec], inputs, tmp_path)
    assert first.quantity.tolist() == ["kl", "logprob", "changed"] and first.predicted.notna().tolist() == [
        True,
        False,
        False,
    ]
    monkeypatch.setattr(Court, "ask", lambda *_: pytest.fail("the run is finished"))
    assert complete(Referees, [spec], inputs, tmp_path).equals(first)


def test_the_figure_has_a_line_for_each_engine_that_rounds(rows):
    table = pd.DataFrame([*rows("torch int8"), {"engine": "x", "quantity": "kl", "refused": "no"}])
    axes = figures.referees(table)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["torch int8"]
