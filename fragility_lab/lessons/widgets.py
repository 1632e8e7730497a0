"""Live figures and exercises for the teaching notebooks.

What a cell shows is one MIME bundle: the live panel for a notebook with a kernel, and a static
figure or text for every reader without one. Only the static part is committed (``refresh``).
"""

import base64
import html
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import ipywidgets
from ipywidgets import HTML, Dropdown, FloatSlider, HBox, HTMLMath, IntSlider, RadioButtons, Text, ToggleButtons, VBox

from fragility_lab.reporting import figures

LABEL = {"description_width": "14em"}
WIDE = {"width": "min(100%, 38em)"}
ROW = {"flex_flow": "row wrap", "align_items": "center"}

Draw = Callable[..., tuple[figures.Axes, str]]


def slider(label: str, low: float, high: float, step: float, start: float) -> FloatSlider | IntSlider:
    """A slider from ``low`` to ``high``, moved by mouse or arrow keys; of whole numbers if ``step`` is one."""
    kind = IntSlider if isinstance(step, int) else FloatSlider
    return kind(start, min=low, max=high, step=step, description=label, style=LABEL, layout=WIDE)


def choice(label: str, options: Sequence[str], start: str) -> Dropdown:
    """One of ``options``."""
    return Dropdown(options=options, value=start, description=label, style=LABEL, layout=WIDE)


def buttons(label: str, options: Sequence[int | str], start: int | str) -> ToggleButtons:
    """One of ``options``, all in sight, to be clicked, or pressed on the keyboard."""
    style = {"button_width": "3.4em"}
    return ToggleButtons(options=options, value=start, description=label, style=style, layout={"width": "100%"})


class Explorer:
    """A figure that is drawn again whenever one of its controls changes.

    ``draw`` takes the values of ``controls`` by name and returns the Axes and, in one line, the
    numbers to be read off. Its exceptions are shown in place of the figure and raised.
    """

    def __init__(self, draw: Draw, **controls: ipywidgets.ValueWidget):
        self.draw = draw
        self.controls = controls
        self.picture = HTML().add_class("picture")
        self.panel = VBox([*controls.values(), self.picture]).add_class("explorer")
        self.redraw()
        for control in controls.values():
            control.observe(self._changed, names="value")

    def current(self) -> tuple[figures.Axes, str]:
        """Axes and readout for the values that the controls have now."""
        with figures.style():
            return self.draw(**{name: control.value for name, control in self.controls.items()})

    def redraw(self) -> None:
        """Bring figure and readout up to date."""
        axes, readout = self.current()
        width = axes.get_figure().get_figwidth()
        # decoding="sync" and a fixed size: the old picture stays until the new one is there, and nothing jumps.
        self.picture.value = (
            f'<img src="data:image/png;base64,{_base64(figures.png(axes))}" alt="{html.escape(readout)}" '
            f'decoding="sync" style="display: block; width: {width * 96:.0f}px; max-width: 100%">'
            f'<p class="readout" aria-live="polite" style="margin: 0">{html.escape(readout)}</p>'
        )

    def _changed(self, _change) -> None:
        try:
            self.redraw()
        except Exception:
            # Jupyter logs what a callback raises where no reader looks.
            self.picture.value = f'<pre role="alert">{html.escape(traceback.format_exc())}</pre>'
            raise

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        axes, readout = self.current()
        static = {"image/png": _base64(figures.captioned_png(axes, readout)), "text/plain": readout}
        return {**self.panel._repr_mimebundle_(), **static}


@dataclass(frozen=True)
class Exercise:
    """A question, the check of an answer to it, and the worked answer, hidden until asked for.

    A ``solution`` that is a number is met within ``tolerance``, relative; one that is text is among
    the ``options`` to choose from. ``question`` and ``explanation`` are HTML.
    """

    question: str
    solution: float | str
    explanation: str
    options: tuple[str, ...] = ()
    tolerance: float = 0.01

    def __post_init__(self):
        if isinstance(self.solution, str) and self.solution not in self.options:
            raise ValueError(f"the solution must be one of the options {self.options}, got {self.solution!r}")

    def is_right(self, answer: str) -> bool:
        """Whether ``answer`` is right; raises ValueError where a number is wanted and it is none."""
        if self.options:
            return answer == self.solution
        return abs(_number(answer) - self.solution) <= self.tolerance * abs(self.solution)

    def verdict(self, answer: str | None) -> str:
        """What a reader who answers ``answer`` is told."""
        if not answer:
            return "Answer first."
        try:
            return "Right." if self.is_right(answer) else "Not yet: try again, or show the answer."
        except ValueError as error:
            return f"{error}."

    def panel(self) -> VBox:
        """Question, field, button and the hidden answer."""
        field = (
            RadioButtons(options=self.options, value=None, layout={"width": "max-content"})
            if self.options
            else Text(description="Answer", placeholder="0.01, 1e-2 or 1/100", continuous_update=False)
        )
        button = ipywidgets.Button(description="Check", tooltip="Check the answer")
        verdict = HTML().add_class("verdict")

        def check(_=None) -> None:
            verdict.value = f'<p role="status">{html.escape(self.verdict(field.value))}</p>'

        button.on_click(check)
        if not self.options:
            field.observe(check, names="value")  # Enter in the field checks too
        row = HBox([field, button, verdict], layout=ROW)
        return VBox([HTMLMath(self.question), row, HTMLMath(self._details())]).add_class("exercise")

    def _details(self) -> str:
        return f"<details><summary>Show the answer</summary><p>{self.explanation}</p></details>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        options = "".join(f"<li>{option}</li>" for option in self.options)
        text = f"<p>{self.question}</p><ul>{options}</ul>{self._details()}"
        return {**self.panel()._repr_mimebundle_(), "text/html": text, "text/plain": self.question}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _number(text: str) -> float:
    try:
        return float(Fraction(text.replace(",", ".").strip()))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"An answer is a number such as 0.01, 1e-2 or 1/100, not {text!r}") from error
