"""Linear layers that read weights and activations in a narrower format than that of the rest of the model.

fp8 is used so in practice (W8A8): its products are fast, while norms, softmax and the residual stream stay in bf16.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fragility_core.arithmetic.formats import Format
from fragility_core.arithmetic.kernels import WEIGHT_PRODUCTS
from fragility_core.arithmetic.nested import map_tensors, tensors
from fragility_core.models.tree import block_of, is_linear


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices, by path, that the blocks of ``model`` multiply by: of linear layers, and of experts together.

    A matrix of all experts has three dimensions. The head and routers that are no linear layers are left out.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if block_of(path) and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == (2 if is_linear(module) else 3)
    }


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory of ``tensors``, which their views share."""
    return {x.untyped_storage().data_ptr() for x in tensors}


class RoundedOperands(TorchFunctionMode):
    """A context that rounds to ``format`` whatever the linear weights of ``model`` are multiplied by.

    Weights of another dtype, those of modules kept in fp32, do not count. With a ``generator`` the rounding is
    stochastic. The rounding itself runs inside of ``paused()``.
    """

    def __init__(
        self, model: nn.Module, format: Format, paused: Callable[[], AbstractContextManager],
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        self.format, self.paused, self.generator = format, paused, generator
        self.weights = storages(w for w in linear_weights(model).values() if w.dtype == format.compute_dtype)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__ in WEIGHT_PRODUCTS and self.weights & storages(tensors((args, kwargs))):
            with self.paused():
                args, kwargs = map_tensors(args, self._rounded), map_tensors(kwargs, self._rounded)
        return func(*args, **kwargs)

    def _rounded(self, x: Tensor) -> Tensor:
        """``x`` rounded if it is an activation; weights are rounded already, and biases are no operands."""
        if x.dtype != self.format.compute_dtype or isinstance(x, nn.Parameter) or self.weights & storages([x]):
            return x
        return self.format.round(x, self.generator)
