"""Pictures with controls that need no kernel: drawn once for every setting, or by a formula in the browser.

The lesson's own function draws the picture of each setting (``drawing``). Pictures of lessons are shipped, and
``make shipped`` draws them again.
"""

import base64
import gzip
import html
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import yaml

from fragility_lab.paths import ASSETS
from fragility_lab.reporting import figures
from fragility_lab.reporting.html import template
from fragility_lab.running.files import write_whole
from fragility_lessons import drawing, pictures
from fragility_lessons.shipped import FOLDER

ASSET, DRAWN = ASSETS / "sliders", FOLDER / "explorers"


@dataclass(frozen=True)
class Control:
    """A slider, menu or row of buttons: its label, the values that the drawing function takes, and the first one."""

    kind: str
    label: str
    values: Sequence[Any]
    start: Any

    def __post_init__(self):
        if self.start not in self.values:
            raise ValueError(f"{self.label!r} starts at one of its values {list(self.values)}, not at {self.start!r}")

    @classmethod
    def given(cls, label: str, start: Any, **values: Sequence[Any]) -> "Control":
        """A control as ``fragility_lab/assets/explorers.yaml`` gives it."""
        ((kind, of),) = values.items()
        if kind == "range":
            low, high, step = of
            of = [round(low + step * place, 9) for place in range(round((high - low) / step) + 1)]
        return cls({"range": "slider", "stops": "slider"}.get(kind, kind), label, of, start)

    def described(self) -> dict[str, Any]:
        """The control as the browser takes it: values as readers see them, and the place of the first one."""
        values = [v if isinstance(v, str) else f"{v:.6g}".replace("-", "−") for v in self.values]
        return {"kind": self.kind, "label": self.label, "values": values, "start": self.values.index(self.start)}


class Figure:
    """A figure with controls; the value of a cell.

    ``draw`` takes the values of ``controls`` by name. It returns the Axes of the figure's panels, and a line with the
    numbers to read off. With a ``formula``, "lesson.name", the script ``assets/sliders/lesson.js`` computes the same
    for any setting, from what ``data`` returns. Then only the first picture is drawn here.
    """

    def __init__(
        self, draw: Callable[..., pictures.Picture], controls: Mapping[str, Control], formula: str = "",
        data: Callable[[], Any] = dict,
    ):  # fmt: skip
        self.draw, self.controls, self.formula, self.data = draw, controls, formula, data

    @property
    def start(self) -> dict[str, Any]:
        """The values of the controls at first."""
        return {name: control.start for name, control in self.controls.items()}

    def settings(self) -> list[dict[str, Any]]:
        """All settings of the controls that are drawn; the last control changes fastest."""
        if self.formula:
            return [self.start]
        values = itertools.product(*(control.values for control in self.controls.values()))
        return [dict(zip(self.controls, each)) for each in values]

    @figures.style()
    def drawn(self, values: dict[str, Any]) -> tuple[list, str]:
        """The panels of the picture at ``values`` as data (``drawing.panel``), and the line with its numbers."""
        panels, told = self.draw(**values)
        return [drawing.panel(axes) for axes in panels], told

    @figures.style()
    def computed(self) -> dict[str, Any]:
        """The pictures of all settings as data. A part that pictures share stands once in the ``pool``.

        ``still`` has the panels of the first picture for readers without scripts: each as SVG, and in words.
        """
        pool: dict[str, int] = {}

        def pooled(value: Any) -> int:
            return pool.setdefault(_text(value), len(pool))

        def thinned(mark: dict[str, Any]) -> dict[str, Any]:
            return mark | {key: pooled(mark[key]) for key in ("x", "y", "cells", "fills", "shapes") if key in mark}

        def picture(values: dict[str, Any]) -> list:
            panels, told = self.drawn(values)
            return [told, *([pooled(frame), *map(pooled, map(thinned, marks))] for frame, marks in panels)]

        drawn = [picture(values) for values in self.settings()]
        still = [(pictures.svg(axes), pictures.alternative_text(axes)) for axes in self.draw(**self.start)[0]]
        controls = [control.described() for control in self.controls.values()]
        known: dict[str, Any] = {"controls": controls, "pool": list(map(json.loads, pool)), "pictures": drawn}
        known |= {"still": still}
        if self.formula:
            for described, (name, control) in zip(controls, self.controls.items()):
                described |= {"name": name, "given": list(control.values)}
            known |= {"formula": self.formula, "data": self.data()}
        return known

    def packed(self) -> bytes:
        """The computed data as the browser takes them: JSON, compressed by gzip."""
        return gzip.compress(_text(self.computed()).encode("utf-8"), mtime=0)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        packed = self.packed()
        known = json.loads(gzip.decompress(packed))
        told = known["pictures"][self.settings().index(self.start)][0]
        parts = {"css": (ASSET / "sliders.css").read_text("utf-8")}
        scripts = ["formulas", self.formula.partition(".")[0]] * bool(self.formula) + ["sliders"]
        parts["js"] = "".join((ASSET / f"{name}.js").read_text("utf-8") for name in scripts)
        parts |= {"data": base64.b64encode(packed).decode("ascii"), "still": _still(known["still"], told)}
        return {"text/html": template("sliders/component.html.jinja").render(parts), "text/plain": told}


class Explorer(Figure):
    """A figure of a lesson, as it is shipped. ``name`` is that of the drawing function, "module.function".

    If a formula draws it in the browser, "module.function_data" returns the data.
    """

    def __init__(self, name: str):
        def call(function: str, **values: Any) -> Any:  # the module is loaded only to draw again
            return getattr(import_module(f"fragility_lessons.{module}"), function)(**values)

        (module, function), given = name.split("."), dict(listed()[name])
        formula = name if given.pop("formula", False) else ""
        controls = {argument: Control.given(**each) for argument, each in given.items()}
        super().__init__(partial(call, function), controls, formula, partial(call, f"{function}_data"))
        self.file = DRAWN / f"{name}.json.gz"

    def packed(self) -> bytes:
        return self.file.read_bytes()

    def write(self) -> None:
        """Draw all pictures, and ship them."""
        self.file.parent.mkdir(exist_ok=True)
        write_whole(self.file, super().packed())


@cache
def listed() -> dict[str, Any]:
    """The contents of ``fragility_lab/assets/explorers.yaml``."""
    return yaml.safe_load((ASSETS / "explorers.yaml").read_text(encoding="utf-8"))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _still(panels: Sequence[tuple[str, str]], told: str) -> str:
    """A picture that does not move, as HTML: its panels, each as SVG and in words, and the line with its numbers."""
    shown = "".join(
        f'<img src="data:image/svg+xml;base64,{base64.b64encode(svg.encode("utf-8")).decode("ascii")}" '
        f'alt="{html.escape(words)}">'
        for svg, words in panels
    )
    return f'<div>{shown}</div><p class="readout">{html.escape(told)}</p>'
