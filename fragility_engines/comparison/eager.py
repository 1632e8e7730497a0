"""Verdicts for eager attention, which rounds scores and probabilities; fused kernels do not round these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.verdict import Verdict, judge
from fragility_numerics.attention import set_attention
from fragility_numerics.internals import attention_of, restored_attention

MOST = 3.0  # times the gap of fused attention: eager attention rounds no more than that
NEAR = 1.15  # times what eager attention must give, at most; and it must give so much more than fused attention


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the attention of ``model`` is eager."""
    with restored_attention(model):
        set_attention(model, "eager")
        yield


def as_eager(model: PreTrainedModel, gap: Gap, verdict: Verdict, measured: Callable[[], Gap]) -> tuple[Gap, Verdict]:
    """Gap and verdict for eager attention if its rounding explains the gap, else ``gap`` and ``verdict`` unchanged.

    ``measured`` computes the gap with the attention that ``model`` is set to. It is called if the gap from the fp32
    model is large, no cause is named, and the model has fused attention.
    """
    undecided = verdict.kind in ("more", "few") and verdict.cause is None and 1 < verdict.ratio[0] < MOST
    if not undecided or gap.two or attention_of(model) != "sdpa":
        return gap, verdict
    with eager(model):
        other = measured()
    second = judge(other)
    column = "emulated" if gap.fails or other.fails else "predicted"  # of both, or their yardsticks differ
    before, after = gap.beside(column), other.beside(column)
    explained = second.kind == "rounding" and after[0] < NEAR < before[0] / after[0]
    return (other, replace(second, fused=before)) if explained else (gap, verdict)
