"""Notebook 7: independent errors add up as squares, the adjoint by hand, and the live picture of the model.

The toy has two layers with one input x: z = (2x, 3x), h = z^2, y = h_1 - h_2 / 2. Each of its five results is rounded.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import torch

from fragility_lab.explorer.component import Component
from fragility_lessons import shipped
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.pictures import Picture, finish, panels
from fragility_numerics.formats import get_format

EXERCISES = exercises("adjoint_predictor")
FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2")
DRAWS, MOST = 400, 64


# --- Squares add up ------------------------------------------------------------------------------


@cache
def signs() -> tuple[np.ndarray, np.ndarray]:
    """Random signs: one for every draw, and one for each single error, (DRAWS, MOST)."""
    generator = np.random.default_rng(0)
    return generator.choice([-1.0, 1.0], (DRAWS, 1)), generator.choice([-1.0, 1.0], (DRAWS, MOST))


def errors(alike: float) -> np.ndarray:
    """Errors (DRAWS, MOST) of mean square 1. Two of one draw have the correlation ``alike``."""
    common, own = signs()
    return alike**0.5 * common + (1 - alike) ** 0.5 * own


def squares(count: int, alike: float) -> Picture:
    """First panel: sums of random errors, one line a draw. Second: their root mean square over their number."""
    sums, numbers = errors(alike).cumsum(1), np.arange(1, MOST + 1)
    measured = np.sqrt((sums**2).mean(0))
    walks, growth = panels(here=count)
    walks.plot(numbers, sums[:40].T, color="C0", linewidth=0.7, alpha=0.5)
    for sign in (-1, 1):
        walks.plot(numbers, sign * numbers**0.5, "--", color="0.2", label="±√n" if sign > 0 else None)
    finish(walks, "number of errors n", "sum", "40 sums of random errors", legend="upper left", ylim=(-MOST, MOST))
    growth.plot(numbers, numbers, color="C3", label="all alike: n")
    growth.plot(numbers, numbers**0.5, "--", color="0.2", label="squares: √n")
    growth.plot(numbers, measured, ".", color="C0", label="measured")
    finish(growth, "number of errors n", "size of the sum", "root mean square of 400 sums", "xy", "upper left")
    return [walks, growth], (
        f"{count} errors of mean square 1: all alike {count}, root of the sum of squares {count**0.5:.3g}, "
        f"measured {measured[count - 1]:.3g}"
    )


# --- The adjoint by hand -------------------------------------------------------------------------

RESULTS = ("z₁ = 2x", "z₂ = 3x", "h₁ = z₁²", "h₂ = z₂²", "y = h₁ − h₂/2")


def toy(x: np.ndarray, round: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The five results (..., 5) of the toy for inputs x (...), each passed through ``round``, and their local errors.

    A local error is that of one rounding: the stored result minus the exact one from rounded operands.
    """
    stored: list[np.ndarray] = []
    local: list[np.ndarray] = []
    kernels = [
        lambda: 2 * x, lambda: 3 * x, lambda: stored[0] ** 2, lambda: stored[1] ** 2, lambda: stored[2] - stored[3] / 2,
    ]  # fmt: skip
    for kernel in kernels:
        exact = kernel()
        stored.append(round(exact))
        local.append(stored[-1] - exact)
    return np.stack(stored, -1), np.stack(local, -1)


def gradients(x: np.ndarray) -> np.ndarray:
    """dy/dr (..., 5) for the five results r of the toy, by the chain rule."""
    one = np.ones_like(x)
    return np.stack([2 * (2 * x), -0.5 * 2 * (3 * x), one, -0.5 * one, one], -1)


def rounding(format: str) -> Callable[[np.ndarray], np.ndarray]:
    """Rounding of fp64 arrays to ``format``."""
    chosen = get_format(format)
    return lambda values: chosen.round(torch.from_numpy(np.asarray(values)).float()).double().numpy()


@cache
def inputs(x: float) -> np.ndarray:
    """Inputs within 25 % of x, each with roundings of its own."""
    return x * np.random.default_rng(0).uniform(0.75, 1.25, 2000)


def toy_errors(x: float, format: str) -> pd.DataFrame:
    """One row per input near ``x``: the ``measured`` error of y, and ``predicted``, the root of the sum of squares."""
    near = inputs(x)
    stored, local = toy(near, rounding(format))
    exact, _ = toy(near, lambda values: values)
    squares = (gradients(near) * local) ** 2
    return pd.DataFrame({"measured": stored[:, -1] - exact[:, -1], "predicted": squares.sum(-1) ** 0.5})


def by_hand(x: float, format: str) -> Picture:
    """First panel: gradient times error of every result, for one input. Second: measured errors of inputs near it."""
    table = toy_errors(x, format)
    _, local = toy(np.array(x), rounding(format))
    slopes = gradients(np.array(x))
    terms = slopes * local
    typical, measured = (float((table[name] ** 2).mean() ** 0.5) for name in ("predicted", "measured"))
    page, histogram = panels(5.4, 4.2, height=3.6)
    page.set_position((0.0, 0.0, 1.0, 0.92))
    page.axis("off")
    columns = (0.02, 0.36, 0.58, 0.84)
    lines = [("result", "gradient", "error", "(g·e)²")]
    lines += [(n, f"{g:.3g}", f"{e:.2g}", f"{t**2:.2g}") for n, g, e, t in zip(RESULTS, slopes, local, terms)]
    lines += [("sum", "", "", f"{(terms**2).sum():.2g}"), ("root", "", "", f"{(terms**2).sum() ** 0.5:.2g}")]
    for row, texts in enumerate(lines):
        for place, text in zip(columns, texts):
            page.text(place, 0.93 - row / (len(lines) + 0.5), text, transform=page.transAxes)
    page.set_title(f"one input, x = {x:g}")
    histogram.hist(table.measured, bins=41, color="C0")
    for sign in (-1, 1):
        histogram.axvline(sign * typical, color="C3", linewidth=2)
    finish(histogram, "error of y", "inputs", "measured errors, and ± predicted")
    return [page, histogram], (
        f"{format}: errors of y near x = {x:g} are {measured:.3g} in the root mean square, predicted {typical:.3g}, "
        f"ratio {typical / measured:.2f}"
    )


CASES = [(torch.tensor([4.0, -3.0, 1.0, -0.5, 1.0]), torch.tensor([0.1, 0.2, -0.1, 0.3, 0.1]))]
CODING = coding("adjoint_predictor", lambda g, errors: torch.linalg.vector_norm(g * errors), CASES)


# --- The model -----------------------------------------------------------------------------------


@cache
def live() -> Component:
    """The explorer of plans for the embedded checkpoint, from the shipped predictions and measurements."""
    return Component(*shipped.views())
