"""Where the error of single tokens begins: in which block and branch it leaves that of the window's other tokens."""

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
from fragility_core.numerics.lowering import LowPrecision
from fragility_core.numerics.nested import tensors

LEAVES = 5.0  # times the median token's error, from which on a token's own has left it
SINK = 10.0  # times the median token's norm, from which on a token's residual stream is one of a sink


@dataclass(frozen=True)
class Origin:
    """Where the error at a ``position`` begins.

    ``branch`` is the path of the first branch whose error leaves that of the median token: it is ``times`` as large,
    relative to the token's residual stream, and the branch's own result changes by ``change`` of its norm. ``branch``
    is "" if none does. ``kind`` says whether the branch is "attention". ``sink`` is the number of the first block after
    which the token's residual stream has SINK times the median token's norm, None if none has, and ``norm`` is the
    largest such ratio of any block.
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
    """Where errors at ``positions`` of one ``window`` (1, T) begin, from one pass of ``low`` and one of ``model``."""
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
            found.append((path, kind, relative / relative.median(), error / exact[path].norm(dim=-1)))
    norms = {block: norm / norm.median() for block, norm in streams.items()}
    return [_origin(position, found, norms) for position in positions]


def _origin(position: int, branches: Sequence[tuple], norms: dict[int, Tensor]) -> Origin:
    """The origin at a ``position`` from each branch's path, kind, error over the median's, and own change, by token."""
    sink = next((block for block, norm in norms.items() if norm[position] > SINK), None)
    largest = max((float(norm[position]) for norm in norms.values()), default=1.0)
    for path, kind, times, change in branches:
        if times[position] > LEAVES:
            return Origin(position, path, kind, float(times[position]), float(change[position]), sink, largest)
    return Origin(position, "", "", 1.0, 0.0, sink, largest)
