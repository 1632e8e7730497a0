"""The first overflow of a low-precision pass: the kernel, and the part of the model that it belongs to.

The pass itself is watched, kernel by kernel, native or emulated. A kernel leaves the range if its result is not finite
where all that it reads is. In fp64 the same kernel tells an overflow from a division by zero. Three are no overflow: a
mask of minus infinity or the lowest number, scores that a later kernel hides, infinities inside of a finite activation.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fragility_adjoint.internals import out_of_memory
from fragility_adjoint.predictor.prediction import Prediction
from fragility_adjoint.predictor.recorder import Place
from fragility_adjoint.predictor.sites import SUMS
from fragility_core.models.paths import is_block, is_norm
from fragility_numerics.internals import TorchDispatchMode, is_composite, schema_of
from fragility_numerics.kernels import CAST, EXACT, FACTORS, FILLING, SOFTMAXES
from fragility_numerics.lookup import elementwise_modules
from fragility_numerics.lowering import LowPrecision
from fragility_numerics.nested import map_tensors, tensors
from fragility_numerics.presence import source_of

HIDING = FILLING | {"bitwise_and_", "bitwise_or_"}  # these write over scores that do not count
CONSTANT = {"full_like", "new_full"}  # an infinity in these is meant
ROOTS = {"rsqrt", "sqrt"}
# Kernels that take no fp64: products of experts, and fused attention on a GPU.
WITHOUT_FP64 = {"_grouped_mm"} | {f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")}
SAYS = {
    "overflow": "", "stored": "", "infinite": "division by zero (1/0) in ", "nan": "not a number (0/0) in ",
}  # fmt: skip


class Overflow(NamedTuple):
    """The first overflow of a pass in ``words``, with the path of the ``module`` whose forward was running.

    ``kind`` is "overflow" where the exact result is a number, "stored" for a parameter beyond the range, "infinite" for
    a division by zero, "nan" for what is no number in any format.
    """

    module: str
    kind: str
    words: str


@dataclass
class ModuleCall:
    """A running forward of the module at ``path``: the names of its ``kernels`` so far, inside of it alone."""

    path: str
    module: nn.Module
    kernels: list[str] = field(default_factory=list)


class NonfiniteKernel(NamedTuple):
    """A kernel whose result is not finite; ``number`` is its place among the kernels of its ``call``."""

    call: ModuleCall
    number: int
    kind: str
    weights: bool  # whether the kernel reads a parameter of the module


class OverflowDetector(TorchDispatchMode):
    """A context that looks for the first kernel of ``low`` whose result leaves the range."""

    def __init__(self, low: LowPrecision):
        super().__init__()
        self.low, self.paused = low, low.paused
        self.calls = [ModuleCall("", low.model)]
        self.whole = 0  # how many activations are running, which count as one kernel
        self.first: NonfiniteKernel | None = None
        self.other: NonfiniteKernel | None = None  # first NaN that a kernel makes of infinities

    def enter(self, path: str, module: nn.Module, whole: bool) -> None:
        """Begin the forward of the ``module`` at ``path``; one that is ``whole`` counts as one kernel."""
        self.calls.append(ModuleCall(path, module))
        self.whole += whole

    def leave(self, args: tuple, output: Any, whole: bool) -> None:
        """End the forward of the running module."""
        if whole:
            self.whole -= 1
            self.calls[-1].kernels.append("")
            with self.low.paused():
                self.look(None, args, {}, output)
        self.calls.pop()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_composite(kernel):
            with self:
                return kernel.decompose(*args, **kwargs)
        if kernel.is_view or self.whole:
            return kernel(*args, **kwargs)
        name = kernel.overloadpacket.__name__
        self.calls[-1].kernels.append(name)
        before = args, kwargs
        if schema_of(kernel).is_mutable:
            with self.low.paused():
                before = map_tensors(before, Tensor.clone)
        result = kernel(*args, **kwargs)
        with self.low.paused():
            if name in HIDING:
                self.hide(before, args[0] if name.endswith("_") else result)
            elif name not in EXACT | CONSTANT or name in ("copy_", "embedding"):
                self.look(kernel, *before, result)
        return result

    def hide(self, before: Any, result: Any) -> None:
        """Forget the first overflow if this call hides it: its ``result`` is finite, and what was ``before`` is not."""
        if self.first is None or self.first.call is not self.calls[-1]:
            return
        dtype = self.low.format.compute_dtype

        def numbers(x: Tensor) -> Tensor:
            return x if x.is_floating_point() or x.dtype.itemsize != dtype.itemsize else x.view(dtype)

        if finite(numbers(x) for x in tensors(result)) and not finite(numbers(x) for x in tensors(before)):
            self.first = None

    def look(self, kernel: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Keep the running kernel if it is the first to leave the range; ``args`` are as they were before it."""
        results = [x for x in tensors(result) if is_float(x)]
        if self.first is not None or finite(results):
            return
        call = self.calls[-1]
        operands = [x for x in tensors((args, kwargs)) if is_float(x)]
        own = {p.untyped_storage().data_ptr() for p in call.module.parameters(recurse=False)}
        parameters = [x for x in operands if x.untyped_storage().data_ptr() in own]

        def found(kind: str) -> NonfiniteKernel:
            return NonfiniteKernel(call, len(call.kernels) - 1, kind, bool(parameters))

        read = [p.shape for p in call.module.parameters(recurse=False) if source_of(p) is not None]
        if not finite(parameters) or (call.kernels[-1] == CAST and results[0].shape in read):  # it is stored now
            self.first = found("stored")
            return
        bad = ~results[0].isfinite()
        if kernel is None or torch.Tag.pointwise in kernel.tags:
            bad &= ~reduce(Tensor.logical_or, map(masking, operands), bad.new_zeros(()))
            bad &= reduce(Tensor.logical_and, map(torch.isfinite, operands), bad.new_ones(()))
        elif not finite(operands):
            bad = bad & False
        if operands and bad.any():
            self.first = found(kind_of(kernel, args, kwargs, bad))
        elif self.other is None and results[0].isnan().any() and not any(x.isnan().any() for x in operands):
            self.other = found("nan")


def finite(values: Any) -> bool:
    """True if all floating ``values`` are finite."""
    return all(bool(x.isfinite().all()) for x in values if is_float(x))


def is_float(x: Tensor) -> bool:
    """True for floating numbers of 16 bits or more; torch cannot test 8-bit ones for being finite."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def masking(x: Tensor) -> Tensor:
    """True where ``x`` is an additive mask: minus infinity or the lowest number."""
    return x <= torch.finfo(x.dtype).min


def kind_of(kernel: Any, args: tuple, kwargs: dict, bad: Tensor) -> str:
    """The kind of ``bad`` entries by their fp64 values: "overflow" if one is finite, else "nan" or "infinite".

    The kind is "overflow" for kernels that take no fp64, and for kernels of other libraries, which may take none.
    """

    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    name = kernel.overloadpacket.__name__ if kernel is not None else ""  # an activation of finite numbers
    if kernel is None or kernel.namespace != "aten" or name in WITHOUT_FP64:
        return "overflow"
    try:
        args, kwargs = map_tensors((args, kwargs), lambda x: x.double() if x.is_floating_point() else x)
        if name in SOFTMAXES:
            args = (*args[:2], False)
        result = kernel(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
    except RuntimeError as error:  # torch's error for a dtype that a kernel does not take is one
        if isinstance(error, NotImplementedError) or out_of_memory(error):
            return "overflow"
        raise
    exact = next(tensors(result))[bad]
    if exact.isfinite().any():
        return "overflow"
    return "nan" if exact.isnan().any() else "infinite"


@torch.no_grad()
def first_overflow(low: LowPrecision, run: Callable[[nn.Module], object]) -> Overflow | None:
    """The first place that leaves the range while ``run`` calls the model; None if every kernel's result is finite."""
    detector, whole = OverflowDetector(low), {id(module) for module in elementwise_modules(low.model)}
    with ExitStack() as stack:
        for path, module in low.model.named_modules():
            alone = id(module) in whole
            before = module.register_forward_pre_hook(lambda m, args, at=(path, module, alone): detector.enter(*at))
            after = module.register_forward_hook(lambda m, args, out, alone=alone: detector.leave(args, out, alone))
            stack.callback(before.remove)
            stack.callback(after.remove)
        with low.running(), detector:
            run(low.model)
    found = detector.first or detector.other
    return None if found is None else Overflow(found.call.path, found.kind, SAYS[found.kind] + part(found))


def part(found: NonfiniteKernel) -> str:
    """The part of the model that the kernel is, in words: by what ran before and after it in the same forward."""
    path, kernels = found.call.path or "the model", found.call.kernels
    name, later = kernels[found.number], kernels[found.number + 1 :]
    if found.kind == "stored":
        return f"the stored weights of {path}"
    if not name:
        return path
    if is_norm(found.call.module) or ROOTS & {name, *later}:
        return f"{'variance of ' if ROOTS & {*later} else ''}the norm {path}"
    if name in SUMS and is_block(found.call.path):
        return f"residual addition in {path}"
    if name in SOFTMAXES:
        return f"softmax in {path}"
    if name.startswith("_scaled_dot_product"):
        return f"fused attention in {path}"
    if name in FACTORS and not found.weights:
        following = next((other for other in later if other in SOFTMAXES or other in FACTORS), "")
        if following in SOFTMAXES:
            return f"QK^T in {path}"
        if SOFTMAXES & {*kernels[: found.number]}:
            return f"probabilities times values in {path}"
    if SOFTMAXES & {*later} and any(other in FACTORS for other in kernels[: found.number]):
        return f"scores in {path}"
    return path if found.weights else f"{'a cast' if name == CAST else name} in {path}"


def with_overflows(
    prediction: Prediction, search: Callable[[int], Overflow | None], inside: Mapping[int, Place]
) -> Prediction:  # fmt: skip
    """``prediction`` with the column ``overflow`` of its windows; ``search`` gives the first one by a window's number.

    ``inside`` has, by window, the place of a kernel that stored +inf, for what the pass itself does not show.
    """
    windows = prediction.windows.assign(overflow="")
    lost = {*prediction.contributions.window[~np.isfinite(prediction.contributions.c2)]}
    for window in np.flatnonzero(~np.isfinite(windows.predicted)).tolist():
        found = search(window)
        if found is not None:
            words = found.words
        elif window in inside:
            words = f"{inside[window].name} in {inside[window].module or 'the model'}"
        elif window in lost:
            words = "the gradient"
        else:
            words = "not a number (0/0) in the error relative to an output of zeros"
        windows.loc[window, "overflow"] = words
    return replace(prediction, windows=windows)
