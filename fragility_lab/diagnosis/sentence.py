"""One broken sentence: the beginning of a window, continued in fp32, in low precision, and with the plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.mixed_precision import Plan
from fragility_lab.diagnosis.found import Diagnosis
from fragility_lab.explorer.continued import Version, continued
from fragility_lab.explorer.sentence import Sentence
from fragility_numerics.lowering import LowPrecision

COUNT = 12  # tokens that are written, half of a window at most
LEAST, MOST = 8, 32  # tokens of the text's beginning
SEARCHED = 8  # windows whose beginnings are tried
EXPLAINED = 1  # changed words that get their causes: the causes of one take longer than all words
TRIED = 3  # parts that are kept, one at a time: each makes another model


@dataclass(frozen=True)
class Beginning:
    """The first ``length`` tokens of a ``window``, and the ``margin`` in logits by which rounding changes the next one.

    The margin is 0 where rounding does not change it.
    """

    window: int
    length: int
    margin: float


@torch.no_grad()
def beginning(model: PreTrainedModel, low: LowPrecision, windows: Mapping[int, Tensor]) -> Beginning:
    """The beginning of one of the first few ``windows`` (1, T) after which ``low`` errs by the largest margin.

    One pass of each model covers all beginnings.
    """
    room = next(iter(windows.values())).shape[1]
    most = min(MOST, room - count_in(room))
    least = min(LEAST, most)
    numbers, tried = zip(*islice(windows.items(), SEARCHED))
    texts = torch.cat(tried)[:, :most]
    exact = model(texts, use_cache=False).logits[:, least - 1 :]
    with low.running():
        moved = low.model(texts, use_cache=False).logits[:, least - 1 :].float()
    margins = moved.max(-1).values - moved.gather(-1, exact.argmax(-1, keepdim=True))[..., 0]  # (windows, places)
    window, place = divmod(int(margins.argmax()), margins.shape[1])
    return Beginning(numbers[window], least + place, float(margins[window, place]))


def count_in(room: int) -> int:
    """The number of tokens to write in a window of ``room`` tokens."""
    return min(COUNT, room // 2)


def broken(
    found: Diagnosis, model: PreTrainedModel, windows: Mapping[int, Tensor], low: LowPrecision,
    kept: Callable[[Plan], LowPrecision], most: int = EXPLAINED,
) -> dict[str, Any]:  # fmt: skip
    """The texts that ``model`` and ``low`` write after a beginning of the ``windows``, in the form of ``continued``.

    ``kept`` applies a plan to ``low``. Causes are found for the first ``most`` words that ``low`` changes.
    """
    begun = beginning(model, low, windows)
    window = windows[begun.window]
    versions = [Version(found.request.described, low, kept, most, TRIED)]
    if found.plan is not None and found.rounds:
        versions.append(Version("the plan", kept(found.plan), kept, 0, 0))
    told = continued(model, found.spelled, window[:, : begun.length], count_in(window.shape[1]), versions)
    text = "".join(map(found.spelled, window[0, : begun.length].tolist()))
    return {"prompt": text, "begun": begun, **told}


def is_broken(told: dict[str, Any] | str | None) -> bool:
    """True if a word changes in the text that is ``told``."""
    return isinstance(told, dict) and any(each["words"] != told["words"] for each in told["recipes"])


def title_of_sentence(diagnosis: Diagnosis) -> str:
    """The title of the section."""
    return "One broken sentence" if is_broken(diagnosis.sentence) else "One text, continued"


def of_sentence(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section with the text: the component, or why there is none."""
    told = diagnosis.sentence
    if not isinstance(told, dict):
        return {"component": "", "why": told}
    text = {name: told[name] for name in ("prompt", "words", "recipes")}
    html = Sentence([text], diagnosis.request.name).html
    return {"component": html, "begun": told["begun"], "count": len(told["words"]), "changed": is_broken(told)}
