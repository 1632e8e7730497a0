"""The origin of single tokens' errors: the block and branch where a token's error leaves that of the other tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.paths import (
    attention_modules,
    block_of,
    block_paths,
    branch_paths,
    forward_hook,
    hidden_and_logits,
)
from fragility_lab.diagnosis.tokens import usual
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.nested import tensors

LEAVES = 5.0  # times the median token's error: a token's error above this has left it
SINK = 10.0  # times the median token's norm: a residual stream above this is that of a sink


@dataclass(frozen=True)
class Origin:
    """The origin of the error at a ``position``.

    - ``branch``: path of the first branch in which the token's error leaves that of the median token; "" if none does.
      ``kind`` is "attention" or "".
    - ``times``: the token's error there over the median token's, both relative to their residual streams.
    - ``change``: relative change of the branch's own result.
    - ``sink``: number of the first block after which the norm of the token's residual stream is above SINK times the
      median token's; None if there is no such block. ``norm`` is the largest such ratio of any block.
    """

    position: int
    branch: str
    kind: str
    times: float
    change: float
    sink: int | None
    norm: float

    def __str__(self) -> str:
        """The origin in words."""
        words = "it grows everywhere, in no single branch"
        if self.branch:
            what = "attention" if self.kind == "attention" else "branch"
            words = f"it begins in {what} {self.branch}: {self.times:.0f} times the median token's error there"
            if self.kind == "attention" and self.change > 0.1:
                words += (
                    f", and the result changes by {self.change:.0%}, as where several keys draw nearly equal attention"
                )
        if self.sink is not None:
            words += (
                f"; its residual stream is {self.norm:.0f} times the median token's from block {self.sink} on (a sink)"
            )
        return words


@contextmanager
def outputs(model: PreTrainedModel, paths: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The results (T, d) of the modules at ``paths`` in a pass over one window inside of this context, by path.

    Modules that return no tensor (1, T, d) for the window are left out.
    """
    seen: dict[str, Tensor] = {}

    def keep(path: str):
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            result = next(tensors(output), None)
            if result is not None and result.ndim == 3 and len(result) == 1:
                seen[path] = result[0].float().cpu()

        return hook

    with ExitStack() as stack:
        for path in paths:
            stack.callback(forward_hook(model.get_submodule(path), keep(path)).remove)
        yield seen


@torch.no_grad()
def origins(low: LowPrecision, model: PreTrainedModel, window: Tensor, positions: Sequence[int]) -> list[Origin]:
    """The origins of errors at ``positions`` of one ``window`` (1, T), from a pass of ``low`` and one of ``model``."""
    blocks, branches = block_paths(model), branch_paths(model)
    passes = []
    for run, context in ((model, nullcontext()), (low.model, low.running())):
        with outputs(run, [*blocks, *branches]) as seen, context:
            hidden_and_logits(run, window)
        passes.append(seen)
    exact, rounded = passes
    numbers = {path: inside[1] for path in [*blocks, *branches] if (inside := block_of(path))}
    streams = {numbers[path]: exact[path].norm(dim=-1) for path in blocks if path in exact}  # (T,) by block
    attention = {id(m) for m in attention_modules(model)}
    found = []
    for path in branches:
        block = numbers[path]
        if path in exact and path in rounded and block in streams and exact[path].shape == rounded[path].shape:
            error = (rounded[path] - exact[path]).norm(dim=-1)
            relative = error / streams[block]
            kind = "attention" if id(model.get_submodule(path)) in attention else ""
            found.append((path, kind, relative / usual(relative), error / exact[path].norm(dim=-1)))
    norms = {block: norm / norm.median() for block, norm in streams.items()}
    return [_origin(position, found, norms) for position in positions]


def _origin(position: int, branches: Sequence[tuple], norms: dict[int, Tensor]) -> Origin:
    """The origin at a ``position``. ``branches`` have path, kind, error over the median's and own change, by token."""
    sink = next((block for block, norm in norms.items() if norm[position] > SINK), None)
    largest = max((float(norm[position]) for norm in norms.values()), default=1.0)
    for path, kind, times, change in branches:
        if times[position] > LEAVES:
            return Origin(position, path, kind, float(times[position]), float(change[position]), sink, largest)
    return Origin(position, "", "", 1.0, 0.0, sink, largest)
