"""Models in low precision: copies with rounded parameters, and contexts in which they compute in the format."""

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from fragility_core.arithmetic.cache import store_cache
from fragility_core.arithmetic.calibration import needs_calibration
from fragility_core.arithmetic.emulation import Emulation
from fragility_core.arithmetic.formats import has_native_kernels
from fragility_core.arithmetic.internals import made_in, names_kept_in_fp32, replace_forward, source_of
from fragility_core.arithmetic.lookup import LookUp, elementwise_modules
from fragility_core.arithmetic.operands import (
    RoundedOperands,
    owner,
    rounded_weight,
    stored_weights,
    weight_schemes,
    with_known_layers,
)
from fragility_core.arithmetic.recipes import GIVEN, Operands, Recipe, Stored, get_recipe
from fragility_core.models.hollow import filled, hollow_parameter, replaced, require_own_places
from fragility_core.models.tree import embedding_paths

TAKING_FP32 = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # most of a GPU's fused attention takes 16 bits alone


class Storing(NamedTuple):
    """How a parameter is stored: the numbers ``stored`` (None: as it is), cast ``through`` a dtype, as ``dtype``."""

    stored: Stored | None
    through: torch.dtype
    dtype: torch.dtype
    linear: bool = False  # whether it is rounded in rows along the inputs of a linear layer

    def __call__(self, model: nn.Module, path: str, exact: Tensor) -> Tensor:
        """The fp32 entries ``exact`` of the parameter at ``path`` as they are stored, in memory of their own."""
        if self.stored is None:
            return exact.clone()
        rounded = rounded_weight(model, path, exact, self.stored) if self.linear else self.stored.round(exact)
        return rounded.to(self.through).to(self.dtype)


def how_stored(model: nn.Module, recipe: Recipe, widened: bool = False) -> dict[str, Storing]:
    """How ``recipe`` stores each parameter of ``model``, by path; ``widened`` tensors are fp32 all the same.

    Those that transformers keeps in fp32, and all in TF32 but for linear weights, are in fp32. Weights are in the dtype
    of the kernels, unless products run in fp32 (``Operands.wide``).
    """
    kernels = recipe.kernels
    dtype = kernels.compute_dtype
    schemes = {} if recipe.plain else weight_schemes(model, recipe)
    weights = {} if recipe.plain else {id(p): path for path, p in stored_weights(model, recipe).items()}
    looked_up = {id(model.get_submodule(path).weight) for path in embedding_paths(model)}
    found = {}
    for path, x in model.named_parameters():
        found[path] = Storing(None, x.dtype, x.dtype)
        if not x.is_floating_point() or stays_fp32(model, path, dtype):
            continue
        operands = recipe.operands(owner(weights[id(x)])) if id(x) in weights else Operands()
        operands = replace(operands, weights=schemes.get(id(x)))
        wide = operands.wide(kernels) and id(x) not in looked_up  # an embedding gives rows in the kernels' dtype
        final = torch.float32 if wide or widened else dtype
        if operands.weights is not None:
            found[path] = Storing(operands.weights, torch.float32 if wide else dtype, final, linear=True)
        elif kernels.name not in ("fp32", "tf32"):
            found[path] = Storing(kernels, dtype, final)
    return found


def stays_fp32(model: nn.Module, path: str, dtype: torch.dtype) -> bool:
    """Whether transformers leaves the tensor at ``path`` in fp32 beside ``dtype``."""
    return any(re.search(name.replace("*", ".*"), path) for name in names_kept_in_fp32(model, dtype))


def rounded_copy(model: nn.Module, recipe: Recipe, weights_only: bool = False) -> nn.Module:
    """A copy of ``model`` whose parameters and ``stored_buffers`` are as ``recipe`` stores them (``how_stored``).

    With ``weights_only`` only the parameters are rounded, and all tensors are fp32. A hollow model has a hollow copy,
    whose parameters are rounded whenever they are read.
    """
    kernels, storing = recipe.kernels, how_stored(model, recipe, weights_only)

    def stored(path: str, parameter: nn.Parameter) -> nn.Parameter:
        def read() -> Tensor:
            with filled([parameter]):
                return storing[path](model, path, parameter.data)

        if source_of(parameter) is not None:
            return hollow_parameter(parameter.shape, storing[path].dtype, parameter.device, read)
        return nn.Parameter(read(), parameter.requires_grad)

    copied = copy.deepcopy(model, replaced(model, stored))
    if (dtype := kernels.compute_dtype) != torch.float32 and not weights_only:
        for path, x in stored_buffers(copied, dtype).items():
            if not stays_fp32(model, path, dtype):
                x.data = kernels.round(x.data).to(dtype)
    return copied


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules, for hooks, with the parameters and buffers of ``model`` itself."""
    return copy.deepcopy(model, {id(x): x for x in chain(model.parameters(), model.buffers())})


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


@contextmanager
def fp32_sums() -> Iterator[None]:
    """A GPU sums the products of 16-bit matrices in fp32 to the end; by default it may round parts of the sum."""
    settings = torch.backends.cuda.matmul
    with ExitStack() as stack:
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
            stack.callback(setattr, settings, name, getattr(settings, name))
            setattr(settings, name, False)
        yield


@dataclass(frozen=True)
class LowPrecision:
    """A ``model`` whose parameters are stored as ``recipe`` says, and how its kernels compute in the format.

    Without ``emulation`` the kernels are the device's own. With ``weights_only`` they compute in fp32.
    """

    model: nn.Module
    recipe: Recipe
    emulation: Emulation | None
    weights_only: bool = False

    @property
    def format(self) -> Stored:
        """The format of the results of kernels, by which they are stored."""
        return self.recipe.kernels

    @property
    def execution(self) -> str:
        """How kernels compute: "native", "emulated", "stochastic" (emulated with random rounding), or "weights"."""
        if self.emulation is None:
            return "weights" if self.weights_only else "native"
        return "emulated" if self.emulation.generator is None else "stochastic"

    def stochastic(self, seed: int) -> "LowPrecision":
        """The same rounded weights, with each kernel's result rounded stochastically (Croci et al. 2022).

        With equal seeds, the same passes in the same order give equal results; see ``formats.round_stochastically``.
        Raises ValueError where weights alone are in the format.
        """
        if self.weights_only:
            raise ValueError(
                "stochastic rounding needs kernels whose results are rounded, but here weights alone are in "
                f'{self.recipe.name}: lower the model with execution="auto"'
            )
        generator = torch.Generator(next(self.model.parameters()).device).manual_seed(seed)
        return replace(self, emulation=Emulation(self.format, generator))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a call of ``model`` computes in the format."""
        with ExitStack() as stack:
            first = next(self.model.parameters(), None)
            if first is not None and first.is_cuda:
                stack.enter_context(fp32_sums() if self.emulation is None else sdpa_kernel(TAKING_FP32))
            if self.emulation is not None:
                # Or torch's Transformer encoder layers would run as one kernel, and be rounded once.
                stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
                mha.set_fastpath_enabled(False)
                stack.enter_context(self.emulation)
            if not (self.recipe.plain or self.weights_only):
                generator = None if self.emulation is None else self.emulation.generator
                stack.enter_context(RoundedOperands(self.model, self.recipe, self.paused, generator))
            yield

    def paused(self) -> AbstractContextManager:
        """A context, inside ``running``, in which results of kernels are not rounded."""
        return nullcontext() if self.emulation is None else self.emulation.paused()


def require_low(low: object) -> None:
    """Raises TypeError unless ``low`` is what ``lower`` returns."""
    if not isinstance(low, LowPrecision):
        raise TypeError(f'a model in low precision is needed, such as lower(model, "bf16"), got a {type(low).__name__}')


def lower(model: nn.Module, recipe: str | Recipe | Stored, execution: str = "auto") -> LowPrecision:
    """``model`` in low precision, by a ``recipe`` or its name: native where its device has the kernels, else emulated.

    The name of a format, such as "bf16", is that of the recipe that stores all weights and results in it.
    ``execution`` may insist on "native" or "emulated". With "weights", parameters alone are rounded and kernels compute
    in fp32. Raises ValueError for an unknown recipe or execution, for static scales that were not measured, for a model
    without parameters or not in fp32, and where native kernels are asked for in a format that torch does not compute
    in. The parts of a model may lie on several devices, as accelerate's ``device_map`` puts them; each stays on its
    own. Raises ValueError where accelerate moves weights, too, and for a streamed model that accelerate has spread; and
    the errors of ``operands.with_known_layers`` for layers of a recipe that the model does not have.
    """
    chosen = with_known_layers(model, get_recipe(recipe))
    kernels = chosen.kernels
    if needs_calibration(chosen):
        raise ValueError(
            f"static scales must be measured before a model is lowered, got {chosen.name}: calibrate it over windows "
            "with fragility_core.arithmetic.calibration.calibrated(model, recipe, tokens)"
        )
    if other := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
        raise ValueError(
            f"a model must be lowered from fp32 parameters, got {', '.join(map(str, sorted(other, key=str)))}: load it "
            "with from_pretrained(..., dtype=torch.float32), or call model.float()"
        )
    require_own_places(model)
    if execution not in ("auto", "native", "emulated", "weights"):
        raise ValueError(f'execution must be "auto", "native", "emulated" or "weights", got {execution!r}')
    if execution == "weights":
        return LowPrecision(rounded_copy(model, chosen, weights_only=True), chosen, None, weights_only=True)
    if execution == "native" and (kernels.is_storage_only or kernels.name == "tf32"):
        raise ValueError(f'no device computes a whole model in {kernels.name}: use execution="emulated" or "auto"')
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"a model must have parameters to be lowered, got a {type(model).__name__} without")
    devices = {p.device for p in model.parameters()}
    native = execution == "native" or (execution == "auto" and all(has_native_kernels(kernels, d) for d in devices))
    low = rounded_copy(model, chosen)
    if kernels.compute_dtype.itemsize == 2 and kernels.elementwise:
        for module in elementwise_modules(low):
            replace_forward(module, LookUp(module, kernels, emulated=not native))
    if chosen.cache is not None:
        store_cache(low, chosen.cache, chosen.uncached)
    return LowPrecision(low, chosen, None if native else Emulation(kernels))


def as_given(rounded: nn.Module) -> LowPrecision:
    """A model whose weights somebody else has ``rounded``, in fp32 tensors: kernels compute in fp32.

    With the original beside it, ``Adjoint(as_given(rounded), original)`` predicts what the rounding does.
    """
    return LowPrecision(rounded, get_recipe(GIVEN), None, weights_only=True)
