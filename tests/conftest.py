"""What pytest itself needs; ``shared`` has what tests share. The process that hands out tests imports no packages."""

import gc
import os
import signal

import pytest
import slow

gc.disable()  # until all is imported: the collector would look through a million new objects of modules again and again
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test touches a network


def pytest_configure(config):
    """One thread in each of several processes; interrupts that count; a warning of PyTorch's own.

    Its rules of forward differentiation, imported at the first JVP, use torch.jit.script.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    worker = "PYTEST_XDIST_WORKER" in os.environ
    if worker or not config.getoption("numprocesses", None):
        import shared

        config.pluginmanager.register(shared, "shared")
    if worker:
        shared.torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    """Mark the tests that ``slow`` lists."""
    slow.mark(items)


def pytest_xdist_auto_num_workers():
    """One worker more than cores: tests wait for processes that they kill, stop or start."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_collection_finish():
    """Collect the garbage of tests alone: what modules and the list of tests hold stays to the end of the session."""
    gc.collect()
    gc.freeze()
    gc.enable()
