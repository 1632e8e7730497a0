"""What the modules of a model's blocks read and return in a pass over one token."""

from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ModuleCall(NamedTuple):
    """One call of a module: the hidden state that it read, and the one that it returned."""

    input: Tensor
    output: Tensor


def _tensor(value) -> Tensor | None:
    """``value`` or the first tensor of nested tuples; None where that is no tensor."""
    while isinstance(value, tuple) and value:
        value = value[0]
    return value if torch.is_tensor(value) else None


@torch.no_grad()
def one_token_pass(base: PreTrainedModel, found: list[nn.Module]) -> dict[nn.Module, dict[nn.Module, ModuleCall]]:
    """For each block of ``found`` the calls of its modules, in the order in which they returned.

    The token is a random vector, since an embedding may be zero. A single token attends to itself alone.
    """
    calls: dict[nn.Module, dict[nn.Module, ModuleCall]] = {block: {} for block in found}
    with ExitStack() as stack:
        for block in found:

            def record(module, args, kwargs, output, own=calls[block]):
                read, returned = _tensor(args or kwargs.get("hidden_states")), _tensor(output)
                if read is not None and returned is not None:
                    own[module] = ModuleCall(read, returned)

            for module in block.modules():
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        for module in base.modules():  # with dropout, sums would not add up
            stack.callback(setattr, module, "training", module.training)
        base.eval()
        table = base.get_input_embeddings().weight
        token = torch.randn(1, 1, table.shape[-1], generator=torch.Generator().manual_seed(0))
        base(inputs_embeds=token.to(table), use_cache=False)
    return calls


def reads(call: ModuleCall, tensor: Tensor) -> bool:
    """Whether ``call`` read ``tensor`` or a view of it. Equal values in other memory do not count."""
    return call.input.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def agree(x: Tensor, *parts: Tensor) -> bool:
    """Whether ``x`` is the sum of ``parts`` up to roundings in its dtype. Entries that overflowed are left out."""
    x, parts = x.flatten(), [part.flatten() for part in parts]
    if any(part.shape != x.shape for part in parts):
        return False
    fine = torch.finfo(x.dtype)
    allowed = 2 * fine.eps * sum(part.float().abs() for part in parts) + fine.tiny
    apart = (x.float() - sum(part.float() for part in parts)).abs()
    return bool(((apart <= allowed) | ~(apart.isfinite() & allowed.isfinite())).all())
