"""Norms, moments and operator norms of observed tensors, without leaving the device."""

from functools import cache

import torch
from torch import Tensor

SEGMENT = 128  # numbers
SAMPLED_ROWS = 16  # probability rows per head on which the softmax differential is estimated
POWER_STEPS = 2


def segment_norms(x: Tensor) -> Tensor:
    """Frobenius norms of the pieces that each window falls into, (B, ..., columns) -> (B, pieces).

    Pieces are rows. A CPU's fast kernel for bf16 rounds to bf16 what it accumulated in fp32: long rows fall into
    pieces of SEGMENT numbers there, unlike whole (normalised) rows not all of one norm and of one error. A
    ``whole_norm`` is at most 2^-8 off for it, as a rule 1e-4, and is had in down to a quarter of the time.
    """
    dtype = torch.float32
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous():
        width = x.shape[-1]
        if width > SEGMENT and width % SEGMENT == 0:
            x, dtype = x.view(*x.shape[:-1], -1, SEGMENT), None
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).flatten(1)


def whole_norm(pieces: Tensor) -> Tensor:
    """Frobenius norm of each window from those of its pieces, (..., pieces) -> (...), accumulated in fp32."""
    return torch.linalg.vector_norm(pieces, dim=-1, dtype=torch.float32)


def window_max(x: Tensor) -> Tensor:
    """Largest |entry| of each window, (B, ...) -> (B,), in fp32."""
    return torch.linalg.vector_norm(x.flatten(1), ord=torch.inf, dim=-1, dtype=torch.float32)


def layernorm_with_moments(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Z_eps(x) in the format of ``x`` (B, T, d), mean and 1 / sqrt(sigma^2 + epsilon) (B, T) in fp32.

    The library's own kernel in one pass. A GPU's returns its statistics in fp32 and wants weights of the format
    of ``x``; a CPU's returns them in the format of the weights.
    """
    weight = gamma.float() if x.device.type == "cpu" else gamma.to(x.dtype)
    path, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, None, epsilon)
    return path, mean.squeeze(-1), scale.squeeze(-1)


def rmsnorm_with_moments(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """gamma x / sqrt(s^2 + epsilon) of ``x`` (B, T, d) in fp32, 0 and 1 / sqrt(s^2 + epsilon) (B, T), s^2 = mean x^2.

    ``layernorm_with_moments`` of a norm that subtracts no mean.
    """
    mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square() / x.shape[-1]
    scale = (mean_square + epsilon).rsqrt()
    path = (x * scale[..., None]).mul_(gamma)
    return path, torch.zeros_like(scale), scale


def blocks_at_once(samples: Tensor) -> int:
    """How many blocks of ``samples`` (L, ...) to reduce together so that they stay in cache."""
    return max(1, 2**19 // samples[0].numel())


@cache
def sampled_rows(rows: int) -> tuple[int, ...]:
    """SAMPLED_ROWS row indices, evenly spaced from first to last (all of them where there are fewer)."""
    if rows <= SAMPLED_ROWS:
        return tuple(range(rows))
    return tuple(torch.linspace(0, rows - 1, SAMPLED_ROWS).round().long().tolist())


def softmax_sensitivity_estimate(p: Tensor) -> Tensor:
    """Estimate of ||J(p)||_2 for rows ``p`` (..., n) -> (...), by power iteration (Appendix A.7 (`app:estimation`)).

    POWER_STEPS steps from the centred linspace(-1, 1), with J(p) v = p v - p (p . v). Never above
    the exact value, but for fp32 rounding: about 1e-7, which is all that is left of saturated rows.
    """
    p = p.float()
    v = torch.linspace(-1, 1, p.shape[-1], device=p.device)
    v -= v.mean()
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    for _ in range(POWER_STEPS + 1):
        weighted = p * v.div_(norm.clamp_min_(torch.finfo(p.dtype).tiny))
        v = torch.addcmul(weighted, p, weighted.sum(-1, keepdim=True), value=-1)
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return norm.squeeze(-1)


def spectral_norm(weight: Tensor) -> Tensor:
    """||W||_2 of a matrix, exactly, from the smaller of its two Gram matrices; NaN if not finite."""
    weight = weight.detach().float()
    gram = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
    if not gram.isfinite().all():  # LAPACK refuses it
        return gram.new_tensor(torch.nan)
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()


def spectral_norm_from_gram(gram: Tensor) -> Tensor:
    """||V||_2 from G = V^T V (..., d, d) -> (...), in fp32: the Rayleigh quotient of G over the columns of G^256.

    Powers are formed in the format of ``gram``. Beyond the rounding of the quotient in fp32 never above the exact
    value, and below it by at most 0.4 % for d <= 128 (mostly by rounding alone): batches of small exact
    eigenproblems would cost a tenth of a forward pass on a CPU. Nonfinite entries give NaN.
    """
    power = gram
    for _ in range(2):
        power = torch.linalg.matrix_power(_unit(power), 16)
    power = _unit(power.float())
    return (power * (gram.float() @ power)).sum((-2, -1)).sqrt()


def _unit(x: Tensor) -> Tensor:
    """Matrices ``x`` (..., d, d) over their Frobenius norms; 0 for 0."""
    norm = torch.linalg.vector_norm(x.flatten(-2), dim=-1)[..., None, None]
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny)
