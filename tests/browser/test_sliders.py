"""The pictures with controls in Chromium, on a page without a kernel: their numbers are Python's, on any screen."""

import gzip
import json
from statistics import median

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, Page, expect

from fragility_lessons import drawing
from fragility_lessons.explorers import Explorer, listed

LESSONS = sorted({name.partition(".")[0] for name in listed()})
MEDIAN = 100  # milliseconds from a key to its picture
PRESSES = """root => {
    const slider = root.querySelector('input'), seen = [];
    for (let i = 0; i < 20; i++) {
        slider.value = (Number(slider.value) + 1) % (Number(slider.max) + 1);
        const before = performance.now();
        slider.dispatchEvent(new Event('input'));
        root.getBoundingClientRect();  // lays the page out
        seen.push(performance.now() - before);
    }
    return seen;
}"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A page for each lesson, with all of its pictures, as a notebook has them."""
    folder = tmp_path_factory.mktemp("sliders")
    for lesson in LESSONS:
        shown = [Explorer(name)._repr_mimebundle_()["text/html"] for name in listed() if name.startswith(f"{lesson}.")]
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{lesson}</title><main>{"".join(shown)}</main>'
        )
        (folder / f"{lesson}.html").write_text(page, encoding="utf-8")
    return folder


def opened(browser: Browser, path, width: int = 1400, scheme: str = "light", **settings) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **settings)
    page.set_default_timeout(60_000)
    page.goto(path.as_uri())
    return page


def live(page: Page):
    roots = page.locator(".sliders")
    expect(page.locator(".sliders[data-picture]")).to_have_count(roots.count())
    return roots.all()


@pytest.mark.parametrize("lesson", LESSONS)
def test_keys_bring_the_pictures_and_numbers_of_python(browser, paths, lesson):
    page = opened(browser, paths / f"{lesson}.html")
    names = [name for name in listed() if name.startswith(f"{lesson}.")]
    for name, root in zip(names, live(page), strict=True):
        explorer = Explorer(name)
        assert root.get_attribute("data-picture") == str(place_of(explorer, explorer.start))
        argument, control = next(iter(explorer.controls.items()))
        value = control.values[(control.values.index(control.start) + 1) % len(control.values)]
        if control.kind == "slider":
            root.get_by_role("slider", name=control.label, exact=True).press("ArrowRight")
        else:
            root.get_by_role("button", name=str(value), exact=True).press("Enter")
        place, setting = place_of(explorer, explorer.start | {argument: value}), explorer.start | {argument: value}
        expect(root).to_have_attribute("data-picture", str(place))
        told = explorer.drawn(setting)[1] if explorer.formula else known(explorer)["pictures"][place][0]
        expect(root.locator(".readout")).to_have_text(" ".join(told.split()))
    page.close()


def place_of(explorer: Explorer, setting: dict) -> int:
    """The number of a setting of all controls; the last control changes fastest."""
    place = 0
    for name, control in explorer.controls.items():
        place = place * len(control.values) + control.values.index(setting[name])
    return place


def known(explorer: Explorer) -> dict:
    return json.loads(gzip.decompress(explorer.packed()))


def test_a_mark_stands_where_python_puts_it(browser, paths):
    """The dot of x among the numbers of a format, in pixels of the axes."""
    page = opened(browser, paths / "floating_point.html")
    explorer = Explorer("floating_point.neighbours")
    root = live(page)[1]
    root.get_by_label("format").select_option("bf16")
    (line, _), _ = explorer.drawn(explorer.start | {"format": "bf16"})
    (share,) = (mark["x"][0] / drawing.SIZE for mark in line[1] if mark.get("marker") == "o")
    svg = root.locator("svg[role=img]").first
    frame = svg.locator(".sliders-frame").bounding_box()
    dots = [dot.bounding_box() for dot in svg.locator("g path[fill='#d55e00']").all()]
    middles = [(dot["x"] + dot["width"] / 2 - frame["x"]) / frame["width"] for dot in dots]
    assert any(abs(middle - share) < 0.01 for middle in middles)
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lesson", LESSONS)
def test_nothing_is_cut_and_no_one_is_kept_out(browser, paths, lesson, width, scheme):
    page = opened(browser, paths / f"{lesson}.html", width, scheme)
    live(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    page.close()


def test_panels_stack_where_there_is_no_room_beside_one_another(browser, paths):
    page = opened(browser, paths / "floating_point.html")
    root = live(page)[1]
    for width, stacked in zip(WIDTHS, (False, True, True)):
        page.set_viewport_size({"width": width, "height": 900})
        expect(root.locator("svg[role=img]").first).to_be_visible()
        page.wait_for_timeout(200)
        first, second = (figure.bounding_box() for figure in root.locator("figure").all())
        assert (second["y"] >= first["y"] + first["height"]) == stacked
    page.close()


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_key_brings_its_picture_at_once(browser, paths, lesson):
    page = opened(browser, paths / f"{lesson}.html")
    for root in live(page):
        if root.locator("input").count():
            assert median(root.evaluate(PRESSES)) <= MEDIAN
    page.close()


def test_the_first_picture_stays_where_no_script_runs(browser, paths):
    page = opened(browser, paths / "floating_point.html", java_script_enabled=False)
    images = page.locator(".sliders-static img")
    assert images.count() >= 6 and all(image.get_attribute("alt") for image in images.all())
    expect(page.locator(".readout").first).to_contain_text("299 added to both scores")
    page.close()
