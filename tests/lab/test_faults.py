"""What goes wrong on real machines: killed processes, stops, full disks, two commands at once."""

import errno
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import forks
import pandas as pd
import psutil
import pytest
import torch
from forks import Fork
from swept import Mitigation, sweep, workers_of

from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.running import engine, files

KILLS = int(os.environ.get("KILLS", 3))  # `make test-faults` asks for 50
EXPERIMENTS = ["E2", "E3", "E5", "X1"] if "KILLS" in os.environ else ["E3", "E5"]  # E3 begins with E2
WORKERS = 2


def environ(**given: str) -> dict[str, str]:
    """The environment of a process of its own."""
    return os.environ | {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}", "OMP_NUM_THREADS": "1"} | given


def start(name: str, folder: Path) -> Fork:
    """An experiment on several workers in a process of its own."""
    return forks.start("swept", "sweep", name, folder, WORKERS, env=environ(SLOW_WRITES="0.1"))


@pytest.fixture(autouse=True)
def as_many_threads_as_a_worker():
    """What is computed here has the values of workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(engine.thread_count(WORKERS))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_killed_at_random_moments_the_tables_are_equal(tmp_path, name):
    whole, moments = sweep(name, tmp_path / "whole", 1), random.Random(name)
    killed = attempt = 0
    while killed < KILLS:
        folder = tmp_path / f"broken{attempt}"
        experiment = start(name, folder)
        while killed < KILLS and experiment.poll() is None:
            time.sleep(moments.uniform(0, 2))
            if victims := workers_of(experiment):
                moments.choice([experiment, *victims]).kill()
                killed += 1
        attempt += experiment.wait(300) == 0  # it was finished before it was killed
    pd.testing.assert_frame_equal(sweep(name, folder, 1), whole)


def test_workers_killed_while_they_start_are_replaced(tmp_path, monkeypatch):
    """One after the other, at three moments of their start, beside a worker that lives and waits for that."""
    monkeypatch.setenv("WRITES_AFTER", str(tmp_path / "killed"))
    killed, ended = [], threading.Event()

    def kill() -> None:
        while len(first := workers_of(psutil.Process())) < WORKERS and not ended.wait(0.01):
            pass
        for delay in (0.0, 0.3, 0.8):
            spared = [*first[1:], *killed]
            while not (found := [each for each in workers_of(psutil.Process()) if each not in spared]):
                if ended.wait(0.01):
                    return
            time.sleep(delay)
            found[0].kill()
            killed.append(found[0])
        (tmp_path / "killed").touch()

    whole, killing = sweep("E2", tmp_path / "whole", 1), threading.Thread(target=kill)
    killing.start()
    try:
        rows = sweep("E2", tmp_path / "broken", WORKERS)
    finally:
        ended.set()
        killing.join()
    assert len(killed) == 3, "each came in place of the one before"
    pd.testing.assert_frame_equal(rows, whole)


def test_two_commands_at_once_get_the_same_tables(tmp_path, monkeypatch):
    both = [start("E5", tmp_path / "one") for _ in range(2)]
    assert [experiment.wait(300) for experiment in both] == [0, 0]
    with monkeypatch.context() as patched:
        patched.setattr(Mitigation, "run", None)  # nothing is left to compute
        rows = sweep("E5", tmp_path / "one", 1)
    pd.testing.assert_frame_equal(rows, sweep("E5", tmp_path / "other", 1))


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_stop_while_workers_are_busy_is_one_line(tmp_path, number, status, said):
    """An interrupt at the terminal goes to all processes of its group; so does this SIGTERM."""
    command = [sys.executable, "-m", "fragility_lab.running.execute", "e2_predictor"]
    results, log = f"stopped-{os.getpid()}", tmp_path / "log"
    for parameter in (f"profile={results}", "workers=2", "windows=200", "lengths=[128]"):
        command += ["-p", parameter]
    try:
        with log.open("w") as stream:
            stopped = forks.popen(command, stream, stream, env=environ(), start_new_session=True)
        while not re.search(r"\| [1-9]\S*/102k", log.read_text()) and stopped.poll() is None:
            time.sleep(0.2)
        processes = stopped.children(recursive=True)
        os.killpg(stopped.pid, number)
        assert stopped.wait(60) == status
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    finally:
        shutil.rmtree(OUTPUTS / results, ignore_errors=True)
    assert log.read_text().splitlines()[-1] == f"{said}: the same command goes on from the last finished run"
    assert not re.search("Traceback|never retrieved|Error", log.read_text())


def test_a_full_disk_says_how_much_is_missing(tmp_path, monkeypatch):
    """Linux has a file whose disk is always full."""
    path = tmp_path / "page.html"
    files.write_whole(path, "before")
    partial = path.with_name(f"page.html.{socket.gethostname()}-{os.getpid()}.partial")
    partial.symlink_to("/dev/full")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=400))
    with pytest.raises(OSError, match=r"page.html must fit .* the file has 1,000 bytes, 400 are free, 600 are missing"):
        files.write_whole(path, "x" * 1000)
    assert path.read_text() == "before" and not partial.is_symlink()


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.EDQUOT, "a quota is used up"), (errno.EFBIG, r"not be as large here \(ulimit -f\)")]
)
def test_a_limit_is_no_full_disk(tmp_path, monkeypatch, number, reason):
    def refused(*_):
        raise OSError(number, "refused")

    monkeypatch.setattr(files.os, "replace", refused)
    with pytest.raises(OSError, match=rf"page.html must be a file that can be written, but .*{reason}"):
        files.write_whole(tmp_path / "page.html", "x")
    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", lambda **options: refused())
    with pytest.raises(OSError, match=rf"results must take files .* cannot be written to \(.*{reason}.*\): free some"):
        files.require_room(tmp_path, "results", "free some")


def test_room_is_looked_for_without_a_trace(tmp_path):
    files.require_room(tmp_path / "outputs" / "mine", "results", "free some", make=False)
    assert [*tmp_path.iterdir()] == []
    files.require_room(tmp_path / "outputs" / "mine", "results", "free some")
    assert [*tmp_path.rglob("*")] == [tmp_path / "outputs", tmp_path / "outputs" / "mine"]


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "page.html"
    files.write_whole(path, "Größe")
    files.write_whole(path, memoryview(b"later"))
    assert path.read_bytes() == b"later"
    with pytest.raises(OSError, match="must be a file that can be written, but that is not possible"):
        files.write_whole(path / "below", b"")
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]
