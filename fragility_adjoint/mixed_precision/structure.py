"""The parts of a model that can be kept in fp32, found from its modules and the kernels that ran, and their price."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from fragility_adjoint.internals import can_set_attention
from fragility_core.models import paths
from fragility_core.models.configuration import heads_width, text_config
from fragility_core.models.paths import block_of, embedding_paths, lineage, within
from fragility_numerics.attention import FP32_SCORES, set_attention
from fragility_numerics.lowering import sharing_copy
from fragility_numerics.nested import tensors
from fragility_quantization.operands import rounded_bits, stored_weights, weight_schemes
from fragility_quantization.recipes import Recipe

# The sites that can be kept in fp32, by the names that plans and budgets use.
KEEPABLE_SITES = ("residual", "norms", "embedding", "head", "attention", "mlp", "scores")
ATTENTION = {"attention", "scores", "softmax", "context", "projection"}  # sites of an attention branch
MLP = {"mlp", "router"}
TRIAL_TOKENS = 8
FP32_BITS = 32


@torch.no_grad()
def scores_can_be_kept(model: Any) -> bool:
    """True if the fp32 ``model`` gives the same with the attention FP32_SCORES: tried on a few tokens."""
    if not (can_set_attention(model) and paths.attention_modules(model)):
        return False
    trial: Any = sharing_copy(model).eval()
    tokens = torch.arange(TRIAL_TOKENS, device=model.device)[None] % getattr(text_config(model), "vocab_size", 8)
    try:
        a = next(tensors(trial(tokens, use_cache=False))).float()
        set_attention(trial, FP32_SCORES)
        b = next(tensors(trial(tokens, use_cache=False))).float()
    except (TypeError, ValueError, IndexError):  # the model needs more, or its attention is more than a softmax
        return False
    return bool(torch.linalg.vector_norm(a - b) <= 1e-3 * torch.linalg.vector_norm(a))


class Structure:
    """The units of ``model``. ``ran`` has the paths of the modules that ran in a prediction; only these count.

    ``places`` has one row per place where values are rounded, in the order of their numbers, with the columns of
    ``predictor.Prediction.contributions`` that are the same for all windows.
    """

    def __init__(self, model: nn.Module, places: pd.DataFrame, ran: frozenset[str]):
        self.model, self.places, self.ran = model, places, ran

    @cached_property
    def blocks(self) -> list[str]:
        """Paths of the blocks; those of a vision tower do not run over text."""
        return [path for path in paths.block_paths(self.model) if path in self.ran]

    @cached_property
    def modules(self) -> list[str]:
        """Paths of the modules that own parameters, without embeddings and head."""
        excluded = {*embedding_paths(self.model), *paths.head_paths(self.model)}
        owning = self.ran & set(self.places.module[self.places.kind == "weight"]) - excluded - {""}
        holding = {path for block in self.blocks for path in lineage(block)}  # blocks and all around them
        return [path for path, _ in self.model.named_modules() if path in owning - holding and not paths.is_block(path)]

    @cached_property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """The modules of every site that can be kept in this model; residual stream and scores have none."""
        found = {
            "norms": [path for path in paths.norm_paths(self.model) if path in self.ran],
            "embedding": [path for path in embedding_paths(self.model) if path in self.ran],
            "head": paths.head_paths(self.model),
            "attention": self._branches_of(ATTENTION),
            "mlp": self._branches_of(MLP),
        }
        scores = (self.places.site == "scores").any() and scores_can_be_kept(self.model)
        can = found | {"residual": self.blocks and self.stream_can_be_kept, "scores": scores}
        return {site: tuple(found.get(site, ())) for site in KEEPABLE_SITES if can[site]}

    def _branches_of(self, sites: Collection[str]) -> list[str]:
        """Paths of the children of blocks that have parameters and contain places of ``sites``."""
        parts = filter(None, map(block_of, self.places.module[self.places.site.isin(sites)]))
        paths = dict.fromkeys(f"{path}.{branch}" for path, _, branch in parts if branch)
        branches = {path: self.model.get_submodule(path) for path in paths}
        owning = (path for path, module in branches.items() if not isinstance(module, nn.ModuleList))
        return [path for path in owning if path in self.ran and next(branches[path].parameters(), None) is not None]

    @cached_property
    def stream_sums(self) -> pd.Series:
        """Booleans by place: True for a sum with the residual stream, and for a kernel that makes the stream."""
        site, embeddings = self.places.site, set(embedding_paths(self.model))
        kernel = self.places.kind == "kernel"
        above_blocks = self.places.module.isin([path for block in self.blocks for path in ("", *lineage(block))])
        embedded = site.eq("embedding") & kernel & above_blocks & ~self.places.module.isin(embeddings)
        return self.places.stream | embedded

    @cached_property
    def stream_can_be_kept(self) -> bool:
        """True if the stream begins with an embedding, and every block reads it through norms and then adds to it.

        A stream that a norm replaces (after a block, or before the first one) is rounded there in any case. A
        stream that branches read directly is rounded, too.
        """
        kernels = self.places[self.places.kind == "kernel"]
        if kernels.empty or not embedding_paths(self.model):  # weights alone are rounded, or no embedding
            return False
        before = kernels[: kernels.module.map(block_of).notna().argmax()]
        outputs = kernels[kernels.block_output]
        ended = {block[0] for block in map(block_of, outputs.module) if block}
        read = [any(within(norm, block) for norm in self.stream_norms) for block in self.blocks]
        return {*self.blocks} <= ended and outputs.stream.all() and all(read) and not before.site.eq("norm").any()

    @cached_property
    def stream_norms(self) -> list[str]:
        """Paths of the norms that read the residual stream: those outside of branches.

        A norm at the end of a branch is none of them. Its result is added to the stream at once.
        """
        followed = self.places.site.shift(-1)
        found = []
        for path in paths.norm_paths(self.model):
            rows = self.places.index[(self.places.module == path) & (self.places.kind == "kernel")]
            block = block_of(path)
            outside = block is None or f"{block[0]}.{block[2]}" == path
            if len(rows) and outside and followed[rows[-1]] != "residual":
                found.append(path)
        return found

    @cached_property
    def attention_widths(self) -> dict[str, int]:
        """The width of all heads together (``heads_width``), by the path of each attention branch."""
        modules = self.places.module[self.places.site.isin(ATTENTION)].unique()
        config = text_config(self.model)
        attending = filter(None, map(block_of, modules))
        return {f"{path}.{branch}": heads_width(config, number) for path, number, branch in attending if branch}


class Stored(NamedTuple):
    """A parameter: how many entries, how many bits each in low precision, and the paths of the modules that use it."""

    entries: int
    bits: float
    users: tuple[str, ...]
    linear: bool  # whether it is a matrix that may have a scheme


def stored_parameters(model: nn.Module, recipe: Recipe) -> list[Stored]:
    """All parameters of ``model`` as ``recipe`` stores them; several modules use those that are tied."""
    linear, schemes = {id(p) for p in stored_weights(model, recipe).values()}, weight_schemes(model, recipe)
    users: dict[int, tuple[int, float, list[str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in users:
                bits = rounded_bits(model, f"{path}.{name}", schemes.get(id(parameter)) or recipe.kernels)
                users[id(parameter)] = parameter.numel(), bits, []
            users[id(parameter)][-1].append(path)
    return [Stored(entries, bits, tuple(paths), p in linear) for p, (entries, bits, paths) in users.items()]


def parameter_bytes(parameters: Iterable[Stored], kept: Collection[str]) -> int:
    """Bytes that are added to the low-precision model if the ``parameters`` of the modules ``kept`` are stored in fp32.

    If a module outside of ``kept`` shares a parameter (a tied head), the parameter is stored twice.
    """
    added, dropped = storage(parameters, [kept])
    return round((sum(bits for bits, _ in added) - sum(bits for bits, _ in dropped)) / 8)


def storage(parameters: Iterable[Stored], kept: Sequence[Collection[str]]) -> tuple[list, list]:
    """The arguments ``shared`` and ``saved`` of a knapsack, in bits; decision i keeps the modules ``kept[i]`` in fp32.

    A parameter's fp32 copy is stored once if any of its users is kept. Its low-precision copy is saved if all are.
    """
    keeping: dict[str, list[int]] = {}
    for number, own in enumerate(kept):
        for path in own:
            keeping.setdefault(path, []).append(number)
    copies: dict[tuple[int, ...], float] = defaultdict(int)
    dropped: dict[tuple[tuple[int, ...], ...], float] = defaultdict(int)
    for stored in parameters:
        sets = []
        for user in stored.users:
            steps = user.split(".")
            above = (".".join(steps[:depth]) for depth in range(1, len(steps) + 1))
            sets.append(tuple(sorted({number for path in above for number in keeping.get(path, ())})))
        copies[tuple(sorted({*chain(*sets)}))] += stored.entries * FP32_BITS
        dropped[tuple(sorted({*sets}))] += stored.entries * stored.bits
    shared = [(amount, members) for members, amount in copies.items() if members]
    return shared, [(amount, sets) for sets, amount in dropped.items() if all(sets)]


def flops(structure: Structure, kept: Collection[str], scores: bool, length: int) -> int:
    """Floating-point operations per token that move from the format to fp32, at windows of ``length`` tokens T.

    A matrix of n entries counts 2 n, in a mixture those of all experts. An attention branch that is kept counts 4 T d
    more, for query times key and for probabilities times value, d the width of all heads together. For ``scores`` each
    other branch counts 2 T d.
    Masked scores count, elementwise kernels do not. d, which may differ by layer, is 0 if no configuration gives it.
    """
    owners = [m for path in kept for m in structure.model.get_submodule(path).modules()]
    matrices = (m.parameters(recurse=False) for m in owners if not isinstance(m, nn.Embedding))
    weights = sum(p.numel() for parameters in matrices for p in parameters if p.ndim >= 2)
    layers = structure.attention_widths
    inside = sum(width for layer, width in layers.items() if any(within(layer, path) for path in kept))
    others = (sum(layers.values()) - inside) * scores
    return 2 * weights + (4 * inside + 2 * others) * length
