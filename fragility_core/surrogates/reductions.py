"""Norms, moments and operator norms of observed tensors, in fp32, without leaving the device."""

import torch
from torch import Tensor

from fragility_core.formats import PIECE

SAMPLED_ROWS = 16  # probability rows per head on which the softmax differential is estimated
POWER_STEPS = 2


def window_norm(x: Tensor) -> Tensor:
    """Frobenius norm of each window, (B, ..., rows, columns) -> (B,), accumulated in fp32.

    Rows first, the faster kernel on a CPU. There it makes an fp32 copy of a 16-bit tensor, which stays in
    cache if it is made piece by piece.
    """
    parts = [x]
    if x.device.type == "cpu" and x.dtype != torch.float32:
        parts = x.split(max(1, PIECE * x.shape[-2] // max(1, x.numel())), -2)
    rows = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts]
    return torch.linalg.vector_norm(torch.cat(rows, -1).flatten(1), dim=-1)


def window_max(x: Tensor) -> Tensor:
    """Largest |entry| of each window, (B, ...) -> (B,), in fp32."""
    return torch.linalg.vector_norm(x.flatten(1), ord=torch.inf, dim=-1, dtype=torch.float32)


def layernorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Z_eps(x) in the format of ``x`` (B, T, d), mean and 1 / sqrt(sigma^2 + epsilon) (B, T) in fp32.

    The library's own kernel in one pass. A GPU's returns its statistics in fp32 and wants weights of the format
    of ``x``; a CPU's returns them in the format of the weights.
    """
    weight = gamma.float() if x.device.type == "cpu" else gamma.to(x.dtype)
    path, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, None, epsilon)
    return path, mean.squeeze(-1), scale.squeeze(-1)


def rmsnorm_path(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """gamma x / sqrt(s^2 + epsilon) of ``x`` (B, T, d) in fp32, 0 and 1 / sqrt(s^2 + epsilon) (B, T), s^2 = mean x^2.

    ``layernorm_path`` of a norm that subtracts no mean.
    """
    mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square() / x.shape[-1]
    scale = (mean_square + epsilon).rsqrt()
    path = (x * scale[..., None]).mul_(gamma)
    return path, torch.zeros_like(scale), scale


def blocks_at_once(samples: Tensor) -> int:
    """How many blocks of ``samples`` (L, ...) to reduce together so that they stay in cache."""
    return max(1, 2**19 // samples[0].numel())


def sampled_rows(rows: int) -> list[int]:
    """SAMPLED_ROWS row indices, evenly spaced from first to last (all of them where there are fewer)."""
    if rows <= SAMPLED_ROWS:
        return list(range(rows))
    return torch.linspace(0, rows - 1, SAMPLED_ROWS).round().long().tolist()


def softmax_sensitivity_estimate(p: Tensor) -> Tensor:
    """Estimate of ||J(p)||_2 for rows ``p`` (..., n) -> (...), by power iteration (app. estimation).

    POWER_STEPS steps from the centred linspace(-1, 1), with J(p) v = p v - p (p . v). Never above
    the exact value, but for fp32 rounding: about 1e-7, which is all that is left of saturated rows.
    """
    p = p.float()
    v = torch.linspace(-1, 1, p.shape[-1], device=p.device)
    v = (v - v.mean()).expand_as(p)
    tiny = torch.finfo(p.dtype).tiny
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(tiny)
    for _ in range(POWER_STEPS):
        v = p * (v - (p * v).sum(-1, keepdim=True))
        v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(tiny)
    return torch.linalg.vector_norm(p * (v - (p * v).sum(-1, keepdim=True)), dim=-1)


def spectral_norm(weight: Tensor) -> Tensor:
    """||W||_2 of a matrix, exactly, from the smaller of its two Gram matrices; NaN if not finite."""
    weight = weight.detach().float()
    gram = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
    if not gram.isfinite().all():  # LAPACK refuses it
        return gram.new_tensor(torch.nan)
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()


def spectral_norm_from_gram(gram: Tensor) -> Tensor:
    """||V||_2 from G = V^T V (..., d, d) -> (...): the Rayleigh quotient of G over the columns of G^256.

    Beyond fp32 rounding never above the exact value, and below it by at most 0.4 % for d <= 128 (mostly by
    rounding alone): batches of small exact eigenproblems would cost a tenth of a forward pass on a CPU.
    Nonfinite entries give NaN.
    """
    tiny = torch.finfo(gram.dtype).tiny
    power = gram
    for exponent in (16, 16, 1):
        unit = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(tiny)
        power = torch.linalg.matrix_power(unit, exponent)
    return (power * (gram @ power)).sum((-2, -1)).sqrt()
