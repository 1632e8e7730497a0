"""What is missing is installed where that is possible, and named where it is not."""

import subprocess
import sys

import prepare
import pytest
from packaging.requirements import Requirement


@pytest.fixture
def commands(monkeypatch):
    """Commands that would have been run; none of them changes anything."""
    run = []
    monkeypatch.setattr(subprocess, "call", lambda command: run.append([str(word) for word in command]) or 1)
    return run


def without_browser(monkeypatch, *, root: bool) -> None:
    monkeypatch.setattr(prepare, "chromium", lambda: None)
    monkeypatch.setattr(prepare, "as_root", lambda: [] if root else None)
    monkeypatch.setattr(prepare.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_debian_package_is_installed_by_root(monkeypatch, commands):
    without_browser(monkeypatch, root=True)
    with pytest.raises(SystemExit):  # since here nothing came of it
        prepare.install_browser()
    assert commands[0] == ["/usr/bin/apt-get", "update"]
    assert commands[1][:2] == ["/usr/bin/apt-get", "install"]
    assert commands[1][-1] == "chromium"


def test_missing_browser_is_named_to_others(monkeypatch, commands):
    without_browser(monkeypatch, root=False)
    with pytest.raises(SystemExit) as error:
        prepare.install_browser()
    assert commands == []
    assert str(error.value).startswith("a browser is missing: install Chromium (on Debian `apt-get install chromium`")
    assert "CHROMIUM=path/to/chrome make test-browser" in str(error.value)


def test_first_browser_there_is_is_taken(monkeypatch, tmp_path):
    own = tmp_path / "own-chrome"
    own.touch(mode=0o755)
    monkeypatch.setattr(prepare, "BROWSERS", (str(tmp_path / "none"), str(own)))
    assert prepare.chromium() == str(own)
    monkeypatch.setattr(prepare, "BROWSERS", (str(tmp_path / "none"),))
    assert prepare.chromium() is None


def test_packages_that_cannot_be_installed_are_named(monkeypatch, commands):
    monkeypatch.setattr(prepare, "is_met", lambda requirement: False)
    with pytest.raises(SystemExit, match=r"packages missing here: playwright>=.*; install them with pip into"):
        prepare.install_packages()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "install"]


def test_nothing_is_done_where_nothing_is_missing(commands):
    prepare.install_packages()
    prepare.install_browser()
    assert commands == []
    assert prepare.is_met(Requirement("pytest>=8"))
    assert not prepare.is_met(Requirement("pytest>=1000"))
    assert not prepare.is_met(Requirement("no-such-package"))
