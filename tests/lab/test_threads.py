"""Threads beside other programs."""

import subprocess
import sys

import psutil
import pytest
import torch

from fragility_lab.running import threads
from fragility_lab.running.threads import free_cores, on_free_cores


@pytest.fixture
def four(monkeypatch):
    """PyTorch as on four cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("free", "used"), [(4, 4), (3, 3), (1, 1), (0, 1), (-1, 1), (64, 4)])
def test_threads_are_as_many_as_cores_are_free(free, used, four, monkeypatch):
    monkeypatch.setattr(threads, "free_cores", lambda: free)
    with on_free_cores():
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == 4
    with pytest.raises(KeyError), on_free_cores():
        raise KeyError
    assert torch.get_num_threads() == 4


def test_a_number_of_threads_that_somebody_asked_for_stays(four, monkeypatch):
    monkeypatch.setattr(threads, "free_cores", lambda: pytest.fail("cores are watched"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with on_free_cores():
        assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("shares", "ours", "free"),
    [([0.0, 0.0], [0, 1], 2), ([100.0, 97.0], [0, 1], 0), ([20.0, 15.0], [0, 1], 2), ([60.0], [0, 7], 0),
     ([100.0, 0.0, 100.0, 5.0], [1, 3], 2)],
)  # fmt: skip
def test_only_cores_of_this_process_count(shares, ours, free, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: shares)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: ours, raising=False)
    assert free_cores() == free


def test_a_busy_loop_takes_a_core(monkeypatch):
    """Pinned to one core with a loop, this process finds none free."""
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        pytest.skip("the system has no affinity")
    before = process.cpu_affinity()
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        psutil.Process(loop.pid).cpu_affinity(before[:1])
        process.cpu_affinity(before[:1])
        monkeypatch.setattr(threads, "WATCHED", 1.0)
        assert free_cores() == 0
    finally:
        loop.kill()
        loop.wait()
        process.cpu_affinity(before)
