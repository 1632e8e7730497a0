"""Known vulnerabilities of the packages in an environment: ``python tools/audit.py PYTHON``, with pip-audit beside it.

Exits 1 where there are some. Where the database does not answer, nothing is audited, and a line says so.
"""

import json
import subprocess
import sys


def packages(python: str) -> list[dict]:
    """What pip-audit says of every package that ``python`` imports from."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "pip_audit", "--path", folder, "--format", "json", "--progress-spinner", "off"]
    said = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(said.stdout)["dependencies"]
    except ValueError:
        reason = (said.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"not audited: pip-audit gave no report ({reason})")
        return []


def main(python: str) -> int:
    found = packages(python)
    audited = [package for package in found if "vulns" in package]
    known = [(package, entry) for package in audited for entry in package["vulns"]]
    if found and not audited:
        print(f"not audited: the vulnerability database knows none of the {len(found)} packages: no answer from it")
    elif audited:
        print(f"{len(known)} known vulnerabilities in {len(audited)} packages; {len(found) - len(audited)} not audited")
    for package, entry in known:
        mended = ", ".join(entry["fix_versions"]) or "no release"
        print(f"{package['name']} {package['version']}: {entry['id']}, mended in {mended}")
    return 1 if known else 0 if audited else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
