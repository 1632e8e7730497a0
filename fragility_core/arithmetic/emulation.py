"""Run any PyTorch model in any number format, natively or emulated.

Emulation (protocol section 1): tensors are stored in the low format, every kernel (ATen op) runs in
fp32 and its result is rounded once. That is what native kernels do, which accumulate in fp32 and
round on output. TF32 is the exception by its definition: only the operands of matrix products are
rounded, everything else is fp32.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import PreTrainedModel

from fragility_core.arithmetic.differentiation import differentiated
from fragility_core.arithmetic.formats import CHUNK_ELEMENTS, Format, get_format, has_native_kernels
from fragility_core.arithmetic.lookup import elementwise_modules, every_number, look_up
from fragility_core.arithmetic.nested import map_tensors, tensors
from fragility_core.arithmetic.operands import RoundedOperands, linear_weights

aten = torch.ops.aten

# Kernels that only move or select values make no rounding error; run as they are, they also keep
# the aliasing of views. Leaving one out costs time, never accuracy: rounding twice changes nothing.
EXACT = {
    aten.clone, aten.cat, aten.stack, aten.index, aten.index_select, aten.gather, aten.embedding,
    aten.where, aten.masked_fill, aten.neg, aten.abs, aten.relu, aten.copy_, aten.fill_, aten.zero_,
    aten.masked_fill_, aten.empty_like, aten.zeros_like, aten.ones_like, aten.new_zeros, aten.new_ones,
    aten.new_empty, aten.constant_pad_nd, aten.repeat, aten.flip, aten.roll, aten.topk, aten.amax,
    aten.tril_, aten.tril, aten.triu, aten._local_scalar_dense, aten.equal, aten.argmax, aten.sort, aten._unsafe_view,
}  # fmt: skip

SOFTMAXES = {aten._softmax, aten._log_softmax}

# Positions of the two factors of a matrix product.
FACTORS = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2), aten.mv: (0, 1),
    aten.dot: (0, 1), aten.convolution: (0, 1),
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention: (0, 1, 2),
    aten._scaled_dot_product_flash_attention: (0, 1, 2),
    aten.addmv: (1, 2), aten.addbmm: (1, 2), aten._trilinear: (0, 1, 2),
}  # fmt: skip
if hasattr(aten, "_grouped_mm"):  # mixtures of experts, since torch 2.7
    FACTORS[aten._grouped_mm] = (0, 1)


def promoted_dtypes(arguments: Any) -> set[torch.dtype]:
    """The floating dtypes that decide a kernel's result: zero-dimensional tensors only where alone."""
    floating = [x for x in tensors(arguments) if x.is_floating_point()]
    return {x.dtype for x in floating if x.ndim} or {x.dtype for x in floating}


@cache
def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether ``func`` is made of other kernels (autograd unfolds it, inference mode does not)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def fits_in_chunks(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether ``func`` is an elementwise kernel over large contiguous tensors of one shape on the CPU."""
    elementwise = torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1 and not func._schema.is_mutable
    if not elementwise or any(map(torch.is_tensor, kwargs.values())):
        return False
    arrays = [x for x in tensors(args) if x.ndim]
    return len({x.shape for x in arrays}) == 1 and all(
        x.numel() > CHUNK_ELEMENTS and x.device.type == "cpu" and x.is_contiguous() for x in arrays
    )


def written(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments of an in-place or out= kernel that it writes to."""
    arguments = [
        kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return list(tensors(arguments))


class Emulation(TorchDispatchMode):
    """Rounds the result of every kernel to ``format``; see the module docstring.

    A kernel with an fp32 operand follows PyTorch's type promotion: its result is fp32 and stays so,
    which is how models that compute a norm or a softmax in fp32 are emulated faithfully.

    With a ``generator``, on the model's device, results are rounded stochastically: one random
    realisation of the format's rounding errors. Only what an in-place kernel writes from a wider
    tensor into one of the format is still rounded to nearest. Where batches hold several ``copies`` of
    the same windows, one after another, all copies meet the same realisation.
    """

    def __init__(self, format: Format, generator: torch.Generator | None = None):
        super().__init__()
        self.format = format
        self.generator = generator
        self.copies = 1
        self.active = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Kernels inside run as they are (for statistics, which are not part of the model).

        Leaving the mode spares them the detour through Python, a quarter of a short monitored pass;
        ``active`` is for a mode that has another one above it, or was entered twice.
        """
        self.active, before = False, self.active
        innermost = before and _get_current_dispatch_mode() is self
        try:
            if innermost:
                self.__exit__(None, None, None)
            yield
        finally:
            if innermost:
                self.__enter__()
            self.active = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = self._rounded(func, args, kwargs)
        if self.format.is_storage_only and func._schema.is_mutable:
            self._settle(func, args, kwargs)
        return result

    def _rounded(self, func, args, kwargs):
        if func.is_view or func.overloadpacket in EXACT:
            return func(*args, **kwargs)
        if self.format.name == "tf32":
            return self._with_rounded_factors(func, args, kwargs)
        if func.overloadpacket is aten._to_copy:
            return self._convert(func, args, kwargs)
        if promoted_dtypes((*args, *kwargs.values())) != {self.format.compute_dtype}:
            return func(*args, **kwargs)
        in_chunks = not self.format.scaled and self.copies == 1 and fits_in_chunks(func, args, kwargs)
        return (self._in_chunks if in_chunks else self._in_fp32)(func, args, kwargs)

    def _round(self, x: Tensor) -> Tensor:
        of_copies = x.ndim and len(x) % self.copies == 0  # not so what all copies have in common
        return self.format.round(x, self.generator, self.copies if of_copies else 1)

    def _narrow(self, x: Tensor) -> Tensor:
        return self._round(x) if x.dtype == torch.float32 else x

    def _widen(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype == self.format.compute_dtype else x

    def _in_fp32(self, func, args, kwargs):
        wide_args = map_tensors(args, self._widen)
        wide_kwargs = map_tensors(kwargs, self._widen)
        requested = kwargs.get("dtype")
        if func.overloadpacket in SOFTMAXES and wide_args[2]:  # half_to_float: fp32 on output, on CUDA
            wide_args, requested = (*wide_args[:2], False), torch.float32
        if requested == self.format.compute_dtype:
            wide_kwargs["dtype"] = torch.float32
        result = func(*wide_args, **wide_kwargs)
        if func._schema.is_mutable:
            return self._write_back(func, (args, kwargs), (wide_args, wide_kwargs), result)
        return result if requested == torch.float32 else map_tensors(result, self._narrow)

    def _in_chunks(self, func, args, kwargs):
        """As ``_in_fp32``; what a chunk is widened to stays in cache, where a whole tensor's would be new memory."""
        whole = next(x for x in tensors(args) if x.ndim)
        flat = (x.view(-1).split(CHUNK_ELEMENTS) if torch.is_tensor(x) and x.ndim else repeat(x) for x in args)
        parts = (self._in_fp32(func, chunk, kwargs) for chunk in zip(*flat))
        first = next(parts)
        result = torch.empty_like(whole, dtype=first.dtype)
        for target, part in zip(result.view(-1).split(CHUNK_ELEMENTS), chain([first], parts)):
            target.copy_(part)
        return result

    def _write_back(self, func, given, wide, result):
        """Store what an in-place kernel wrote to widened copies into the tensors it was given."""
        targets = dict(zip(map(id, written(func, *wide)), written(func, *given)))
        for source in written(func, *wide):
            targets[id(source)].copy_(self._narrow(source))
        return map_tensors(result, lambda x: targets[id(x)] if id(x) in targets else self._narrow(x))

    def _settle(self, func, args, kwargs):
        """Bring what was written into compute_dtype tensors, from constants or wider ones, onto the grid."""
        for target in written(func, args, kwargs):
            if target.dtype == self.format.compute_dtype:
                target.copy_(self._round(target.float()))

    def _convert(self, func, args, kwargs):
        narrowed = kwargs.get("dtype") == self.format.compute_dtype != args[0].dtype
        if narrowed and (self.format.is_storage_only or self.generator is not None):
            return func(self._round(args[0].float()), **kwargs)
        return func(*args, **kwargs)

    def _with_rounded_factors(self, func, args, kwargs):
        factors = FACTORS.get(func.overloadpacket, ())
        rounded = [self._narrow(x) if i in factors else x for i, x in enumerate(args)]
        return func(*rounded, **kwargs)


class LookUp:
    """The forward of an activation, read off a table of what the module itself makes of every 16-bit number.

    Bit for bit the same, at a fraction of the time where the module is a chain of kernels: the eight of GPT-2's
    take longer on a CPU than its matrix products. Whatever else is at work (another dtype, gradients, random
    rounding, other modes of torch) takes the module's own way.
    """

    def __init__(self, module: nn.Module, format: Format, emulated: bool):
        self.module, self.format, self.emulated = module, format, emulated
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        mode = _get_current_dispatch_mode()
        if not self._applies(x, mode):
            return self._compute(x)
        if self.table is None or self.table.device != x.device:
            self.table = self._compute(every_number(self.format.compute_dtype, x.device))
        with nullcontext() if mode is None else mode.paused():
            return look_up(self.table, x)

    def _compute(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x)

    def _applies(self, x: Tensor, mode: TorchDispatchMode | None) -> bool:
        if type(x) is not Tensor or not isinstance(_get_current_function_mode(), RoundedOperands | None):
            return False
        emulating = isinstance(mode, Emulation) and mode.active and mode.format == self.format and not mode.generator
        as_made = emulating if self.emulated else mode is None
        return as_made and x.dtype == self.format.compute_dtype and not differentiated(x)


def rounded_copy(model: nn.Module, format: Format, buffers: bool = True) -> nn.Module:
    """A copy of ``model`` whose floating parameters are rounded to ``format``, and with ``buffers`` what it stores too.

    TF32 stores fp32, so its parameters keep every bit; so do those that transformers keeps in fp32. Linear weights
    are rounded to the format of operands, where that is another.
    """
    model = copy.deepcopy(model)
    if format.name not in ("fp32", "tf32"):
        stays = stays_fp32(model, format.compute_dtype)
        stored = dict(model.named_parameters()) | (stored_buffers(model, format.compute_dtype) if buffers else {})
        multiplied = linear_weights(model) if format.operands else {}
        for path, x in stored.items():
            if x.is_floating_point() and not stays(path):
                x.data = (format.operands if path in multiplied else format).round(x.data)
    return model


def stays_fp32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Of the path of a parameter or buffer, whether ``from_pretrained`` in ``dtype`` leaves it in fp32."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    patterns = [re.compile(name.replace("*", ".*")) for name in names]
    return lambda path: any(pattern.search(path) for pattern in patterns)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules, to attach to, with the parameters and buffers of ``model`` itself."""
    return copy.deepcopy(model, {id(x): x for x in chain(model.parameters(), model.buffers())})


def stored_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating buffers of ``model``, by path, that are of ``dtype`` when it is.

    Of a model of transformers those that it has when made in ``dtype``: rotary frequencies stay in fp32, tables of
    positions do not. Of another all, as ``model.to(dtype)`` does.
    """
    floating = {path: buffer for path, buffer in model.named_buffers() if buffer.is_floating_point()}
    if floating and isinstance(model, PreTrainedModel):
        with torch.device("meta"):
            made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
        dtypes = {path: buffer.dtype for path, buffer in made.named_buffers()}
        return {path: buffer for path, buffer in floating.items() if dtypes.get(path) == dtype}
    return floating


@contextmanager
def fp32_sums() -> Iterator[None]:
    """A GPU's products of 16-bit matrices are summed in fp32 to the end; by default parts may be rounded before."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@contextmanager
def single_kernels() -> Iterator[None]:
    """torch's Transformer encoder layers run kernel by kernel; as one, a whole layer would be rounded once."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def fp32_attention() -> AbstractContextManager:
    """A GPU's fused attention of kernels that take fp32, as emulation calls them; most take 16 bits alone."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@dataclass(frozen=True)
class LowPrecision:
    """A model whose parameters are rounded to a format, and how its kernels compute in it.

    With ``weights_only`` they compute in fp32.
    """

    model: nn.Module
    format: Format
    emulation: Emulation | None
    weights_only: bool = False

    @property
    def execution(self) -> str:
        """How kernels compute: "native", "emulated", "stochastic" (emulated with random rounding), or "weights"."""
        if self.emulation is None:
            return "weights" if self.weights_only else "native"
        return "emulated" if self.emulation.generator is None else "stochastic"

    def stochastic(self, seed: int) -> "LowPrecision":
        """The same rounded weights, each kernel's result rounded stochastically (Croci et al. 2022).

        Equal seeds give equal passes in the same order; see ``formats.round_stochastically``. Raises
        ValueError where weights alone are in the format.
        """
        if self.weights_only:
            raise ValueError(
                "stochastic rounding needs kernels whose results are rounded, but here weights alone are in "
                f'{self.format.name}: lower the model with execution="auto"'
            )
        generator = torch.Generator(next(self.model.parameters()).device).manual_seed(seed)
        return replace(self, emulation=Emulation(self.format, generator))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which calling ``model`` computes in the format."""
        with ExitStack() as stack:
            first = next(self.model.parameters(), None)
            if first is not None and first.is_cuda:
                stack.enter_context(fp32_sums() if self.emulation is None else fp32_attention())
            if self.emulation is not None:
                stack.enter_context(single_kernels())
                stack.enter_context(self.emulation)
            if self.format.operands and not self.weights_only:
                generator = None if self.emulation is None else self.emulation.generator
                stack.enter_context(RoundedOperands(self.model, self.format.operands, self.paused, generator))
            yield

    def paused(self):
        """Context, inside ``running``, in which kernels are not rounded."""
        return nullcontext() if self.emulation is None else self.emulation.paused()


def lower(model: nn.Module, format: str, execution: str = "auto") -> LowPrecision:
    """``model`` in low precision: native where its device has the kernels, else emulated.

    ``execution`` may insist on "native" or "emulated", or round the "weights" only and compute in fp32. Raises
    ValueError for an unknown format or execution, a model without parameters or not in fp32, or when native kernels are
    asked for in a format that torch cannot compute in.
    """
    chosen = get_format(format)
    if other := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}:
        raise ValueError(
            f"a model must be lowered from fp32 parameters, got {', '.join(map(str, sorted(other, key=str)))}: load it "
            "with fragility_lab.inputs.checkpoints.load_model, or call model.float()"
        )
    if execution not in ("auto", "native", "emulated", "weights"):
        raise ValueError(f'execution must be "auto", "native", "emulated" or "weights", got {execution!r}')
    if execution == "weights":
        rounded = rounded_copy(model, chosen, buffers=False).float()
        return LowPrecision(rounded, chosen, None, weights_only=True)
    if execution == "native" and (chosen.is_storage_only or chosen.name == "tf32"):
        raise ValueError(f'no device computes a whole model in {format}: use execution="emulated" or "auto"')
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"a model must have parameters to be lowered, got a {type(model).__name__} without")
    device = first.device
    native = execution == "native" or (execution == "auto" and has_native_kernels(chosen, device))
    low = rounded_copy(model, chosen)
    if chosen.compute_dtype.itemsize == 2 and not chosen.scaled:  # scales depend on the other entries
        for module in elementwise_modules(low):
            module.forward = LookUp(module, chosen, emulated=not native)
    return LowPrecision(low, chosen, None if native else Emulation(chosen))
