"""Runs shared out over processes: same values, no lost work, errors and interrupts that end them all."""

import os
import re
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

import forks
import pandas as pd
import psutil
import pytest
import torch
from swept import workers_of

from fragility_lab.paths import PROJECT
from fragility_lab.running import engine, runs
from fragility_lab.running.cluster import connected
from fragility_lab.running.environment import STALE
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.spread import LostWorkersError
from fragility_lab.running.task import Worker

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Number(Specification):
    """A run whose result is a number of its process and its own value."""

    experiment, unit = "squares", "number"

    value: int
    device: str = "cpu"

    @property
    def label(self) -> str:
        return f"number{self.value}"

    @property
    def size(self) -> int:
        return 1

    @property
    def group(self) -> int:
        return self.value // 3  # 1 and 2; 3, 4 and 5


@dataclass(frozen=True)
class Paired(Number):
    """Runs that are compared step by step."""

    paired = True


class Square(Worker):
    """Squares, and refuses or waits where a test wants it to."""

    def __init__(self, inputs, store, refused: int = -1, endless: int = -1, deadly: int = -1):
        super().__init__(inputs, store)
        self.refused, self.endless, self.deadly = refused, endless, deadly

    def run(self, spec, advance):
        if spec.value == self.refused:
            raise ValueError(f"no square of {spec.value}")
        if spec.value == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        while spec.value == self.endless and time.monotonic() < begin + 300:
            time.sleep(0.005)
            advance(0)
        advance(1)
        return pd.DataFrame({"value": [spec.value], "square": [spec.value**2], "process": [os.getpid()]})


INPUTS = SimpleNamespace(device=CPU, attention={"monitored": "eager"})
SPECS = [Number(value) for value in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_run_is_computed_once_and_kept_in_order(tmp_path, workers):
    store = RunStore(tmp_path)
    rows = engine.complete(Square, SPECS, INPUTS, tmp_path, workers)
    assert rows.value.tolist() == [1, 2, 3, 4, 5]
    assert rows.square.tolist() == [1, 4, 9, 16, 25]
    assert (rows.process == os.getpid()).all() == (workers == 1)
    assert rows.process[0] == rows.process[1], "a group stays in one process"
    assert store.metadata(Number(3))["attention"] == INPUTS.attention
    again = engine.complete(Square, SPECS, INPUTS, tmp_path, workers, refused=1)
    pd.testing.assert_frame_equal(rows, again)


@pytest.mark.parametrize("reported", [[], [1, 1], [2, 2]])
def test_a_finished_run_is_all_of_its_progress(tmp_path, monkeypatch, reported):
    """A worker may have less to do than was thought, or more."""

    class Long(Number):
        size = 3

    class Reporting(Square):
        def run(self, spec, advance):
            for units in reported:
                advance(units)
            return super().run(spec, lambda units: None)

    bar = MagicMock()
    monkeypatch.setattr(engine, "progress", lambda **options: bar)
    engine.complete(Reporting, [Long(1), Long(2)], INPUTS, tmp_path)
    assert sum(call.args[0] for call in bar.__enter__().update.call_args_list) == 2 * 3


def test_stale_runs_are_computed_again_or_kept_and_either_is_said(tmp_path, monkeypatch):
    engine.complete(Square, SPECS[:2], INPUTS, tmp_path)
    monkeypatch.setattr(runs, "code_digest", lambda kind: "other")
    monkeypatch.setenv(STALE, "keep")
    with pytest.warns(UserWarning, match="2 finished runs .* computed by other code .* are taken as they are"):
        assert len(engine.complete(Square, SPECS[:2], INPUTS, tmp_path, refused=1)) == 2
    monkeypatch.delenv(STALE)
    with pytest.warns(UserWarning, match="2 finished runs .* are computed again"):
        engine.complete(Square, SPECS, INPUTS, tmp_path)
    assert {RunStore(tmp_path).metadata(spec)["code"] for spec in SPECS} == {"other"}


def test_a_copy_of_another_run_is_computed_again(tmp_path):
    rows, store = engine.complete(Square, SPECS, INPUTS, tmp_path), RunStore(tmp_path)
    shutil.copy(store.path(Number(4)), store.path(Number(2)))
    with pytest.warns(UserWarning, match="must hold the run that its name says, but holds another one"):
        pd.testing.assert_frame_equal(engine.complete(Square, SPECS, INPUTS, tmp_path), rows)


@pytest.mark.parametrize(("workers", "endless"), [(1, -1), (2, 3)])
def test_an_error_ends_the_experiment_and_keeps_finished_runs(tmp_path, workers, endless):
    """Also while another process is busy and reports."""
    store, begin = RunStore(tmp_path), time.monotonic()
    with pytest.raises(ValueError, match="no square of 2"):
        engine.complete(Square, SPECS, INPUTS, tmp_path, workers, refused=2, endless=endless)
    assert time.monotonic() - begin < 250
    assert store.load(Number(1)) is not None
    assert store.load(Number(2)) is None


def test_a_run_that_kills_its_workers_is_named_and_the_others_finish(tmp_path):
    told = r"3 ended in each of these of squares, probably out of memory: number4\. All others are finished"
    with pytest.raises(LostWorkersError, match=told):
        engine.complete(Square, SPECS, INPUTS, tmp_path, 2, deadly=4)
    store = RunStore(tmp_path)
    assert [spec.value for spec in SPECS if store.load(spec) is None] == [4]
    assert engine.complete(Square, SPECS, INPUTS, tmp_path).square.tolist() == [1, 4, 9, 16, 25]


def test_an_interrupt_ends_the_processes(tmp_path):
    def interrupt():
        while RunStore(tmp_path).load(Number(2)) is None:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        engine.complete(Square, SPECS, INPUTS, tmp_path, 2, endless=3)
    assert workers_of(psutil.Process()) == []


def test_processes_end_with_a_killed_parent(tmp_path):
    given = (Square, SPECS, INPUTS, tmp_path, 2)
    parent = forks.start("fragility_lab.running.engine", "complete", *given, env=os.environ, endless=3)
    deadline = time.monotonic() + 60
    while RunStore(tmp_path).load(Number(2)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    children = workers_of(parent)
    assert children
    parent.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


@pytest.mark.parametrize(
    ("asked", "groups", "device", "count"),
    [(1, 9, "cpu", 1), (0, 9, "cpu", 4), (0, 3, "cpu", 3), (8, 9, "cpu", 8), (0, 9, "cuda", 1), (8, 9, "cuda", 1)],
)
def test_worker_count(monkeypatch, asked, groups, device, count):
    monkeypatch.setattr(engine, "cores", lambda: 4)
    assert engine.worker_count(asked, groups, torch.device(device)) == count


def test_paired_runs_need_as_many_threads(tmp_path, monkeypatch):
    """Runs that were finished with other threads round otherwise; all finished, they are taken as they are."""
    paired, threads = [Paired(value) for value in (1, 2, 3)], torch.get_num_threads()
    for specs in (paired, SPECS):
        engine.complete(Square, specs[:2], INPUTS, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert len(engine.complete(Square, paired[:2], INPUTS, tmp_path)) == 2
    refused = f"would have {threads + 1}, finished ones had {threads}: .* remove {tmp_path}"
    with pytest.raises(ValueError, match=refused):
        engine.complete(Square, paired, INPUTS, tmp_path)
    assert RunStore(tmp_path).load(paired[2]) is None, "refused before any work"
    assert len(engine.complete(Square, SPECS, INPUTS, tmp_path)) == 5, "runs that are not paired are computed"


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_paired_runs_of_several_calls_have_equal_threads(tmp_path, monkeypatch, cores):
    """E5 computes its policies by one call, and another rule by a second, which has fewer groups."""
    monkeypatch.setattr(engine, "cores", lambda: cores)
    for values in ((0, 3, 6), (1, 2)):
        engine.complete(Square, [Paired(value) for value in values], INPUTS, tmp_path, workers=0)
    store = RunStore(tmp_path)
    assert len({store.metadata(Paired(value))["threads"] for value in (0, 3, 6, 1, 2)}) == 1


@pytest.mark.parametrize("count", [2, 3, 9])
def test_thread_count(monkeypatch, count):
    monkeypatch.setattr(engine, "cores", lambda: 4)
    assert engine.thread_count(count) == max(1, 4 // count)
    assert engine.thread_count(1) == torch.get_num_threads()


def test_negative_workers_are_refused():
    with pytest.raises(ValueError, match=r"workers must be 0 \(one per core\) or a number of processes, got -1"):
        engine.worker_count(-1, 3, CPU)


def test_a_local_cluster_listens_on_this_machine_alone():
    """Whoever reaches a scheduler can run code on its workers."""
    with connected(1, 1):
        mine = psutil.Process()
        everyone = [mine, *mine.children(recursive=True)]
        sockets = [socket for process in everyone for socket in process.net_connections("tcp")]
        listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert "127.0.0.1" in listening and listening <= {"127.0.0.1", "::1"}


def test_jupyter_keeps_its_own_address_and_token():
    """By default it listens on this machine alone, and wants the token that it prints."""
    config = (PROJECT / "jupyter_server_config.py").read_text() + (PROJECT / "Makefile").read_text()
    assert not re.search(r"\b(ip|token|password|allow_origin|disable_check_xsrf)\b *=", config)
    assert "--ip" not in config and "--ServerApp" not in config
