"""Suspects: changes of a model's function that people reported as bugs of engines, each to be run in fp32.

A suspect scores a window with one thing changed: how a text begins, RoPE, the scale of attention, an epsilon, the
temperature, a norm, or a branch of a block that is left out. What this does to the log-probabilities of the tokens is a
direction. ``slopes`` tests how much of an engine's gap lies along it. ``catalogue`` lists them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.padding import context_length

Change = Callable[[PreTrainedModel], Any]  # gives a context in which the model is changed, or another one runs


@dataclass(frozen=True)
class Suspect:
    """A change of how windows are scored.

    ``name`` says what differs, and ``mend`` what to look at. In the context of ``change`` the model has other settings,
    or the context is another model.
    ``prefix`` are tokens put before a window, and ``skip`` are left out at its start; of those before the first scored
    one all but ``kept`` are left out, if given. ``run`` makes its own pass: it gives the logits (T, V) of a window, or
    None. ``before`` is the number of earlier sequences that each sequence sees. ``processed`` changes the logits (T, V)
    after tokens (T,), and ``unit`` divides log-probabilities. Each token is scored ``ahead`` places after the right
    one, and log-probabilities stand ``late`` places after their own; if ``top``, they are those of the most probable
    tokens. A ``slope`` is a small change of a number, along which the gap may have any size. A ``place`` is a branch of
    a block, left out for whatever is wrong in it; places are tried if no other suspect explains a gap. A suspect that
    ``rounds`` explains a gap only in part, as an engine draws other roundings. A suspect ``in_log`` is certain: the
    numbers of the log show it.
    """

    name: str
    mend: str
    change: Change = nullcontext
    prefix: tuple[int, ...] = ()
    skip: int = 0
    kept: int | None = None
    run: "Callable[[PreTrainedModel, Window], Tensor | None] | None" = None
    before: tuple[int, ...] = ()
    processed: Callable[[Tensor, Tensor], Tensor] | None = None
    unit: float = 1.0
    ahead: int = 0
    late: int = 0
    top: bool = False
    slope: bool = False
    place: bool = False
    rounds: bool = False
    in_log: bool = False

    @property
    def same_pass(self) -> bool:
        """True if the logits are those of the model itself, read in another way."""
        whole = not (self.prefix or self.skip) and self.kept is None
        return whole and self.change is nullcontext and self.run is None


class Window(NamedTuple):
    """The ``tokens`` (T,) of a sequence, the position of the ``first`` one scored, and the sequences ``before`` it."""

    tokens: Tensor
    first: int = 1
    before: Sequence[Tensor] = ()


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits (T, V) of one window (T,), in fp32."""
    return model(tokens[None], use_cache=False).logits[0].float()


@torch.no_grad()
def logprobs(model: nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (T - 1,), in fp64, of the tokens after the first of one window (T,)."""
    return read(logits(model, tokens) / temperature, tokens, Suspect("", ""))


def read(z: Tensor, tokens: Tensor, suspect: Suspect, norm: Tensor | None = None) -> Tensor:
    """Log-probabilities (T - 1,) of the tokens after the first, as ``suspect`` reads them from logits ``z`` (T, V).

    ``norm`` is ``log_sum`` of ``z``, if it is known. NaN where there is no number.
    """
    if suspect.processed is not None:
        z, norm = suspect.processed(z, tokens), None
    norm = log_sum(z) if norm is None else norm
    places = torch.arange(len(tokens) - 1, device=z.device) + suspect.ahead
    inside = places.clamp(0, len(tokens) - 1)
    chosen = z[inside].amax(-1) if suspect.top else z[inside, tokens[1:].to(z.device)]
    found = chosen.double() - norm[inside]
    found = found.masked_fill((places < 0) | (places >= len(tokens)), torch.nan) / suspect.unit
    if not suspect.late:
        return found
    moved, gap = found.roll(suspect.late), found.new_tensor(torch.nan)
    return torch.cat([gap[None], moved[1:]]) if suspect.late > 0 else torch.cat([moved[:-1], gap[None]])


def log_sum(z: Tensor) -> Tensor:
    """log sum exp z over the last dimension of fp32 logits, in fp64: sums in fp64, of exponentials in fp32."""
    largest = z.amax(-1, keepdim=True)
    return (z - largest).exp_().sum(-1, dtype=torch.float64).log() + largest[..., 0].double()


def score(model: PreTrainedModel, tokens: Tensor, suspect: Suspect, first: int = 1) -> Tensor:
    """Log-probabilities (T - 1,) of one window (T,) under ``suspect``, as ``scores`` has them."""
    return scores(model, [Window(tokens, first)], suspect)[0]


@torch.no_grad()
def scores(model: PreTrainedModel, windows: Sequence[Window], suspect: Suspect) -> list[Tensor]:
    """Log-probabilities (T - 1,) of ``windows`` under ``suspect``; NaN for tokens that are not scored then.

    These are all tokens of a window that ``suspect`` makes longer than the context, of which it leaves nothing, or for
    which it has no pass. The model is changed once for all.
    """
    found, context = [], context_length(model.config)
    with suspect.change(model) as other:
        runs = model if other is None else other
        for window in windows:
            tokens = window.tokens
            skip = suspect.skip if suspect.kept is None else max(0, window.first - suspect.kept)
            prefix = suspect.prefix if skip or suspect.kept is None else ()
            seen = torch.cat([tokens.new_tensor(prefix), tokens[skip:]])
            z = None
            if len(tokens) - skip >= 2 and len(seen) <= context:
                z = logits(runs, seen) if suspect.run is None else suspect.run(runs, window)
            if z is None:
                found.append(torch.full((len(tokens) - 1,), torch.nan, dtype=torch.float64))
                continue
            values = read(z, seen, suspect)[len(prefix) :]
            found.append(torch.cat([values.new_full((skip,), torch.nan), values]))
    return found


def new(value: Tensor) -> nn.Parameter:
    """``value`` as the parameter of a module."""
    return nn.Parameter(value, requires_grad=False)


Setting = tuple[Any, str]  # an object, and the name of one of its attributes


@contextmanager
def changed(settings: Sequence[Setting], value: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which each of the ``settings`` has another value, made from the one it has."""
    before = [(one, name, getattr(one, name)) for one, name in settings]
    try:
        for one, name, old in before:
            setattr(one, name, value(old))
        yield
    finally:
        for one, name, old in before:
            setattr(one, name, old)


def change(settings: Sequence[Setting], value: Callable[[Any], Any]) -> Change:
    """The change of ``settings`` as a suspect has it."""
    return lambda model: changed(settings, value)


def having(model: nn.Module, name: str, kind: type) -> list[Setting]:
    """The attribute ``name`` of all modules of ``model`` in which it is of ``kind``."""
    return [(module, name) for module in model.modules() if isinstance(getattr(module, name, None), kind)]


@contextmanager
def assigned(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """A context in which attributes have other values: objects, names and values."""
    before = [(one, name, getattr(one, name)) for one, name, _ in values]
    try:
        for one, name, value in values:
            setattr(one, name, value)
        yield
    finally:
        for one, name, old in before:
            setattr(one, name, old)


def assigning(values: Sequence[tuple[Any, str, Any]]) -> Change:
    """The change that assigns ``values``."""
    return lambda model: assigned(values)
