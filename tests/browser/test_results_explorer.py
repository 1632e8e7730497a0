"""The committed results in Chromium: what is chosen, by mouse or by keyboard, changes all that is linked with it."""

import re

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Page, expect
from test_explorer import opened

from fragility_explorer.results import EXPERIMENTS, Results
from fragility_lab.reporting.report import read_tables


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One page for each experiment."""
    folder, files = tmp_path_factory.mktemp("results"), {}
    for name in EXPERIMENTS:
        files[name] = folder / f"{name}.html"
        body = f'<!doctype html><html lang="en"><title>{name}</title><main><h1>{name}</h1>{Results(name).html}</main>'
        files[name].write_text(body, encoding="utf-8")
    return files


def pearson(page: Page, windows: int) -> float:
    """The correlation that the page tells of as many points as a run has windows."""
    told = page.locator(".rx-told").inner_text().replace("−", "-")
    return float(re.match(rf"{windows} windows\. Correlation of both axes: Pearson (-?[\d.]+),", told)[1])


def test_model_run_and_signal_change_the_points(browser, paths):
    runs = read_tables("embedded")["e2_runs"]
    with opened(browser, paths["E2"]) as page:
        told = page.locator(".rx-told")
        for run in runs[runs.length == 512].itertuples():
            page.get_by_label("format", exact=True).select_option(run.precision)
            page.get_by_label("tokens a window", exact=True).select_option("512 tokens")
            page.get_by_label("seed", exact=True).select_option(f"seed {run.seed}")
            page.get_by_label("across", exact=True).select_option("the paper's score")
            assert pearson(page, run.windows) == pytest.approx(run.combined_pearson, abs=1.1e-3)
            page.get_by_label("across", exact=True).select_option("transport alone")
            assert pearson(page, run.windows) == pytest.approx(run.transport_only_pearson, abs=2e-3)
            expect(page.locator(".rx-marked")).to_contain_text("transport alone")
        page.get_by_label("format", exact=True).select_option("all")
        expect(told).to_contain_text("192 windows.")
        page.get_by_role("button", name="SmolLM2 135M").press("Enter")
        expect(page.get_by_role("button", name="SmolLM2 135M")).to_be_focused()
        expect(page.locator(".rx-verdicts")).to_contain_text("SmolLM2 135M")
        expect(told).to_contain_text("16 windows.")
        expect(page.locator(".rx-text")).to_contain_text("WikiText")


def test_a_window_is_chosen_by_mouse_and_by_keyboard(browser, paths):
    table = read_tables("embedded")["x1_windows"].query("precision == 'bf16' and length == 128 and seed == 0")
    ranked = table.sort_values("mismatch").window.tolist()
    with opened(browser, paths["E2"]) as page:
        heading, slider = page.locator(".rx-values h3"), page.get_by_label("window, by measured mismatch")
        expect(heading).to_have_text(f"Window {ranked[-1]}, bf16, 128 tokens, seed 0")
        slider.press("ArrowLeft")
        expect(heading).to_contain_text(f"Window {ranked[-2]},")
        expect(slider).to_be_focused()
        expect(page.locator(".rx-text")).to_contain_text("How its text begins")
        expect(page.locator(".rx-blocks figure")).to_have_count(0)
        page.get_by_role("button", name="next window with a ring").click()
        expect(heading).to_contain_text(f"Window {ranked[-1]},")
        point = page.locator(".rx-dot:not(.rx-chosen)").nth(40)
        number, box = point.get_attribute("data-point"), point.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(page.locator(".rx-chosen").first).to_have_attribute("data-point", number)
        expect(heading).to_contain_text(f"Window {table.window.iloc[int(number)]},")
        expect(page.locator(".rx-values")).to_contain_text(f"{table.mismatch.iloc[int(number)]:.4g}")
        expect(slider).to_be_focused()


def test_blocks_and_tokens_are_linked(browser, paths):
    with opened(browser, paths["E2"]) as page:
        page.locator(".rx-blocks input").press("End")
        expect(page.locator(".rx-text h4")).to_contain_text("after block 11")
        said = page.locator(".rx-text .rx-note")
        before, chart = said.inner_text(), page.locator(".rx-blocks polyline").get_attribute("points")
        page.locator(".rx-token[aria-pressed=true]").press("ArrowRight")
        expect(page.locator(".rx-token[aria-pressed=true]")).to_be_focused()
        expect(said).to_contain_text("Token 1,")
        page.locator(".rx-token").nth(7).click()
        expect(said).to_contain_text("Token 7,")
        assert said.inner_text() != before
        assert page.locator(".rx-blocks polyline").get_attribute("points") != chart
        box = page.locator(".rx-blocks svg").first.bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(page.locator(".rx-text h4")).to_contain_text("after block 5")


def test_a_recipe_shows_its_layers(browser, paths):
    layers = read_tables("embedded")["x2_layers"].query("recipe == 'w3a16-g128'")
    with opened(browser, paths["X2"]) as page:
        page.get_by_label("recipe, by measured").press("End")
        expect(page.locator(".rx-values h3")).to_contain_text("w3a16-g128")
        slider = page.locator(".rx-blocks input")
        slider.press("End")
        expect(page.locator(".rx-blocks label")).to_contain_text(layers.layer.iloc[-1])
        expect(page.locator(".rx-blocks rect")).to_have_count(2 * len(layers))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_nothing_is_cut_and_no_one_is_kept_out(browser, paths, experiment, width, scheme):
    with opened(browser, paths[experiment], width, scheme) as page:
        for tab in [None, *page.locator(".rx-tabs button").all()]:
            if tab is not None:
                tab.click()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.locator(".rx-dot").count() > 0
        for box in page.locator(".rx-scroll").all():
            assert box.evaluate("node => node.scrollWidth <= node.clientWidth + 1"), box.inner_text()
        assert serious(page) == []
