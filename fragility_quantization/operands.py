"""Linear layers that store weights, or read their inputs, in other numbers than the rest of the model.

fp8 and int8 are used so in practice (W8A8): their products are fast, while norms, softmax and the residual stream stay
in bf16.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fragility_core.models.paths import block_of, embedding_paths, head_paths, is_linear
from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import NumberFormat
from fragility_numerics.kernels import WEIGHT_PRODUCTS
from fragility_numerics.modes import FunctionMode
from fragility_numerics.nested import map_tensors, tensors
from fragility_numerics.presence import source_of
from fragility_quantization.ggml import GgmlType
from fragility_quantization.gguf_mixes import ends, types_by_path
from fragility_quantization.recipes import Operands, Recipe, of_type
from fragility_quantization.schemes import Scheme


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices, by path, that the blocks of ``model`` multiply by: of linear layers, and of experts together.

    A matrix of all experts has three dimensions. The head and routers that are no linear layers are left out.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if block_of(path) and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.ndim == 2 if is_linear(module) else parameter.ndim == 3 and min(parameter.shape[1:]) > 1)
    }


def stored_weights(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """The matrices, by path, that have ``recipe.operands``: ``linear_weights``, and ends that are among its layers."""
    ends = (path for path in (*embedding_paths(model), *head_paths(model)) if path in recipe.layers)
    return linear_weights(model) | {f"{path}.weight": model.get_parameter(f"{path}.weight") for path in ends}


def weight_schemes(model: nn.Module, recipe: Recipe) -> dict[int, NumberFormat]:
    """Schemes of matrices that ``recipe`` gives one, by the ``id`` of the parameter, which tied modules share."""
    operands = ((p, recipe.operands(owner(path))) for path, p in stored_weights(model, recipe).items())
    return {id(p): each.weights for p, each in operands if each.weights is not None}


def with_known_layers(model: nn.Module, recipe: Recipe) -> Recipe:
    """``recipe`` with ``layers`` of ``model`` alone: linear layers of blocks, embeddings, and the head.

    Layers for which a recipe of GGUF gives only a rule get their operands here.

    An embedding reads no numbers, so that it has operands for its weights only. A head that is tied to an embedding
    shares its matrix. The matrix is stored once, by the scheme of either name, and the embedding gives its rows in the
    dtype of the kernels. The head's inputs are rounded only if the head is named. Raises ValueError for other paths,
    naming the most similar ones, for layers that are no ``Operands``, and for an embedding and a tied head with
    different weights.
    """
    embeddings, heads = embedding_paths(model), head_paths(model)
    known = [*dict.fromkeys(map(owner, linear_weights(model))), *embeddings, *heads]
    recipe = replace(recipe, layers=layers_by_rules(model, recipe) | dict(recipe.layers))
    for path, operands in recipe.layers.items():
        if not (isinstance(path, str) and isinstance(operands, Operands)):
            raise ValueError(
                f"layers of a recipe must be Operands by path, got {operands!r} for {path!r}: such as "
                'get_recipe("w8a8-int8").linear'
            )
        if path not in known:
            like = ", ".join(get_close_matches(path, known)) or ", ".join(known[:3])
            raise ValueError(
                f"layers of a recipe must be linear layers of blocks, embeddings or the head, got {path!r}: see {like}"
            )
    layers = {p: Operands(x.weights) if p in embeddings else x for p, x in recipe.layers.items()}
    for head in layers.keys() & heads:
        weight = model.get_submodule(head).weight
        tied = [path for path in layers.keys() & embeddings if model.get_submodule(path).weight is weight]
        for path in tied:
            if len({layers[path].weights, layers[head].weights} - {None}) > 1:
                raise ValueError(
                    f"{head!r} is tied to {path!r}, so both must store their one matrix alike, got different weights: "
                    "name one of them"
                )
    return replace(recipe, layers=layers)


def layers_by_rules(model: nn.Module, recipe: Recipe) -> dict[str, Operands]:
    """The operands by path that ``recipe`` gives layers of ``model`` by rules: its mix's, or of embedding and head."""
    kind, _, name = recipe.gguf.partition("-")
    if kind == "gguf":
        paths = dict.fromkeys(map(owner, linear_weights(model)))
        return {p: of_type(each) for p, each in types_by_path(name, model, [*paths, *ends(model)]).items()}
    heads = head_paths(model)
    found = {path: recipe.head if path in heads else recipe.embedding for path in ends(model)}
    return {path: operands for path, operands in found.items() if operands}


def rounded_bits(model: nn.Module, path: str, stored: NumberFormat) -> float:
    """Bits of an entry of the parameter at ``path``, by the length of its rows.

    The last group of a row may be short, and a type of ggml falls back to another.
    """
    if isinstance(stored, GgmlType):
        return stored.of_width(row_width(model, path)).bits
    if isinstance(stored, Scheme) and stored.granularity == "group":  # others may store vectors, too
        return stored.bits_of_width(row_width(model, path))
    return stored.bits


def row_width(model: nn.Module, path: str) -> int:
    """The length of the rows of the matrix at ``path``."""
    return in_rows(model, path).shape[-1]


def in_rows(model: nn.Module, path: str) -> Tensor:
    """The matrix at ``path`` as a view whose rows lie along the inputs, over which a product sums."""
    weight = model.get_parameter(path).detach()
    return weight.mT if inputs_first(model.get_submodule(owner(path))) else weight


def inputs_first(module: nn.Module) -> bool:
    """True if the weight of ``module`` has its inputs as the rows."""
    return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


def owner(parameter: str) -> str:
    """The path of the module that has the ``parameter``."""
    return parameter.rpartition(".")[0]


def rounded_weight(model: nn.Module, path: str, weight: Tensor, stored: NumberFormat) -> Tensor:
    """The linear ``weight`` at ``path``, rounded to ``stored`` in rows along the inputs, which a product sums over."""
    turned = inputs_first(model.get_submodule(owner(path)))
    return stored.round(weight.mT).mT.contiguous() if turned else stored.round(weight)


def address(x: Tensor) -> int:
    """Address at which the memory of ``x`` begins, which its views share."""
    return x.untyped_storage().data_ptr()


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory of ``tensors``, which their views share."""
    return set(map(address, tensors))


def operands_by_storage(weights: Mapping[str, Tensor], recipe: Recipe) -> dict[int, Operands]:
    """The operands of linear layers that have any in ``recipe``, by the addresses of their ``weights``."""
    found = {address(x): recipe.operands(owner(path)) for path, x in weights.items()}
    return {address: operands for address, operands in found.items() if operands}


class RoundedOperands(FunctionMode):
    """A context in which the linear layers of ``model`` read their inputs as ``recipe`` says.

    Under a stochastic ``emulation`` inputs are rounded stochastically, too. The rounding runs inside of ``paused()``.
    """

    keeps_activations = True

    def __init__(
        self, model: nn.Module, recipe: Recipe, paused: Callable[[], AbstractContextManager],
        emulation: Emulation | None = None,
    ):  # fmt: skip
        super().__init__()
        self.kernels, self.paused, self.emulation = recipe.kernels, paused, emulation
        self.recipe, self.weights = recipe, stored_weights(model, recipe)
        self.offloaded = any(map(source_of, self.weights.values()))
        self._layers = operands_by_storage(self.weights, recipe)

    @property
    def layers(self) -> dict[int, Operands]:
        """The operands by the addresses of weights; weights of an offloaded model have new addresses at each read."""
        return operands_by_storage(self.weights, self.recipe) if self.offloaded else self._layers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = self._operands(args, kwargs) if func.__name__ in WEIGHT_PRODUCTS else None
        if operands is None or operands.inputs is None:
            return func(*args, **kwargs)
        wide = operands.wide(self.kernels)
        change = partial(self._changed, stored=operands.inputs, wide=wide)
        with self.paused():
            args, kwargs = map_tensors(args, change), map_tensors(kwargs, change)
        result = func(*args, **kwargs)
        return result.to(self.kernels.compute_dtype) if wide else result

    def _operands(self, *given: Any) -> Operands | None:
        """The operands of the layer whose weight is among the arguments ``given``, if any."""
        layers = self.layers
        return next((layers[address] for address in storages(tensors(given)) & layers.keys()), None)

    def _changed(self, x: Tensor, stored: NumberFormat, wide: bool) -> Tensor:
        """``x`` rounded if it is an input. Weights are rounded already, and biases are no operands."""
        if not x.is_floating_point():
            return x
        widened = x.float() if wide else x
        other = x.dtype != self.kernels.compute_dtype and not wide  # experts cast inputs to the weights' dtype
        if other or isinstance(x, nn.Parameter) or storages([x]) & self.layers.keys():
            return widened
        return stored.round(widened, *(self.emulation.drawing(x) if self.emulation else ())).to(widened.dtype)
