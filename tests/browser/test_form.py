"""The form of ``diagnose_my_model`` in JupyterLab: run all, change the recipe, diagnose, and see the new page."""

import shutil

import pytest
from accessibility import WIDTHS
from playwright.sync_api import expect
from prepare import AXE
from test_lessons import ENOUGH, PICTURES, open_notebook, run_all

from fragility_lab import paths

RESULTS = "smoke-custom"
IN_FORM = """async () => (await axe.run('.diagnosis-form', {iframes: false})).violations
    .filter(v => ['serious', 'critical'].includes(v.impact))
    .map(v => v.id + ': ' + v.nodes.map(n => n.html + ' ' + n.failureSummary).slice(0, 3).join(' | '))"""


@pytest.fixture
def outputs(page):
    """The pages that the kernel writes to this project's outputs, where the server's root is a copy without them."""
    shutil.rmtree(paths.OUTPUTS / RESULTS, ignore_errors=True)

    def serve(route):
        file = paths.PROJECT / route.request.url.partition("/files/")[2].partition("?")[0]
        route.fulfill(path=file) if file.is_file() else route.fulfill(body="not yet")

    page.route("**/files/outputs/smoke*/diagnosis.html*", serve)


def test_the_form_diagnoses_in_place(page, lab, outputs):
    open_notebook(page, lab, "diagnose_my_model")
    expect(page.locator(".jp-OutputArea-output table").first).to_contain_text("embedded")
    run_all(page)
    form = page.locator(".diagnosis-form")
    expect(form).to_be_visible()
    form.get_by_label("windows").fill("0")
    form.get_by_label("windows").press("Enter")
    expect(form.get_by_role("alert")).to_contain_text("windows must be at least 1, got 0")
    expect(form.get_by_role("button", name="Diagnose")).to_be_disabled()
    form.get_by_label("windows").fill("2")
    form.get_by_label("windows").press("Enter")
    expect(form.get_by_role("alert")).to_have_count(0)
    form.get_by_label("round", exact=True).select_option("weights")
    form.get_by_label("recipe").select_option("w3a16-g64: int3, groups of 64")
    expect(form.locator("pre")).to_contain_text("make diagnose FORMAT=w3a16-g64")
    form.get_by_role("button", name="More options").click()
    form.get_by_label("probes").fill("1")
    form.get_by_label("probes").press("Enter")
    form.get_by_role("button", name="Fewer options").click()
    expect(form.get_by_label("probes")).to_be_hidden()

    form.get_by_role("button", name="Diagnose").click()
    expect(form.get_by_role("status")).to_contain_text("Step", timeout=ENOUGH)
    expect(form).to_contain_text("of additional memory")
    form.screenshot(path=PICTURES / "form_running.png")
    expect(form.get_by_role("status")).to_contain_text("Done in", timeout=ENOUGH)
    shown = form.frame_locator("iframe")
    expect(shown.locator("h1")).to_be_visible()
    expect(shown.locator("body")).to_contain_text("w3a16-g64")
    page.locator(".jp-mod-left .lm-TabBar-tab.lm-mod-current").click()  # folds the list of files away
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        page.evaluate(AXE.read_text())
        form.scroll_into_view_if_needed()
        page.screenshot(path=PICTURES / f"form_{width}.png")
        assert page.evaluate(IN_FORM) == []
        assert form.evaluate("form => form.scrollWidth <= form.clientWidth")
