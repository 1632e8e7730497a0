"""Samples of the rounding errors of a pass: each of the errors that a prediction knows gets a random sign.

A prediction adds up squares: it says how large an error is on the whole. A choice, such as that of the next token,
depends on which errors of logits are large together. One pass with random signs is one draw of all of them. A pass with
a share of every error shows whether the error of the output grows in proportion, as a prediction assumes.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fragility_adjoint.internals import mark_stored, stored_as
from fragility_adjoint.predictor.arithmetic import LowArithmetic
from fragility_adjoint.predictor.estimator import Adjoint
from fragility_adjoint.predictor.parameters import ParameterTable, RoundedParameters
from fragility_adjoint.predictor.recorder import ALIKE
from fragility_core.models.paths import within
from fragility_numerics.formats import NumberFormat
from fragility_numerics.lowering import base_of
from fragility_numerics.rounding_errors import local_error, stochastic_error
from fragility_offload.offloaded import is_offloaded
from fragility_quantization.operands import operands_by_storage

Result = TypeVar("Result")


def with_random_signs(error: Tensor, generator: torch.Generator, alike: bool = False) -> Tensor:
    """``error`` (..., T, channels) times a random sign for each entry, or if ``alike`` one for all T positions."""
    shape = torch.Size([*error.shape[:-2], 1, error.shape[-1]]) if alike and error.ndim > 1 else error.shape
    pairs = shape.numel() // 2 + 1  # of 32 bits, the first of which is the sign
    bits = torch.randint(-(2**62), 2**62, (pairs,), generator=generator, device=generator.device)
    signs = bits.to(error.device).view(torch.float32)[: shape.numel()].view(shape)
    if alike:  # errors of one channel keep their signs relative to each other
        return error * torch.copysign(error.new_ones(()), signs)
    return torch.copysign(error, signs)


class RandomSigns:
    """Rounding whose errors get random signs, drawn by ``generator``.

    If ``stochastic``, their size is the standard deviation of stochastic rounding.
    """

    def __init__(self, generator: torch.Generator, stochastic: bool = False):
        self.generator, self.stochastic = generator, stochastic

    def __call__(self, x: Tensor, stored: NumberFormat, alike: bool = False, of_stored: Tensor | None = None) -> Tensor:
        """``x`` with a random error, that of ``of_stored`` if given; ``alike`` as in ``with_random_signs``."""
        read = x if of_stored is None else of_stored
        error = local_error(read, stored.round(read).float())
        if self.stochastic:
            error = stochastic_error(error, read, stored)
        return x + with_random_signs(error, self.generator, alike and not self.stochastic)

    def weight(self, leaf: Tensor, rounded: RoundedParameters, path: str) -> Tensor:
        """The weight or buffer at ``path`` with its error; ``leaf`` holds it without."""
        error = rounded.weighted_error(path, rounded.in_fp32(path)).error(...)
        return leaf + with_random_signs(error, self.generator)


class ScaledErrors:
    """Rounding with a share of its error: x + share (Q(x) - x)."""

    def __init__(self, share: float):
        self.share = share

    def __call__(self, x: Tensor, stored: NumberFormat, alike: bool = False, of_stored: Tensor | None = None) -> Tensor:
        """``x`` with its share of the error, that of ``of_stored`` if given."""
        rounded = stored.round(x if of_stored is None else of_stored).float()
        if of_stored is not None:
            rounded = torch.where(rounded.isfinite(), x + (rounded - of_stored), rounded)
        return self._between(x, rounded)

    def weight(self, leaf: Tensor, rounded: RoundedParameters, path: str) -> Tensor:
        """The weight or buffer at ``path`` with its error; ``leaf`` holds it without."""
        return self._between(leaf, rounded.in_fp32(path))

    def _between(self, exact: Tensor, rounded: Tensor) -> Tensor:
        """``exact`` plus ``share`` of the rounding error. Values of ±inf are kept whole unless the share is 0."""
        if self.share == 0:
            return exact
        return torch.where(rounded.isfinite(), torch.lerp(exact, rounded, self.share), rounded)


class Rescaled(ScaledErrors):
    """Rounding to the numbers of a format times 1 / ``scale``: as accurate on the whole, but with other errors.

    A scale that is a number of the format keeps much of what is exact in it: sums of two numbers, and 1. Weights keep
    their errors. Where the format's range ends, and for numbers with scales of their own, rounding is as ever.
    """

    def __init__(self, scale: float):
        super().__init__(1.0)
        self.scale = scale

    def __call__(self, x: Tensor, stored: NumberFormat, alike: bool = False, of_stored: Tensor | None = None) -> Tensor:
        """``x`` rounded to the numbers of ``stored`` times 1 / ``scale``. Its operands are such numbers."""
        rounded = stored.round(x).float()
        if self.scale == 1 or not stored.elementwise:
            return rounded
        numbers: Any = stored  # a Format, perhaps behind a stand-in
        inside = (x.abs() >= 2 * numbers.smallest_normal) & (x.abs() <= numbers.largest / 2)
        return torch.where(inside, stored.round(x * self.scale).float() / self.scale, rounded)


Rounding = RandomSigns | ScaledErrors


def scales(format: NumberFormat, count: int) -> list[float]:
    """At most ``count`` numbers of ``format`` from 1 on and below 2, about evenly apart in the logarithm.

    There are fewer in a format of few numbers: fp8_e5m2 has four. Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"realisations of rounding must be at least 1, got {count}")
    step = format.spacing
    return sorted({1 + round((2 ** (i / count) - 1) / step) * step for i in range(count)} - {2.0})


class Sampled:
    """Numbers as ``stored`` rounds them, but with errors by ``rounding``; a stand-in for a format."""

    def __init__(self, stored: NumberFormat, rounding: Rounding | None):
        self.stored, self.rounding = stored, rounding

    def __getattr__(self, name: str):
        return getattr(self.stored, name)

    def round(self, x: Tensor, alike: bool = False, of_stored: Tensor | None = None) -> Tensor:
        """``x`` with an error, or without one, as ``RandomSigns`` and ``ScaledErrors`` make it."""
        return x if self.rounding is None else self.rounding(x, self.stored, alike, of_stored)


class SampledArithmetic(LowArithmetic):
    """A context in which kernels compute as in ``at``, with the errors that ``rounding`` makes, or none if it is None.

    Kernels of modules outside of ``base`` round nothing.
    """

    def __init__(self, at: LowArithmetic, parameters: ParameterTable, base: str, rounding: Rounding | None):
        # Exact: what only moves has its errors already, and gets none a second time.
        super().__init__(at.recipe, at.recorder, parameters, rounding=at.rounding, exact=True)
        self.base, self.rounding_by = base, rounding
        self.format = cast(NumberFormat, Sampled(at.recipe.kernels, rounding))

    def round(
        self, y: Tensor, name: str, product: str = "", stream: bool = False, constant: bool = False,
        in_place: bool = False, format: NumberFormat | None = None, of_stored: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``y`` with the error of its rounding, in its own memory."""
        # What changed in place looks constant, as nothing here has a gradient.
        if (in_place or not constant) and (not self.base or within(self.recorder.path[-1], self.base)):
            numbers: Any = self.format if format is None else Sampled(format, self.rounding_by)
            y.data.copy_(numbers.round(y.data, name in ALIKE, of_stored))
        return self._marked(y)


class ErrorSamples:
    """Passes of the model of an ``adjoint`` in fp32 with realised errors.

    A pass without errors has the fp32 weights if the adjoint takes its gradients in fp32, else the rounded weights.
    """

    def __init__(self, adjoint: Adjoint, seed: int = 0):
        """``seed`` draws the signs. Raises ValueError for a model that is streamed, part by part."""
        if is_offloaded(adjoint.model):
            raise ValueError("errors are realised for all weights at once, but the model is streamed: load it whole")
        self.adjoint, self.at = adjoint, adjoint.points[-1]
        self.generator = torch.Generator(next(adjoint.model.parameters()).device).manual_seed(seed)
        base = base_of(adjoint.model)
        self.base = next(path for path, module in adjoint.model.named_modules() if module is base)

    @property
    def stored(self) -> NumberFormat | None:
        """The format that the head rounds logits to; None if it does not."""
        return self.at.recipe.kernels if self.at.rounding else None

    def exact(self, run: Callable[[nn.Module], Result]) -> Result:
        """The result of ``run`` for the model without random errors."""
        return self._run(run, None)

    def draw(self, run: Callable[[nn.Module], Result]) -> Result:
        """The result of ``run`` for the model with errors of new random signs.

        The head rounds nothing: its rounding keeps the order of logits.
        """
        return self._run(run, RandomSigns(self.generator, self.at.stochastic), self.base)

    def again(self, run: Callable[[nn.Module], Result], scale: float) -> Result:
        """The result of ``run`` for the low-precision model that rounds to its format's numbers times 1 / ``scale``.

        Averaged over ``scales``, the squared error is that of rounding. The pass at scale 1 is the measured one.
        Raises the errors of ``scaled``.
        """
        self._require_errors()
        return self._run(run, Rescaled(scale), "")

    def scaled(self, run: Callable[[nn.Module], Result], share: float) -> Result:
        """The result of ``run`` for the model with ``share`` of every error: at 1 as in low precision, at 0 as in fp32.

        Raises ValueError for stochastic rounding, and unless gradients are taken in fp32: errors are then not known.
        """
        self._require_errors()
        return self._run(run, ScaledErrors(share), "")

    def _require_errors(self) -> None:
        if not self.at.exact:
            raise ValueError(
                'scaled errors need the fp32 pass, got none: round to nearest, and make Adjoint with gradients="both"'
            )

    def _run(self, run: Callable[[nn.Module], Result], rounding: Rounding | None, base: str = "") -> Result:
        adjoint = self.adjoint
        with adjoint.lock, torch.inference_mode(False), torch.no_grad():
            parameters = self.at.parameters if rounding is None else self._drawn(rounding)
            adjoint.recorder.begin()
            with SampledArithmetic(self.at, parameters, base, rounding):
                return run(adjoint.model)

    def _drawn(self, rounding: Rounding) -> ParameterTable:
        """Stand-ins for weights and buffers, with their errors."""
        rounded, known = self.adjoint.rounded, self.at.parameters
        weights, buffers = dict(known.weights), dict(known.buffers)
        for path in filter(rounded.watched, rounded.tensors):
            made, key = weights if path in rounded.parameters else buffers, id(rounded.tensors[path])
            made[key] = mark_stored(rounding.weight(made[key], rounded, path), stored_as(made[key]))
        linear = {path: weights[id(p)] for path, p in rounded.linear.items()}
        return ParameterTable(weights, buffers, operands_by_storage(linear, self.at.recipe))
