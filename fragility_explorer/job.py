"""A diagnosis in a process of its own, which reports how far it is, and can be stopped.

A process keeps its memory apart: what a large model takes is free again at the end, and a kernel outlives it.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from fragility_lab import diagnosis
from fragility_lab.diagnosis.__main__ import require_possible
from fragility_lab.diagnosis.request import Request
from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.reporting.tables import duration
from fragility_lab.running.environment import TERMINAL

FORECAST = re.compile(r"^(about .* of additional memory.*)$")
STEP = re.compile(r"^step (\d+) of (\d+): (.*)")
BAR = re.compile(r"^([^:%]+): +\d+%\|.*\| (\d+)/(\d+) \[")
PATIENCE = 10.0  # seconds that a stopped process has to end by itself


class Job:
    """A running diagnosis for ``request``, whose page goes to the folder ``results`` of outputs.

    ``changed`` is called whenever there is something new to tell, from another thread.
    """

    def __init__(self, request: Request, results: str, changed: Callable[[], None]):
        self.changed, self.page = changed, OUTPUTS / results / "diagnosis.html"
        self.before = self._last_written()
        self.forecast = self.doing = self.bar = self.error = self.took = ""
        self.step, self.steps, self.stopped, self.running = 0, 1, False, True
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "fragility_explorer.job", results, json.dumps(asdict(request))],
            cwd=PROJECT,
            env=os.environ | {TERMINAL: "1"},  # bars come as text
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        atexit.register(self.process.kill)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    @property
    def written(self) -> Path | None:
        """The page, if this job has written one."""
        return None if self._last_written() == self.before else self.page

    def _last_written(self) -> int | None:
        return self.page.stat().st_mtime_ns if self.page.is_file() else None

    def stop(self) -> None:
        """End the process, which has PATIENCE to end by itself."""
        if self.running and not self.stopped:
            self.stopped = True
            self.process.send_signal(signal.SIGTERM)
            timer = threading.Timer(PATIENCE, self.process.kill)
            timer.daemon = True
            timer.start()

    def _follow(self) -> None:
        """Read what the process says until it ends."""
        assert self.process.stdout and self.process.stderr
        beside = threading.Thread(target=self._read, args=[self.process.stderr], daemon=True)
        beside.start()
        self._read(self.process.stdout)
        beside.join()
        status = self.process.wait()
        atexit.unregister(self.process.kill)
        if status == 0 or self.stopped:
            self.error = ""
        elif status < 0 or not self.error:
            self.error = f"The process ended with status {status}. Perhaps memory did not suffice."
        self.took = duration(time.perf_counter() - self.started)
        self.running = False
        self.changed()

    def _read(self, stream: IO[str]) -> None:
        """Take from ``stream`` what it says; a bar's carriage return ends a line, too."""
        with stream:
            for line in stream:
                if self._takes(line.strip(), stream is self.process.stderr):
                    self.changed()

    def _takes(self, line: str, error: bool) -> bool:
        """True if ``line`` says something new."""
        if found := BAR.search(line):
            told = f"{found[1].strip()}: {found[2]} of {found[3]}"
            new, self.bar = told != self.bar, told
            return new
        if found := STEP.search(line):
            self.step, self.steps, self.doing, self.bar = int(found[1]), int(found[2]), found[3], ""
        elif found := FORECAST.search(line):
            self.forecast = found[1]
        else:
            self.error = line if error and line else self.error  # the last line is that of the exception
            return False
        return True


def main(arguments: Sequence[str]) -> None:
    """Diagnose as the notebook does: a folder of results, and the options as JSON."""
    results, options = arguments
    request = Request(**json.loads(options))
    require_possible({name: value for name, value in asdict(request).items() if value != getattr(Request, name)})
    loaded, tokens = diagnosis.load(request)
    expected = diagnosis.forecast(request, loaded, tokens)
    print(expected, flush=True)
    found = diagnosis.diagnose(request, loaded, tokens, expected, lambda so_far: diagnosis.write(so_far, results))
    diagnosis.write(found, results)
    found.require_complete()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as refused:  # which say what to do
        sys.exit(" ".join(str(refused).split()))
