"""Live figures for the teaching notebooks.

A cell shows one MIME bundle: a live panel for a notebook with a kernel, and static HTML for every reader without
one. Notebooks are stored with the static part only (``running.refresh``).
"""

import base64
import html
import traceback
from collections.abc import Callable, Sequence

import ipywidgets
from ipywidgets import HTML, Dropdown, FloatSlider, IntSlider, ToggleButtons, VBox

from fragility_lab.reporting import figures
from fragility_lessons import pictures

LABEL = {"description_width": "14em"}
WIDE = {"width": "min(100%, 38em)"}

# ipywidgets names neither its sliders nor its toggles to a screen reader. Each new picture lends them their labels.
NAME_CONTROLS = html.escape("""
for (const e of this.closest('.explorer')?.querySelectorAll('[role=slider], .widget-toggle-buttons button') ?? []) {
    const label = e.closest('.widget-hslider, .widget-toggle-buttons').querySelector('label').textContent;
    e.setAttribute('aria-label', e.role === 'slider' ? label : label + ' ' + e.textContent.trim());
    if (e.role !== 'slider') e.setAttribute('aria-pressed', e.classList.contains('mod-active'));
}""")
# ipywidgets marks the panels of a kernel that is gone with the class jupyter-widgets-disconnected.
# Nor has a picture a grey bar for its folded code above it; View > Expand Selected Code shows the code.
LOST = """<style>.jp-CodeCell:has(.explorer) .jp-InputPlaceholder { display: none }
.lost { display: none } .jupyter-widgets-disconnected > .lost { display: block }
.jupyter-widgets-disconnected > .picture { opacity: 0.4 }</style>
<p role="alert"><b>The kernel that drew this was restarted or shut down. Run this cell again.</b></p>"""


def slider(label: str, low: float, high: float, step: float, start: float) -> FloatSlider | IntSlider:
    """A slider from ``low`` to ``high``, moved by mouse or arrow keys; of integers if ``step`` is one."""
    kind = IntSlider if isinstance(step, int) else FloatSlider
    return kind(start, min=low, max=high, step=step, description=label, style=LABEL, layout=WIDE)


def choice(label: str, options: Sequence[str], start: str) -> Dropdown:
    """A menu of ``options``."""
    return Dropdown(options=options, value=start, description=label, style=LABEL, layout=WIDE)


def buttons(label: str, options: Sequence, start: int | str, width: str = "3.4em") -> ToggleButtons:
    """A button for each of ``options``, which are values or pairs of text and value. One button is pressed."""
    style = {"button_width": width}
    return ToggleButtons(options=options, value=start, description=label, style=style, layout={"width": "100%"})


def _panel(kind: str, *children: ipywidgets.Widget) -> VBox:
    return VBox([*children, HTML(LOST).add_class("lost")]).add_class(kind)


class Explorer:
    """A figure that is drawn again whenever one of its controls changes.

    ``draw`` takes the values of ``controls`` by name. It returns the Axes of the figure's panels, and a line with
    the numbers to read off. If it raises an exception, the traceback takes the place of the figure.
    """

    def __init__(self, draw: Callable[..., pictures.Picture], **controls: ipywidgets.ValueWidget):
        self.draw = draw
        self.controls = controls
        self.picture = HTML().add_class("picture")
        self.panel = _panel("explorer", *controls.values(), self.picture)
        self.redraw()
        for control in controls.values():
            control.observe(self._changed, names="value")

    @figures.style()
    def drawn(self, attributes: str = "") -> tuple[str, str]:
        """Panels and readout for the present values of the controls as HTML, and the readout alone as text."""
        panels, readout = self.draw(**{name: control.value for name, control in self.controls.items()})
        images = "".join(
            f'<img src="data:image/svg+xml;base64,{base64.b64encode(pictures.svg(axes)).decode("ascii")}" '
            f'alt="{html.escape(pictures.alternative_text(axes))}"{attributes}>'
            for axes in panels
        )
        return f'<div>{images}</div><p class="readout" aria-live="polite">{html.escape(readout)}</p>', readout

    def redraw(self) -> None:
        """Bring figure and readout up to date."""
        # decoding="sync": the old picture stays until the new one is there.
        self.picture.value, _ = self.drawn(f' decoding="sync" style="max-width: 100%" onload="{NAME_CONTROLS}"')

    def _changed(self, _change) -> None:
        try:
            self.redraw()
        except Exception:
            # Jupyter logs the exception of a callback, whatever it is, where no reader looks.
            self.picture.value = f'<pre role="alert">{html.escape(traceback.format_exc())}</pre>'
            raise

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        static, readout = self.drawn()
        return {**self.panel._repr_mimebundle_(), "text/html": static, "text/plain": readout}
