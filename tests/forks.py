"""Processes of tests: forks of one that has imported the packages (Linux). Each would import them for seconds."""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import psutil

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
IMPORTED = [
    "fragility_lab.running.preloaded", "fragility_lab.experiments.e3", "fragility_lab.experiments.e5",
    "fragility_lab.experiments.x1", "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2",
    "fragility_explorer.job", "fragility_engines.logs.score", "IPython", "ipykernel.ipkernel", "papermill",
]  # fmt: skip


class Descriptor:
    """A descriptor of a file, which the process that gets it has under another number."""

    def __init__(self, stream: IO[str] | int):
        self._number = stream if isinstance(stream, int) else stream.fileno()

    def __reduce__(self) -> tuple:
        return _detached, (DupFd(self._number),)


def _detached(passed: Any) -> int:
    return passed.detach()


class Fork(psutil.Process):
    """A process of multiprocessing, as ``psutil.Popen`` shows one; ``stdout`` and ``stderr`` are what it says."""

    def __init__(self, started: BaseProcess, stdout: IO[str] | None = None, stderr: IO[str] | None = None):
        self._init(started.pid, _ignore_nsp=True)
        self._started, self.stdout, self.stderr = started, stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._started.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._started.join(timeout)
        if self._started.exitcode is None:
            raise psutil.TimeoutExpired(timeout, self.pid)
        return self._started.exitcode


def start(module: str, function: str, *arguments: Any, env: Mapping[str, str], **named: Any) -> Fork:
    """Call a ``function`` in a process of its own, which has the environment ``env`` and says nothing."""
    with open(os.devnull, "w") as nothing:
        return Fork(_started(nothing, nothing, env, _call, module, function, arguments, named))


def popen(
    command: Sequence[str], stdout: IO[str] | int, stderr: IO[str] | int, cwd: os.PathLike | str = ".",
    env: Mapping[str, str] = os.environ, start_new_session: bool = False, **_: Any,
) -> Fork:  # fmt: skip
    """``subprocess.Popen`` for a ``command`` of Python, -m, a module and its arguments; what is said is text."""
    pipes = [os.pipe() if stream == subprocess.PIPE else None for stream in (stdout, stderr)]
    writers = [ends[1] if ends else stream for ends, stream in zip(pipes, (stdout, stderr))]
    words = list(command[command.index("-m") + 1 :])
    process = _started(*writers, env, _run, words, os.path.abspath(cwd), start_new_session)
    for ends in filter(None, pipes):
        os.close(ends[1])
    return Fork(process, *(os.fdopen(ends[0], errors="replace") if ends else None for ends in pipes))


def _started(stdout: Any, stderr: Any, env: Mapping[str, str], function: Callable, *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(IMPORTED)
    streams = Descriptor(stdout), Descriptor(stderr)
    process = context.Process(target=_be, args=(*streams, dict(env), function, arguments))
    process.start()
    return process


def _be(stdout: int, stderr: int, env: dict[str, str], function: Callable, arguments: tuple) -> None:
    """Be the process that was started."""
    os.environ.clear()
    os.environ.update(env)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout.reconfigure(line_buffering=True)
    if METHOD == "forkserver":
        os.close(forkserver._forkserver._forkserver_alive_fd)  # or the server would outlive a pytest that is killed
    function(*arguments)


def _call(module: str, function: str, arguments: tuple, named: dict[str, Any]) -> None:
    found = getattr(import_module(module), function)
    serve_forks()
    found(*arguments, **named)


def _run(words: list[str], folder: str, new_session: bool) -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    import_module("tests.forked_kernels")  # a kernel is a fork, too

    os.chdir(folder)
    serve_forks()
    if new_session:
        os.setsid()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def serve_forks() -> None:
    """Let processes that this one starts be forks of a fork of it. A server of its own would import all again."""
    if METHOD != "forkserver":
        return
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()  # the server ends when nobody holds the second end
    server = os.fork()
    if not server:
        os.close(held)
        try:
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(0)
    listener.close()
    os.close(alive)
    known = forkserver._forkserver
    known._forkserver_address, known._forkserver_alive_fd, known._forkserver_pid = address, held, server
