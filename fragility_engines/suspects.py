"""Suspects: changes of a model's function that people reported as bugs of engines, each to be run in fp32.

A suspect scores a window with one thing changed: how a text begins, RoPE, the scale of attention, an epsilon, the
temperature, or a branch of a block that is left out. What this does to the log-probabilities of the tokens is a
direction. ``slopes`` tests how much of an engine's gap lies along it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.norms import epsilon_name
from fragility_core.models.paths import branch_paths

Change = Callable[[PreTrainedModel], Any]  # gives a context in which the model is changed


@dataclass(frozen=True)
class Suspect:
    """A change of how windows are scored.

    ``name`` says what differs, and ``mend`` what to look at. In the context of ``change`` the model has other settings.
    ``prefix`` are tokens put before a window, and ``skip`` are left out at its start; ``temperature`` divides logits. A
    ``slope`` is a small change of a number, along which the gap may have any size. A ``branch`` of a block is left out,
    for whatever is wrong in it.
    """

    name: str
    mend: str
    change: Change = nullcontext
    prefix: tuple[int, ...] = ()
    skip: int = 0
    temperature: float = 1.0
    slope: bool = False
    branch: bool = False


@torch.no_grad()
def logprobs(model: nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (T - 1,), in fp64, of the tokens after the first of one window (T,)."""
    z = model(tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    return z.gather(-1, tokens[1:, None].to(z.device))[:, 0] - z.logsumexp(-1)


def score(model: PreTrainedModel, tokens: Tensor, suspect: Suspect) -> Tensor:
    """Log-probabilities (T - 1,) of one window (T,) under ``suspect``; NaN for tokens that are not scored then."""
    seen = torch.cat([tokens.new_tensor(suspect.prefix), tokens[suspect.skip :]])
    with suspect.change(model):
        found = logprobs(model, seen, suspect.temperature)
    found = found[len(suspect.prefix) :]
    return torch.cat([found.new_full((suspect.skip,), torch.nan), found])


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


def beginnings(model: PreTrainedModel, first: int, bos: int | None) -> Iterator[Suspect]:
    """Suspects of how a window begins, whose first token is ``first``."""
    if bos is None:
        return
    look = "what template and tokenizer put in front of a text"
    if first == bos:
        yield Suspect("a second BOS token", look, prefix=(bos,))
        yield Suspect("no BOS token", look, skip=1)
    else:
        yield Suspect("a BOS token that the tokens do not show", look, prefix=(bos,))


def rotary(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of rotary positions: another base, linear scaling, a narrow dtype, another order of the pairs."""
    found = [
        (module, name)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    if not found:
        return
    bases = sorted({base_of(getattr(*each)) for each in found})
    where = f"in place of {bases[0]:g}" if len(bases) == 1 else "in all layers"
    others = {1e4, 1e5, 5e5, 1e6} | {bases[0] * factor for factor in (0.1, 0.2, 0.5, 2, 5, 10) if len(bases) == 1}
    for base in sorted(others - {*bases} if len(bases) == 1 else others):
        if base > 100:
            yield Suspect(
                f"RoPE base {base:g} {where}", "rope_theta of the engine's configuration",
                change(found, partial(with_base, base)),
            )  # fmt: skip
    for factor in (2.0, 8.0):
        yield Suspect(
            f"RoPE positions divided by {factor:g}", "rope_scaling of the engine's configuration",
            change(found, partial(divided, factor)),
        )  # fmt: skip
    yield Suspect(
        "RoPE frequencies in bf16", "the dtype in which the engine keeps RoPE",
        change(found, lambda x: x.bfloat16().float()),
    )  # fmt: skip
    if having(model, "q_proj", nn.Module):
        yield Suspect("RoPE pairs in another order", "the permutation of query and key heads when converted", reordered)


def base_of(frequencies: Tensor) -> float:
    """The base of ``frequencies`` (d / 2,), each its power -2 i / d; three significant digits."""
    return float(f"{float(frequencies[0] / frequencies[1]) ** len(frequencies):.3g}")


def divided(factor: float, frequencies: Tensor) -> Tensor:
    """``frequencies`` for positions divided by ``factor``."""
    return frequencies / factor


def with_base(base: float, frequencies: Tensor) -> Tensor:
    """``frequencies`` (d / 2,) with another ``base``, and the scale that they have."""
    steps = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
    return frequencies[0] * base**-steps


@contextmanager
def reordered(model: PreTrainedModel) -> Iterator[None]:
    """A context in which query and key heads have RoPE's pairs in another order (``interleave``)."""
    before = interleave(model)
    try:
        yield
    finally:
        for x, data in before:
            x.data = data


def interleave(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """Interleave RoPE's pairs in the rows of query and key heads, as GGUF files have them; return what was there."""
    before = []
    for module, _ in having(model, "q_proj", nn.Module):
        for x in (x for projection in (module.q_proj, module.k_proj) for x in projection.parameters()):
            before.append((x, x.data))
            x.data = x.data.unflatten(0, (-1, 2, module.head_dim // 2)).transpose(1, 2).reshape(x.shape)
    return before


def replaced(value: float, before: float) -> float:
    """``value``, whatever was there."""
    return value


def settings(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of single numbers: epsilon of norms, the scale of attention, softcaps, the temperature."""
    norms = [(module, str(epsilon_name(module))) for module in model.modules() if epsilon_name(module)]
    known = sorted({getattr(*each) for each in norms})
    for epsilon in (1e-2, 1e-3, 1e-5, 1e-6, 1e-12):
        if known and epsilon not in known:
            yield Suspect(
                f"epsilon {epsilon:g} of norms in place of {known[0]:g}", "rms_norm_eps or layer_norm_eps",
                change(norms, partial(replaced, epsilon)),
            )  # fmt: skip
    if scales := having(model, "scaling", float):
        yield Suspect(
            "another scale of attention", "1 / sqrt(head_dim), and what multiplies it",
            change(scales, lambda scale: 1.01 * scale), slope=True,
        )  # fmt: skip
    if caps := having(model, "attn_logit_softcapping", float):
        yield Suspect("no softcap of attention", "kernels of attention without softcap", change(caps, lambda _: None))
    config = model.config.get_text_config()
    if isinstance(getattr(config, "final_logit_softcapping", None), float):
        cap = [(config, "final_logit_softcapping")]
        yield Suspect("no softcap of logits", "final_logit_softcapping", change(cap, lambda _: None))
    yield Suspect("another temperature", "temperature, or a scale of logits", temperature=1.01, slope=True)


def branches(model: PreTrainedModel) -> list[Suspect]:
    """A suspect for each branch of each block, which its change leaves out, for whatever is wrong in it."""
    mend = "the weights of this branch, the order of its heads, and the kernel that the engine runs for it"
    return [Suspect(f"something in {path}", mend, partial(without, path), branch=True) for path in branch_paths(model)]


@contextmanager
def without(path: str, model: PreTrainedModel) -> Iterator[None]:
    """A context in which the branch at ``path`` adds nothing to the residual stream."""

    def nothing(module: nn.Module, args: tuple, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    handle = model.get_submodule(path).register_forward_hook(nothing)
    try:
        yield
    finally:
        handle.remove()


def suspects(model: PreTrainedModel, first: int, bos: int | None = None) -> list[Suspect]:
    """All suspects that ``model`` can have, for windows that begin with token ``first``."""
    return [*beginnings(model, first, bos), *rotary(model), *settings(model)]
