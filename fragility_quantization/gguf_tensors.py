"""The tensors of a model as a GGUF file has them: one by one, with a type and a size each."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from fragility_core.models.paths import block_of
from fragility_numerics.formats import NumberFormat
from fragility_quantization.ggml import GgmlType
from fragility_quantization.gguf_mixes import tensor_names
from fragility_quantization.operands import owner, rounded_bits, row_width, stored_weights, with_known_layers
from fragility_quantization.recipes import Operands, Recipe

UNQUANTIZED = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def tensor_groups(model: nn.Module, recipe: Recipe) -> list[tuple[str, ...]]:
    """Paths of the layers that a ``recipe`` of GGUF rounds, each alone; a tied head and its embedding are one."""
    tensors: dict[int | str, list[str]] = {}
    for path, weight in stored_weights(model, with_known_layers(model, recipe)).items():
        name = owner(path)
        tensors.setdefault(id(weight) if block_of(name) is None else name, []).append(name)
    return [tuple(dict.fromkeys(paths)) for paths in tensors.values()]


def with_shared(model: nn.Module, groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """``groups`` of paths of layers; those that have a parameter of ``model`` in common are one."""
    merged: list[tuple[set[int], tuple[str, ...]]] = []
    for paths in groups:
        own = {id(x) for path in paths for x in model.get_submodule(path).parameters()}
        sharing = [each for each in merged if each[0] & own]
        merged = [each for each in merged if each not in sharing]
        own, paths = own.union(*(each[0] for each in sharing)), (*(p for each in sharing for p in each[1]), *paths)
        merged.append((own, paths))
    return [paths for _, paths in merged]


def group_bits(
    model: nn.Module, groups: Sequence[tuple[str, ...]], recipes: Sequence[Recipe], known: Recipe
) -> np.ndarray:  # fmt: skip
    """Bits (groups, recipes) of the matrices of each group in each recipe, with scales, each tied matrix once."""
    weights: dict[str, list[str]] = {}
    for path in stored_weights(model, known):
        weights.setdefault(owner(path), []).append(path)
    rows = []
    for group in groups:
        matrices = {id(model.get_parameter(path)): path for layer in group for path in weights.get(layer, ())}
        schemes = [recipe.operands(owner(p)).weights or recipe.kernels for recipe in recipes for p in matrices.values()]
        each = [
            model.get_parameter(p).numel() * rounded_bits(model, p, scheme)
            for p, scheme in zip([*matrices.values()] * len(recipes), schemes)
        ]
        rows.append(np.reshape(each, (len(recipes), -1)).sum(1))
    return np.array(rows)


def stored_types(model: nn.Module, layers: Mapping[str, Operands], otherwise: NumberFormat) -> dict[str, str]:
    """The types in GGUF, by the names of tensors, for the operands of ``layers`` by path.

    Layers without a scheme for weights are stored ``otherwise``. Raises ValueError for a scheme that is no type of
    GGUF, and for modules whose tensors have no name that is known.
    """
    found: dict[str, str] = {}
    for path, name in tensor_names(model, layers).items():
        stored = layers[path].weights or otherwise
        if isinstance(stored, GgmlType):
            stored = stored.of_width(row_width(model, f"{path}.weight"))
        kind = stored.name if isinstance(stored, GgmlType) else UNQUANTIZED.get(stored.name)
        if kind is None:
            raise ValueError(
                f"llama-quantize has no {stored.name} for the weights of {path}: choose a type, such as ggml-q4_k"
            )
        if name not in found or layers[path].weights is not None:  # a tied head may have no scheme of its own
            found[name] = kind
    return found
