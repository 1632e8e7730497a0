"""The findings of a diagnosis, and its failures."""

import traceback
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase as Tokenizer

from fragility_adjoint import predictor
from fragility_adjoint.explain.coherence import Coherence
from fragility_adjoint.mixed_precision import Contributions, Plan
from fragility_adjoint.mixed_precision.bits import Choice, Choices
from fragility_exports.libraries import Export
from fragility_lab.diagnosis.flips import Flips
from fragility_lab.diagnosis.remedy import Remedy
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.tokens import ErrorsByToken
from fragility_lab.measurement.growth import Growth

Result = TypeVar("Result")


def made(result: Result | None) -> Result:
    """The ``result`` of a step that ran before this one."""
    assert result is not None
    return result


@dataclass(frozen=True)
class Failure:
    """A failure: ``what`` failed (a step of the work or a part of the page), its ``error`` in a line, its ``trace``."""

    what: str
    error: str
    trace: str

    @classmethod
    def of(cls, what: str, error: Exception) -> "Failure":
        """The failure of ``what`` by ``error``."""
        words = " ".join(str(error).split())
        return cls(what, f"{type(error).__name__}: {words}".rstrip(": "), "".join(traceback.format_exception(error)))


class IncompleteError(RuntimeError):
    """Raised after the page is written, if steps or sections of it failed."""


@dataclass
class Diagnosis:
    """The result of a diagnosis, as far as its steps have come. A field is None until its step is done.

    Tables have one row per window unless stated otherwise.

    - ``failed``: the steps that failed, by name. ``pending``: names of the steps to come. ``seconds``: time by step.
    - ``prediction``: of the model without a plan. ``contributions``: what each unit contributes to it. ``planned``: the
      prediction with the ``plan``, by window. If every window overflows, all but the first are None.
    - ``exports``: the plan for each other library by name, or why it has none.
    - ``measured``, ``protected``: windows of ``comparison.compare`` without and with the plan. ``drift``,
      ``protected_drift``: its blocks. All need a reference; ``referenced`` says whether fp32 passes are measured.
    - ``ranges``: one row per module with values out of range.
    - ``changed_experts``: the share of choices of experts that rounding changes, for models that choose experts.
    - ``coherence``: errors that act together without a plan, unless every window overflows.
    - ``by_token``: the error by token. ``origins``: origins of its tail, by the rows of its table. ``flips``: changed
      choices. ``growth``: does the error grow in proportion? It needs a reference. All are for models that are whole.
    - ``remedy``: plans that were tried to bring back windows that overflow. ``mended``: the prediction of these windows
      with the plan that does, of mismatch for the target "hidden", else of KL, and columns of ``comparison.compare``.
    - ``choices``: the schemes among which a budget for schemes chose. ``choice``: the chosen ones.
    - ``sentence``: a text continued in fp32 and in low precision (``sentence.broken``), or why there is none.
    - ``opening``: the tokens with which each window begins. ``attention``: the implementation that ran.
      ``vocabulary``: the number of tokens that the model chooses among; 0 if it is not known.
    """

    request: Request
    execution: str = ""
    attention: str = ""
    vocabulary: int = 0
    tokenizer: Tokenizer | None = None
    opening: tuple[str, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)
    referenced: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    prediction: predictor.Prediction | None = None
    ranges: pd.DataFrame | None = None
    contributions: Contributions | None = None
    plan: Plan | None = None
    planned: pd.Series | None = None
    exports: dict[str, Export | str] = field(default_factory=dict)
    choices: Choices | None = None
    choice: Choice | None = None
    measured: pd.DataFrame | None = None
    drift: pd.DataFrame | None = None
    protected: pd.DataFrame | None = None
    protected_drift: pd.DataFrame | None = None
    changed_experts: float | None = None
    by_token: ErrorsByToken | None = None
    origins: pd.Series | None = None
    flips: Flips | None = None
    coherence: Coherence | None = None
    growth: Growth | None = None
    remedy: Remedy | None = None
    mended: pd.DataFrame | None = None
    sentence: dict[str, Any] | str | None = None

    def text(self, token: int) -> str:
        """The text of a ``token`` in quotes, its spaces to be seen; its number where the tokenizer is not known."""
        return f"token {token}" if self.tokenizer is None else repr(self.tokenizer.decode(token)).replace(" ", "␣")

    def spelled(self, token: int) -> str:
        """The text of a ``token`` among others; its number where the tokenizer is not known."""
        return f" {token}" if self.tokenizer is None else str(self.tokenizer.decode([token]))

    @property
    def rounds(self) -> bool:
        """False if the passes over these windows round no number; True also before this is known."""
        known = self.prediction
        return known is None or not known.finite or bool(known.contributions.c2.any())

    @property
    def lost_in_fp32(self) -> set[int]:
        """The numbers of the windows for which fp32 itself gives no finite loss, as far as that was measured."""
        return set() if self.measured is None else {*self.measured.window[~np.isfinite(self.measured.reference_loss)]}

    @property
    def chooses_experts(self) -> bool:
        """True if the model is known to choose experts."""
        return self.prediction is not None and bool(self.prediction.contributions.site.eq("router").any())

    def require_complete(self) -> None:
        """Raises IncompleteError if steps or sections of the page failed; the error names them."""
        if self.failed:
            told = "; ".join(f"{failure.what} ({failure.error})" for failure in self.failed.values())
            raise IncompleteError(
                f"a diagnosis must have all its parts, but of {self.request.model!r} these failed: {told}. "
                "The page has all others, and beside each failure what a report of it needs"
            )
