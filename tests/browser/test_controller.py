"""The controller in JavaScript: it decides as the Python one on random courses, and draws the pictures of Python."""

import base64
import gzip
import json
import random
import re

import matplotlib
import numpy as np
import pandas as pd
import pytest
from accessibility import WIDTHS, serious
from playwright.sync_api import Browser, expect

matplotlib.use("Agg")

from fragility_core.bgss.printed import PrintedBGSS
from fragility_lessons import controller

DRAWN = """async () => {
    const text = document.querySelector(".sliders script[type='text/plain']").textContent;
    const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    globalThis.known = await new Response(stream).json();
    const part = (k) => (typeof k === "number" ? known.pool[k] : k);
    globalThis.first = known.pictures[0].slice(1).map(([frame, ...marks]) => [part(frame), ...marks.map((mark) => {
        const whole = { ...known.pool[mark] };
        for (const key of ["x", "y", "cells", "fills", "shapes"]) if (key in whole) whole[key] = part(whole[key]);
        return whole;
    })]);
}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("controller") / "controller.html"
    body = controller.free()._repr_mimebundle_()["text/html"]
    file.write_text(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>c</title><main>{body}</main></html>')
    return file


@pytest.fixture
def page(browser: Browser, path):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(path.as_uri())
    expect(page.locator(".sliders[data-picture]")).to_have_count(1)
    yield page
    page.close()


def random_settings(count: int) -> list[dict]:
    draw = random.Random(0)
    return [{name: draw.choice(control.values) for name, control in controller.CONTROLS.items()} for _ in range(count)]


def random_rows(seed: int, layers: int = 7, steps: int = 20) -> pd.DataFrame:
    """Made-up statistics of inspected steps, with equal risks among them, on which every gate decides something."""
    draw, shape = np.random.default_rng(seed), (steps, layers)
    columns = {
        "step": np.repeat(np.arange(1, steps + 1) * controller.INTERVAL - 1, layers),
        "layer": np.tile(np.arange(layers), steps),
        "risk": draw.integers(1, 9, shape).ravel().astype(float),
        "dominance": 10.0 ** draw.uniform(-4, 0, shape).ravel(),
        "variance_1": 10.0 ** draw.uniform(-6, -2, shape).ravel(),
    }
    same = {"variance_2": 0.0, "epsilon_1": controller.BASE, "d_model": 128, "combined": 1.0}
    return pd.DataFrame(columns).assign(**same)


def test_random_courses_are_decided_as_by_python(page, monkeypatch):
    """Gates, stops, epsilons and rests of every block at every inspection."""
    rows, reached = {seed: random_rows(seed) for seed in range(4)}, set()
    monkeypatch.setattr(controller, "recorded", lambda run, precision: controller.with_ratio(rows[run], precision))
    for place, values in enumerate(random_settings(200)):
        values |= {"risk": random.Random(place).choice([0.0, 0.3, 0.5]), "run": place % 4}
        policy = PrintedBGSS(
            risk_threshold=10 ** values["risk"], dominance_threshold=10 ** values["dominance"],
            target_ratio=values["target"], budget=values["budget"], cooldown=values["cooldown"],
            base_epsilon=controller.BASE, epsilon_max=controller.CAP,
        )  # fmt: skip
        python = controller.inspections.__wrapped__(policy, values["run"], values["precision"])
        bounds = {"base": controller.BASE, "cap": controller.CAP}
        given = [controller.course(rows[values["run"]]), values, bounds]
        found = page.evaluate("given => slidersFormulas['controller.playground'].inspections(...given)", given)
        assert [[block["stop"] for block in blocks] for blocks in found] == [seen.stop.tolist() for seen in python]
        for blocks, seen in zip(found, python, strict=True):
            assert [block["gates"] for block in blocks] == seen.gates[controller.GATES].to_numpy().tolist()
            chosen = np.where(seen.gates.raised, seen.gates.target, seen.state.epsilon)
            assert [block["epsilon"] for block in blocks] == chosen.tolist()
            until = {action.layer: action.cooldown_until for action in seen.state.actions}
            waits = [until.get(block, 0) - seen.state.step for block in range(len(blocks))]
            assert [block["wait"] for block in blocks] == waits
            reached |= set(seen.stop)
    assert reached == set(range(7)), "a gate stopped no block"


def test_random_settings_give_the_pictures_of_python(page):
    page.evaluate(DRAWN)
    settings = random_settings(40)
    settings += [
        controller.START,
        *(stop | {"run": run} for stop in controller.TOUR.values() for run in controller.RUNS),
    ]
    for values in settings:
        drawn = "values => slidersFormulas['controller.playground'](known.data, values, first)"
        told, *found = page.evaluate(drawn, values)
        panels, known = controller.free().drawn(values)
        assert told == known
        for (frame, *marks), (wanted, parts) in zip(found, panels, strict=True):
            assert {**frame, "alt": ""} == {**json.loads(json.dumps(wanted)), "alt": ""}
            assert len(marks) == len(parts)
            for mark, part in zip(marks, parts):
                assert mark.keys() == part.keys()
                for key in part:
                    if key in ("x", "y", "at"):
                        np.testing.assert_allclose(
                            mark[key], part[key], atol=1
                        )  # of 2000: a half is rounded either way
                    else:
                        assert mark[key] == part[key], key


def test_keys_move_what_the_shipped_pictures_had_fixed(page):
    """The target ratio and the cooldown are free, and the picture follows."""
    root = page.locator(".sliders")
    sliders = {
        name: root.get_by_role("slider", name=controller.CONTROLS[name].label)
        for name in controller.START
        if name != "run"
    }
    before = root.locator(".readout").text_content()
    assert before == controller.playground(**controller.START)[1]
    for name, key in (("risk", "Home"), ("dominance", "Home"), ("cooldown", "Home"), ("target", "Home")):
        sliders[name].press(key)
    while sliders["precision"].get_attribute("aria-valuetext") != "27":
        sliders["precision"].press("ArrowRight")
    lowest = {name: controller.CONTROLS[name].values[0] for name in ("risk", "dominance", "cooldown", "target")}
    free = controller.playground(**controller.START | lowest | {"precision": 27})[1]
    expect(root.locator(".readout")).to_have_text(free)
    assert int(re.search(r"raised: (\d+)", free)[1]) > 0
    sliders["target"].press("End")
    expect(root.locator(".readout")).not_to_have_text(free)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_and_no_one_is_kept_out(browser, path, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    expect(page.locator(".sliders[data-picture]")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    page.close()


def test_the_page_is_small():
    packed = controller.free().packed()
    assert len(packed) < 60_000 and len(base64.b64encode(packed)) > 0
    assert set(json.loads(gzip.decompress(packed))) == {"controls", "pool", "pictures", "still", "formula", "data"}
