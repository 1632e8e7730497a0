"""Norms, moments and operator norms of observed tensors. All results stay on the device."""

from functools import cache

import torch
from torch import Tensor

SEGMENT = 128  # entries of a row that are reduced at once
SAMPLED_ROWS = 16  # probability rows per head for which the softmax differential is estimated
POWER_STEPS = 2


def segment_norms(x: Tensor) -> Tensor:
    """Norms of the segments of each window, (B, ..., columns) -> (B, segments). ``whole_norm`` combines them.

    A segment is a row. In bf16 on a CPU it is SEGMENT entries of a row: the fast kernel there sums in fp32, but rounds
    the norm of each segment to bf16. Whole rows behind a norm would all have one norm and so one rounding error. The
    errors of their segments differ and average out. The norm of a window is then off by 1e-4 as a rule and by
    2^-8 at most, and takes as little as a quarter of the time of a norm in fp32.
    """
    dtype = torch.float32
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous():
        width = x.shape[-1]
        if width > SEGMENT and width % SEGMENT == 0:
            return torch.linalg.vector_norm(x.view(*x.shape[:-1], -1, SEGMENT), dim=-1).flatten(1)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).flatten(1)


def whole_norm(segments: Tensor) -> Tensor:
    """Frobenius norms from the norms of their segments, (..., segments) -> (...), accumulated in fp32."""
    return torch.linalg.vector_norm(segments, dim=-1, dtype=torch.float32)


def window_max(x: Tensor) -> Tensor:
    """Largest |entry| of each window, (B, ...) -> (B,), in fp32."""
    return torch.linalg.vector_norm(x.flatten(1), ord=torch.inf, dim=-1, dtype=torch.float32)


def layernorm_with_moments(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Z_eps(x) in the format of ``x`` (B, T, d), mean and 1 / sqrt(sigma^2 + epsilon) (B, T) in fp32.

    torch's own kernel computes all three in one pass. On a GPU it returns fp32 statistics and needs weights in the
    format of ``x``. On a CPU it returns statistics in the format of the weights.
    """
    weight = gamma.float() if x.device.type == "cpu" else gamma.to(x.dtype)
    path, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, None, epsilon)
    return path, mean.squeeze(-1), scale.squeeze(-1)


def rmsnorm_with_moments(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """gamma x / sqrt(s^2 + epsilon) of ``x`` (B, T, d) in fp32, 0 and 1 / sqrt(s^2 + epsilon) (B, T), s^2 = mean x^2.

    This is ``layernorm_with_moments`` for a norm that subtracts no mean.
    """
    mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square() / x.shape[-1]
    scale = (mean_square + epsilon).rsqrt()
    path = (x * scale[..., None]).mul_(gamma)
    return path, torch.zeros_like(scale), scale


@cache
def sampled_rows(rows: int) -> tuple[int, ...]:
    """SAMPLED_ROWS row indices, evenly spaced from the first to the last; all indices if there are fewer."""
    if rows <= SAMPLED_ROWS:
        return tuple(range(rows))
    return tuple(torch.linspace(0, rows - 1, SAMPLED_ROWS).round().long().tolist())


def softmax_sensitivity_estimate(p: Tensor) -> Tensor:
    """Estimate of ||J(p)||_2 for rows ``p`` (..., n) -> (...), by power iteration (Appendix A.7 (`app:estimation`)).

    POWER_STEPS steps start from the centred linspace(-1, 1), with J(p) v = p v - p (p . v). The estimate is never
    above the exact value by more than fp32 rounding, about 1e-7. A saturated row has J = 0, so its estimate is that
    rounding alone.
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
    """||W||_2 of a matrix in fp32, from the eigenvalues of its smaller Gram matrix. Nonfinite entries give NaN."""
    weight = weight.detach().float()
    gram = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
    if not gram.isfinite().all():  # LAPACK would raise
        return gram.new_tensor(torch.nan)
    return torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()


def spectral_norm_from_gram(gram: Tensor) -> Tensor:
    """||V||_2 from G = V^T V (..., d, d) -> (...), in fp32: the Rayleigh quotient of G over the columns of G^256.

    Powers are formed in the format of ``gram``, the quotient in fp32. But for the rounding of the quotient, the result
    is never above the exact norm. It is at most 0.4 % below for d <= 128, and mostly by rounding alone. Exact
    eigenvalues of these small matrices would cost a tenth of a forward pass on a CPU. Nonfinite entries give NaN.
    """
    # The squares of large and of small entries would leave the range. A power of two scales without rounding.
    halves = (gram.detach().float().abs().amax((-2, -1), keepdim=True).log2() / 2).round().nan_to_num(0.0, 0.0, 0.0)
    root = torch.exp2(halves.where((halves < -20) | (halves > 25), 0.0))
    power = gram = gram / root.to(gram.dtype) / root.to(gram.dtype)
    # The 16th power of a flat spectrum underflows for large d; the heads of committed runs keep their bits.
    for exponent in (16, 16) if gram.shape[-1] <= 256 else (4,) * 4:
        power = torch.linalg.matrix_power(_unit(power), exponent)
    power = _unit(power.float())
    return (power * (gram.float() @ power)).sum((-2, -1)).sqrt() * root[..., 0, 0]


def _unit(x: Tensor) -> Tensor:
    """Matrices ``x`` (..., d, d) divided by their Frobenius norms; a zero matrix stays 0."""
    norm = torch.linalg.vector_norm(x.flatten(-2), dim=-1)[..., None, None]
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny)
