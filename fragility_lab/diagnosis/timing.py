"""The times of passes over one window, and the times of a diagnosis's steps that follow from them."""

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fragility_lab.diagnosis.flips import DECODED
from fragility_lab.diagnosis.passes import estimator, low_model
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.sentence import MOST, SEARCHED, count_in
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.comparison import compare, observe
from fragility_quantization.operands import linear_weights

REPEATS = 3  # timed passes, of which the fastest counts: beside other work some take longer
SAMPLE = 2**17  # entries of a weight whose rounding is timed
MANY = 4  # windows for which a second estimate is timed: the first takes up to 1.4 times as long, as its memory is new


class Timing(NamedTuple):
    """Seconds that the kinds of work take of which a diagnosis consists.

    ``making`` an estimator happens once. An ``estimate``, and a ``measurement`` that compares a low-precision pass with
    the fp32 pass, are for one window. ``rounding`` is the time by which the other schemes of a choice round all weights
    slower than the first.
    """

    making: float
    estimate: float
    measurement: float
    rounding: float = 0.0

    @classmethod
    def of(cls, request: Request, loaded: Inputs, tokens: Tensor, fits: bool) -> "Timing":
        """Time the work on the first window of ``tokens`` (B, T), or an fp32 pass if the work does not fit."""
        try:
            return cls.run(request, loaded, tokens) if fits else cls.of_plain(request, loaded, tokens)
        except (TypeError, ValueError, RuntimeError):  # the first step refuses such a model, on the page
            return cls.of_plain(request, loaded, tokens)

    @classmethod
    def of_plain(cls, request: Request, loaded: Inputs, tokens: Tensor) -> "Timing":
        """A guess from the time of fp32 passes, good to a factor of two."""
        plain = min(timed(loaded.model, tokens[:1], loaded.device) for _ in range(REPEATS))
        return cls(0.0, plain * (1 + 4 * request.probes) * ends(request), 2 * plain)

    @classmethod
    def run(cls, request: Request, loaded: Inputs, tokens: Tensor) -> "Timing":
        """Time each kind of work; before many estimates, time a second one. Raises the errors of ``Adjoint``."""
        low, window, start = low_model(request, loaded, tokens), tokens[:1], seconds(loaded.device)
        known = estimator(low, loaded.model, request.probes, request.measured_in)
        made = begun = seconds(loaded.device)
        known(window)
        if len(tokens) >= MANY:
            begun = seconds(loaded.device)
            known(window)
        estimated = seconds(loaded.device)
        compare(observe(low.model, window, low), observe(loaded.model, window), window)
        measured = seconds(loaded.device) - estimated
        return cls(made - start, estimated - begun, measured, slower(request, loaded.model) if request.mixes else 0.0)

    def by_step(self, request: Request, count: int) -> dict[str, float]:
        """The seconds of the steps of a diagnosis of ``count`` windows, by name.

        The numbers of measurements and estimates of a step were found on models of 3 M, 135 M and 270 M parameters in
        bf16, with windows of 256 tokens and two probes. A diagnosis prints what its steps took beside the forecast.
        """
        prediction, passes, probes = self.making + count * self.estimate, count * self.measurement, request.probes
        schemes, written = len(request.schemes) - 1 if request.mixes else 0, count_in(request.length)
        return {
            "prediction": prediction,
            "measurement": 1.5 * passes,
            "plan": schemes * prediction + self.rounding,
            "plan measured": 0.93 * passes,
            "experts": 0.93 * passes,
            "tokens": passes * (2.6 + 1.55 * probes),
            "choices": min(DECODED, count) * self.measurement * (2.3 + 3.6 * probes),
            "coherence": 2.1 * prediction,
            "growth": 1.75 * passes,
            "sentence": min(1, (MOST + written) / request.length)
            * ((2 * written + min(SEARCHED, count)) * self.measurement + 2 * self.estimate),
        }


def slower(request: Request, model: nn.Module) -> float:
    """The seconds by which each later scheme of ``request`` rounds ``model``'s weights slower than the first, added."""
    weights = [*linear_weights(model).values()]
    sample = max(weights, key=torch.numel).data.flatten(0, -2)
    sample = sample[: max(1, SAMPLE // sample.shape[-1])]
    taken = []
    for stored in (recipe.linear.weights for recipe in request.schemes if recipe.linear.weights is not None):
        start = seconds(sample.device)
        stored.round(sample)
        taken.append(seconds(sample.device) - start)
    return sum(max(0.0, each - taken[0]) for each in taken[1:]) * sum(map(torch.numel, weights)) / sample.numel()


def timed(model: nn.Module, tokens: Tensor, device: torch.device) -> float:
    """The seconds of an fp32 pass over ``tokens``."""
    start = seconds(device)
    observe(model, tokens)
    return seconds(device) - start


def seconds(device: torch.device) -> float:
    """The clock in seconds, after ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ends(request: Request) -> int:
    """The number of points at which gradients are taken: 1 for the hidden state, else 2."""
    return 1 if request.measured_in == "hidden" else 2
