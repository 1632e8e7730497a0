"""The report and every page of the site in Chromium: axe-core finds nothing serious."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, Page

from fragility_lab import paths


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the site, built now."""
    subprocess.run(["make", "site"], cwd=paths.PROJECT, check=True, capture_output=True)
    return paths.OUTPUTS / "site"


def violations(page: Page, path: Path, width: int) -> list[str]:
    """What axe-core finds on the page of the file at ``path``, of what is serious."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    return serious(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_can_be_used_by_everyone(page, width):
    assert violations(page, paths.OUTPUTS / "embedded" / "report.html", width) == []


def test_every_page_of_the_site_can_be_used_by_everyone(page, site):
    files = [
        file for file in sorted(site.rglob("*.html")) if "_static" not in file.parts and "autoapi" not in file.parts
    ]
    files = [file for file in files if 'http-equiv="refresh"' not in file.read_text(encoding="utf-8")]
    assert len(files) > 20
    found = {str(file.relative_to(site)): violations(page, file, 900) for file in files}
    assert {file: problems for file, problems in found.items() if problems} == {}
