"""Suspects of scales: layers whose output, without its bias, an engine has too large or too small by one factor.

A wrong scale of quantized weights is one, or a norm that is loaded wrongly. There are hundreds in a model, too many to
try each. A router, whose output is no tensor, keeps its scale. ``comparison.scoring`` finds the few that are in
line with a gap.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.norms import known_norm
from fragility_core.models.paths import block_of, is_norm
from fragility_engines.suspects.suspect import Suspect

STORED = ".weight"  # ends the path of a norm's stored weight, where the norm multiplies by 1 + weight
HEAT = "the temperature, which does the same, and "
MEND = "the weights there and their scales: how they are quantized, converted and loaded"


@dataclass(frozen=True)
class Scale:
    """The scale of what ``layers`` give, each a ``part`` of a model; ``name`` says which, ``mend`` what to look at."""

    name: str
    layers: tuple[str, ...]
    mend: str = MEND

    def at(self, factor: float) -> Suspect:
        """The suspect that an engine has ``factor`` times this scale."""
        name = f"the scale of {self.name}, {factor:.3g} times its own"
        return Suspect(name, self.mend, partial(scaled, self.layers, factor - 1), slope=True)


def scales(model: PreTrainedModel) -> list[Scale]:
    """The scales of each layer that has weights of its own, of all norms of a block, and of a layer in all blocks.

    A norm that multiplies by 1 + weight has two: that of what it gives, and that of its stored weight.
    """
    layers = {path: module for path, module in model.named_modules() if [*module.parameters(recurse=False)]}
    parts = {path: path for path in layers}
    parts |= {f"{path}{STORED}": f"the stored weight of {path}" for path, norm in layers.items() if offset(norm)}
    groups: dict[str, list[str]] = {}
    for part in parts:
        if found := block_of(part):
            groups.setdefault(f"{part.removeprefix(found[0])[1:]} of all blocks", []).append(part)
            if is_norm(layers[part.removesuffix(STORED)]):
                stored = "stored weights of the " * part.endswith(STORED)
                groups.setdefault(f"the {stored}norms of {found[0]}", []).append(part)
    head = model.get_output_embeddings()
    return [
        *(Scale(name, (part,), HEAT * (layers.get(part) is head) + MEND) for part, name in parts.items()),
        *(Scale(name, tuple(found)) for name, found in groups.items() if len(found) > 1),
    ]


def offset(layer: nn.Module) -> float:
    """The number that a norm adds to its stored weight before it multiplies; 0 for other layers."""
    known = known_norm(layer)
    return 0.0 if known is None else known.offset


def part_of(model: nn.Module, path: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The layer at ``path``, and the function that gives the part of its output which grows with the scale."""
    layer: Any = model.get_submodule(path.removesuffix(STORED))
    if not path.endswith(STORED):
        return layer, partial(unbiased, layer)
    weight = layer.weight.detach()
    share = (weight / (weight + offset(layer))).nan_to_num(0.0, 0.0, 0.0)
    return layer, lambda output: output * share


def unbiased(layer: nn.Module, output: Tensor) -> Tensor:
    """The ``output`` (..., d) of a ``layer`` less its bias (d,), if it has one."""
    bias = getattr(layer, "bias", None)
    return output - bias if isinstance(bias, Tensor) and bias.shape == output.shape[-1:] else output


@contextmanager
def scaled(layers: Sequence[str], by: float, model: PreTrainedModel) -> Iterator[None]:
    """A context in which each ``part_of`` the ``model`` at the paths ``layers`` is larger ``by`` a share."""

    def larger(part: Callable[[Tensor], Tensor], layer: nn.Module, args: tuple, output: Any) -> Any:
        return output + by * part(output) if isinstance(output, Tensor) else output

    with ExitStack() as stack:
        for layer, part in (part_of(model, path) for path in layers):
            stack.callback(layer.register_forward_hook(partial(larger, part)).remove)
        yield
