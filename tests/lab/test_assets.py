"""The embedded default is what its README says."""

import hashlib
import json

import pytest
from transformers import AutoModelForCausalLM

from fragility_lab.inputs.checkpoints import load_model, load_tokenizer
from fragility_lab.inputs.text import load_rows, tokenize
from fragility_lab.paths import ASSETS, CHECKPOINTS, EVALUATION_TEXT, TRAINING_TEXT

SHIPPED = sorted(folder.name for folder in CHECKPOINTS.iterdir())
PASSAGE = 20  # words


def passages(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + PASSAGE]) for i in range(len(words) - PASSAGE + 1)}


def record(checkpoint: str) -> dict:
    return json.loads((CHECKPOINTS / checkpoint / "record.json").read_text())


@pytest.mark.parametrize("checkpoint", SHIPPED)
def test_weights_are_the_recorded_ones(checkpoint):
    weights = (CHECKPOINTS / checkpoint / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record(checkpoint)["sha256"]


def test_architecture_is_the_documented_one():
    model = load_model("embedded", "cpu", AutoModelForCausalLM)
    config = model.config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (12, 128, 4, 1024)
    assert config.vocab_size == 4096 == len(load_tokenizer("embedded"))
    assert config.activation_function == "gelu_new"
    assert sum(p.numel() * 4 for p in model.parameters()) == pytest.approx(12.1e6, rel=0.01)


@pytest.mark.parametrize("checkpoint", SHIPPED)
def test_checkpoint_predicts_the_evaluation_text_as_recorded(checkpoint):
    """The recorded loss is of the first 24 windows in bf16 autocast; four in fp32 must come near it."""
    model = load_model(checkpoint, "cpu", AutoModelForCausalLM)
    tokens = tokenize(load_rows("embedded"), load_tokenizer(checkpoint))[: 4 * 1024].view(4, 1024)
    loss = model(tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(record(checkpoint)["best"]["evaluation_loss"], abs=0.4)
    assert loss < 6  # 8.3 nats, log(4096), is knowing nothing


def test_the_llama_is_of_another_family_and_reads_the_same_tokens():
    model = load_model("embedded-llama", "cpu", AutoModelForCausalLM)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 12, 128)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (4, 2, False)
    assert load_tokenizer("embedded-llama").get_vocab() == load_tokenizer("embedded").get_vocab()


def test_texts_share_no_passage():
    evaluation, training = (passages(path.read_text()) for path in (EVALUATION_TEXT, TRAINING_TEXT))
    assert min(len(evaluation), len(training)) > 40_000
    assert not evaluation & training


def test_training_text_is_long_enough_for_e5():
    assert len(tokenize(load_rows("embedded:training"), load_tokenizer("embedded"))) >= 150_000


def test_licences_lie_beside_the_texts():
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (ASSETS / "LICENSE-PYTHON.txt").read_text()
    assert "LICENSE-PYTHON.txt" in (ASSETS / "README.md").read_text()
