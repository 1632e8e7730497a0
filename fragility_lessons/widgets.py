"""The questions of the teaching notebooks.

A cell shows one MIME bundle: a live panel for a notebook with a kernel, and static HTML for every reader without
one. Notebooks are stored with the static part only (``running.refresh``).
"""

import html
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import ipywidgets
from ipywidgets import HTML, HBox, HTMLMath, RadioButtons, Text, VBox

from fragility_lessons.coding import listed

ATTEMPTS = 2
ROW = {"flex_flow": "row wrap", "align_items": "center"}

# ipywidgets marks the panels of a kernel that is gone with the class jupyter-widgets-disconnected.
# Nor has a question a grey bar for its folded code above it; View > Expand Selected Code shows the code.
LOST = """<style>.jp-CodeCell:has(.exercise) .jp-InputPlaceholder { display: none }
.exercise .widget-radio-box label { display: flex; flex-direction: row-reverse; justify-content: flex-end }
.exercise .widget-radio-box label { align-items: center; height: auto; white-space: normal }
.lost { display: none } .jupyter-widgets-disconnected > .lost { display: block }</style>
<p role="alert"><b>The kernel that drew this was restarted or shut down. Run this cell again.</b></p>"""


def _panel(kind: str, *children: ipywidgets.Widget) -> VBox:
    return VBox([*children, HTML(LOST).add_class("lost")]).add_class(kind)


@dataclass(frozen=True)
class Exercise:
    """A question, the check of an answer to it, a hint, and the worked answer, hidden until asked for.

    If the ``solution`` is a number, an answer may be off by the relative ``tolerance``. If it is text, it is one of
    the ``options``. ``question``, ``hint`` and ``explanation`` are HTML.
    """

    question: str
    solution: float | str
    hint: str
    explanation: str
    options: Sequence[str] = ()
    tolerance: float = 0.01

    def __post_init__(self):
        if isinstance(self.solution, str) and self.solution not in self.options:
            raise ValueError(f"the solution must be one of the options {self.options}, got {self.solution!r}")

    def is_right(self, answer: str) -> bool:
        """True if ``answer`` is right; raises ValueError for an answer that should be a number and is not."""
        if self.options:
            return answer == self.solution
        solution = float(self.solution)
        return any(abs(value - solution) <= self.tolerance * abs(solution) for value in numbers(answer))

    def verdict(self, answer: str | None) -> str:
        """The response to ``answer``, as HTML."""
        if not answer:
            return "Answer first."
        try:
            return "Right." if self.is_right(answer) else f"Not yet. Hint: {self.hint}"
        except ValueError as error:
            return html.escape(f"{error}.")

    def panel(self) -> VBox:
        """Question, field, button and the answer, which opens after a right answer or ATTEMPTS wrong ones."""
        field = (
            RadioButtons(options=self.options, value=None, layout={"width": "max-content", "max_width": "100%"})
            if self.options
            else Text(description="Answer", placeholder="0.01, 1e-2, 1/100 or 1 %", continuous_update=False)
        )
        button = ipywidgets.Button(description="Check", tooltip="Check the answer")
        verdict, answer, wrong = HTML().add_class("verdict"), HTMLMath(self._details()), set()

        def check(_=None) -> None:
            told = self.verdict(field.value)
            verdict.value = f'<p role="status">{told}</p>'
            if told.startswith("Not yet."):
                wrong.add(field.value)
            if told == "Right." or len(wrong) >= ATTEMPTS:
                answer.value = self._details(" open")

        def forget(_) -> None:
            verdict.value = ""

        button.on_click(check)
        field.observe(forget if self.options else check, names="value")  # Enter in a text field checks too
        row = HBox([field, button], layout=ROW)
        return _panel("exercise", HTMLMath(self.question), row, verdict, answer)

    def _details(self, attribute: str = "") -> str:
        return f"<details{attribute}><summary>Show the answer</summary><p>{self.explanation}</p></details>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        options = f"<ul>{''.join(f'<li>{option}</li>' for option in self.options)}</ul>" if self.options else ""
        text = f"<p>{self.question}</p>{options}{self._details()}"
        return {**self.panel()._repr_mimebundle_(), "text/html": text, "text/plain": self.question}


def exercises(lesson: str) -> tuple[Exercise, ...]:
    """The exercises of the module ``lesson``, in the order of ``fragility_lab/assets/exercises.yaml``."""
    return tuple(Exercise(**texts) for texts in listed()[lesson])


# --- Answers that are numbers -------------------------------------------------------------------

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SIGNS = str.maketrans("−–×·∙", "--***")


def numbers(answer: str) -> set[float]:
    """The values that ``answer`` may stand for: "375,000" is read with a thousands separator and a decimal comma.

    Products, quotients, powers and a percent sign are allowed: "1.5 × 10⁻³", "2/0.2", "50 %". Raises ValueError
    for anything else.
    """
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda found: "^" + found[0].translate(SUPERSCRIPTS), answer.translate(SIGNS))
    text = re.sub(r"[\s_']", "", text).replace("**", "^")
    thousands = re.sub(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?!\d)", lambda m: m[0].replace(",", ""), text)
    values = set()
    for spelling in (thousands, text.replace(",", ".")):
        with suppress(ValueError, ArithmeticError, TypeError):
            values.add(_value(spelling))
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"An answer is a number such as 0.01, 1e-2, 1/100 or 1 %, not {answer!r}")
    return values


def _value(text: str) -> float:
    """The value of a product or quotient of powers, in percent if it ends with that sign."""
    if text.endswith("%"):
        return _value(text[:-1]) / 100
    first, *divisors = (math.prod(map(_power, part.split("*"))) for part in text.split("/"))
    return first / math.prod(divisors)


def _power(text: str) -> float:
    base, *exponents = text.split("^")
    return math.pow(float(base), float(*exponents)) if exponents else float(base)
