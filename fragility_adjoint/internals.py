"""The insides of torch and transformers that this package uses, and the marks that it hides on tensors.

``fragility_numerics.internals`` has what the core uses.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fragility_numerics import nested
from fragility_numerics.internals import private, require

PRIVATE = {
    "torch._softmax_backward_data": "the gradient of a softmax from its result, in place",
    "torch.Tensor._version": "whether a tensor has changed since a layer read it",
    "torch.Tensor._base": "the tensor whose memory a view shares, and a kernel writes to",
    "torch._C._functorch.maybe_current_level": "whether a backward pass runs for several probes at once",
    "torch._C._functorch._unwrap_batched": "the gradient of all probes, behind the one that looks like that of one",
    "torch._C._functorch._add_batch_dim": "makes it look like that of one again",
    "torch._C._functorch._set_vmap_fallback_enabled": "a kernel that cannot be computed at once shall be refused",
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack": "kernels on such gradients are ordinary ones",
    "transformers.PreTrainedModel._can_set_attn_implementation": "whether a model calls the attention interface",
}
require(PRIVATE)

softmax_backward = private("torch._softmax_backward_data", PRIVATE)
outside_of_transforms = private("torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack", PRIVATE)  # a context
base_of = attrgetter("_base")  # of a view


def can_set_attention(model: Any) -> bool:
    """True if ``model`` calls transformers' attention interface, and so can be set to another attention."""
    return hasattr(model, "_can_set_attn_implementation") and model._can_set_attn_implementation()


functorch: Any = torch._C._functorch  # its type has not all of its functions


def beyond_vmap(function: Callable[..., tuple | None], *values: Tensor | None) -> tuple | None:
    """The results of ``function`` for ``values`` (N, ...) of all members of the ``torch.func.vmap`` that is running.

    Each value, and each result that is returned, looks like that of one member. N = 1 where the members share a value,
    and where no vmap is running. Inside of ``function`` kernels run as if none were.
    """
    level = functorch.maybe_current_level()
    if level is None:
        results = function(*(None if x is None else x[None] for x in values))
    else:
        with outside_of_transforms():
            results = function(*(None if x is None else of_members(x, level) for x in values))

    def of_one(x: Tensor) -> Tensor:
        return x[0] if len(x) == 1 else functorch._add_batch_dim(x, 0, level)

    return None if results is None else tuple(None if x is None else of_one(x) for x in results)


def of_members(x: Tensor, level: int) -> Tensor:
    """``x`` for all members of the vmap with number ``level``, (N, ...); N = 1 if they share it."""
    whole, dimension = functorch._unwrap_batched(x, level)
    return whole[None] if dimension is None else whole.movedim(dimension, 0)


@contextmanager
def without_vmap_fallback() -> Iterator[None]:
    """A context in which a kernel that ``torch.func.vmap`` can only loop over raises RuntimeError."""
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(True)


# torch has no types for these errors.
REFUSED_BY_VMAP = re.compile(
    "^vmap: |hit the vmap fallback|Batching rule not implemented|You tried to vmap over|with functorch transforms|"
    "storage of BatchedTensorImpl|Tensor that doesn't have storage|doesn't match the broadcast shape"
)
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED")


def refused_by_vmap(error: RuntimeError) -> bool:
    """True if ``error`` says that ``torch.func.vmap`` cannot run a kernel or an autograd function for several."""
    return REFUSED_BY_VMAP.search(str(error)) is not None


def out_of_memory(error: RuntimeError) -> bool:
    """True if ``error`` says that memory does not suffice, that of a GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def is_view(x: Tensor) -> bool:
    """True if ``x`` shares the memory of another tensor."""
    return base_of(x) is not None


# What is hidden on tensors: an fp32 tensor of a differentiated pass stands for one of the low dtype. A
# torch.utils.weak.WeakTensorKeyDictionary could hold it, but a prediction would take a fifth longer.


def stored_as(x: Tensor) -> str | None:
    """ "weight" or "value" for an fp32 tensor that stands for one of the low dtype, else None."""
    return getattr(x, "_stored_as", None)


def mark_stored(x: Tensor, kind: str | None = "value") -> Tensor:
    """Let fp32 ``x`` stand for a tensor of the low dtype, a "weight" or a "value"."""
    vars(x)["_stored_as"] = kind
    return x


def is_stream(x: Tensor) -> bool:
    """True if ``x`` is the residual stream that a running block reads, or a view of it."""
    return getattr(x, "_is_stream", False)


def mark_stream(x: Tensor, stream: bool = True) -> Tensor:
    """Let ``x`` be, or not be, the residual stream."""
    vars(x)["_is_stream"] = stream
    return x


def has_reference(x: Tensor) -> bool:
    """True if ``x`` has another value in the fp32 pass that runs beside this one."""
    return hasattr(x, "_reference")


def reference_of(x: Tensor) -> Tensor:
    """The value of ``x`` in the fp32 pass that runs beside this one: its own unless ``refer`` gave it another."""
    return getattr(x, "_reference", x)


def refer(x: Tensor, reference: Tensor) -> Tensor:
    """Let ``x`` have the value ``reference`` in the fp32 pass that runs beside this one."""
    vars(x)["_reference"] = reference
    return x


def read_as(x: Tensor) -> dict[Any, Any]:
    """What was kept of ``x`` by how it was read, for as long as it is there and does not change."""
    version, known = getattr(x, "_read_as", (-1, {}))
    if version != x._version:
        vars(x)["_read_as"] = x._version, (known := {})
    return known


def copy_marks(source: Tensor, x: Tensor) -> Tensor:
    """Let ``x`` stand for what ``source`` stands for."""
    if has_reference(source):
        refer(x, reference_of(source).to(x.device))
    return mark_stream(mark_stored(x, stored_as(source)), is_stream(source))


def entering(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A hook that moves arguments as ``nested.entering`` does, with what is hidden on the tensors."""
    return nested.entering(module, args, kwargs, lambda x, device: copy_marks(x, x.to(device)))
