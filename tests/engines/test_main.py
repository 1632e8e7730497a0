"""The command from a log to the page, on the embedded Llama."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fragility_engines.__main__ import main
from fragility_engines.logs import Scored, write
from fragility_engines.suspects import logprobs
from fragility_lab import paths
from fragility_lab.inputs.loading import load

MODEL = "embedded-llama"


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    for name, folder in {"PROJECT": tmp_path, "OUTPUTS": tmp_path / "outputs"}.items():
        monkeypatch.setattr(paths, name, folder)
    return tmp_path / "outputs"


@pytest.fixture(scope="module")
def windows():
    return load(MODEL, "embedded", [48], 4, "cpu", AutoModelForCausalLM).windows(48, 4, 0)[1]


@pytest.fixture(scope="module")
def native():
    folder = paths.CHECKPOINTS / MODEL
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def log(path, windows, score):
    write(path, [Scored(w.numpy(), np.concatenate([[np.nan], score(w).numpy()])) for w in windows])
    return str(path)


def test_native_bf16_is_rounding_and_another_temperature_is_named(tmp_path, outputs, windows, native, capsys):
    main(["--log", log(tmp_path / "a.jsonl", windows, lambda w: logprobs(native, w)), "--model", MODEL])
    assert capsys.readouterr().out.startswith("rounding explains it: the gap is ")
    other = log(tmp_path / "b.jsonl", windows, lambda w: logprobs(native, w, 1.1))
    main(["--log", other, "--model", MODEL, "--results", "b"])
    printed = capsys.readouterr().out
    assert printed.startswith("more than rounding") and "Another temperature explains" in printed
    page = (outputs / "b" / "comparison.html").read_text()
    assert "explains the gap" in page and str(tmp_path) not in page


def test_two_engines_are_compared(tmp_path, outputs, windows, native, capsys):
    first = log(tmp_path / "a.jsonl", windows, lambda w: logprobs(native, w))
    eager = AutoModelForCausalLM.from_pretrained(
        paths.CHECKPOINTS / MODEL, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    second = log(tmp_path / "b.jsonl", windows, lambda w: logprobs(eager, w))
    main(["--log", first, "--against", second, "--model", MODEL])
    printed = capsys.readouterr().out
    assert "more than rounding" not in printed and "page: outputs/engines/comparison.html" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "an engine's log is compared, got none: give LOG=log.jsonl"),
        (["--log", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
        (["--log", "{log}", "--recipe", "bf61"], "bf61"),
        (["--log", "{log}", "--model", "nowhere"], "nowhere"),
        (["--log", "{large}", "--model", MODEL], "is this the log of another model?"),
        (["--log", "{log}", "--against", "{large}", "--model", MODEL], "the same tokens in the same order"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, outputs, arguments, message):
    named = {"log": tmp_path / "log.jsonl", "large": tmp_path / "large.jsonl"}
    named["log"].write_text('{"tokens": [5, 6, 7], "logprobs": [null, -1, -2]}\n')
    named["large"].write_text('{"tokens": [5, 600000], "logprobs": [null, -1]}\n')
    with pytest.raises(SystemExit) as refused:
        main([each.format(**named) for each in arguments])
    assert str(refused.value).startswith("make compare: ") and message in str(refused.value)
    assert not outputs.exists()
