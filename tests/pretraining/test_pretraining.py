"""Corpus and training loop of the embedded checkpoint."""

import math

import numpy as np
import pytest
import torch

from fragility_pretraining import corpus, train

CODE = '''"""Module help, which is long enough to be kept as text."""

# A comment that is not a block of prose.
x = 1  # trailing


def f():
    """Function help, which is long enough to be kept too."""
    return """
    a string
    of several
    lines
    as help tables are
    """
'''


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(CODE)
    return path


def test_documents_hold_docstrings_and_long_strings_in_order(source):
    text = corpus.read_document(source, "module.py").text
    assert text.split("\n\n")[:2] == [
        "Module help, which is long enough to be kept as text.",
        "Function help, which is long enough to be kept too.",
    ]
    assert "of several\nlines" in text
    assert "comment" not in text


def test_long_comment_blocks_are_prose(tmp_path):
    path = tmp_path / "commented.py"
    lines = ["# This comment explains at some length why things are as they are, in plain words."] * 4
    path.write_text("\n".join(lines) + "\nx = 1\n")
    assert corpus.read_document(path, "commented.py").text.startswith("This comment explains")


def test_broken_files_and_files_without_help_are_skipped(tmp_path):
    broken, bare = tmp_path / "broken.py", tmp_path / "bare.py"
    broken.write_text("def (:\n")
    bare.write_text("x = 1\n")
    assert corpus.read_document(broken, "broken.py") is None
    assert corpus.read_document(bare, "bare.py") is None


def test_deduplicator_drops_repeats_and_protected_passages():
    words = " ".join(f"word{i}" for i in range(40))
    keep = corpus.Deduplicator(protected=[words])
    inside = corpus.Document("a", f"before it {words} and after it")
    assert keep(inside).text == ""
    fresh = corpus.Document("b", " ".join(f"other{i}" for i in range(40)))
    assert keep(fresh).text == fresh.text
    assert keep(fresh).text == ""
    assert keep(corpus.Document("c", "Parameters")).text == "Parameters"


def test_missing_package_is_named():
    with pytest.raises(ModuleNotFoundError, match="needs the package 'nowhere_to_be_found'.*leave it out"):
        list(corpus.source_files("nowhere_to_be_found"))


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    config = train.TrainingConfig(steps=100, peak_learning_rate=1.0, warmup_fraction=0.1)
    rates = [train.learning_rate(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_batches_are_windows_of_the_stream():
    stream = np.arange(2000, dtype=np.uint16)
    config = train.TrainingConfig(batch_windows=3, context=50)
    batch = next(train.batches(stream, config))
    assert batch.shape == (3, 51)
    assert ((batch[:, 1:] - batch[:, :-1]) == 1).all()


@pytest.mark.parametrize("name", ["steps", "batch_windows", "micro_batch", "context", "evaluation_interval"])
def test_a_training_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        train.TrainingConfig(**{name: 0})


def test_windows_weigh_the_same_in_parts_of_other_sizes():
    model = train.new_model("embedded", 16, 8, 0)
    stream = np.random.default_rng(0).integers(16, size=100).astype(np.uint16)
    found = [
        train.evaluate(model, stream, train.TrainingConfig(context=8, evaluation_windows=5, micro_batch=size))
        for size in (1, 4, 5)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=2e-3)  # in bf16


def test_short_corpus_is_an_error():
    with pytest.raises(ValueError, match="more than two batches of 8 windows of 1024 tokens, but has 100 tokens"):
        next(train.batches(np.zeros(100, dtype=np.uint16), train.TrainingConfig()))


@pytest.mark.parametrize("checkpoint", ["embedded", "embedded-llama"])
def test_training_learns_a_pattern_and_keeps_the_best_weights(checkpoint, tmp_path):
    stream = np.tile(np.arange(16, dtype=np.uint16), 200)
    config = train.TrainingConfig(
        steps=12, batch_windows=4, micro_batch=2, context=32, evaluation_interval=4, evaluation_windows=4
    )
    model = train.new_model(checkpoint, vocabulary=16, context=32, seed=0)
    log = train.train(model, stream, {"validation": stream}, config, tmp_path)
    assert log.step.tolist() == [4, 8, 12]
    assert log.tokens.tolist() == [512, 1024, 1536]
    assert log.validation_loss.min() < 0.8 * math.log(16)
    assert train.evaluate(model, stream, config) == pytest.approx(log.validation_loss.min(), rel=1e-5)


def test_new_models_are_the_embedded_ones():
    with pytest.raises(ValueError, match="must be embedded or embedded-llama, got 'gpt2'"):
        train.new_model("gpt2", vocabulary=16, context=32, seed=0)


def test_tokenizer_is_byte_level_and_lossless():
    tokenizer = train.train_tokenizer(iter(["some words and some words again"] * 50), vocabulary=300)
    text = "words unseen: Ünïcödé\n\ttab"
    ids = train.encode(tokenizer, [text])
    assert ids[-1] == tokenizer.eos_token_id == 0
    assert tokenizer.decode(ids[:-1].tolist()) == text
    assert torch.tensor(ids.astype(np.int64)).max() < 300
