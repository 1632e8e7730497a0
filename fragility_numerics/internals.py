"""The private names of torch and transformers that this package and the core use.

None of their other files uses a private name (``tests/numerics/test_internals.py``). A library may drop one without
notice. ``PRIVATE`` says why each is needed. Importing this module fails, with the name, if torch has dropped one. The
test checks the names of transformers, whose import takes seconds.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PRIVATE = {
    "torch.utils._python_dispatch.TorchDispatchMode": "emulation sees every kernel (ATen op), whoever calls it",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "an activation's table holds in one mode only",
    "torch._C.DisableTorchFunction": "values are read as they are, while a mode pretends another dtype",
    "torch.ops.aten.add.Tensor._schema": "which arguments a kernel writes to, and how many results it has",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether this CPU multiplies in bf16",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "whether this CPU multiplies in fp16",
    "transformers.PreTrainedConfig._attn_implementation": "the attention that a model is set to",
    "transformers.PreTrainedConfig._experts_implementation": "the form of experts that a model is set to",
    "transformers.PreTrainedModel._from_config": "which buffers a model made in 16 bits has in them",
    "transformers.PreTrainedModel._keep_in_fp32_modules": "what from_pretrained leaves in fp32 beside fp16",
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": "what from_pretrained leaves in fp32",
}


def private(name: str, reasons: Mapping[str, str] = PRIVATE) -> Any:
    """The object with the dotted ``name``, one of ``reasons``; raises ImportError where the library has it no more."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        library = import_module(name.partition(".")[0])
        raise ImportError(
            f"the project needs {name} ({reasons[name]}), which {library.__name__} {library.__version__} lacks: "
            "install the version in constraints.txt, or mend the file internals.py of the package"
        ) from None


def require(reasons: Mapping[str, str]) -> None:
    """Raises ImportError if torch lacks one of the names in ``reasons`` that begin with "torch."."""
    for name in reasons:
        if name.startswith("torch.") and (torch.backends.mkldnn.is_available() or ".mkldnn." not in name):
            private(name, reasons)


require(PRIVATE)

TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
current_dispatch_mode = private("torch.utils._python_dispatch._get_current_dispatch_mode")
without_function_modes = private("torch._C.DisableTorchFunction")  # a context
ASKING_FOR_MODES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
schema_of = attrgetter("_schema")  # of a kernel


@cache
def is_composite(kernel: Any) -> bool:
    """True if ``kernel`` is made of other kernels: autograd unfolds it, inference mode does not."""
    return kernel.has_kernel_for_dispatch_key("CompositeImplicitAutograd")


def differentiated(x: Tensor) -> bool:
    """True if results of ``x`` may be differentiated: backward, forward, or in a transform of ``torch.func``."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    try:
        with without_function_modes():
            x.untyped_storage()
    except NotImplementedError:  # such tensors stand for others, and have no memory of their own
        return True
    return forward_ad.unpack_dual(x).tangent is not None


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of ``dtype``, bf16 or fp16, at full speed (oneDNN's own test)."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def attention_of(model: nn.Module) -> str | None:
    """The name of the attention that ``model`` is set to; None for a model that has no such setting."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def experts_of(model: nn.Module) -> str | None:
    """The name of the implementation of experts that ``model`` is set to; None for a model without such a setting."""
    return getattr(getattr(model, "config", None), "_experts_implementation", None)


@contextmanager
def restored_attention(model: nn.Module) -> Iterator[None]:
    """A context after which ``model`` and the models inside it are set to the attention that they had before."""
    before: list[tuple[Any, str | None]]
    before = [(m.config, attention_of(m)) for m in model.modules() if attention_of(m) is not None]
    try:
        yield
    finally:
        for config, implementation in before:  # setting one sets those inside it, which come later
            config._attn_implementation = implementation


def made_in(model: Any, dtype: torch.dtype) -> nn.Module:
    """A model of transformers like ``model``, made in ``dtype``, without memory (device "meta")."""
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)


def names_kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parts of the paths that ``from_pretrained`` in ``dtype`` leaves in fp32; "*" stands for any text."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return names


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let ``module`` run ``forward`` in place of its own, which no hook can prevent from running.

    Wrapping the module would also work, but would change the paths of modules.
    """
    module.forward = forward


def spreading_hooks(model: nn.Module) -> list[Any]:
    """Hooks of accelerate on the modules of ``model``, which move values, and perhaps weights, between devices."""
    found = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    return [each for hook in found for each in getattr(hook, "hooks", [hook])]  # one may hold several
