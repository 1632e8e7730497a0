"""Pictures that a formula computes in the browser: at random settings they are those that Python draws."""

import random
import re

import matplotlib
import numpy as np
import pytest
from playwright.sync_api import Browser, expect
from test_controller import DRAWN

matplotlib.use("Agg")

from fragility_lessons.explorers import Explorer, listed

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf")
NAMES = [name for name in listed() if Explorer(name).formula]
COMPUTED = "([formula, values]) => slidersFormulas[formula](known.data, values, first)"
PLACES, NEAR = ("x", "y", "at", "cells"), 10  # of 2000: sums in fp32 have another order here
SETTINGS = 12


@pytest.fixture
def page(browser: Browser, tmp_path, request):
    body, file = Explorer(request.param)._repr_mimebundle_()["text/html"], tmp_path / "page.html"
    file.write_text(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>f</title><main>{body}</main></html>')
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(file.as_uri())
    expect(page.locator(".sliders[data-picture]")).to_have_count(1)
    page.evaluate(DRAWN)
    yield page
    page.close()


def numbers(told: str) -> list[float]:
    return [float(found) for found in NUMBER.findall(told)]


def settings(explorer: Explorer) -> list[dict]:
    draw = random.Random(0)
    drawn = [{name: draw.choice(each.values) for name, each in explorer.controls.items()} for _ in range(SETTINGS)]
    return [explorer.start, *drawn]


def far(found, wanted) -> float:
    """The share of numbers that are not near those of Python."""
    found, wanted = np.asarray(found, dtype=float), np.asarray(wanted, dtype=float)
    assert found.shape == wanted.shape
    return float((np.abs(found - wanted) > NEAR).mean()) if found.size else 0.0


@pytest.mark.parametrize(("page", "name"), [(name, name) for name in NAMES], indirect=["page"])
def test_random_settings_give_the_pictures_of_python(page, name):
    explorer = Explorer(name)
    for values in settings(explorer):
        told, *found = page.evaluate(COMPUTED, [name, values])
        panels, wanted = explorer.drawn(values)
        assert NUMBER.sub("", told) == NUMBER.sub("", wanted), values
        np.testing.assert_allclose(numbers(told), numbers(wanted), rtol=0.06, atol=1, err_msg=f"{values}")
        for (frame, *marks), (drawn, parts) in zip(found, panels, strict=True):
            for key in ("title", "alt", "x", "y"):
                assert frame[key] == drawn[key], (values, key)
            assert len(marks) == len(parts)
            for mark, part in zip(marks, parts):
                assert mark.keys() == part.keys()
                for key in part:
                    if key == "text":
                        np.testing.assert_allclose(numbers(mark[key]), numbers(part[key]), rtol=0.02)
                    elif key not in PLACES:
                        assert mark[key] == part[key], key
                    elif np.shape(mark[key]) == np.shape(part[key]):
                        assert far(mark[key], part[key]) <= 0.05, (values, key)
                    else:  # a point on the line is on either side of it
                        assert abs(len(mark[key]) - len(part[key])) <= 2
