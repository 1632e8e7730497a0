"""Models in low precision: copies with rounded parameters, and contexts in which they compute in the format."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import FORMATS, NumberFormat, called_by_torch, has_native_kernels, of_dtype
from fragility_numerics.internals import made_in, names_kept_in_fp32, replace_forward, spreading_hooks
from fragility_numerics.lookup import LookUp, elementwise_modules
from fragility_numerics.presence import filled, source_of

_running: ContextVar[frozenset[int]] = ContextVar("running", default=frozenset())  # ``id`` of models in ``running``
TAKING_FP32 = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # most of a GPU's fused attention takes 16 bits alone


class Storing(NamedTuple):
    """A way to store a parameter: its fp32 entries as ``round`` gives them (None: as they are), as ``dtype``.

    What is rounded is cast ``through`` a dtype first.
    """

    round: Callable[[Tensor], Tensor] | None
    through: torch.dtype
    dtype: torch.dtype

    def __call__(self, exact: Tensor) -> Tensor:
        """The fp32 entries ``exact`` as they are stored, in memory of their own."""
        return exact.clone() if self.round is None else self.round(exact).to(self.through).to(self.dtype)


def how_stored(model: nn.Module, format: NumberFormat, widened: bool = False) -> dict[str, Storing]:
    """Ways to store each parameter of ``model`` in ``format``, by path; ``widened`` tensors are fp32 all the same.

    Tensors that transformers keeps in fp32 stay in fp32, and so do all tensors if the format is TF32.
    """
    found, dtype = {}, format.compute_dtype
    for path, x in model.named_parameters():
        found[path] = Storing(None, x.dtype, x.dtype)
        if x.is_floating_point() and format.name not in ("fp32", "tf32") and not stays_fp32(model, path, dtype):
            found[path] = Storing(format.round, dtype, torch.float32 if widened else dtype)
    return found


def stays_fp32(model: nn.Module, path: str, dtype: torch.dtype) -> bool:
    """True if transformers leaves the tensor at ``path`` in fp32 beside ``dtype``."""
    return any(re.search(name.replace("*", ".*"), path) for name in names_kept_in_fp32(model, dtype))


def rounded_copy(model: nn.Module, storing: Mapping[str, Storing], buffers: NumberFormat | None = None) -> nn.Module:
    """A copy of ``model`` whose parameters are stored as ``storing`` says, by path.

    Its ``stored_buffers`` are in the format ``buffers``, if one is given. If the entries of a parameter lie elsewhere,
    so do those of its copy, which are rounded whenever they are read.
    """

    def stored(path: str, parameter: nn.Parameter) -> nn.Parameter:
        def read() -> Tensor:
            with filled([parameter]):
                return storing[path](parameter.data)

        if (source := source_of(parameter)) is not None:
            return source.another(parameter.shape, storing[path].dtype, parameter.device, read)
        return nn.Parameter(read(), parameter.requires_grad)

    copied = copied_tree(model, {id(p): stored(path, p) for path, p in model.named_parameters()})
    if buffers is not None and (dtype := buffers.compute_dtype) != torch.float32:
        for path, x in stored_buffers(copied, dtype).items():
            if not stays_fp32(model, path, dtype):
                x.data = buffers.round(x.data).to(dtype)
    return copied


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules, for hooks, with the parameters and buffers of ``model`` itself.

    A shared module without tensors is copied for each owner: all blocks of GPT-1 share one activation module.
    """
    copied, seen = copied_tree(model, {id(x): x for x in chain(model.parameters(), model.buffers())}), set()
    for path, module in [*copied.named_modules(remove_duplicate=False)]:
        if module in seen and not [*module.parameters(), *module.buffers()]:
            owner, _, name = path.rpartition(".")
            setattr(copied.get_submodule(owner), name, copy.deepcopy(module))
        seen.add(module)
    return copied


def copied_tree(model: nn.Module, known: Mapping[int, Any]) -> nn.Module:
    """A deep copy of ``model`` with the ``known`` copies of its tensors, by ``id``.

    Most of what a module holds are empty collections of hooks. To copy those one by one would take half of the time.
    """
    held = [*chain.from_iterable(vars(module).values() for module in model.modules())]
    empty = {id(x): type(x)() for x in held if type(x) in (dict, OrderedDict, set) and not x}
    states = {id(x): x.detach().clone() for x in held if isinstance(x, Tensor) and not x.is_leaf}  # of earlier passes
    return copy.deepcopy(model, empty | states | {**known})


def stored_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating buffers, by path, that are of ``dtype`` when ``model`` is.

    A model of transformers is made again in ``dtype`` to see which: rotary frequencies stay in fp32, tables of
    positions do not. In other models all are, as after ``model.to(dtype)``.
    """
    floating = {path: buffer for path, buffer in model.named_buffers() if buffer.is_floating_point()}
    if floating and isinstance(model, PreTrainedModel):
        dtypes = {path: buffer.dtype for path, buffer in made_in(model, dtype).named_buffers()}
        return {path: buffer for path, buffer in floating.items() if dtypes.get(path) == dtype}
    return floating


def refuse_bare_calls(model: nn.Module) -> None:
    """Let calls of ``model`` and its base (not of copies) raise RuntimeError outside of ``LowPrecision.running``."""
    for module in entrances(model):
        vars(module)["_called_in_running"] = id(module)
        module.register_forward_pre_hook(require_running, with_kwargs=True)


def entrances(model: nn.Module) -> list[nn.Module]:
    """``model``, and its base, which ``final_hidden`` calls."""
    return list(dict.fromkeys([model, base_of(model)]))


def base_of(model: nn.Module) -> nn.Module:
    """A model of transformers without its head; any other as it is."""
    if not isinstance(model, PreTrainedModel):
        return model
    base = model.base_model
    if base is not model or model.get_output_embeddings() is None:
        return base
    # The prefix of some families, such as Llama 4, names no part of the model.
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def require_running(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the forward of ``module``: raises RuntimeError for a call outside of ``LowPrecision.running``.

    Calls with embeddings in place of tokens pass: they ask what modules read, and their numbers are not used.
    """
    bare = vars(module)["_called_in_running"] == id(module) and id(module) not in _running.get()
    if bare and kwargs.get("inputs_embeds") is None:
        raise RuntimeError(
            "a lowered model computes in its numbers inside of `with low.running():` alone, got a bare call of "
            "low.model: call low(tokens), or enter the context"
        )


@contextmanager
def fp32_sums() -> Iterator[None]:
    """A context in which a GPU sums products of 16-bit matrices in fp32; by default it may round parts of the sum."""
    settings = torch.backends.cuda.matmul
    with ExitStack() as stack:
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            stack.callback(setattr, settings, name, getattr(settings, name))
            setattr(settings, name, False)
        yield


@dataclass(frozen=True)
class LowPrecision:
    """A ``model`` whose parameters are stored in ``format``, and how its kernels compute in it.

    Without ``emulation`` the kernels are the device's own. With ``weights_only`` they compute in fp32.
    """

    model: Any  # an ``nn.Module``
    format: NumberFormat
    emulation: Emulation | None
    weights_only: bool = False

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.format.name

    @property
    def plain(self) -> bool:
        """True if every rounded number is rounded to ``format``."""
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``model`` on these arguments inside of ``running``, and return its result."""
        with self.running():
            return self.model(*args, **kwargs)

    @property
    def execution(self) -> str:
        """The way kernels compute: "native", "emulated", "stochastic" (emulated with random rounding), or "weights"."""
        if self.emulation is None:
            return "weights" if self.weights_only else "native"
        return "emulated" if self.emulation.generator is None else "stochastic"

    def stochastic(self, seed: int) -> "LowPrecision":
        """This model with its rounded weights, and each kernel's result rounded stochastically (Croci et al. 2022).

        With equal seeds, the same passes in the same order give equal results; see ``formats.round_stochastically``.
        Raises ValueError where weights alone are in the format.
        """
        if self.weights_only:
            raise ValueError(
                "stochastic rounding needs kernels whose results are rounded, but here weights alone are in "
                f'{self.name}: lower the model with execution="auto"'
            )
        generator = torch.Generator(next(self.model.parameters()).device).manual_seed(seed)
        return replace(self, emulation=Emulation(self.format, generator))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a call of ``model`` computes in the format; raises ValueError within autocast."""
        require_no_autocast()
        with ExitStack() as stack:
            inside = _running.set(_running.get() | {*map(id, entrances(self.model))})
            stack.callback(_running.reset, inside)
            first = next(self.model.parameters(), None)
            if first is not None and first.is_cuda:
                stack.enter_context(fp32_sums() if self.emulation is None else sdpa_kernel(TAKING_FP32))
            if self.emulation is not None:
                # Or torch's Transformer encoder layers would run as one kernel, and be rounded once.
                stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
                mha.set_fastpath_enabled(False)
                stack.enter_context(self.emulation)
            yield

    def paused(self) -> AbstractContextManager[None]:
        """A context, inside ``running``, in which results of kernels are not rounded."""
        return nullcontext() if self.emulation is None else self.emulation.paused()


def require_low(low: object) -> None:
    """Raises TypeError unless ``low`` is what ``lower`` returns."""
    if not isinstance(low, LowPrecision):
        raise TypeError(f'a model in low precision is needed, such as lower(model, "bf16"), got a {type(low).__name__}')


def require_weights_in_place(model: nn.Module) -> None:
    """Raises ValueError where accelerate moves weights of ``model``, or values between parts that read their own."""
    hooks = spreading_hooks(model)
    if hooks and any(source_of(parameter) is not None for parameter in model.parameters()):
        raise ValueError(
            "a streamed model must be opened on its devices, but accelerate has spread this one afterwards: give the "
            "places of its modules to fragility_offload.files.open_offloaded"
        )
    if any(getattr(hook, "offload", False) for hook in hooks):
        raise ValueError(
            "weights must stay on their devices, but accelerate has put some on the CPU or the disk: load the model "
            "with a device_map of GPUs alone, or streamed (fragility_offload.files.open_offloaded)"
        )


def require_no_autocast() -> None:
    """Raises ValueError within ``torch.autocast``, whose dtypes are others than those of the operands."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError("kernels must compute in the dtypes of their operands, got torch.autocast: leave its context")


def require_plain_torch() -> None:
    """Raises ValueError under autocast, inference mode, or a default dtype other than fp32."""
    require_no_autocast()
    if torch.is_inference_mode_enabled():
        raise ValueError("a model is lowered for gradients, too, got torch.inference_mode(): use torch.no_grad()")
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise ValueError(f"new tensors must be fp32, got torch.set_default_dtype({dtype}): set torch.float32")


def require_module(model: object) -> None:
    """Raises TypeError unless ``model`` is a module of torch, and for one that torch.ao quantized."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a model is lowered, got a {type(model).__name__}, {' '.join(repr(model).split()):.60}: load it first, "
            "with AutoModelForCausalLM.from_pretrained(..., dtype=torch.float32)"
        )
    if packed := [path for path, each in model.named_modules() if type(each).__module__.startswith("torch.ao.")]:
        raise TypeError(f"a model is lowered from fp32, got {packed[0]} quantized by torch.ao: load the original")


def as_format(name: str | NumberFormat | torch.dtype) -> NumberFormat:
    """The format called ``name``, that of a dtype, or ``name`` if it is a format; raises ValueError for others."""
    if isinstance(name, torch.dtype):
        return of_dtype(name)
    if not isinstance(name, str):
        if not (hasattr(name, "compute_dtype") and hasattr(name, "round")):
            raise TypeError(f"a format is needed, got a {type(name).__name__}: fragility_adjoint.lower takes recipes")
        return name
    if name not in FORMATS:
        alike = called_by_torch(name.lower())
        meant = f" (do you mean {alike}?)" if alike in FORMATS else ""
        raise ValueError(
            f"a format must be one of {', '.join(FORMATS)}, got {name!r}{meant}; fragility_adjoint.lower takes recipes"
        )
    return FORMATS[name]


def lower(
    model: nn.Module, format: str | NumberFormat | torch.dtype, execution: str = "auto",
    storing: Mapping[str, Storing] | None = None
) -> LowPrecision:  # fmt: skip
    """``model`` in low precision, by a ``format`` or its name: native where its device has the kernels, else emulated.

    ``execution`` may insist on "native" or "emulated". With "weights", parameters alone are rounded and kernels compute
    in fp32. Parameters are stored as ``storing`` says, ``how_stored`` unless given. The parts of a model may lie on
    several devices, as accelerate's ``device_map`` puts them; each stays on its own.

    Raises ValueError for an unknown format or execution, for a model without parameters or not in fp32, where native
    kernels are asked for in a format that torch does not compute in, where accelerate moves weights, and within
    autocast, inference mode or another default dtype.
    """
    require_module(model)
    require_plain_torch()
    kernels = as_format(format)
    if other := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
        raise ValueError(
            f"a model must be lowered from fp32 parameters, got {', '.join(map(str, sorted(other, key=str)))}: load it "
            "with from_pretrained(..., dtype=torch.float32), or call model.float()"
        )
    require_weights_in_place(model)
    if execution not in ("auto", "native", "emulated", "weights"):
        raise ValueError(f'execution must be "auto", "native", "emulated" or "weights", got {execution!r:.40}')
    weights_only = execution == "weights"
    storing = how_stored(model, kernels, weights_only) if storing is None else storing
    if weights_only:
        return LowPrecision(rounded_copy(model, storing), kernels, None, weights_only=True)
    if execution == "native" and (kernels.is_storage_only or kernels.name == "tf32"):
        raise ValueError(f'no device computes a whole model in {kernels.name}: use execution="emulated" or "auto"')
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise ValueError(f"a model must have parameters to be lowered, got a {type(model).__name__} without")
    native = execution == "native" or (execution == "auto" and all(has_native_kernels(kernels, d) for d in devices))
    low = rounded_copy(model, storing, kernels)
    if kernels.compute_dtype.itemsize == 2 and kernels.elementwise:
        for module in elementwise_modules(low):
            replace_forward(module, LookUp(module, kernels, emulated=not native))
    if not native:
        refuse_bare_calls(low)
    return LowPrecision(low, kernels, None if native else Emulation(kernels))
