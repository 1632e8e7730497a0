"""Norms, moments and operator norms of observed tensors, in fp32, without leaving the device."""

import torch
from torch import Tensor

SAMPLED_ROWS = 16  # probability rows per head on which the softmax differential is estimated
POWER_STEPS = 2


class Reductions:
    """Norms and moments in fp32 of tensors (B, ...) in any format, without a fresh copy each time.

    Widening to fp32 goes through one buffer that is used again and again: at these sizes the page
    faults of a fresh allocation cost more than the arithmetic.
    """

    def __init__(self):
        self._buffer: Tensor | None = None

    def widen(self, x: Tensor) -> Tensor:
        """``x`` in fp32; the result is overwritten by the next call."""
        if self._buffer is None or self._buffer.numel() < x.numel() or self._buffer.device != x.device:
            self._buffer = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        return self._buffer[: x.numel()].view(x.shape).copy_(x)

    def norm(self, x: Tensor) -> Tensor:
        """Frobenius norm of each window, (B, ...) -> (B,)."""
        return torch.linalg.vector_norm(self.widen(x).flatten(1), dim=-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Norm (B,) and biased variance at each position (B, T) of ``x`` (B, T, d)."""
        wide = self.widen(x)
        mean = wide.mean(-1, keepdim=True)
        deviation = torch.linalg.vector_norm(wide.sub_(mean), dim=-1).square()  # (B, T)
        width = x.shape[-1]
        return (deviation + width * mean.squeeze(-1).square()).sum(-1).sqrt(), deviation / width

    def norm_and_centred(self, x: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Norms (B,) of ``x`` and of ``x - shift``."""
        wide = self.widen(x)
        norm = torch.linalg.vector_norm(wide.flatten(1), dim=-1)
        if shift is None:
            return norm, norm
        return norm, torch.linalg.vector_norm(wide.sub_(shift.float()).flatten(1), dim=-1)


def sampled_rows(rows: int) -> list[int]:
    """SAMPLED_ROWS row indices, evenly spaced from first to last (all of them where there are fewer)."""
    if rows <= SAMPLED_ROWS:
        return list(range(rows))
    return torch.linspace(0, rows - 1, SAMPLED_ROWS).round().long().tolist()


def softmax_sensitivity_estimate(p: Tensor) -> Tensor:
    """Estimate of ||J(p)||_2 for rows ``p`` (..., n) -> (...), by power iteration (app. estimation).

    POWER_STEPS steps from the centred linspace(-1, 1), with J(p) v = p v - p (p . v). Never above
    the exact value.
    """
    v = torch.linspace(-1, 1, p.shape[-1], device=p.device)
    v = (v - v.mean()).expand_as(p)
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    for _ in range(POWER_STEPS):
        v = p * (v - (p * v).sum(-1, keepdim=True))
        v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    return torch.linalg.vector_norm(p * (v - (p * v).sum(-1, keepdim=True)), dim=-1)


def spectral_norm(weight: Tensor) -> Tensor:
    """||W||_2 of a matrix, from the smaller of its two Gram matrices, in fp32; NaN if not finite."""
    weight = weight.detach().float()
    gram = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
    return spectral_norm_from_gram(gram)


def spectral_norm_from_gram(gram: Tensor) -> Tensor:
    """||V||_2 from V^T V (..., d, d) -> (...); NaN where an entry is not finite."""
    finite = gram.isfinite().all(-1).all(-1)
    # LAPACK refuses nonfinite input.
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0.0))
    return torch.where(finite, eigenvalues[..., -1].clamp_min(0).sqrt(), torch.nan)
