"""Changes of a model's function, made in place: other kernels, which are harmless, and faults that people reported."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fragility_core.models import paths
from fragility_core.models.norms import epsilon_name, known_norm

Change = Callable[[Any], object]  # of a model, in place


def split_products(model: Any) -> None:
    """Have every ``nn.Linear`` add each product in two halves, the last first."""
    linear: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linear:
        module.forward = partial(in_halves, module)


def in_halves(module: Any, x: Tensor) -> Tensor:
    """The result of a linear layer from two halves of its inputs, added in fp32."""
    half = x.shape[-1] // 2
    weight = module.weight.float()
    y = x[..., half:].float() @ weight[:, half:].mT + x[..., :half].float() @ weight[:, :half].mT
    return (y if module.bias is None else y + module.bias.float()).to(x.dtype)


def wide(kind: Callable[[Any], list[str]]) -> Change:
    """A change that lets the modules at the paths of ``kind`` compute in fp32, between values in bf16."""

    def change(model: Any) -> None:
        for path in kind(model):
            module = model.get_submodule(path)
            module.forward = partial(in_fp32, copy.deepcopy(module))

    return change


def in_fp32(module: Any, x: Tensor, *args, **how) -> Tensor:
    """The result of ``module``, which is in fp32, for values in bf16."""
    return module(x.float(), *args, **how).to(x.dtype)


def block(model: Any, number: int) -> Any:
    """The block with ``number``, a share of the depth in tenths."""
    return model.get_submodule(paths.block_paths(model)[number * len(paths.block_paths(model)) // 10])


def scaled_norms(tenths: int, factor: float) -> Change:
    """A change that multiplies what a block's norms multiply by, weight or 1 + weight, by ``factor``."""

    def done(model: Any) -> None:
        inside = block(model, tenths)
        for path in paths.norm_paths(inside):
            norm = inside.get_submodule(path)
            known = known_norm(norm)
            norm.weight.mul_(factor).add_(0.0 if known is None else known.offset * (factor - 1))

    return done


def other_norms(model: Any) -> None:
    """Have norms multiply by 1 + weight where they multiply by their weight, and the reverse."""
    for path in paths.norm_paths(model):
        module = model.get_submodule(path)
        known = known_norm(module)
        module.weight.add_(1 - 2 * known.offset if known is not None else 1.0)


def epsilon(value: float) -> Change:
    """A change of epsilon in all norms."""

    def done(model: Any) -> None:
        for module in model.modules():
            if epsilon_name(module):
                setattr(module, str(epsilon_name(module)), value)

    return done


def attention_scale(factor: float) -> Change:
    """A change of the scale of attention."""

    def done(model: Any) -> None:
        modules: list[Any] = paths.attention_modules(model)
        for module in modules:
            module.scaling *= factor

    return done


def frequencies(change: Callable[[Tensor], Tensor]) -> Change:
    """A change of RoPE's frequencies."""

    def done(model: Any) -> None:
        for module in [*model.modules()]:
            for name, x in [*module.named_buffers(recurse=False)]:
                if name.endswith("inv_freq"):
                    setattr(module, name, change(x))

    return done


def base(factor: float) -> Change:
    """A change of RoPE's base by ``factor``."""
    return frequencies(lambda x: x * factor ** -(torch.arange(len(x)) / len(x)))


def linear_of(model: Any, tenths: int, branch: int) -> list[Any]:
    """The linear layers of the first (attention) or second ``branch`` (MLP) of a block."""
    inside = [*block(model, tenths).children()]
    branches = [m for m in map(model.get_submodule, paths.branch_paths(model)) if m in inside]
    return [m for m in branches[branch].modules() if paths.is_linear(m)]


def matrix_of(model: Any, tenths: int, branch: int) -> Tensor:
    """The weights of the last of these layers."""
    return linear_of(model, tenths, branch)[-1].weight


def next_matrix(tenths: int, branch: int) -> Change:
    """A change that gives the last linear layer of a branch the weights of an earlier block."""
    return lambda model: matrix_of(model, tenths, branch).copy_(matrix_of(model, tenths - 2, branch))


def scaled_matrix(tenths: int, branch: int, factor: float) -> Change:
    """A change that multiplies the weights of the last linear layer of a branch by ``factor``."""
    return lambda model: matrix_of(model, tenths, branch).mul_(factor)


def flipped(tenths: int) -> Change:
    """A change that reverses the rows of a block's first attention matrix: heads are then in another order."""
    return lambda model: linear_of(model, tenths, 0)[0].weight.copy_(linear_of(model, tenths, 0)[0].weight.flip(0))


def without_branch(tenths: int, branch: int) -> Change:
    """A change that makes a branch add nothing."""
    return lambda model: [p.zero_() for p in linear_of(model, tenths, branch)[-1].parameters()]
