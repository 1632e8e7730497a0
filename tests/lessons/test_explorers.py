"""Shipped pictures are those that the lessons draw, and a picture as data has the numbers of its plot."""

import gzip
import json
import random
import re

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib.backends.backend_agg import FigureCanvasAgg

from fragility_lab.reporting import figures
from fragility_lab.running.execute import notebook_names, notebook_path
from fragility_lessons import drawing, pictures
from fragility_lessons.explorers import DRAWN, Control, Explorer, Figure, listed

CLOSE = 0.05  # sums round in another order on another CPU
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MEASURED = ("window.",)  # whose passes over the model take seconds
HALF = 0.5 * drawing.SIZE


def line(slope: float, colour: str) -> pictures.Picture:
    first, second = pictures.panels(here=1.0)
    first.plot([0, 1], [0, slope], color=colour, label="slope")
    pictures.finish(first, "place", "height", "a line", legend="upper left", xlim=(0, 2), ylim=(0, 2))
    second.bar([1, 2], [10, 100], color=["C0", "C3"])
    pictures.finish(second, "bar", "size", "bars", "y", ylim=(1, 100))
    return [first, second], f"slope {slope:g} & {colour}"


@pytest.fixture
def figure():
    slope = Control.given("slope", 1.0, range=[-1.0, 2.0, 0.5])
    return Figure(line, {"slope": slope, "colour": Control.given("colour", "0.2", menu=["0.2", "C1"])})


def test_a_control_has_values_from_end_to_end_and_starts_at_one():
    assert Control.given("x", 0.2, range=[0.0, 0.3, 0.1]).values == [0.0, 0.1, 0.2, 0.3]
    assert Control.given("x", 2, stops=[0, 2, 8]).kind == Control.given("x", 2, range=[0, 2, 1]).kind == "slider"
    assert Control.given("x", -0.5, stops=[-0.5]).described()["values"] == ["−0.5"]
    with pytest.raises(ValueError, match="'x' starts at one of its values"):
        Control.given("x", 0.25, range=[0.0, 0.3, 0.1])


def test_settings_and_pictures_have_one_order(figure):
    data = figure.computed()
    assert len(data["pictures"]) == len(figure.settings()) == 14
    for setting, (told, *_) in zip(figure.settings(), data["pictures"]):
        assert told == f"slope {setting['slope']:g} & {setting['colour']}"
    assert [control["start"] for control in data["controls"]] == [4, 0]


def test_a_picture_as_data_has_the_numbers_of_its_plot(figure):
    (first, second), _ = figure.drawn({"slope": 1.0, "colour": "0.2"})
    frame, marks = first
    curve = next(mark for mark in marks if mark.get("x") == [0, HALF])
    assert curve["y"] == [0, HALF] and curve["line"] == "ink"  # follows the theme of the page
    assert frame["title"] == "a line" and frame["x"]["label"] == "place" and [0, "0.0"] in frame["y"]["ticks"]
    assert [label for _, label in frame["legend"]] == ["slope"]
    assert any(mark.get("x") == [HALF, HALF] and mark["dash"] == ":" for mark in marks)  # here
    frame, marks = second
    (low, high) = (mark["cells"][0] for mark in marks if "cells" in mark)
    assert low[3] == HALF and high[3] == drawing.SIZE  # 10 and 100 on a logarithmic axis from 1
    assert [place for place, _ in frame["y"]["ticks"]] == [0, HALF, drawing.SIZE]


def test_what_pictures_share_is_stored_once(figure):
    data = figure.computed()
    same = [picture[2] for picture in data["pictures"]]  # the second panel never changes
    assert all(panel == same[0] for panel in same)
    assert len({str(each) for each in data["pool"]}) == len(data["pool"])


def test_a_page_without_scripts_shows_the_first_picture_and_its_numbers(figure):
    bundle = figure._repr_mimebundle_()
    assert bundle["text/plain"] == "slope 1 & 0.2"
    static = bundle["text/html"].split('<div class="sliders-static">')[1].split("<script")[0]
    assert re.findall(r'alt="([^"]*)"', static) == ["a line: height over place", "bars: size over bar"]
    assert static.count("data:image/svg+xml;base64,") == 2 and "slope 1 &amp; 0.2" in static
    assert bundle == figure._repr_mimebundle_()  # the same bytes


def test_every_explorer_is_in_a_lesson_and_shipped():
    shown = [
        name
        for notebook in notebook_names()
        if notebook.startswith("theory/")
        for name in re.findall(r'"Explorer\(\\"([^"]*)\\"\)"', notebook_path(notebook).read_text(encoding="utf-8"))
    ]
    assert sorted(shown) == sorted(listed()) and len(shown) == len(set(shown))
    assert {path.name for path in DRAWN.iterdir()} == {f"{name}.json.gz" for name in listed()}


def numbers(told: str) -> list[float]:
    return [float(found) for found in NUMBER.findall(told)]


def shipped(explorer: Explorer) -> dict:
    return json.loads(gzip.decompress(explorer.packed()))


@pytest.mark.parametrize("name", listed())
def test_the_shipped_pictures_are_those_that_the_lesson_draws(name):
    """The first picture, and two of the others."""
    explorer = Explorer(name)
    data, settings = shipped(explorer), explorer.settings()
    for known, control in zip(data["controls"], explorer.controls.values(), strict=True):
        assert known | control.described() == known
    assert len(data["pictures"]) == len(settings)
    others = random.Random(name).sample(range(len(settings)), min(2, len(settings)))  # a formula draws one alone
    for place in [settings.index(explorer.start), *others]:
        panels, told = explorer.drawn(settings[place])
        known, *frames = data["pictures"][place]
        assert NUMBER.sub("", known) == NUMBER.sub("", told)
        np.testing.assert_allclose(numbers(known), numbers(told), rtol=CLOSE)
        assert [data["pool"][frame]["title"] for frame, *_ in frames] == [frame["title"] for frame, _ in panels]
        for (_, *marks), (_, drawn) in zip(frames, panels):
            assert len(marks) == len(drawn)
            for mark, new in zip((data["pool"][mark] for mark in marks), drawn):
                if "x" in new and not name.startswith(MEASURED):
                    for axis in "xy":
                        np.testing.assert_allclose(data["pool"][mark[axis]], new[axis], atol=0.02 * drawing.SIZE)


@pytest.mark.parametrize("name", [name for name in listed() if not Explorer(name).formula])
def test_every_control_changes_the_picture_and_no_number_is_missing(name):
    explorer = Explorer(name)
    known, settings = shipped(explorer)["pictures"], explorer.settings()
    assert not [told for told, *_ in known if re.search(r"\bnan\b", told)]
    start = known[settings.index(explorer.start)]
    for argument, control in explorer.controls.items():
        others = [explorer.start | {argument: value} for value in control.values if value != control.start]
        assert any(known[settings.index(other)] != start for other in others), argument


def test_a_slider_moves_finely():
    for name in listed():
        for argument, control in Explorer(name).controls.items():
            assert control.kind != "slider" or len(control.values) >= 9, (name, argument)


@pytest.mark.parametrize("name", [name for name in listed() if not name.startswith(MEASURED)])
@figures.style()
def test_no_label_leaves_its_picture(name):
    explorer = Explorer(name)
    panels, _ = explorer.draw(**explorer.start)
    for axes in panels:
        figure = axes.get_figure()
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, axes.get_title()
