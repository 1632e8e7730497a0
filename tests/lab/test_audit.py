"""What ``make audit`` says of the answers of pip-audit."""

import json
import runpy
from types import SimpleNamespace

import pytest

from fragility_lab.paths import PROJECT

SCRIPT = runpy.run_path(str(PROJECT / "tools/audit.py"))
SKIPPED = {"name": "a", "skip_reason": "not found on PyPI"}
CLEAN = {"name": "b", "version": "1", "vulns": []}
KNOWN = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ([SKIPPED, SKIPPED], 2, "not audited: the vulnerability database knows none of the 2 packages"),
        ([SKIPPED, CLEAN], 0, "0 known vulnerabilities in 1 packages; 1 not audited"),
        ([CLEAN, KNOWN], 1, "1 known vulnerabilities in 2 packages; 0 not audited\nc 2: CVE-1, mended in 2.1"),
        (None, 2, "not audited: pip-audit gave no report (no route)"),
    ],
)
def test_audit(report, code, said, monkeypatch, capsys):
    def run(command, **options):
        if command[0] == "python":
            return SimpleNamespace(stdout="/somewhere\n")
        assert "/somewhere" in command
        answer = "" if report is None else json.dumps({"dependencies": report})
        return SimpleNamespace(stdout=answer, stderr="trying\nno route")

    monkeypatch.setattr(SCRIPT["subprocess"], "run", run)
    assert SCRIPT["main"]("python") == code
    assert capsys.readouterr().out.startswith(said)
