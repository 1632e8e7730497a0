"""The command from a log to the page, on the embedded Llama."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fragility_engines.__main__ import main
from fragility_engines.comparison import compare
from fragility_engines.logs.sequences import Scored, write
from fragility_engines.suspects.suspect import logprobs
from fragility_lab import paths
from fragility_lab.inputs.loading import load

MODEL = "embedded-llama"
BOS = "A BOS token that the tokens do not show"


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
    assert printed.startswith("more than rounding") and "A temperature of 1.1 explains" in printed
    page = (outputs / "b" / "comparison.html").read_text()
    assert "explains the gap" in page and str(tmp_path) not in page


def test_an_eager_engine_is_compared_as_one_and_so_are_parts_in_fp32(tmp_path, outputs, capsys):
    """Of the embedded GPT-2, whose eager attention rounds a third more than its fused one."""
    windows = load("embedded", "embedded", [128], 6, "cpu", AutoModelForCausalLM).windows(128, 6, 0)[1]
    folder = paths.CHECKPOINTS / "embedded"
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    main(["--log", log(tmp_path / "a.jsonl", windows, lambda w: logprobs(low, w)), "--model", "embedded"])
    assert capsys.readouterr().out.startswith("rounding explains it if the engine's attention is eager: the gap is")
    (page,) = outputs.glob("*/comparison.html")
    rows = re.findall(r'data-label="Leaves">([\d.]+)\s%</td><td data-label="Emulated">([\d.]+)\s%', page.read_text())
    predicted, emulated = np.array(rows, dtype=float).T
    assert len(rows) >= 4 and predicted.min() < 85  # scores in fp32; fused attention would have none to widen
    np.testing.assert_allclose(emulated, predicted, atol=15)


def test_an_interrupt_ends_with_a_line_and_leaves_no_page(tmp_path, windows):
    """In a process of its own, at moments after it began to import PyTorch, of a log that is long for any machine."""
    path = tmp_path / "log.jsonl"
    write(path, [Scored(np.tile(w.numpy(), 8), -1.5 - 0.5 * np.cos(np.arange(8 * len(w)))) for w in windows] * 16)
    name = f"interrupted-{os.getpid()}"
    command = [sys.executable, "-X", "importtime", "-m", "fragility_engines"]  # every import is a line of stderr
    command += ["--log", str(path), "--model", MODEL, "--results", name]
    for wait in (0.0, 3.0, 6.0):
        for again in (0.0, 0.1, 0.2):
            process = subprocess.Popen(
                command, cwd=paths.PROJECT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": str(paths.PROJECT)},
            )  # fmt: skip
            assert any("torch" in line for line in process.stderr)
            time.sleep(wait + again)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
            if "Exception ignored in" not in err:  # Python drops an interrupt inside of a destructor
                break
            shutil.rmtree(paths.PROJECT / "outputs" / name, ignore_errors=True)
        assert process.returncode in (1, -signal.SIGINT) and not out, err  # Python's own, in an exec of an import
        said = [line for line in err.splitlines() if not line.startswith("import time:")]
        assert said[-1] == "make compare: interrupted before the page was written"
        assert "Traceback" not in err
    assert not (paths.PROJECT / "outputs" / name).exists()


def test_two_engines_are_compared_and_the_one_with_a_fault_is_named(tmp_path, outputs, windows, native, capsys):
    right = log(tmp_path / "right.jsonl", windows, lambda w: logprobs(native, w))
    prefix = torch.tensor([native.config.bos_token_id])
    wrong = log(tmp_path / "wrong.jsonl", windows, lambda w: logprobs(native, torch.cat([prefix, w]))[1:])
    hot = log(tmp_path / "hot.jsonl", windows, lambda w: logprobs(native, w, 1.05))
    for first, second, owner, cause in (
        (wrong, right, "LOG (wrong.jsonl)", BOS), (right, wrong, "AGAINST (wrong.jsonl)", BOS),
        (right, hot, "AGAINST (hot.jsonl)", "temperature of 1.05"),
        (hot, right, "LOG (hot.jsonl)", "temperature of 1.05"),
    ):  # fmt: skip
        main(["--log", first, "--against", second, "--model", MODEL])
        printed = capsys.readouterr().out
        assert printed.startswith("more than rounding") and f"{cause} in {owner} explains" in printed, printed
    assert "explains the gap: LOG (hot.jsonl)" in (outputs / "engines" / "comparison.html").read_text()


def with_tops(path, windows, score, reported):
    """A log with the three most probable tokens by the model ``reported``."""
    found = []
    for window in windows:
        with torch.no_grad():
            z = reported(window[None]).logits[0, :-1].double().log_softmax(-1)
        values, tokens = z.topk(3)
        tops = (None, *(dict(zip(*pair)) for pair in zip(tokens.tolist(), values.tolist())))
        found.append(Scored(window.numpy(), np.concatenate([[np.nan], score(window).numpy()]), tops))
    write(path, found)
    return str(path)


def test_most_probable_tokens_are_compared_and_parts_in_fp32_are_judged(tmp_path, outputs, windows, native):
    path = with_tops(tmp_path / "a.jsonl", windows, lambda w: logprobs(native, w), native)
    main(["--log", path, "--model", MODEL])
    page = (outputs / "engines" / "comparison.html").read_text()
    assert "KL, at least" in page and "positions where another token is most probable" in page
    for part in ("the head (lm_head)", "the residual stream", "all norms"):
        assert part in page
    main(["--log", path, "--against", path, "--model", MODEL, "--results", "same"])
    assert "KL, at least" in (outputs / "same" / "comparison.html").read_text()


def test_two_engines_are_compared(tmp_path, outputs, windows, native, capsys):
    first = log(tmp_path / "a.jsonl", windows, lambda w: logprobs(native, w))
    eager = AutoModelForCausalLM.from_pretrained(
        paths.CHECKPOINTS / MODEL, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    second = log(tmp_path / "b.jsonl", windows, lambda w: logprobs(eager, w))
    main(["--log", first, "--against", second, "--model", MODEL])
    printed = capsys.readouterr().out
    assert "more than rounding" not in printed and os.path.relpath(outputs / "engines" / "comparison.html") in printed


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


def test_a_place_that_takes_no_page_is_told_before_the_passes(tmp_path, outputs, monkeypatch):
    path = tmp_path / "log.jsonl"
    path.write_text('{"tokens": [5, 6, 7], "logprobs": [null, -1, -2]}\n')
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("a pass runs"))
    outputs.write_text("no folder")
    with pytest.raises(SystemExit, match="^make compare: results must take files of .* cannot be written to"):
        main(["--log", str(path)])
