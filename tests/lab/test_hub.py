"""A model and a text of a hub, with the real clients.

The server is on this machine and behaves well, badly, or not at all.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub import COMMIT, REPOSITORY, Hub, serving

from fragility_lab.paths import CHECKPOINTS

ROWS = 60

# Loads the model or the text and prints what it is or the error. Every line of stdin asks for one of them, with an
# empty cache or the one there is, and a hub that may be silent for so many seconds.
CLIENT = """
import shutil, sys
from datasets.config import HF_CACHE_HOME
from fragility_lab.inputs import hub
from fragility_lab.inputs.checkpoints import load_config, load_model, load_tokenizer
from fragility_lab.inputs.text import load_rows
for line in sys.stdin:
    what, cache, patience = line.split()
    hub.TIMEOUT = int(patience)
    hub.snapshot.cache_clear()
    if cache != "keep":
        shutil.rmtree(HF_CACHE_HOME, ignore_errors=True)
    try:
        if what == "text":
            print(f"loaded {len(load_rows(NAME + ':default:train'))}", flush=True)
            continue
        load_config(NAME), load_tokenizer(NAME)
        print(f"loaded {sum(p.numel() for p in load_model(NAME).parameters())}", flush=True)
    except OSError as error:
        print(error, flush=True)
""".replace("NAME", repr(REPOSITORY))


@pytest.fixture(scope="module")
def ask(tmp_path_factory, reference_model_path):
    """Asks one client, with an empty cache or the one there is, under a behaviour of the hub."""
    folder, home = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("home")
    for path in (*reference_model_path.glob("*.json"), *reference_model_path.glob("*.safetensors")):
        shutil.copy(path, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "embedded" / name, folder)
    rows = [json.dumps({"text": f"row {number}"}) for number in range(ROWS)]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    with serving(folder) as (address, server):
        offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
        environ = {name: value for name, value in os.environ.items() if name not in offline}
        environ |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", CLIENT], env=environ, **piped) as client:
            yield answering(client, server, home)
            client.kill()


def answering(client: subprocess.Popen, server: type[Hub], home: Path) -> Callable[..., str]:
    """The function that asks ``client``; its ``cache`` is where the client keeps what it downloads."""

    def answer(behaviour: str, what: str = "model", cache: str = "empty") -> str:
        server.behaviour = behaviour
        server.asked.clear()
        patience = 1 if behaviour == "silent" else 60  # a busy machine answers late
        client.stdin.write(f"{what} {cache} {patience}\n")
        client.stdin.flush()
        return client.stdout.readline().strip()

    answer.cache = home / "hub"
    return answer


@pytest.mark.parametrize("behaviour", ["good", "slow", "flaky"])
def test_a_model_is_loaded(ask, behaviour):
    assert ask(behaviour).startswith("loaded ")
    assert (ask.cache / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT).is_dir()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("401", "the hub answers 401, which means that it does not know you or the name: check the name, or log in"),
        ("gated", "the hub answers 403, which means that access is restricted: accept the terms on the model's page"),
        ("404", "the hub answers 404, which means that there is no such repository"),
        ("429", "the hub answers 429, which means too many requests: wait some minutes"),
        ("500", "the hub answers 500"),
        ("cut", "the download broke off, and the same command goes on from there; "),
        ("wrong checksum", "model.safetensors must have the checksum that the hub says, "),
        ("silent", "the hub did not answer within 1 s"),
    ],
)
def test_a_hub_that_fails_is_answered_by_the_reason(ask, behaviour, said):
    assert ask(behaviour).startswith(
        f"cannot load the model {REPOSITORY!r} from the model hub and this machine's cache ({said}"
    )


@pytest.mark.parametrize("behaviour", ["good", "slow", "flaky"])
def test_a_text_is_loaded(ask, behaviour):
    assert ask(behaviour, "text") == f"loaded {ROWS}"


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("401", "the hub answers 401, which means that it does not know you or the name: check the name, or log in"),
        ("gated", "the hub answers 403, which means that access is restricted: accept the terms"),
        ("404", "the hub answers 404, which means that there is no such repository"),
        ("429", "the hub answers 429, which means too many requests: wait some minutes"),
        ("500", "the hub answers 500"),
        ("silent", "the hub did not answer within 1 s"),
    ],
)
def test_a_hub_that_does_not_give_a_text_is_answered_by_the_reason(ask, behaviour, said):
    start = f"cannot load the text {REPOSITORY!r} from the model hub and this machine's cache ({said}"
    assert ask(behaviour, "text").startswith(start)


@pytest.mark.parametrize("what", ["model", "text"])
@pytest.mark.parametrize("behaviour", ["500", "silent", "404"])
def test_the_cache_serves_when_the_hub_does_not(ask, behaviour, what):
    loaded = ask("good", what)
    assert loaded.startswith("loaded ") and ask(behaviour, what, cache="keep") == loaded


def test_a_broken_download_is_taken_up_again(ask):
    assert "broke off" in ask("cut")
    assert ask("good", cache="keep").startswith("loaded ")
    assert "checksum" in ask("wrong checksum")
    assert ask("good", cache="keep").startswith("loaded ")
