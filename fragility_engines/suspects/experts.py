"""Suspects of mixtures of experts: how many a token gets, how they are weighed, and how their weights are stored.

The experts of a layer are one module, whose matrices (experts, ..., ...) have three dimensions.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_engines.suspects.outputs import multiplied
from fragility_engines.suspects.suspect import Setting, Suspect, assigning, change, new

ROUTING = "the settings of the router in the engine's configuration, and the kernel that chooses experts"
STORED = "how the engine's loader puts the experts together, and which rank has which"
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
COUNTS = ("top_k", "num_experts_per_tok")
BIASES = ("e_score_correction_bias", "expert_bias")
ORDERS = {  # of the rows of gate and up, which stand in two halves, or in turns
    "the halves in each other's place in gate_up_proj of experts": lambda rows: rows.roll(len(rows) // 2),
    "neighbours in each other's place in gate_up_proj of experts": lambda rows: rows.unflatten(0, (-1, 2)).flip(1),
    "gate_up_proj of experts read in turns, not in halves": lambda rows: rows.unflatten(0, (-1, 2)).T,
    "gate_up_proj of experts read in halves, not in turns": lambda rows: rows.unflatten(0, (2, -1)).T,
}
Mixture = tuple[nn.Module, Any]  # the router's and the experts' parent, and the experts


def mixtures(model: PreTrainedModel, blocks: Sequence[str]) -> list[Mixture]:
    """The mixtures of experts in the ``blocks`` at these paths."""
    found: list[Mixture] = []
    for block in blocks:
        for path, module in model.get_submodule(block).named_modules(prefix=block):
            parent = model.get_submodule(path.rpartition(".")[0])
            if path != block and matrices(module) and any(map(chooses, parent.modules())):
                found.append((parent, module))
    return found


def chooses(module: nn.Module) -> bool:
    """True if ``module`` says how many experts a token gets."""
    return any(hasattr(module, name) for name in COUNTS)


def matrices(module: nn.Module) -> list[str]:
    """The names of the matrices of experts that ``module`` has itself."""
    own = module.named_parameters(recurse=False)
    return [] if isinstance(module, nn.Conv1d) else [name for name, value in own if value.ndim == 3]


def experts(model: PreTrainedModel, blocks: Sequence[str]) -> Iterator[Suspect]:
    """The suspects of the mixtures of experts in ``blocks``."""
    if found := mixtures(model, blocks):
        yield from routed(found)
        yield from stored([module for _, module in found])


def routed(found: Sequence[Mixture]) -> Iterator[Suspect]:
    """Suspects of how experts are chosen and weighed."""
    modules = [*dict.fromkeys(module for parent, _ in found for module in parent.modules())]
    count = min(len(getattr(module, matrices(module)[0])) for _, module in found)

    def having(kind: type, *names: str) -> list[Setting]:
        return [(one, name) for one in modules for name in names if type(getattr(one, name, None)) is kind]

    if chosen := having(int, *COUNTS):
        own = int(getattr(*chosen[0]))
        for other in sorted({1, own - 1, own + 1, 2 * own} - {own}):
            if 0 < other <= count:
                name = f"{other} expert{'s' * (other != 1)} for a token in place of {own}"
                yield Suspect(name, ROUTING, assigning([(*each, other) for each in chosen]))
    if scaled := having(bool, "norm_topk_prob"):
        words = "not scaled to add up to 1" if getattr(*scaled[0]) else "scaled to add up to 1"
        yield Suspect(f"weights of the chosen experts {words}", ROUTING, change(scaled, lambda own: not own))
    if factors := [each for each in having(float, "routed_scaling_factor") if getattr(*each) != 1]:
        yield Suspect("no scaling factor of the chosen experts", ROUTING, assigning([(*each, 1.0) for each in factors]))
    groups = having(int, "n_group", "num_group", "topk_group")
    if any(getattr(*each) > 1 for each in groups):
        yield Suspect("experts chosen without groups", ROUTING, assigning([(*each, 1) for each in groups]))
    if biases := [(one, name) for one in modules for name in router_biases(one)]:
        yield Suspect("no bias of the router", ROUTING, change(biases, cleared))
    if shared := [one for parent, _ in found for name in SHARED if (one := getattr(parent, name, None)) is not None]:
        yield Suspect("no shared expert", ROUTING, partial(multiplied, shared, 0))


def router_biases(module: nn.Module) -> list[str]:
    """The names of the biases that ``module`` has if it is a router: of its scores, or of the choice alone."""
    names = (*BIASES, "bias") if chooses(module) else BIASES
    return [name for name in names if isinstance(bias := getattr(module, name, None), Tensor) and bias.any()]


def cleared(bias: Tensor) -> Tensor:
    """Zeros in place of a ``bias``, which may be a parameter or a buffer."""
    return new(bias * 0) if isinstance(bias, nn.Parameter) else bias * 0


def stored(holders: Sequence[Any]) -> Iterator[Suspect]:
    """Suspects of experts in each other's place, and of gate and up in one matrix."""
    own = [(one, name) for one in holders for name, _ in one.named_parameters(recurse=False)]
    yield Suspect("each expert with the weights of the one after it", STORED, change(own, partial(rolled, 1)))
    counts = {len(getattr(one, matrices(one)[0])) for one in holders}
    if len(counts) == 1 and (count := counts.pop()) > 2 and count % 2 == 0:
        name = "the first half of the experts with the weights of the second, and the reverse"
        yield Suspect(name, STORED, change(own, partial(rolled, count // 2)))
    if axis := axis_of_both(holders[0]):
        both = [(one, name) for one, name in own if name.startswith("gate_up_proj")]
        for name, order in ORDERS.items():
            yield Suspect(name, STORED, change(both, partial(reordered, order, axis)))


def axis_of_both(module: Any) -> int:
    """The dimension of gate and up in the matrix of both; 0 if ``module`` has none."""
    both, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(both, Tensor) and isinstance(down, Tensor)):
        return 0
    fits = ((both.shape[axis], both.shape[3 - axis]) == (2 * down.shape[3 - axis], down.shape[axis]) for axis in (1, 2))
    return next((axis for axis, fit in zip((1, 2), fits) if fit), 0)


def rolled(by: int, value: Tensor) -> nn.Parameter:
    """``value`` (experts, ...) in which each expert has the rows of the expert that is ``by`` places after it."""
    return new(value.roll(-by, 0))


def reordered(order: Callable[[Tensor], Tensor], axis: int, value: Tensor) -> nn.Parameter:
    """The matrix of gate and up, or its bias, with another ``order`` along ``axis``, the last one of a bias."""
    axis = min(axis, value.ndim - 1)
    rows = order(torch.arange(value.shape[axis])).flatten()
    return new(value.index_select(axis, rows.to(value.device)))
