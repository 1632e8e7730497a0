"""Engines with known truth on the embedded Llama: no false alarm, and causes that are named."""

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from fragility_engines.comparison.figures import verdicts
from fragility_engines.proving.ground import Ground, expected_cause, summary
from fragility_engines.proving.variations import FAULTS, HARMLESS, gathered
from fragility_engines.suspects.suspect import logprobs
from fragility_lab.inputs.loading import load

BY_NAME = {each.name: each for each in (*HARMLESS, *FAULTS)}


@pytest.fixture(scope="module")
def ground():
    loaded = load("embedded-llama", "embedded", [64], 4, "cpu", AutoModelForCausalLM)
    return Ground(loaded.model, loaded.windows(64, 4, 0)[1], loaded.tokenizer.bos_token_id)


@pytest.fixture(scope="module")
def table(ground):
    chosen = (
        "sdpa", "padding at the left", "a cache, 7 tokens at a time", "products in two halves", "norms in fp32",
        "autocast", "fp32 where bf16 is said", "a second BOS", "RoPE base a half", "RoPE pairs in another order",
        "temperature 0.9", "an MLP left out", "a window of 16 tokens", "weights of 4 bits",
    )  # fmt: skip
    before = {path: p.clone() for path, p in ground.model.named_parameters()}
    found = ground.table([BY_NAME[name] for name in chosen])
    assert all(torch.equal(p, before[path]) for path, p in ground.model.named_parameters())
    return found.set_index("engine", drop=False)


def test_no_harmless_engine_is_more_than_rounding(table):
    harmless = table[table.harmless]
    assert len(harmless) == 7 and (harmless.verdict != "more").all(), harmless[["ratio", "low", "high", "verdict"]]
    decided = harmless.drop("autocast")  # its gap is near the limit to "less", where four windows may be too few
    assert decided.right.all(), decided[["ratio", "low", "high", "verdict"]]
    assert table.ratio["fp32 where bf16 is said"] < 1e-5


def test_faults_are_noticed_and_their_causes_named(table):
    faults = table[~table.harmless]
    assert len(faults) == 7 and (faults.verdict == "more").all(), faults[["ratio", "low", "high", "verdict"]]
    assert faults.named.all(), faults[["cause", "expected"]]


def test_the_summary_counts(table):
    table = table.assign(right=True)
    assert summary(table).values.tolist() == [[0, 7], [0, 7], [0, 7], [7, 7]]
    wrong = table.assign(verdict=["more"] * 7 + ["rounding"] * 7, right=False, named=False)
    assert summary(wrong).values.tolist() == [[7, 7], [7, 7], [7, 7], [0, 7]]
    small = table.assign(ratio=1.1)
    assert summary(small).of.tolist() == [7, 7, 0, 0]


@pytest.fixture(scope="module")
def gpt2():
    """The embedded GPT-2, whose eager attention rounds a third more than its fused one."""
    loaded = load("embedded", "embedded", [128], 6, "cpu", AutoModelForCausalLM)
    return Ground(loaded.model, loaded.windows(128, 6, 0)[1], loaded.tokenizer.bos_token_id)


def test_eager_attention_is_rounding_under_that_condition(gpt2):
    before = gpt2.model.config._attn_implementation
    gap, verdict = gpt2.judged(BY_NAME["eager"])
    assert verdict.kind == "rounding" and verdict.fused[0] > 1.25 > gap.ratio[0]
    assert "if the engine's attention is eager" in verdict.title
    _, verdict = gpt2.judged(BY_NAME["sdpa"])
    assert verdict.kind == "rounding" and verdict.fused is None
    assert gpt2.model.config._attn_implementation == before == "sdpa"
    assert gpt2.row(BY_NAME["eager"])["ratio"] > 1.25  # a fault of this size counts as one


@pytest.mark.parametrize("name", ["epsilon 1e-1", "attention scale halved"])
def test_a_fault_that_breaks_the_model_is_not_taken_for_another_one(gpt2, name):
    """Wrong places in the log, or another convention of norms, change log-probabilities in a similar way."""
    _, verdict = gpt2.judged(BY_NAME[name])
    assert BY_NAME[name].cause in verdict.cause.suspect.name and verdict.cause.share > 0.9


def test_the_figure_has_a_line_for_every_engine(table):
    labels = [label.get_text() for label in verdicts(table).get_yticklabels()]
    assert sorted(labels) == sorted(table.engine)


@pytest.mark.parametrize("how", [{"chunk": 5}, {"shift": 3}, {"window_size": 64}, {"drop": 0}, {"before": 0}])
def test_what_should_change_nothing_changes_nothing_in_fp32(ground, how):
    window = ground.windows[0]
    torch.testing.assert_close(
        gathered(ground.model, window, **how), logprobs(ground.model, window), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("how", [{"window_size": 16}, {"drop": 8}, {"before": 1}, {"temperature": 1.1}])
def test_what_is_a_fault_changes_log_probabilities(ground, how):
    window = ground.windows[0]
    assert (gathered(ground.model, window, **how) - logprobs(ground.model, window)).abs().max() > 0.05


def test_every_engine_runs_and_leaves_the_model_as_it_was(ground):
    before = {path: p.clone() for path, p in ground.model.named_parameters()}
    windows = ground.windows[:2]
    plain = BY_NAME["sdpa"].run(ground.model, windows)
    for name, engine in BY_NAME.items():
        found = engine.run(ground.model, windows)
        assert found.numel() == plain.numel() and found.isfinite().all(), name
        assert engine in HARMLESS or not torch.equal(found, plain), name
        assert all(torch.equal(p, before[path]) for path, p in ground.model.named_parameters()), name


def test_every_engine_says_what_is_right_and_whether_it_was_seen():
    assert len(BY_NAME) == len(HARMLESS) + len(FAULTS)
    assert all(set(each.verdicts) <= {"rounding", "less"} for each in HARMLESS)
    assert all(each.verdicts == ("more",) for each in FAULTS)
    table = pd.Series({each.name: each.seen for each in FAULTS})
    assert (~table).sum() >= 10


def test_expected_causes_are_parts_of_names(ground):
    assert expected_cause(ground.model, "RoPE base") == "RoPE base"
    assert expected_cause(ground.model, "4:1") == "model.layers.4.mlp"
    assert expected_cause(ground.model, "5:") == "model.layers.6"
