"""The picture of bits in Chromium: it rounds as the library does, and narrow screens cut nothing."""

import math
import re

import pytest
import torch
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, expect

from fragility_lessons.bits import NAMES, Bits, pattern
from fragility_numerics.formats import get_format

NUMBERS = (
    0.1,
    -5.3,
    9.4,
    1.0,
    300.7,
    2049.0,
    1e-3,
    3e-5,
    7e-8,
    1e6,
    70000.0,
    447.0,
    -465.0,
    0.0625,
    2.5,
    3.5,
    0.25,
    1e39,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Two pictures on one page, as a notebook may have them."""
    file = tmp_path_factory.mktemp("bits") / "bits.html"
    body = Bits(5.3, "fp8_e4m3").html + Bits(0.1, "bf16").html
    file.write_text(f'<!doctype html><html lang="en"><title>bits</title><main>{body}</main></html>', encoding="utf-8")
    return file


def opened(browser: Browser, path, width: int = 1400, scheme: str = "light"):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    return page


def shown_bits(root) -> str:
    groups = root.locator(".bits-group").all()
    return " ".join("".join(group.locator("button").all_text_contents()) for group in groups)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_rounded_and_stored_as_by_the_library(browser, path, name):
    page, format = opened(browser, path), get_format(name)
    root = page.locator(".bits-of-number").first
    root.get_by_label("format").select_option(name)
    for x in NUMBERS:
        root.get_by_label("number x").fill(repr(x))
        # From the same fp32 number, as the library rounds it. JavaScript rounds the number that was typed.
        expected = format.round(torch.tensor(x)).double().item()
        assert float(root.get_attribute("data-value").replace("Infinity", "inf")) == expected, x
        assert shown_bits(root) == pattern(x, format), x
    page.close()


def test_a_flipped_bit_changes_the_number_and_typing_starts_anew(browser, path):
    page = opened(browser, path)
    root = page.locator(".bits-of-number").first
    assert float(root.get_attribute("data-value")) == 5.5
    root.get_by_role("button", name=re.compile("sign bit")).press("Enter")
    assert float(root.get_attribute("data-value")) == -5.5
    root.get_by_role("button", name=re.compile("fraction bit 3")).press("Space")
    assert float(root.get_attribute("data-value")) == -5.0
    expect(root.locator(".bits-told")).to_contain_text("These bits mean")
    for button in root.locator(".bits-exponent button").all():
        if button.text_content() == "0":
            button.click()
    for place in (1, 3):
        root.get_by_role("button", name=re.compile(f"fraction bit {place}")).click()
    assert math.isnan(float(root.get_attribute("data-value")))  # 1111 111 is e4m3's NaN
    root.get_by_label("number x").fill("5,3")
    assert float(root.get_attribute("data-value")) == 5.5
    root.get_by_label("number x").fill("five")
    expect(root.get_by_label("number x")).to_have_attribute("aria-invalid", "true")
    assert float(root.get_attribute("data-value")) == 5.5
    assert float(page.locator(".bits-of-number").nth(1).get_attribute("data-value")) == 0.10009765625
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_no_one_is_kept_out(browser, path, width, scheme):
    page = opened(browser, path, width, scheme)
    for name in ("fp8_e4m3", "fp32"):
        page.locator(".bits-of-number").first.get_by_label("format").select_option(name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert serious(page) == []
    page.close()
