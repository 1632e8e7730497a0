"""Numbers of a model's settings that may differ in an engine, by any amount: epsilon, scales, RoPE, a window.

``catalogue`` tries the usual values as suspects. Where none of them explains a gap, ``comparison.fitting`` looks for
the value that does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel

from fragility_core.models.norms import epsilon_name
from fragility_core.models.paths import attention_modules
from fragility_engines.suspects.rotary import divided, frequencies, rebased
from fragility_engines.suspects.suspect import Setting, Suspect, change, having
from fragility_engines.suspects.windows import LOOK, fully_attending, kinds, seeing, sliding, without_first

EPSILONS = tuple(10.0**-power for power in range(8, -1, -1))
SCALES = (0.25, 0.5, 0.7, 1.4, 2.0, 4.0)  # times the scale of attention
BASES = tuple(10.0 ** (quarter / 4) for quarter in (-8, -6, -4, -2, -1, 1, 2, 4, 6, 8))  # times RoPE's base
DIVISORS = (0.5, 0.7, 1.4, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0)  # of RoPE's positions
FIRST = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens
WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens


@dataclass(frozen=True)
class Number:
    """A number of the model, such as a norm's epsilon, that an engine may have set to another value.

    ``name`` has a place for its value, and ``mend`` says what to look at. ``own`` is the model's value, or 1 for a
    factor. The usual ``values`` are tried first. ``change`` gives the change of a model for a value, or of its logits
    if it ``processes`` these. A ``whole`` number is an integer.
    """

    name: str
    mend: str
    own: float
    values: tuple[float, ...]
    change: Callable[[Any], Any]
    whole: bool = False
    processes: bool = False

    @cached_property
    def usual(self) -> list[Suspect]:
        """The suspects of its ``values``."""
        return [self.at(value) for value in self.values]

    def at(self, value: float) -> Suspect:
        """The suspect that the number has this ``value``."""
        value = round(value) if self.whole else value
        shown = value if self.whole else f"{value:.3g}"
        how = {"processed" if self.processes else "change": self.change(value)}
        return Suspect(self.name.format(shown), self.mend, **how)


def product(factor: float, own: float) -> float:
    """``own`` times ``factor``."""
    return own * factor


def factor(name: str, mend: str, settings: Sequence[Setting]) -> Number:
    """The number that multiplies all ``settings``."""
    return Number(
        f"{name}, {{}} times its own", mend, 1.0, SCALES, lambda factor: change(settings, partial(product, factor))
    )


def scales_of_attention(model: PreTrainedModel) -> dict[str, list[Setting]]:
    """The scales of attention, in words and as attributes: of all layers, and of each type where there are several."""
    scales, found = having(model, "scaling", float), dict[str, list[Setting]]()
    types = {id(module): kind for module, kind in kinds(model)}
    for scale in scales:
        for words in ("attention", f"{types.get(id(scale[0]), 'other attention').replace('_', ' ')}"):
            found.setdefault(words, []).append(scale)
    return {words: own for words, own in found.items() if own is found["attention"] or len(own) < len(scales)}


def multipliers_of(model: PreTrainedModel) -> dict[str, list[Setting]]:
    """The numbers by which modules multiply what passes, such as Granite's ``residual_multiplier``, by their names."""
    names = {name for module in model.modules() for name in vars(module) if name.endswith("multiplier")}
    found = {name: having(model, name, float) for name in sorted(names)}
    return {name: settings for name, settings in found.items() if settings}


def numbers(model: PreTrainedModel, longest: int) -> Iterator[Number]:
    """The numbers that ``model`` has, for sequences of at most ``longest`` tokens."""
    norms = [(module, str(epsilon_name(module))) for module in model.modules() if epsilon_name(module)]
    if norms:
        own = max(1e-12, *(getattr(*norm) for norm in norms))  # 0 has no logarithm
        yield Number(
            "epsilon {} of norms", "rms_norm_eps or layer_norm_eps", own, EPSILONS,
            lambda value: change(norms, lambda _: value),
        )  # fmt: skip
    for words, scales in scales_of_attention(model).items():
        yield factor(f"another scale of {words}", "1 / sqrt(head_dim), and what multiplies it", scales)
    for name, multipliers in multipliers_of(model).items():
        yield factor(f"another {name.replace('_', ' ')}", f"{name} of the engine's configuration", multipliers)
    if found := frequencies(model):
        yield Number(
            "RoPE base {} times its own", "rope_theta of the engine's configuration", 1.0, BASES,
            lambda factor: change(found, partial(rebased, factor)),
        )  # fmt: skip
        yield Number(
            "RoPE positions divided by {}", "rope_scaling of the engine's configuration", 1.0, DIVISORS,
            lambda factor: change(found, partial(divided, factor)),
        )  # fmt: skip
    if counts := tuple(count for count in FIRST if count < longest // 2 and attention_modules(model)):
        yield Number(
            "the first {} tokens not seen by later ones", "what the cache drops or overwrites, and what a mask hides",
            0.5, counts, lambda count: partial(without_first, count), whole=True,
        )  # fmt: skip
    full = fully_attending(model)
    if sizes := tuple(size for size in WINDOWS if size < longest and full):
        yield Number(
            "a window of {} in place of full attention", "the cache of keys and values, and its blocks", longest, sizes,
            lambda size: partial(seeing, full, size), whole=True,
        )  # fmt: skip
    window, having_it = sliding(model)
    others = {*WINDOWS, window // 4, window // 2, window - 1, window + 1} - {window}
    if narrow := tuple(sorted(size for size in others if 1 < size < longest and having_it)):
        yield Number(
            f"a window of {{}} in place of {window}", LOOK, window, narrow,
            lambda size: partial(seeing, having_it, size), whole=True,
        )  # fmt: skip
