"""Servers that score text, and all ways in which they fail."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import forks
import numpy as np
import pytest
import stub
import torch

from fragility_engines.logs import score
from fragility_engines.logs.sequences import read
from fragility_engines.logs.servers import Text, detected
from fragility_engines.logs.transport import Client, ServerError
from fragility_lab.paths import CHECKPOINTS, PROJECT

TOKENS = (5, 9, 9, 40, 3)
MODEL = str(CHECKPOINTS / "embedded-llama")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("fragility_engines.logs.transport.WAITS", (0.01, 0.01))


def asked(server, longest=60.0, most=2**20, top=3, engine="", key=""):
    client = Client(stub.url(server), 300.0, 60.0, most, key)
    found = detected(client, engine, top)
    client.longest = longest  # for the text alone: a busy machine may be slow to say which engine it is
    return found.score(Text(TOKENS))


@pytest.mark.parametrize("engine", stub.SERVERS)
def test_every_engine_scores_what_it_was_sent(engine):
    with stub.running(engine) as server:
        found = asked(server)
    assert found.tokens.tolist() == [*TOKENS]
    assert np.isnan(found.logprobs[0])
    assert found.logprobs[1:].tolist() == pytest.approx(stub.scores([*TOKENS])[1:])
    if engine == "openai":  # its most probable tokens are texts
        assert not found.tops
        return
    assert found.tops[0] is None
    for at, top in enumerate(found.tops[1:], 1):
        best = dict(stub.largest([*TOKENS[:at]], 3))
        assert top == pytest.approx(best | {TOKENS[at]: found.logprobs[at]} if len(top) > 3 else best)


def test_a_key_is_sent_and_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with stub.running("vllm") as server:
        asked(server, key="secret")
        assert all(headers["Authorization"] == "Bearer secret" for _, _, headers in server.seen)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_no_most_probable_tokens_are_asked_for_if_none_are_wanted(engine):
    with stub.running(engine) as server:
        assert not [top for top in asked(server, top=0).tops if top and len(top) > 1]


def entry(found):
    return found["choices"][0]


WRONG = {
    "404": (stub.status(404), "got 404 Not Found: 'the reason'"),
    "500": (stub.status(500), "got 500 Internal Server Error: 'the reason'"),
    "a plain error": (stub.status(400, b"context too long"), "got 400 Bad Request: 'context too long'"),
    "a detail": (stub.status(422, b'{"detail": "bad field"}'), "'bad field'"),
    "a redirect": (stub.status(307, Location="http://example.org/"), "got a redirect (307) to 'http://example.org/'"),
    "slow": (stub.slow, "within 0.3 s, and did not"),
    "a byte now and then": (stub.dripping, "within 0.3 s, and did not"),
    "endless": (stub.endless, "at most 1,048,576 bytes, got more"),
    "cut": (stub.cut, "must send all bytes that it announced, got 13"),
    "cut chunks": (stub.cut_chunks, "IncompleteRead"),
    "hung up": (stub.hung_up, "RemoteDisconnected"),
    "nothing": (stub.status(200, b""), "with a JSON object, got nothing"),
    "no JSON": (stub.status(200, b"ready"), "with a JSON object, got Expecting value"),
    "no text": (stub.status(200, b"\xff\xfe"), "with a JSON object, got 'utf-8' codec"),
    "HTML": (stub.status(200, b"<html>welcome</html>", Content_Type="text/html"), "a page of HTML"),
    "a list": (stub.status(200, b"[1]"), "got a list"),
    "deep": (stub.status(200, b"[" * 100000), "with a JSON object, got"),
    "too short a length": (stub.changed(lambda found: json.dumps(found).encode()[:40]), "with a JSON object"),
    "an error with 200": (stub.status(200, b'{"error": {"message": "no memory"}}'), "got an error: 'no memory'"),
    "vLLM's error with 200": (stub.status(200, b'{"object": "error", "message": "busy"}'), "got an error: 'busy'"),
    "NaN": (
        stub.changed(lambda found: json.dumps(found).encode().replace(b"-", b"NaN, -", 1)), "with a JSON object, got"
    ),
    "another object": (stub.status(200, b'{"ok": true}'), "must have one choice, got None"),
    "two choices": (stub.changed(lambda found: {"choices": found["choices"] * 2}), "must have one choice"),
    "no choice": (stub.changed(lambda found: {"choices": []}), "must have one choice, got []"),
    "a strange choice": (stub.changed(lambda found: {"choices": ["x"]}), "must have one choice"),
    "no log-probabilities": (
        stub.changed(lambda found: entry(found).update(prompt_logprobs=None)), "a token with a log-probability"
    ),
    "a missing one": (
        stub.changed(lambda found: entry(found)["prompt_logprobs"].__setitem__(2, None)), "got none at token 2"
    ),
    "null": (
        stub.changed(lambda found: entry(found)["prompt_logprobs"][2]["9"].update(logprob=None)),
        "must map tokens to log-probabilities",
    ),
    "too few": (
        stub.changed(lambda found: entry(found)["prompt_logprobs"].pop() and None), "each token, got 4 for 5"
    ),
    "other tokens": (
        stub.changed(lambda found: entry(found).update(prompt_token_ids=[5, 9, 8, 40, 3])), "must have its token, 8"
    ),
    "fewer tokens": (
        stub.changed(lambda found: entry(found).update(
            prompt_token_ids=[5, 9, 9], prompt_logprobs=entry(found)["prompt_logprobs"][:3], token_ids=[]
        )),
        "the tokens that were sent, got none for 40 at token 3",
    ),
    "probabilities": (
        stub.changed(lambda found: entry(found)["prompt_logprobs"][2]["9"].update(logprob=0.5)), "must be at most 0"
    ),
    "minus infinity": (
        stub.changed(lambda found: json.dumps(found).replace(": -", ': -Infinity, "x": -', 1).encode()),
        "-Infinity, which is no number of JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_fails_is_refused_with_what_it_gave(name):
    failing, message = WRONG[name]
    start, longest = time.monotonic(), 0.3 if "within 0.3 s" in message else 60.0
    with stub.running("vllm", failing) as server, pytest.raises(ServerError) as refused:
        asked(server, longest)
    assert message in str(refused.value)
    assert time.monotonic() - start < 60, "no failure is waited for: a byte now and then would take three minutes"
    tries = sum(path == "/v1/completions" for path, _, _ in server.seen)
    again = ("500", "slow", "a byte now and then", "cut", "cut chunks", "hung up")
    assert tries == (3 if name in again else 1)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("first", [stub.status(503), stub.cut, stub.hung_up, stub.status(429)])
def test_what_passes_is_asked_for_again(first):
    with stub.running("vllm", [first, stub.passed]) as server:
        assert asked(server).tokens.tolist() == [*TOKENS]


def test_an_answer_in_chunks_is_put_together():
    with stub.running("vllm", stub.chunked) as server:
        assert asked(server).tokens.tolist() == [*TOKENS]


def test_a_version_that_does_not_say_the_tokens_is_read_by_its_entries():
    with stub.running("vllm", stub.changed(lambda found: entry(found).pop("prompt_token_ids") and None)) as server:
        assert asked(server).tokens.tolist() == [*TOKENS]


def test_entries_that_are_none_are_refused():
    def five(found):
        entry(found).pop("prompt_token_ids")
        entry(found)["prompt_logprobs"] = 5

    with stub.running("vllm", stub.changed(five)) as server, pytest.raises(ServerError, match="must have the tokens"):
        asked(server)


def test_a_server_that_counts_the_bias_in_is_refused():
    def biased(found):
        found["completion_probabilities"][0]["logprob"] = 0.0
        found["completion_probabilities"][0]["top_logprobs"] = []

    with stub.running("llama.cpp", stub.changed(biased)) as server, pytest.raises(ServerError, match="logit_bias"):
        asked(server)


def test_a_server_that_generates_another_token_is_refused():
    def other(found):
        found["completion_probabilities"][0]["id"] = 77

    with stub.running("llama.cpp", stub.changed(other)) as server, pytest.raises(ServerError, match="got 77 for 9"):
        asked(server)


def of_text(values=None, pieces=("once", " upon", " a")):
    """llama-cpp-python's server: it takes text alone, and echoes it without BOS."""

    def fail(handler, asked):
        if not isinstance(asked["prompt"], str):
            return stub.status(422)(handler, asked)
        logprobs = {"tokens": [*pieces, "x"], "token_logprobs": values or [None, -1.0, -2.0, -0.5]}
        handler.send(json.dumps({"choices": [{"logprobs": logprobs}]}).encode())
        return True

    return fail


TEXT = Text((1, 7, 8, 9), "once upon a", (1, 7, 8, 9), opening=1)


@pytest.mark.parametrize("owner", ["me", "somebody"])  # the first is llama-cpp-python
def test_a_server_that_takes_no_tokens_is_sent_their_text(owner):
    with stub.running("openai", of_text()) as server:
        server.paths = stub.SERVERS["openai"] | {"/v1/models": lambda _: stub.listed(owner)}
        found = detected(Client(stub.url(server))).score(TEXT)
        assert len(server.seen) == (2 if owner == "me" else 5)
    assert found.tokens.tolist() == [1, 7, 8, 9] and found.logprobs[2:].tolist() == [-1.0, -2.0]
    assert np.isnan(found.logprobs[:2]).all()


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (of_text(values=[None, -1.0]), "must score 3 tokens of the prompt, got 2"),
        (of_text(pieces=("two", " upon", " a")), "must be of the text that was sent, got ['two', ' upon', ' a']"),
        (of_text(values=[None, None, -1.0, -2.0]), "got none at token 2"),
        (stub.status(200, b'{"choices": [{"logprobs": null}]}'), "must have logprobs of the echoed prompt, got None"),
        (
            stub.status(200, b'{"choices": [{"logprobs": {"token_logprobs": [null, -1, -2], "tokens": 5}}]}'),
            "must have logprobs of the echoed prompt, got {'token_logprobs': [None, -1, -2], 'tokens': 5}",
        ),
        (
            stub.status(200, b'{"choices": [{"logprobs": {"token_logprobs": [null, -1, -2], "tokens": {"a": 1}}}]}'),
            "must have logprobs of the echoed prompt",
        ),
    ],
)
def test_an_echo_of_something_else_is_refused(failing, message):
    with stub.running("openai", failing) as server, pytest.raises(ServerError) as refused:
        detected(Client(stub.url(server))).score(TEXT)
    assert message in str(refused.value)


def test_no_server_and_no_url_are_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ServerError, match="Connection refused"):
            detected(Client(f"http://127.0.0.1:{free.getsockname()[1]}"))
    for url in (
        "ftp://host",
        "127.0.0.1:8000",
        "http://",
        "http://host:99999",
        "http://host/?a=b",
        "file:///etc/passwd",
    ):
        with pytest.raises(ValueError, match="URL must be that of a server"):
            Client(url)
    with pytest.raises(ValueError, match="no name and password"):
        Client("http://me:secret@host")
    with stub.running("vllm") as server:
        server.paths = {}
        with pytest.raises(ServerError, match="answers neither /v1/models nor"):
            detected(Client(stub.url(server)))
        with pytest.raises(ValueError, match="ENGINE must be one of vllm"):
            detected(Client(stub.url(server)), "vlm")


def test_no_more_is_asked_after_the_time_for_all():
    with stub.running("vllm") as server, pytest.raises(ServerError, match="WITHIN="):
        detected(Client(stub.url(server), seconds=0.0))


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_engines_that_do_not_say_their_name_are_known_by_their_paths(engine):
    with stub.running(engine) as server:
        path = "/get_model_info" if engine == "sglang" else "/props"
        server.paths = stub.SERVERS[engine] | {path: lambda _: {"a": 1}}
        del server.paths["/v1/models"]
        assert asked(server).tokens.tolist() == [*TOKENS]


@pytest.fixture
def wide(monkeypatch):
    """The stub with a vocabulary as large as that of the embedded model."""
    monkeypatch.setattr(stub, "VOCABULARY", 4096)


def command(server, path, *more):
    return ["--url", stub.url(server), "--model", MODEL, "--length", "12", "--log", str(path), *more]


def test_the_command_writes_a_log_of_windows_that_begin_with_the_opening(tmp_path, wide, capsys):
    with stub.running("vllm") as server:
        score.main(command(server, tmp_path / "log.jsonl", "--windows", "3"))
    found = read(tmp_path / "log.jsonl")
    assert len(found) == 3 and all(len(each.tokens) == 12 for each in found)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert "3 windows scored by vllm (a/model)" in capsys.readouterr().out
    windows = score.windows_of(MODEL, "embedded", 12, 3)
    assert [each.tokens.tolist() for each in found] == [[*window.tokens] for window in windows]


def test_what_was_scored_stays_and_the_same_command_goes_on(tmp_path, wide, capsys):
    path, unfinished = tmp_path / "log.jsonl", tmp_path / "log.jsonl.unfinished"
    failing = [stub.passed, stub.status(400)]

    def after_two(handler, asked):
        return sum(path == "/v1/completions" for path, _, _ in handler.server.seen) > 2 and failing[1](handler, asked)

    with stub.running("vllm", after_two) as server:
        with pytest.raises(SystemExit, match="make score: .* got 400"):
            score.main(command(server, path))
        assert "2 of 4 windows are in" in capsys.readouterr().err
        assert not path.exists() and len(read(unfinished)) == 2
        server.failing = []
        score.main(command(server, path))
        assert len(server.seen) == 1 + 3 + 1 + 2  # models twice; the windows that were missing alone
        assert len(read(path)) == 4 and not unfinished.exists()
        assert "2 of them in an earlier run" in capsys.readouterr().out
        unfinished.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
        score.main(command(server, path, "--seed", "1"))  # other windows: none of them is kept
        assert "earlier" not in capsys.readouterr().out


def test_an_interrupt_leaves_whole_lines_and_says_so(tmp_path):
    """The command in a process of its own, which is interrupted while the server keeps it waiting."""

    def third(handler, asked):
        return sum(path == "/v1/completions" for path, _, _ in handler.server.seen) > 2 and stub.slow(handler, asked)

    with stub.running("vllm", third) as server:
        server.paths = stub.SERVERS["vllm"] | {"/v1/completions": of_any}
        path = tmp_path / "log.jsonl"
        process = forks.popen(
            [sys.executable, "-m", "fragility_engines.logs.score", *command(server, path)], cwd=PROJECT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(server.seen) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    assert not out
    assert err.rstrip().endswith("make score: interrupted") and "Traceback" not in err
    assert len(read(f"{path}.unfinished")) == 2 and not path.exists()


def of_any(asked):
    """An answer of vLLM for tokens of any vocabulary."""
    tokens = asked["prompt"]
    return {"choices": [{"prompt_token_ids": tokens, "prompt_logprobs": [
        None, *({str(token): {"logprob": -1.0 - token % 7, "rank": 1}} for token in tokens[1:])
    ]}]}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", ""], "got no URL: give URL= and MODEL="),
        (["--url", "nowhere"], "URL must be that of a server"),
        (["--model", "nowhere"], "nowhere"),
        (["--length", "100000"], "must fit the context"),
        (["--windows", "900", "--length", "256"], "the text must hold 900 windows"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--log", "/proc/nothing/log.jsonl"], "/proc/nothing"),
        (["--log", "."], "LOG must be a file to write, got the folder, pipe or device .: name a file"),
        (["--url", "http://127.0.0.1:1/ä"], "URL must be that of a server"),
        (["--url", "http://a..b"], "URL must be that of a server"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_line(tmp_path, wide, words, message):
    with stub.running("vllm") as server, pytest.raises(SystemExit) as refused:
        score.main([*command(server, tmp_path / "log.jsonl"), *words])
    assert str(refused.value).startswith("make score: ") and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_and_a_pipe_are_refused_before_a_window_is_sent(tmp_path, wide):
    """A log takes the place of what is there, which may be a device."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with stub.running("vllm") as server, pytest.raises(SystemExit, match="LOG must be a file to write"):
            score.main(command(server, path))
        assert not server.seen and path.exists() and not path.is_file()


def test_an_unfinished_log_goes_on_with_as_many_most_probable_tokens_alone(tmp_path, wide, capsys):
    path = tmp_path / "log.jsonl"
    with stub.running("vllm") as server:
        score.main(command(server, path, "--top", "2"))
        path.rename(tmp_path / "log.jsonl.unfinished")
        score.main(command(server, path, "--top", "3"))
    assert "earlier" not in capsys.readouterr().out.splitlines()[-2]
    assert all(len(top) >= 3 for each in read(path) for top in each.tops[1:])


@pytest.mark.parametrize(("key", "sent"), [(" secret\r\n", "secret"), ("se\ncret", ""), ("sécret", "")])
def test_a_key_is_one_line_and_never_shown(tmp_path, wide, monkeypatch, key, sent):
    monkeypatch.setenv(score.KEY, key)
    with stub.running("vllm") as server:
        if sent:
            score.main(command(server, tmp_path / "log.jsonl"))
            assert {headers["Authorization"] for _, _, headers in server.seen} == {f"Bearer {sent}"}
        else:
            with pytest.raises(SystemExit, match="one line of ASCII") as refused:
                score.main(command(server, tmp_path / "log.jsonl"))
            assert "cret" not in str(refused.value) and not server.seen


@pytest.mark.parametrize("words", [["--windows", "0"], ["--length", "1"], ["--top", "-1"], ["--within", "x"]])
def test_numbers_outside_of_their_bounds_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        score.main(words)
    assert "must be a whole number from" in capsys.readouterr().err


def test_the_stub_gives_a_distribution():
    assert torch.isclose(stub.row([1, 2]).exp().sum(), torch.ones((), dtype=torch.float64))
    assert partial(stub.row, [1])().argmax() == stub.largest([1], 1)[0][0]
