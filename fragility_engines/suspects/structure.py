"""Suspects of what all blocks have in common: biases, matrices in each other's place, norms, activations, heads.

They are tried where no setting explains a gap: each is a mistake of the engine's own code, or of what loads weights.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from fragility_core.models.norms import known_norm
from fragility_core.models.paths import (
    attention_modules,
    block_paths,
    embedding_paths,
    is_linear,
    is_norm,
    norm_paths,
)
from fragility_engines.suspects.experts import experts
from fragility_engines.suspects.outputs import again, multiplied, passing
from fragility_engines.suspects.suspect import Suspect, assigned, assigning, change, having, new
from fragility_engines.suspects.windows import masks

LOADED = "what the engine's loader does with these weights, and the names that it knows"
ALL = " of all blocks"
CODE = "the engine's code of this model"
RANKS = 2, 4, 8  # that share a layer
ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_pytorch_tanh": "GELU by tanh", "relu": "ReLU"}
ACTIVATIONS["quick_gelu"] = "GELU by a sigmoid (quick_gelu)"
Values = list[tuple[Any, str, Any]]  # modules, names of parameters, and other values


def structure(model: PreTrainedModel) -> list[Suspect]:
    """The suspects of what the blocks of ``model`` have in common."""
    return [
        *inside_blocks(model, block_paths(model)), *norms(outside(model)), *twice(outside(model)), *masks(model),
        *activations(model), *positions(model), *grouped(model), *embedded(model), *order(model), *split(model),
    ]  # fmt: skip


def inside_blocks(model: PreTrainedModel, blocks: Sequence[str]) -> list[Suspect]:
    """The suspects of weights inside of the ``blocks`` at these paths."""
    groups = norms_inside(model, blocks)
    weights = [*biases(model, blocks), *swaps(model, blocks), *experts(model, blocks)]
    return [*weights, *norms(groups), *norm_swaps(model, blocks)]


def in_one_block(model: PreTrainedModel, path: str, names: Collection[str] | None = None) -> list[Suspect]:
    """The suspects of weights inside of the block at ``path`` alone: those with ``names`` among ``inside_blocks``."""
    return [
        replace(suspect, name=f"{suspect.name.replace(ALL, '')} in {path}")
        for suspect in inside_blocks(model, [path])
        if names is None or suspect.name in names
    ]


def around(model: PreTrainedModel, path: str) -> list[Suspect]:
    """The suspects of the block at ``path`` by itself, and of the weights of its neighbours."""
    paths, own = block_paths(model), in_one_block(model, path)
    at = paths.index(path)
    for other in (paths[beside] for beside in (at - 1, at + 1) if 0 <= beside < len(paths)):
        one, two = model.get_submodule(path), model.get_submodule(other)
        if shapes(one) == shapes(two):
            own.append(Suspect(f"{path} with the weights of {other}", LOADED, assigning(taken(one, two))))
            both = [*taken(one, two), *taken(two, one)]
            own.append(Suspect(f"{path} and {other} in each other's place", LOADED, assigning(both)))
    return own


def runs(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of blocks that an engine leaves out or runs twice."""
    for path in block_paths(model):
        block = [model.get_submodule(path)]
        yield Suspect(f"{path} left out", CODE, partial(passing, block))
        yield Suspect(f"{path} run twice", CODE, partial(again, block))


def inside(model: PreTrainedModel, blocks: Sequence[str], kind: Callable[[nn.Module], bool]) -> dict[str, list[Any]]:
    """The modules of a ``kind`` in ``blocks``, by their path in the block."""
    found: dict[str, list[Any]] = {}
    for path in blocks:
        for name, module in model.get_submodule(path).named_modules():
            if name and kind(module):
                found.setdefault(name, []).append(module)
    return found


def families(model: PreTrainedModel, blocks: Sequence[str]) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    """The modules in ``blocks`` that hold linear layers: a path in the block, names of layers, the layers of each."""
    found: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for path in blocks:
        for name, module in model.get_submodule(path).named_modules():
            layers = dict(linear_children(module))
            if len(layers) > 1:
                found.setdefault((name, tuple(layers)), []).append(layers)
    return [(name, [*keys], holders) for (name, keys), holders in found.items()]


def linear_children(module: nn.Module) -> list[tuple[str, Any]]:
    """The linear layers of ``module`` by name, the one that gives its output last: Phi-3 names it first."""
    found = [each for each in module.named_children() if is_linear(each[1])]
    return sorted(found, key=lambda each: each[0] == "o_proj")


def biases(model: PreTrainedModel, blocks: Sequence[str]) -> Iterator[Suspect]:
    """Suspects of biases that an engine leaves out: of a branch's first layers, of its last one, of all, of norms."""
    groups: dict[str, list[Any]] = {}
    for path, names, holders in families(model, blocks):
        for part in dict.fromkeys([tuple(names[:-1]), *((name,) for name in names)]):
            groups[f"biases of {' and '.join(part)} in {path}"] = [each[name] for each in holders for name in part]
    groups["biases of all linear layers"] = [one for each in inside(model, blocks, is_linear).values() for one in each]
    if blocks == block_paths(model):
        groups["biases of all norms"] = [model.get_submodule(path) for path in norm_paths(model)]
    for name, modules in groups.items():
        if having_bias := [(one, "bias") for one in modules if getattr(one, "bias", None) is not None]:
            yield Suspect(f"no {name}", LOADED, change(having_bias, lambda bias: new(torch.zeros_like(bias))))


def split(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of a bias that each rank adds to its part of the last layer of a branch, whose parts are then added."""
    last = [each[names[-1]] for _, names, holders in families(model, block_paths(model)) for each in holders]
    own = [(layer, "bias") for layer in last if getattr(layer, "bias", None) is not None]
    look = "which rank adds the bias of a layer whose inputs are split"
    for count in RANKS if own else ():
        name = f"biases of the last layers of branches added {count} times, as by each of {count} ranks"
        yield Suspect(name, look, change(own, partial(times, count)))


def times(count: int, bias: Tensor) -> nn.Parameter:
    """``count`` times a ``bias``."""
    return new(count * bias)


def swaps(model: PreTrainedModel, blocks: Sequence[str]) -> Iterator[Suspect]:
    """Suspects of matrices, or parts of a fused one, in each other's place."""
    for _, names, holders in families(model, blocks):
        for one, other in combinations(names[:-1], 2):
            if all(each[one].weight.shape == each[other].weight.shape for each in holders):
                values = [value for each in holders for value in exchanged(each[one], each[other])]
                yield Suspect(f"{one} and {other} in each other's place", LOADED, assigning(values))
        if len(names) == 2:
            for words, order in orders(model, *holders[0].values()):
                layers = [each[names[0]] for each in holders]
                yield Suspect(f"{words} {names[0]}", LOADED, partial(rearranged, layers, order))


def exchanged(one: Any, other: Any) -> Values:
    """The parameters of two modules, each the other's."""
    names = [name for name, value in one.named_parameters() if getattr(other, name, None) is not None]
    return [value for name in names for value in ((one, name, getattr(other, name)), (other, name, getattr(one, name)))]


def orders(model: PreTrainedModel, first: Any, last: Any) -> Iterator[tuple[str, Tensor]]:
    """Other orders of the outputs of a fused layer ``first``, of which a part, or a combination, enters ``last``."""
    width, taken = rows_of(first.weight, first), rows_of(last.weight, last, inputs=True)
    places, more = torch.arange(width), width - taken
    if more == taken:
        yield "the halves in each other's place in", places.roll(taken)
    if more > 0 and more % 2 == 0:
        yield "keys and values in each other's place in", torch.cat([places[:taken], places[taken:].roll(more // 2)])
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
    if more == 2 * taken and heads:
        yield "queries, keys and values head by head, not each together, in", mixed(places, 3, heads)
        yield "queries, keys and values each together, not head by head, in", mixed(places, heads, 3)


def mixed(places: Tensor, outer: int, inner: int) -> Tensor:
    """``places``, ``outer`` groups of ``inner`` parts each, with equal parts of all groups put together."""
    return places.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten()


def rows_of(weight: Tensor, module: nn.Module, inputs: bool = False) -> int:
    """The number of outputs, or of ``inputs``, of a linear ``module``."""
    return weight.shape[int(isinstance(module, Conv1D) != inputs)]


def arranged(module: Any, order: Tensor, inputs: bool = False) -> Values:
    """The parameters of a linear ``module`` with outputs, or ``inputs``, in another ``order``."""
    axis = int(isinstance(module, Conv1D) != inputs)
    found: Values = [(module, "weight", new(module.weight.index_select(axis, order.to(module.weight.device))))]
    if module.bias is not None and not inputs:
        found.append((module, "bias", new(module.bias[order.to(module.bias.device)])))
    return found


@contextmanager
def rearranged(layers: Sequence[Any], order: Tensor, model: nn.Module) -> Iterator[None]:
    """A context in which the outputs of linear ``layers`` are in another ``order``; the copied weights last as long."""
    with assigned([value for layer in layers for value in arranged(layer, order)]):
        yield


def norms_inside(model: PreTrainedModel, blocks: Sequence[str]) -> dict[str, list[Any]]:
    """The norms in ``blocks`` by name: each by itself, those that one module holds, and those behind branches."""
    by_name: dict[str, list[Any]] = {}
    for name, modules in inside(model, blocks, is_norm).items():  # StableLM has a norm for each head
        by_name.setdefault(re.sub(r"(\.norms)?\.\d+$", "", name), []).extend(modules)
    groups = {name + ALL: modules for name, modules in by_name.items()}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in by_name):
        names = [name for name in by_name if name.rpartition(".")[0] == path and (path or name.startswith("post_"))]
        if len(names) > 1:
            groups[" and ".join(names) + ALL] = [module for name in names for module in by_name[name]]
    return groups


def outside(model: PreTrainedModel) -> dict[str, list[Any]]:
    """The norms outside of blocks by path, each alone in a list."""
    within = {id(module) for found in inside(model, block_paths(model), is_norm).values() for module in found}
    found = {path: [model.get_submodule(path)] for path in norm_paths(model)}
    return {path: norm for path, norm in found.items() if id(norm[0]) not in within}


def norm_swaps(model: PreTrainedModel, blocks: Sequence[str]) -> Iterator[Suspect]:
    """Suspects of two norms of a block that have each other's weights."""
    for one, other in combinations(inside(model, blocks, is_norm).items(), 2):
        pairs = [*zip(one[1], other[1])]
        if len(one[1]) == len(other[1]) and all(shapes(a) == shapes(b) for a, b in pairs):
            values = [value for a, b in pairs for value in (*taken(a, b), *taken(b, a))]
            yield Suspect(f"{one[0]} and {other[0]} in each other's place", LOADED, assigning(values))


def norms(groups: Mapping[str, Sequence[Any]]) -> Iterator[Suspect]:
    """Suspects of ``groups`` of norms that an engine leaves out, or whose weights it does not load."""
    for name, modules in groups.items():
        yield Suspect(f"no {name}", CODE, partial(passing, modules))
        values = [value for module in modules for value in fresh(module)]
        yield Suspect(f"{name} without the weights of the file", LOADED, assigning(values))


def twice(groups: Mapping[str, Sequence[Any]]) -> Iterator[Suspect]:
    """Suspects of ``groups`` of norms that an engine applies once more to what they give."""
    for name, modules in groups.items():
        yield Suspect(f"{name} applied twice", CODE, partial(again, modules))


def order(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of blocks that have the weights of others, as a loader counts or sorts them."""
    blocks: list[nn.Module] = [model.get_submodule(path) for path in block_paths(model)]
    count = len(blocks)
    orders = {
        "blocks in the order of their numbers as text (0, 1, 10, 2)": sorted(range(count), key=str),
        "each block with the weights of the one after it": [*range(1, count), count - 1],
        "each block with the weights of the one before it": [0, *range(count - 1)],
    }
    for name, numbers in orders.items():
        pairs = [(blocks[at], blocks[number]) for at, number in enumerate(numbers) if at != number]
        if pairs and all(shapes(one) == shapes(other) for one, other in pairs):
            yield Suspect(name, LOADED, assigning([value for pair in pairs for value in taken(*pair)]))


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the parameters of ``module``, by name."""
    return {name: value.shape for name, value in module.named_parameters()}


def taken(one: nn.Module, other: nn.Module) -> Values:
    """The parameters of ``other`` as values for the parameters of ``one``."""
    theirs = dict(other.named_parameters())
    holders = [(name, *name.rpartition(".")[::2]) for name in shapes(one)]
    return [(one.get_submodule(path), last, theirs[name]) for name, path, last in holders]


def fresh(norm: Any) -> Values:
    """The parameters of a ``norm`` as they are before a file is loaded."""
    known = known_norm(norm)
    one = 1.0 - (known.offset if known is not None else 0.0)
    start = {name: torch.full_like(value, one if name == "weight" else 0.0) for name, value in norm.named_parameters()}
    return [(norm, name, new(value)) for name, value in start.items()]


def activations(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects that the MLPs have another activation: one for each of ACTIVATIONS that differs from the model's."""
    names = ("act_fn", "act", "activation_fn", "activation")
    settings = [found for name in names for found in having(model, name, nn.Module) if takes_one(getattr(*found))]
    x = torch.linspace(-4, 4, 33)
    for name, words in ACTIVATIONS.items():
        if settings and not torch.allclose(getattr(*settings[0])(x), ACT2FN[name](x), atol=1e-6):
            yield Suspect(
                f"{words} in place of the model's activation", "hidden_act or activation_function",
                assigning([(*setting, ACT2FN[name]) for setting in settings]),
            )  # fmt: skip


def takes_one(module: nn.Module) -> bool:
    """True if a call of ``module`` takes one value, and no gate beside it."""
    return len(inspect.signature(module.forward).parameters) == 1


def positions(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of the place from which positions are counted, where an embedding has one vector for each."""
    own = [model.get_submodule(path) for path in embedding_paths(model)]
    settings = [(one, "weight") for one in own if one is not model.get_input_embeddings()]
    look = "the position of the first token, and of tokens behind padding"
    for first in (1, 2, -1) if settings else ():
        yield Suspect(f"positions moved by {first}", look, change(settings, partial(moved, first)))


def moved(first: int, weight: Tensor) -> nn.Parameter:
    """The vectors of positions that begin at ``first``."""
    return new(weight.roll(-first, 0))


APART = {"q_layernorm", "lambda_q1"}  # of attention that has something else for each head, or heads in two halves


def grouped(model: PreTrainedModel) -> Iterator[Suspect]:
    """The suspect of query heads that share keys and values with others, where several share them."""
    values: Values = []
    for module in attention_modules(model):
        layers: list[Any] = [child for _, child in linear_children(module)]
        groups, size = getattr(module, "num_key_value_groups", 1), getattr(module, "head_dim", None)
        if len(layers) < 2 or groups < 2 or not size:
            continue
        width, rows = rows_of(layers[-1].weight, layers[-1], inputs=True), rows_of(layers[0].weight, layers[0])
        if width > rows or (len(layers) > 2 and rows > width) or APART & {*dir(module)}:  # of low rank, or with gates
            continue
        heads = mixed(torch.arange(width), groups, width // size // groups)
        rest = torch.arange(width, rows)  # keys and values of a fused layer
        values += [*arranged(layers[0], torch.cat([heads, rest])), *arranged(layers[-1], heads, inputs=True)]
        norm, sinks = getattr(getattr(module, "q_norm", None), "weight", None), getattr(module, "sinks", None)
        if norm is not None and norm.numel() == width:
            values.append((module.q_norm, "weight", new(norm.flatten()[heads.to(norm.device)].view(norm.shape))))
        if sinks is not None:
            values.append((module, "sinks", new(sinks[(heads[::size] // size).to(sinks.device)])))
    if values:
        name = "query heads that take turns at the heads of keys (repeat, not repeat_interleave)"
        yield Suspect(name, "how the engine repeats heads of keys and values", assigning(values))


def embedded(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of the scale of embeddings, by the root of their width."""
    embedding: Any = model.get_input_embeddings()
    root = float(embedding.weight.shape[-1] ** 0.5)
    for factor, words in ((root, "multiplied"), (1 / root, "divided")):
        yield Suspect(
            f"embeddings {words} by the root of their width",
            "the scale of embeddings",
            partial(multiplied, [embedding], factor),
        )
