"""The questions of the lessons, which a browser asks, checks and remembers; no kernel is needed.

Solutions, hints and explanations are encoded in the page (``sealed``), so that nobody reads them by chance. That is no
protection: whoever wants to can decode them.
"""

import base64
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from IPython.display import HTML

import fragility_core
from fragility_lab.paths import ASSETS
from fragility_lab.reporting.html import template
from fragility_lessons.coding import listed

LESSONS = tuple(name for name in listed() if name not in ("recall", "sheet", "coding"))  # in the order of their numbers
ATTEMPTS = 2  # wrong answers after which the explanation opens
NUMBER = "An answer is a number such as 0.01, 1e-2, 1/100 or 1 %, not "


@dataclass(frozen=True)
class Exercise:
    """A question, the check of an answer to it, a hint, and an explanation.

    If the ``solution`` is a number, an answer may be off by the relative ``tolerance``. If it is text, it is one of
    the ``options``. ``question``, ``hint`` and ``explanation`` are HTML. Answers are kept by ``lesson`` and ``id``.
    """

    lesson: str
    id: str
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

    @property
    def sealed(self) -> str:
        """The texts that a student reads only after an answer, as Base64 of JSON."""
        hidden = {name: asdict(self)[name] for name in ("solution", "hint", "explanation", "tolerance")}
        return base64.b64encode(json.dumps(hidden, ensure_ascii=False).encode()).decode("ascii")

    @property
    def html(self) -> str:
        """The question, to be placed once or several times on any page."""
        return self.inside(**_parts())

    def inside(self, css: str = "", script: str = "") -> str:
        """The question on a page that has style and script already, unless they are given."""
        given = {"lesson": self.lesson, "id": self.id, "options": self.options, "sealed": self.sealed}
        return _component(
            "question", given | {"attempts": ATTEMPTS, "told": NUMBER}, exercise=self, css=css, script=script
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.question}


class Exercises(tuple[Exercise, ...]):
    """The exercises of one lesson."""

    @property
    def recall(self) -> Exercise | None:
        """A question of an earlier lesson, if one is listed. Its answer is stored with this lesson."""
        lesson = self[0].lesson
        name = listed()["recall"].get(lesson)
        return replace(find(lesson, name), lesson=lesson, id=name) if name else None

    def progress(self) -> HTML:
        """The end of the lesson: the earlier question, how many are answered, and a button that saves the answers."""
        recall = [self.recall] if self.recall else []
        given = {"lesson": self[0].lesson, "ids": [each.id for each in (*self, *recall)]}
        inside = "".join(each.inside() for each in recall)
        return HTML(_component("progress", given, recall=inside, count=len(given["ids"]), **_parts()))


def _parts() -> dict[str, str]:
    """Style and script in one line each, without comments, so that a notebook stays thin."""
    lines = {
        kind: (ASSETS / "exercises" / f"exercises.{kind}").read_text("utf-8").splitlines() for kind in ("css", "js")
    }
    css, script = (" ".join(x for line in each if (x := line.strip()) and x[:2] != "//") for each in lines.values())
    return {"css": css, "script": script}


def _component(name: str, given: dict, **values: object) -> str:
    data = json.dumps(given | {"version": fragility_core.__version__}, ensure_ascii=False).replace("<", "\\u003c")
    return template(f"exercises/{name}.html.jinja").render(data=data, **values)


def exercises(lesson: str) -> Exercises:
    """The exercises of the module ``lesson``, in the order of ``fragility_lab/assets/exercises.yaml``."""
    return Exercises(Exercise(lesson, **texts) for texts in listed()[lesson])


def find(lesson: str, name: str) -> Exercise:
    """The exercise that ``lesson`` asks by the ``name`` of its id, or of "earlier lesson/id"; KeyError if none."""
    earlier, _, id = name.rpartition("/")
    return {(each.lesson, each.id): each for known in LESSONS for each in exercises(known)}[earlier or lesson, id]


# --- Answers that are numbers (exercises.js does the same) ---------------------------------------

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
        raise ValueError(f"{NUMBER}{answer!r}")
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
