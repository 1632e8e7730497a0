"""Residual blocks x -> x + J x with ||J||_2 = rho, alone and stacked, and what they do to an error.

A stack is a tensor of Jacobians (L, WIDTH, WIDTH). Block 0 is the first.
"""

from itertools import accumulate

import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory

WIDTH = 16


def _random(blocks: int) -> Tensor:
    normal = torch.randn(blocks, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return normal / torch.linalg.matrix_norm(normal, 2)[:, None, None]


def _one_direction(blocks: int) -> Tensor:
    return torch.ones(WIDTH, WIDTH, dtype=torch.float64).expand(blocks, -1, -1) / WIDTH


def _stretch_and_shrink(blocks: int) -> Tensor:
    return torch.diag(1 - 2 * (torch.arange(WIDTH).double() % 2)).expand(blocks, -1, -1)


def _rotation(blocks: int) -> Tensor:
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return torch.block_diag(*[turn] * (WIDTH // 2)).expand(blocks, -1, -1)


def _shrink(blocks: int) -> Tensor:
    return -torch.eye(WIDTH, dtype=torch.float64).expand(blocks, -1, -1)


# Jacobians of norm 1. Every bound of the paper has the same value for all of them.
KINDS = {
    "random": _random,
    "one direction shared": _one_direction,
    "half stretch, half shrink": _stretch_and_shrink,
    "rotation": _rotation,
    "shrink": _shrink,
}


def jacobians(kind: str, rho: float, blocks: int) -> Tensor:
    """J_l with ||J_l||_2 = ``rho``, (blocks, WIDTH, WIDTH), of a ``kind`` of KINDS."""
    return rho * KINDS[kind](blocks)


def singular_values(jacobian: Tensor) -> Tensor:
    """Singular values of I + J, descending, (..., WIDTH, WIDTH) -> (..., WIDTH)."""
    return torch.linalg.svdvals(torch.eye(WIDTH, dtype=torch.float64) + jacobian)


def course(kind: str, rho: float, blocks: int) -> pd.DataFrame:
    """What a stack does to an error at its input, one row for each depth 1, ..., ``blocks``.

    ``worst`` is ||prod (I + J)||_2, the growth in the worst direction. ``typical`` is the root mean square of the
    growth over all directions. ``transport`` is prod (1 + rho), which bounds both. Only for rho < 1: ``condition``,
    kappa of the product, and its ``condition_bound`` (Corollary 1 (`cor:depth`)).
    """
    norm, factors = torch.linalg.matrix_norm, torch.eye(WIDTH, dtype=torch.float64) + jacobians(kind, rho, blocks)
    products = torch.stack(list(accumulate(factors, lambda product, factor: factor @ product)))
    # The gain of a first block is never used, so one block more than the stack has is passed.
    transport = theory.downstream_transport(torch.full((blocks + 1,), rho, dtype=torch.float64)).flip(0)[1:]
    table = {
        "blocks": range(1, blocks + 1),
        "transport": transport,
        "worst": norm(products, 2),
        "typical": norm(products) / WIDTH**0.5,
    }
    if rho < 1:
        # The product's small singular values drown in rounding errors, those of the product of inverses do not.
        inverses = torch.stack(list(accumulate(torch.linalg.inv(factors), lambda product, factor: product @ factor)))
        table["condition"] = norm(products, 2) * norm(inverses, 2)
        gains = torch.full((blocks,), rho, dtype=torch.float64)
        table["condition_bound"] = theory.residual_condition_bound(gains).cumprod(0)
    return pd.DataFrame(table)
