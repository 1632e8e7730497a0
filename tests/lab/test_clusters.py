"""Clusters of several processes that a person starts: by hand, and through SLURM's sbatch."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from swept import sweep
from test_faults import environ

from fragility_lab.paths import PROJECT
from fragility_lab.running.environment import SCHEDULER


@pytest.fixture
def whole(tmp_path):
    """The rows of an experiment, computed here with one thread, as the workers below have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: sweep(name, tmp_path / "whole", 1)
    torch.set_num_threads(threads)


def ended(processes: list[psutil.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(60)


def test_a_cluster_started_by_two_commands_loses_a_worker(tmp_path, monkeypatch, whole):
    file, folder = tmp_path / "cluster.json", tmp_path / "runs"
    dask = Path(sys.executable).with_name("dask")  # an environment that is not activated is on no path
    # Ports are left to the system, as other tests may run at the same time.
    scheduler = [dask, "scheduler", "--scheduler-file", file, "--port", "0", "--no-dashboard", "--host", "127.0.0.1"]
    worker = [dask, "worker", "--scheduler-file", file, "--nthreads", "1"]
    quiet = {"env": environ(SLOW_WRITES="0.2"), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [psutil.Popen(command, **quiet) for command in (scheduler, worker, worker, worker)]
    finished_at_kill = []

    def kill() -> None:
        while not list(folder.glob("*/*.parquet")):
            time.sleep(0.02)
        children = processes[1].children(recursive=True)
        processes[1].kill()
        finished_at_kill.append(len(list(folder.glob("*/*.parquet"))))
        psutil.wait_procs(children, timeout=60)

    try:
        while not file.exists():
            time.sleep(0.1)
        monkeypatch.setenv(SCHEDULER, str(file))
        threading.Thread(target=kill, daemon=True).start()
        found = {name: sweep(name, folder, 1) for name in ("E2", "X1")}
    finally:
        ended(processes)
    assert finished_at_kill[0] < 16, "runs were left to compute"
    monkeypatch.delenv(SCHEDULER)
    for name, rows in found.items():
        pd.testing.assert_frame_equal(rows, whole(name))


STUB = {  # like the real one, it keeps a copy of the script
    "sbatch": """#!/bin/sh
cp "$1" "{jobs}.$$"
bash "{jobs}.$$" >/dev/null 2>&1 &
echo $! >> "{jobs}"
echo "Submitted batch job $!"
""",
    "scancel": '#!/bin/sh\npkill -P "$1"; kill "$1"\n',
}


def test_workers_come_through_sbatch(tmp_path, monkeypatch, whole):
    file, jobs = tmp_path / "cluster.json", tmp_path / "jobs"
    for name, text in STUB.items():
        (tmp_path / name).write_text(text.format(jobs=jobs))
        (tmp_path / name).chmod(0o755)
    command = [sys.executable, PROJECT / "tools" / "slurm_cluster.py", file, "--workers", "2"]
    stub = environ(PATH=f"{tmp_path}:{os.environ['PATH']}")
    with psutil.Popen(command, env=stub, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout.readline().startswith(f"SCHEDULER={file}, dashboard: http")
        monkeypatch.setenv(SCHEDULER, str(file))
        rows = sweep("E2", tmp_path / "runs", 1)
        started = [psutil.Process(int(job)) for job in jobs.read_text().split()]
        cluster.send_signal(signal.SIGTERM)
        assert cluster.wait(60) == 0
        assert len(started) == 2 and psutil.wait_procs(started, timeout=60)[1] == []
    monkeypatch.delenv(SCHEDULER)
    pd.testing.assert_frame_equal(rows, whole("E2"))


@pytest.mark.parametrize("address", ["absent.json", "tcp://127.0.0.1:1"])
def test_a_scheduler_that_does_not_answer_is_refused(tmp_path, monkeypatch, address):
    monkeypatch.setenv(SCHEDULER, address)
    with pytest.raises(OSError, match=f"SCHEDULER must lead to a running Dask scheduler, .* got '{address}'"):
        sweep("E2", tmp_path, 1)
