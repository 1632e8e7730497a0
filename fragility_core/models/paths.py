"""Parts of a model found in the tree of its modules: blocks, branches, norms. No class or family is known by name.

A block is a numbered module. A branch is a child of a block.
"""

import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fragility_core.models.padding import require_tensor, without_padding
from fragility_numerics.lowering import base_of

BLOCK = re.compile(r"((?:.+?\.)??(\d+))(?:\.([^.]+).*)?")  # its path, its number, the branch


def forward_hook(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a forward hook on ``module`` that is called only for passes of the caller's thread."""
    caller = threading.get_ident()
    return module.register_forward_hook(lambda *call: hook(*call) if threading.get_ident() == caller else None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` is in eval mode; afterwards each module has its former mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The options of a pass of ``model`` that keeps no state for tokens to come."""
    return {"use_cache": False} if isinstance(model, PreTrainedModel) else {}


@without_padding
def final_hidden(model: nn.Module, tokens: Tensor) -> Tensor:
    """The final hidden state (B, T, d_model) of a Hugging Face model, after its final norm; else the module's output.

    An ``attention_mask`` (B, T) is 1 for tokens and 0 for padding (``padding.without_padding``). Raises TypeError if
    ``model`` is no module, such as the result of ``lower``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch module is needed, got a {type(model).__name__}: give low.model inside low.running()")
    require_tensor(tokens)
    if isinstance(model, PreTrainedModel):
        return base_of(model)(tokens, use_cache=False).last_hidden_state
    return model(tokens)


def hidden_and_logits(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``final_hidden`` and the logits (B, T, vocabulary) of one pass, as the model, which has a head, scales them."""
    finals: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if (final := getattr(output, "last_hidden_state", None)) is not None:
            finals.append(final)

    with ExitStack() as stack:
        for path, module in model.named_modules():  # the last to return it is taken: OPT's head calls the decoder alone
            if block_of(path) is None:
                stack.callback(forward_hook(module, keep).remove)
        output = model(tokens, use_cache=False)
    if not hasattr(output, "logits"):
        raise TypeError(f"a loss needs a head: load AutoModelForCausalLM, got {type(model).__name__}")
    return finals[-1], output.logits


@cache  # every pass asks for all paths of its model
def block_of(path: str) -> tuple[str, int, str] | None:
    """Path and number of the block that holds the module at ``path``, and the branch, "" for the block itself."""
    found = BLOCK.fullmatch(path)
    return (found[1], int(found[2]), found[3] or "") if found else None


def is_block(path: str) -> bool:
    """True if ``path`` is that of a block: a numbered module that is not inside of another."""
    found = block_of(path)
    return found is not None and found[0] == path


def is_norm(module: nn.Module) -> bool:
    """True if all weights of ``module`` are vectors, by which it scales and perhaps shifts, and it has no children."""
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(p.ndim == 1 for p in parameters)


def is_linear(module: nn.Module) -> bool:
    """True if ``module`` multiplies by a weight matrix: ``nn.Linear``, or GPT-2's ``Conv1D``."""
    return isinstance(module, (nn.Linear, Conv1D))


def attention_modules(module: nn.Module) -> list[nn.Module]:
    """The attention modules in ``module``: those with the attribute ``is_causal``, which attention functions read."""
    return [m for m in module.modules() if hasattr(m, "is_causal")]


def within(path: str, module: str) -> bool:
    """True if ``path`` is that of ``module`` or of a module inside it."""
    return path == module or path.startswith(f"{module}.")


def lineage(path: str) -> list[str]:
    """The paths of all modules that hold the one at ``path``, the outermost first, and ``path`` itself."""
    return [*accumulate(path.split("."), "{}.{}".format)]


def outermost(paths: Collection[str]) -> tuple[str, ...]:
    """The ``paths`` that lie inside of no other path of the list."""
    known = dict.fromkeys(paths)
    return tuple(path for path in known if known.keys().isdisjoint(lineage(path)[:-1]))


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the blocks that have parameters, in order. Numbered embeddings do not count."""
    numbered = ((path, m) for path, m in model.named_modules() if is_block(path) and not isinstance(m, nn.Embedding))
    return [path for path, module in numbered if next(module.parameters(), None) is not None]


def norm_paths(model: nn.Module) -> list[str]:
    """Paths of all norms."""
    return [path for path, module in model.named_modules() if is_norm(module)]


def embedding_paths(model: nn.Module) -> list[str]:
    """Paths of the embeddings outside of blocks."""
    return [p for p, module in model.named_modules() if isinstance(module, nn.Embedding) and not block_of(p)]


def head_paths(model: Any) -> list[str]:
    """The path of the layer that gives the logits, alone in a list; an empty list where there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [path for path, module in model.named_modules() if module is head]


def branch_paths(model: nn.Module) -> list[str]:
    """Paths of the branches that have parameters and are no norms."""
    children = (
        (f"{path}.{name}", child)
        for path in block_paths(model)
        for name, child in model.get_submodule(path).named_children()
    )
    return [path for path, child in children if not is_norm(child) and next(child.parameters(), None) is not None]
