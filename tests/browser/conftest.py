"""One JupyterLab and one Chromium for all browser tests, with nothing of the user's in them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from prepare import chromium

from fragility_lab import paths

# Seconds, generous: on a busy machine everything takes its time, and only a failure waits this long.
STARTS_WITHIN = 180
RESPONDS_WITHIN = 60

expect.set_options(timeout=1000 * RESPONDS_WITHIN)

# JupyterLab's debugger asks the kernel something at every start, and complains if a restart comes before the answer.
CLOSED = re.compile(  # what the server and its tasks say of a message to a page that was just closed
    r"^(?:\[E |Task exception)[^\n]*\n(?:(?!\[)[^\n]*\n)*? *tornado\.websocket\.WebSocketClosedError\n", re.M
)
NOISE = "Could not restore the debugger state: Canceled future for debug_request message before replies were done"


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: address, token, root folder, log of server and kernels, folder of remembered layouts."""

    url: str
    token: str
    root: Path
    log: Path
    workspaces: Path

    def address(self, page: str) -> str:
        """The address of ``page``; "" is the page that ``make lab`` opens."""
        return f"{self.url}{page}?token={self.token}"

    def clear(self) -> None:
        """End every session, which takes memory, and forget the open notebooks."""
        for session in json.load(self._ask("api/sessions")):
            self._ask(f"api/sessions/{session['id']}", "DELETE")
        shutil.rmtree(self.workspaces, ignore_errors=True)

    def _ask(self, path: str, method: str = "GET"):
        headers = {"Authorization": f"token {self.token}"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers, method=method))

    def problems(self) -> list[str]:
        """The errors in the log of server and kernels.

        An entry without text is none: the server logs its own address as critical, after a blank line. Nor is one of
        CLOSED.
        """
        log = CLOSED.sub("", self.log.read_text())
        return re.findall(r"^(?:\[[EC] [^]]*\] *\S.*|.*\bERROR\b.*|Traceback .*)$", log, re.M)


def private_environment(home: Path) -> dict[str, str]:
    """The environment of a server whose settings, workspaces and logs all lie in ``home``."""
    folders = {
        name: str(home / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
        )
    }  # fmt: skip
    settings = Path(folders["JUPYTER_CONFIG_DIR"]) / "labconfig" / "page_config.json"
    settings.parent.mkdir(parents=True)
    # Announcements ask the network, and whether they may.
    settings.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    return {**inherited, **folders, "PYTHONPATH": str(paths.PROJECT)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Iterator[Lab]:
    """What ``make lab`` starts, in a folder with the same configuration, a copy of the notebooks, and outputs."""
    home = tmp_path_factory.mktemp("lab")
    root = home / "project"
    shutil.copytree(paths.NOTEBOOKS, root / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for name in ("jupyter_server_config.py", ".gitignore"):
        shutil.copy(paths.PROJECT / name, root)
    shutil.copytree(paths.OUTPUTS / "embedded" / "tables", root / "outputs" / "embedded" / "tables")
    environment, log = private_environment(home), home / "lab.log"
    command = [
        sys.executable, "-m", "jupyterlab", "--config=jupyter_server_config.py", "--no-browser",
        *["--allow-root"] * (os.geteuid() == 0),
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={free_port()}", "--expose-app-in-browser",
    ]  # fmt: skip
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, cwd=root)
    try:
        record = Path(environment["JUPYTER_RUNTIME_DIR"]) / f"jpserver-{server.pid}.json"
        deadline = time.monotonic() + STARTS_WITHIN
        while not record.exists() or not record.read_text().endswith("}"):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        info = json.loads(record.read_text())
        yield Lab(info["url"], info["token"], root, log, Path(environment["JUPYTERLAB_WORKSPACES_DIR"]))
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    executable = chromium()
    assert executable, "no Chromium found: `make test-browser` installs it, or says how"
    with sync_playwright() as playwright:
        # Chromium's sandbox does not run as root, as which containers run.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"] * (os.geteuid() == 0))
        yield browser
        browser.close()


@pytest.fixture
def page(lab, browser) -> Iterator[Page]:
    """A fresh page; a test fails on any error that the page, the server or a kernel reports meanwhile."""
    problems, before = [], len(lab.problems())
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(1000 * RESPONDS_WITHIN)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    problems += lab.problems()[before:]
    page.close()
    lab.clear()
    assert [problem for problem in problems if problem != NOISE] == []
