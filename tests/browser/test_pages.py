"""The report and every page of the site in Chromium: axe-core finds nothing serious."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, Page, expect

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
    page.set_viewport_size({"width": 390, "height": 900})
    for file in files:
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, file


def test_every_page_has_a_description_and_a_preview_and_the_site_is_small(site):
    files = [file for file in sorted(site.rglob("*.html")) if "_static" not in file.parts]
    for file in files:
        text = file.read_text(encoding="utf-8")
        for tag in ('name="description"', 'property="og:title"', 'property="og:image"', 'name="twitter:card"'):
            assert text.count(tag) == 1, (file, tag)
        assert "Run all cells" not in text, file
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 60e6


def test_a_search_in_a_folder_shows_excerpts(page, site):
    problems = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{(site / 'search.html').as_uri()}?q=softmax")
    found = page.locator("#search-results li")
    expect(found.first).to_contain_text("Floating point, and how softmax")  # lessons before functions
    expect(found.first.locator(".excerpt")).to_contain_text("softmax")
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="Learn").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Floating point")
    assert problems == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_front_page_fits_and_leads_on(page, site, width):
    assert violations(page, site / "index.html", width) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Try", "Learn", "Diagnose your model", "See an example"):
        link = page.get_by_role("link", name=name, exact=True)
        assert link.bounding_box()["y"] < (900 if width > 400 else 1100)
        assert (site / link.get_attribute("href")).is_file()


def test_no_table_and_no_printed_line_of_a_lesson_is_cut_on_a_phone(page, site):
    lessons = sorted((site / "notebooks/theory").glob("*.html"))
    assert len(lessons) == 7
    page.set_viewport_size({"width": 390, "height": 900})
    for lesson in lessons:
        page.goto(lesson.as_uri())
        boxes = page.locator(".cell_output .text_html:has(> div > table, > table), .cell_output pre")
        assert boxes.count(), lesson.name
        cut = "boxes => boxes.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60))"
        assert boxes.evaluate_all(cut) == [], lesson.name
        parted = """heads => heads.filter(e => {
            const text = document.createRange();
            text.selectNodeContents(e);
            return !/\\s/.test(e.innerText.trim()) && text.getClientRects().length > 1;
        }).map(e => e.innerText)"""
        assert page.locator(".cell_output .dataframe thead th").evaluate_all(parted) == [], lesson.name
