"""One broken sentence: the beginning of a window, continued in fp32, in low precision, and with the plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fragility_adjoint.mixed_precision import Plan
from fragility_lab.diagnosis.found import Diagnosis
from fragility_lab.explorer.continued import Version, continued
from fragility_lab.explorer.sentence import Sentence
from fragility_numerics.lowering import LowPrecision

COUNT = 12  # tokens that are written, half of a window at most
LEAST, MOST = 8, 32  # tokens of the text's beginning
EXPLAINED = 1  # changed words that get their causes: the causes of one take longer than all words
TRIED = 3  # parts that are kept, one at a time: each makes another model


@dataclass(frozen=True)
class Beginning:
    """The first ``length`` tokens of a ``window``; ``changed`` if a measured pass changes the token after them."""

    window: int
    length: int
    changed: bool


def beginning(found: Diagnosis, windows: Mapping[int, Tensor]) -> Beginning:
    """The shortest beginning of the ``windows`` (1, T) after which most passes change a token; or any, if none does."""
    room = next(iter(windows.values())).shape[1]
    most = min(MOST, room - count_in(room))
    if found.by_token is None or found.by_token.measured is None:
        return Beginning(next(iter(windows)), most, False)
    rows = found.by_token.measured
    rows = rows[rows.position.between(min(LEAST, most) - 1, most - 1)]
    first = rows.sort_values(["changed", "position"], ascending=[False, True], kind="stable").iloc[0]
    if not first.changed:
        return Beginning(int(first.window), most, False)
    return Beginning(int(first.window), int(first.position) + 1, True)


def count_in(room: int) -> int:
    """The number of tokens that are written where a window has ``room`` for so many."""
    return min(COUNT, room // 2)


def broken(
    found: Diagnosis, model: Any, windows: Mapping[int, Tensor], low: LowPrecision,
    kept: Callable[[Plan], LowPrecision], most: int = EXPLAINED,
) -> dict[str, Any]:  # fmt: skip
    """What ``model`` and ``low`` write after a beginning of the ``windows``, as ``continued`` tells it.

    ``kept`` is ``low`` with a plan. The first ``most`` words that ``low`` changes get their causes.
    """
    begun = beginning(found, windows)
    window = windows[begun.window]
    versions = [Version(found.request.described, low, kept, most, TRIED)]
    if found.plan is not None:
        versions.append(Version("with the plan", kept(found.plan), kept, 0, 0))
    told = continued(model, found.spelled, window[:, : begun.length], count_in(window.shape[1]), versions)
    text = "".join(map(found.spelled, window[0, : begun.length].tolist()))
    return {"prompt": text, "begun": begun, **told}


def title_of_sentence(diagnosis: Diagnosis) -> str:
    """The title of the section: is a sentence broken?"""
    told = diagnosis.sentence
    changed = isinstance(told, dict) and any(each["words"] != told["words"] for each in told["recipes"])
    return "One broken sentence" if changed else "One text, continued"


def of_sentence(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section with the text: the component, or why there is none."""
    told = diagnosis.sentence
    if not isinstance(told, dict):
        return {"component": "", "why": told}
    text = {name: told[name] for name in ("prompt", "words", "recipes")}
    html = Sentence([text], diagnosis.request.model).html
    return {"component": html, "begun": told["begun"], "count": len(told["words"])}
