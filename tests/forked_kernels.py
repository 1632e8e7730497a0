"""A plugin of pytest: kernels of nbval are forks of one process that has imported the packages (Linux).

``make test`` gives ``-p tests.forked_kernels``. Without it each notebook would import them again.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import Any

import pandas
from jupyter_client.provisioning import local_provisioner

from tests.forks import serve_forks

IMPORTED = ["fragility_lab.running.preloaded", "IPython", "ipykernel.ipkernel", "seaborn"]


class Fork:
    """A kernel's process, as ``subprocess.Popen`` shows it to its provisioner."""

    stdin = stdout = stderr = None

    def __init__(self, process: Any):
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launch(command: Sequence[str], env: dict[str, str], stderr: Any = None, cwd: str | None = None, **_: Any) -> Fork:
    """Fork a kernel by the ``command`` of a kernel's specification: Python, -m, a module and its arguments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    given = (command[2:], env, DupFd(stderr.fileno() if stderr else 2), cwd or os.getcwd())
    process = context.Process(target=run, args=given, daemon=False)
    process.start()
    while process.is_alive() and os.getpgid(process.pid) != process.pid:  # signals go to this group
        time.sleep(0.01)
    return Fork(process)


def run(command: Sequence[str], env: dict[str, str], stderr: Any, cwd: str) -> None:
    """Be the kernel: a session of its own, with the environment, errors and folder that were given."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # or the server would outlive a pytest that is killed
    env["JPY_PARENT_PID"] = str(os.getppid())  # a kernel ends with the server
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(stderr.detach(), 2)
    serve_forks()
    pandas.set_option("display.max_columns", 20)  # as pandas chooses where it is imported in a kernel
    sys.argv = [*command]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


if sys.platform == "linux":
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # a kernel's; read by the import
    local_provisioner.launch_kernel = launch
