"""Statistics of a model's weights, measured exactly or followed while the model trains.

Exact spectral norms cost more than a training step of a small model. A training step moves the weights by little, so
the singular vectors of the step before nearly fit: one subspace iteration from them gives the new norms.
"""

import math

import torch
from torch import Tensor, nn

from fragility_core.models.blocks import Block
from fragility_core.surrogates.reductions import spectral_norm
from fragility_numerics.nested import together
from fragility_numerics.presence import loaded

FOLLOWED = 4  # singular vectors kept from step to step: the largest ones may change their order


def activation_lipschitz(activation: nn.Module, reach: float = 20.0) -> float:
    """Largest |slope| of a pointwise activation at the points of a grid of step 1e-3 on [-reach, reach]."""
    x = torch.arange(-reach, reach, 1e-3, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(activation(x).sum(), x)
    return slope.abs().max().item()


def matrices(block: Block) -> dict[str, Tensor]:
    """The weight matrices of a block that score and transport need, by the name of their norm.

    Gate and up of a gated MLP count as one matrix [W_gate; W_up], whether or not a family stores them as one.
    """
    names = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
    return {f"{name}_weight_norm": getattr(block, name).weight.detach() for name in names}


def largest_gammas(block: Block) -> dict[str, Tensor]:
    """The largest |gamma| of each norm of a block."""
    return {f"gamma_{site}_max": norm.gamma.abs().amax() for site, norm in block.norms.items()}


class WeightStatistics:
    """Statistics of the weights of ``blocks``: under each name a list with one entry per block.

    ``follow`` starts from ``subspaces``. To resume a training run bit for bit, store them with its other state.
    """

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.subspaces: dict[tuple[int, ...], Tensor] = {}
        self._constants = {
            "activation_lipschitz": [activation_lipschitz(block.activation) for block in blocks],
            "score_scaling": [block.score_scaling for block in blocks],
            # The d of scores Q K^T / sqrt(d): the width of a head, or scaling^-2 if the model scales otherwise.
            "head_width": [
                b.head_width if math.isclose(b.score_scaling, b.head_width**-0.5) else b.score_scaling**-2
                for b in blocks
            ],
            "d_model": [block.width for block in blocks],
        }
        if any(block.parallel for block in blocks):
            self._constants |= {
                "parallel": [block.parallel for block in blocks],
                "shared_norm": [block.shares_norm for block in blocks],
            }

    @torch.no_grad()
    def measure(self) -> dict[str, list[float]]:
        """Exact spectral norms (``reductions.spectral_norm``), largest |gamma|, and constants."""
        self.subspaces = {}
        per_block = []
        for block in self.blocks:
            with loaded(block.module):
                norms = {name: spectral_norm(weight) for name, weight in matrices(block).items()}
                per_block.append(norms | largest_gammas(block))
        return self._collected({name: torch.stack(together(each[name] for each in per_block)) for name in per_block[0]})

    @torch.no_grad()
    def follow(self) -> dict[str, list[float]]:
        """The statistics of ``measure``, estimated, for weights that moved a little since the last call.

        The norms are Ritz values of ``FOLLOWED`` vectors after one subspace iteration. They are never above the exact
        norms, and fall short of them to second order in the movement. So with them ``operator_norm_transport`` of
        ``transport`` is no strict upper bound. The first call measures exactly.
        """
        stacks: dict[tuple[int, ...], dict[str, Tensor]] = {}  # matrices of one shape form one batch
        for layer, block in enumerate(self.blocks):
            for name, weight in matrices(block).items():
                stacks.setdefault(tuple(weight.shape), {})[f"{name} {layer}"] = weight
        norms: dict[str, list[Tensor]] = {}
        for shape, weights in stacks.items():
            stacked = torch.stack(together(weights.values())).float()  # (N, m, n)
            values, self.subspaces[shape] = followed_norms(stacked, self.subspaces.get(shape))
            for key, value in zip(weights, values.unbind()):
                norms.setdefault(key.split()[0], []).append(value)
        for site in self.blocks[0].norms:
            gammas = torch.stack(together(block.norms[site].gamma for block in self.blocks))
            norms[f"gamma_{site}_max"] = list(gammas.abs().amax(-1))
        return self._collected({name: torch.stack(together(values)) for name, values in norms.items()})

    def _collected(self, measured: dict[str, Tensor]) -> dict[str, list[float]]:
        """``measured``, each (L,), and the constants, with one transfer from the device."""
        values = torch.stack(together(value.float() for value in measured.values())).tolist()
        return dict(zip(measured, values)) | self._constants


def followed_norms(weights: Tensor, subspace: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest singular values (N,) of ``weights`` (N, m, n), and their leading right vectors (N, n, k).

    One subspace iteration with Rayleigh-Ritz from ``subspace`` (Golub & Van Loan, sec. 8.2), or a full
    decomposition if it is None. Nonfinite weights give NaN in this call and in later ones.
    """
    if subspace is None:  # LAPACK would raise for nonfinite entries
        subspace = torch.linalg.svd(weights.nan_to_num(), full_matrices=False)[2].mT[..., :FOLLOWED]
    basis, _ = torch.linalg.qr(weights.mT @ (weights @ subspace))
    image = weights @ basis
    gram = image.mT @ image
    finite = gram.isfinite().flatten(1).all(-1)
    squares, rotation = torch.linalg.eigh(torch.where(finite[:, None, None], gram, 0.0))  # ascending
    return torch.where(finite, squares[:, -1].clamp_min(0).sqrt(), torch.nan), basis @ rotation
