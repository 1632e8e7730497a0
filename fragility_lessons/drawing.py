"""A picture as data: what matplotlib would draw, in units of each panel, for ``assets/sliders/sliders.js`` to draw.

A coordinate is a whole number: 0 and SIZE are the ends of an axis, whatever its scale. So the browser knows neither
scales nor limits, and draws a panel at the width that there is.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from fragility_lab.reporting.figures import figure_of
from fragility_lessons.pictures import alternative_text

SIZE = 2000
FAR = 3 * SIZE  # what lies outside of a panel is cut off there
PIXELS = 96  # an inch
ROOM = 1.1  # inches beside the axes, for labels


def panel(axes: Axes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The frame of ``axes`` (title, labels, ticks, legend, size in pixels), and its marks in the order of drawing."""
    axes.apply_aspect()
    box, (width, height) = axes.get_position(), figure_of(axes).get_size_inches()
    frame: dict[str, Any] = {"title": axes.get_title(), "alt": alternative_text(axes)}
    frame |= {"width": round(PIXELS * (box.width * width + ROOM)), "height": round(PIXELS * box.height * height)}
    if not axes.axison and not axes.collections:
        return frame | {"rows": _rows(axes.texts)}, []
    cells = any(isinstance(part, QuadMesh) for part in axes.collections)
    frame |= {"grid": axes.axison and not cells, "bare": not axes.axison, "square": axes.get_aspect() == 1}
    for name in "xy":
        frame[name] = _axis(axes, name)
    frame |= _legend(axes)
    texts = [text for text in axes.texts if text.get_text()]
    parts = sorted((*axes.patches, *axes.lines, *axes.collections, *texts), key=lambda part: part.get_zorder())
    return frame, [_mark(axes, part, cells) for part in parts if part.get_visible()]


def _rows(texts: Iterable[Text]) -> list[list[str]]:
    """The lines of a panel that has text only, from top to bottom, each from its start."""
    lines = defaultdict(list)
    for text in texts:
        x, y = text.get_position()
        lines[-y].append((x, text.get_text()))
    return [[text for _, text in sorted(lines[y])] for y in sorted(lines)]


def _axis(axes: Axes, name: str) -> dict[str, Any]:
    axis: Axis = getattr(axes, f"{name}axis")
    places = np.asarray(axis.get_majorticklocs(), dtype=float)
    names = axis.get_major_formatter().format_ticks(places.tolist())
    known = [tick.label1 for tick in axis.majorTicks]  # to ask for labels would make ticks, which takes long
    blended = axes.get_xaxis_transform() if name == "x" else axes.get_yaxis_transform()
    points = np.stack([places, np.zeros_like(places)] if name == "x" else [np.zeros_like(places), places], 1)
    at = _whole(axes, points.reshape(-1, 2), blended)[:, "xy".index(name)]
    ticks: list[list[Any]] = []
    for place, text, label in zip_longest(at.tolist(), names, known[: len(names)]):
        if 0 <= place <= SIZE:
            patch = label and label.get_bbox_patch()
            shade = [to_hex(patch.get_facecolor()), to_hex(label.get_color())] if patch else []
            ticks.append([place, text, *shade])
    offset = axis.get_major_formatter().get_offset()
    return {"label": axis.get_label_text() + f" ({offset})" * bool(offset), "ticks": ticks}


def _legend(axes: Axes) -> dict[str, Any]:
    """The entries of a legend, or of a colour bar with its label."""
    if axes.get_legend():
        return {"legend": [[_look(part), label] for part, label in zip(*axes.get_legend_handles_labels())]}
    for part in axes.collections:
        if part.colorbar:
            ticks, names = part.colorbar.get_ticks(), part.colorbar.ax.get_yticklabels()
            entries = [[{"fill": _colour(part.to_rgba(at), False)}, name.get_text()] for at, name in zip(ticks, names)]
            return {"legend": entries, "scale": part.colorbar.ax.get_ylabel()}
    return {}


def _whole(axes: Axes, points, transform) -> np.ndarray:
    """Points (n, 2) in whole units of the panel; FAR away if they are infinite."""
    with np.errstate(all="ignore"):
        places = axes.transAxes.inverted().transform(transform.transform(np.asarray(points, dtype=float)))
    return np.nan_to_num(np.round(places * SIZE), nan=-FAR, posinf=FAR, neginf=-FAR).clip(-FAR, FAR).astype(int)


def _colour(colour: Any, themed: bool = True) -> str:
    """A colour as hex; of greys that are drawn on the page itself, "ink" or "muted", which follow its theme."""
    name = to_hex(colour)
    red, green, blue = (int(name[at : at + 2], 16) for at in (1, 3, 5))
    if themed and red == green == blue and red < 0xD0:
        return "ink" if red < 0x48 else "muted"
    return name


def _look(part: Any) -> dict[str, Any]:
    """The look of a mark (colours, widths, marker), without its coordinates."""
    alpha, kind = part.get_alpha(), type(part)
    look: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    if issubclass(kind, Line2D):
        look["line"] = _colour(part.get_color())
        if part.get_linestyle() not in ("None", "none", " ", ""):
            look |= {"width": part.get_linewidth(), "dash": part.get_linestyle()}
        if (marker := part.get_marker()) not in (None, "None", "none", "", " "):
            fill = part.get_markerfacecolor() if part.get_fillstyle() != "none" else None
            look |= {"marker": marker, "size": part.get_markersize(), "edge": _colour(part.get_markeredgecolor())}
            look |= {"edgeWidth": part.get_markeredgewidth(), "fill": fill and _colour(fill, fill != "white")}
        return look
    face = part.get_facecolor()
    return look | {"fill": to_hex(face if issubclass(kind, Rectangle) else face[0])}


def _mark(axes: Axes, part: Any, cells: bool) -> dict[str, Any]:
    kind = type(part)
    if issubclass(kind, Text):
        x, y = _whole(axes, [part.get_position()], part.get_transform())[0].tolist()
        align = {"left": "start", "center": "middle", "right": "end"}[part.get_ha()]
        colour = _colour(part.get_color(), not cells)
        return {"text": part.get_text(), "at": [x, y], "align": align, "line": colour, "side": part.get_va()}
    if issubclass(kind, Line2D):
        return _look(part) | _series(_whole(axes, part.get_xydata(), part.get_transform()))
    if issubclass(kind, Rectangle):
        low, high = _whole(axes, part.get_path().vertices[[0, 2]], part.get_transform()).tolist()
        return {"cells": [[*low, *high]], "fills": [to_hex(part.get_facecolor())], "alpha": part.get_alpha() or 1}
    if issubclass(kind, QuadMesh):
        part.update_scalarmappable()
        corners = part.get_coordinates()
        pairs = np.concatenate([corners[:-1, :-1], corners[1:, 1:]], -1).reshape(-1, 2)
        places = _whole(axes, pairs, part.get_transform()).reshape(-1, 4)
        return {"cells": places.tolist(), "fills": [to_hex(each) for each in part.get_facecolor()]}
    part.update_scalarmappable()  # areas and contours
    shapes = []
    for path, fill in zip(part.get_paths(), part.get_facecolor()):
        polygons = path.to_polygons(closed_only=False)
        shapes.append([to_hex(fill), *[_series(_whole(axes, each, part.get_transform())) for each in polygons]])
    return {"shapes": shapes, "alpha": part.get_alpha() or 1}


def base64_of(numbers: np.ndarray) -> str:
    """The bytes of ``numbers`` in fp32, which a browser reads as a Float32Array."""
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")


def _series(points: np.ndarray) -> dict[str, list[int]]:
    return {"x": points[:, 0].tolist(), "y": points[:, 1].tolist()}
