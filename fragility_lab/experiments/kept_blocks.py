"""Passes with several choices of blocks kept in fp32, all of them in one batch.

Choices that agree up to a block have the same state before it, and this state is computed once. At every block the
batch has one member for each distinct beginning of a choice. Members that keep the block run it in fp32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fragility_adjoint.mixed_precision import Plan, apply
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates.patching import one_mask
from fragility_numerics.lowering import LowPrecision

Blocks = tuple[int, ...]  # numbers, ascending


class KeptBlocks:
    """Low-precision passes of ``model`` under plans that keep whole blocks."""

    def __init__(self, model: nn.Module, none: Plan, every: Plan, execution: str = "auto"):
        """``none`` is the model that keeps nothing, ``every`` the one that keeps the blocks ``every.modules``."""
        self.low: LowPrecision = apply(model, none, execution)
        kept = apply(model, every, execution).model
        self.pairs = [(self.low.model.get_submodule(path), kept.get_submodule(path)) for path in every.modules]

    @torch.no_grad()
    def __call__(self, tokens: Tensor, choices: Sequence[Blocks]) -> Tensor:
        """Final hidden states (C, T, d_model) of one window (1, T), for each of the C ``choices`` of block numbers."""
        with self._choosing([frozenset(choice) for choice in choices]) as members, self.low.running():
            hidden = final_hidden(self.low.model, tokens)
        return members_of(hidden, members)

    @contextmanager
    def _choosing(self, choices: list[frozenset[int]]) -> Iterator[list[int]]:
        """A context with hooks that branch the batch at every block in one pass.

        It gives the number of each choice's member in the last batch.
        """
        members = [0] * len(choices)
        with ExitStack() as stack:
            for number, (block, kept) in enumerate(self.pairs):
                entries = [(member, number in choice) for member, choice in zip(members, choices)]
                distinct = sorted(set(entries), key=lambda entry: (entry[1], entry[0]))  # members in the format first
                members = [distinct.index(entry) for entry in entries]
                before, after = self._branching(kept, distinct)
                stack.callback(block.register_forward_pre_hook(one_mask, with_kwargs=True).remove)
                stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(after, with_kwargs=True).remove)
            yield members

    @staticmethod
    def _branching(kept: nn.Module, entries: list[tuple[int, bool]]) -> tuple[Callable, Callable]:
        """Hooks before and after a block. ``entries`` are pairs: a member of the batch before, kept or not."""
        in_format = [member for member, keeps in entries if not keeps]
        in_fp32 = [member for member, keeps in entries if keeps]
        states: list[Tensor] = []

        def before(block, args, kwargs):
            states.append(args[0])
            return (members_of(args[0], in_format or [0]), *args[1:]), kwargs

        def after(block, args, kwargs, output):
            state = states.pop()
            rounded = [output] if in_format else []
            exact = [kept(members_of(state, in_fp32), *args[1:], **kwargs)] if in_fp32 else []
            return torch.cat([*rounded, *exact])

        return before, after


def members_of(batch: Tensor, members: list[int]) -> Tensor:
    """The ``members`` of a batch (B, ...), in that order."""
    return batch.index_select(0, torch.tensor(members, device=batch.device))
