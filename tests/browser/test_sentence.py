"""The broken sentence in Chromium: its words and causes are the data's, by mouse and by keyboard, at every width."""

import json

import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import expect
from test_explorer import opened

from fragility_explorer.continued import page as sentence_page
from fragility_lab.explorer.sentence import DATA

TEXTS = json.loads(DATA.read_text("utf-8"))["texts"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The page of the shipped data."""
    file = tmp_path_factory.mktemp("sentence") / "sentence.html"
    file.write_text(sentence_page(TEXTS, "a model"), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_every_changed_word_has_its_causes(browser, path, width):
    with opened(browser, path, width) as page:
        for number, text in enumerate(TEXTS):
            page.locator(f'[data-key="tab-{number}"]').click()
            for recipe in text["recipes"]:
                word = page.locator(f'[data-key="word-{recipe["name"]}"]')
                expect(word).to_have_count(1 if recipe["words"] != text["words"] else 0)
                if not recipe["changed"]:
                    continue
                word.click()
                expect(page.locator('[data-key^="chip-"]')).to_have_count(len(recipe["changed"]))
                for place, change in enumerate(recipe["changed"]):
                    page.locator(f'[data-key="chip-{place}"]').click()
                    panel = page.locator(".bs-panel")
                    for saver in change.get("saved", []):
                        expect(panel).to_contain_text(saver)
                    expect(panel.locator("figure")).to_have_count(2 if "fp32" in change else 0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert serious(page) == []


def test_a_key_press_keeps_its_place(browser, path):
    with opened(browser, path) as page:
        tab = page.locator('[data-key="tab-1"]')
        tab.focus()
        page.keyboard.press("Enter")
        expect(tab).to_have_attribute("aria-pressed", "true")
        expect(tab).to_be_focused()
