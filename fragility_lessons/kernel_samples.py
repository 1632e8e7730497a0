"""Random inputs for the four kernels of the theory, run in a low format and compared with fp64.

The kernels are the scores Q K^T / sqrt(d), the softmax, P V, and LayerNorm without bias, as Hugging Face's eager
GPT-2 runs them. The error model is the paper's with its gaps closed. Inputs are numbers of the format. Each kernel
accumulates in fp32 and rounds its result once; the scores are rounded once more after scaling. A result
below the smallest normal number may err by half a subnormal spacing more (Higham 2002, eq. 2.8): the columns
``*_underflow`` hold the norm of this error. Draws in which a result leaves the format's range are left out,
because no bound covers overflow.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from fragility_core import theory
from fragility_numerics.formats import NumberFormat
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

ATTENTION_SHAPES = (  # queries n, keys m, head width d; small shapes average least, so they come near the worst case
    (1, 2, 2), (1, 3, 3), (2, 2, 8), (2, 5, 12), (4, 4, 16), (8, 8, 64), (7, 16, 80), (16, 32, 32), (4, 64, 128),
)  # fmt: skip
FEATURES = (2, 3, 8, 64, 768)  # d_model
EPSILONS = (1e-12, 1e-5, 1e-3, 1e-1, 10.0)
STACKS = ((1, 4), (2, 8), (6, 16), (12, 32))  # blocks L, width d
GAINS = (0.01, 0.1, 0.5, 2.0)  # rho of every block
ROWS = 4  # tokens in a residual stack
NUMBERS = 2**15  # per shape and family, spread over as many draws as fit

Heads = tuple[Tensor, Tensor, Tensor]  # Q, K, V or S, P, A


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _scale(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Powers of two with exponents uniform in [low, high]."""
    return 2 ** (low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64))


def _normal_heads(generator: torch.Generator, draws: int, n: int, m: int, d: int) -> Heads:
    return _normal(generator, draws, n, d), _normal(generator, draws, m, d), _normal(generator, draws, m, d)


def _parallel_heads(generator: torch.Generator, draws: int, n: int, m: int, d: int) -> Heads:
    """Heads whose rows are multiples of one vector: ||Q K^T|| = ||Q|| ||K||, and V has rank one."""
    common = _normal(generator, draws, 1, d)
    query, key, value = (_normal(generator, draws, rows, 1) * common for rows in (n, m, m))
    return query, key, value


def _cancelling_heads(generator: torch.Generator, draws: int, n: int, m: int, d: int) -> Heads:
    """Heads whose products cancel: scores are near 0, so that P is even, and the context is near 0 (kappa_val >> 1)."""
    query, key, value = (0.01 * part for part in _normal_heads(generator, draws, n, m, d))
    query = query + _normal(generator, draws, n, 1)
    key = key + _normal(generator, draws, m, 1) * (-1.0) ** torch.arange(d)
    value = value + _normal(generator, draws, 1, d) * (-1.0) ** torch.arange(m).unsqueeze(-1)
    return query, key, value


def _heavy_tailed_heads(generator: torch.Generator, draws: int, n: int, m: int, d: int) -> Heads:
    sizes, parts = (_normal_heads(generator, draws, n, m, d) for _ in range(2))
    query, key, value = (part * (1.5 * size).exp() for part, size in zip(parts, sizes))
    return query, key, value


HEADS: dict[str, Callable[..., Heads]] = {
    "normal": _normal_heads,
    "parallel": _parallel_heads,
    "cancelling": _cancelling_heads,
    "heavy-tailed": _heavy_tailed_heads,
}


def draw_heads(
    family: str, shape: tuple[int, int, int], draws: int, format: NumberFormat, generator: torch.Generator
) -> Heads:
    """Q (draws, n, d), K and V (draws, m, d) exactly in ``format``, each draw at scales of its own.

    ``shape`` is (n, m, d), ``family`` a key of HEADS. Rows of P range from nearly even to nearly one-hot.
    """
    heads = HEADS[family](generator, draws, *shape)
    query, key, value = (format.round((_scale(generator, -3, 3, draws, 1, 1) * part).float()) for part in heads)
    return query, key, value


def draw_rows(features: int, draws: int, format: NumberFormat, generator: torch.Generator) -> dict[str, Tensor]:
    """LayerNorm inputs (draws, d_model) by family, exactly in ``format``, each row at a scale of its own."""
    rows = {
        "centred": _normal(generator, draws, features),
        "shifted": _normal(generator, draws, features) + _scale(generator, 0, 8, draws, 1),
        "heavy-tailed": _normal(generator, draws, features) * _normal(generator, draws, features).exp(),
        "constant": torch.ones(draws, features, dtype=torch.float64),
    }
    return {name: format.round((_scale(generator, -6, 5, draws, 1) * x).float()) for name, x in rows.items()}


def draw_stacks(
    shape: tuple[int, int], gain: float, draws: int, format: NumberFormat, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """X_0 (draws, ROWS, d) and weights F (L, draws, d, d) with ||F_l||_2 near ``gain``, exactly in ``format``."""
    blocks, width = shape
    weights = _normal(generator, blocks, draws, width, width)
    weights = gain * weights / torch.linalg.matrix_norm(weights, 2)[..., None, None]
    return format.round(_normal(generator, draws, ROWS, width).float()), format.round(weights.float())


def arithmetic(format: str, device: str = "cpu", execution: str = "auto") -> LowPrecision:
    """The arithmetic of kernels in ``format`` on ``device``, chosen and checked as ``lower`` does."""
    return lower(nn.LayerNorm(1, device=device), format, execution)


def device_of(low: LowPrecision) -> torch.device:
    """The device that ``arithmetic`` was given."""
    return next(low.model.parameters()).device


def run_attention(query: Tensor, key: Tensor, value: Tensor, low: LowPrecision) -> Heads:
    """S~, P~ and A~ by the format's kernels."""
    with low.running():
        scores = (query @ key.mT) * query.shape[-1] ** -0.5  # (..., n, m)
        probabilities = scores.softmax(-1)
        return scores, probabilities, probabilities @ value


def run_layernorm(x: Tensor, gamma: Tensor, epsilon: float, low: LowPrecision) -> Tensor:
    """Z~ of rows ``x`` (..., d_model) by the format's kernel."""
    with low.running():
        return nn.functional.layer_norm(x, gamma.shape, gamma, None, epsilon)


def run_stack(x: Tensor, weights: Tensor, low: LowPrecision) -> Tensor:
    """X~_0, ..., X~_L (L + 1, draws, n, d) of the linear residual blocks X + X F_l."""
    states = [x]
    with low.running():
        for weight in weights:
            states.append(states[-1] + states[-1] @ weight)
    return torch.stack(states)


def underflow(format: Any, entries: int) -> float:
    """Norm of the underflow of ``entries`` results: each may err by half a subnormal spacing beyond the model."""
    return format.unit_roundoff * format.smallest_normal * entries**0.5


def _in_range(low: LowPrecision, *results: Tensor) -> Tensor:
    """Booleans (draws,): True if all results (draws, ...) of a draw lie within the format's range."""
    return torch.stack([x.flatten(1).abs().amax(-1) < low.format.largest for x in results]).all(0)


def observe_attention(query: Tensor, key: Tensor, value: Tensor, low: LowPrecision) -> pd.DataFrame:
    """Errors of the three attention kernels and of the whole head, with ``theory.AttentionNorms``; one row a draw.

    Heads are (draws, n, d) and (draws, m, d) in the format. A kernel is compared with the fp64 result for the
    inputs that it was given, the computed ones; ``softmax_exact_norm`` and ``gemm_left_norm`` belong to these.
    ``attention_error`` is ||A~ - A||, ``spread`` the largest max - min over a row of S~ - S.
    """
    norm = torch.linalg.matrix_norm
    computed = [x.double().cpu() for x in run_attention(query, key, value, low)]
    query, key, value = (x.double().cpu() for x in (query, key, value))
    (scores, probabilities, context), exact = computed, theory.exact_attention(query, key, value)
    score_change, softmax_exact = scores - exact[0], scores.softmax(-1)
    columns = theory.attention_norms(query, key, value)._asdict() | {
        "score_error": norm(score_change),
        "spread": (score_change.amax(-1) - score_change.amin(-1)).amax(-1),
        "softmax_error": norm(probabilities - softmax_exact),
        "softmax_exact_norm": norm(softmax_exact),
        "gemm_error": norm(context - probabilities @ value),
        "gemm_left_norm": norm(probabilities),
        "attention_error": norm(context - exact[2]),
        "score_underflow": 2 * underflow(low.format, scores[0].numel()),  # rounded before and after scaling
        "softmax_underflow": underflow(low.format, scores[0].numel()),
        "context_underflow": underflow(low.format, context[0].numel()),
    }
    return pd.DataFrame(columns)[_in_range(low, query @ key.mT, *computed).numpy()]


def observe_layernorm(x: Tensor, gamma: Tensor, epsilon: float, low: LowPrecision) -> pd.DataFrame:
    """||Z~ - Z|| for every row of ``x`` (draws, d_model) in the format, with ``theory.LayerNormNorms``."""
    computed = run_layernorm(x, gamma, epsilon, low).double().cpu()
    x, gamma = x.cpu(), gamma.cpu()
    norms = theory.layernorm_norms(x, gamma, epsilon)
    columns = norms._asdict() | {
        "gamma_max": norms.gamma_max.expand_as(norms.variance),
        "epsilon": epsilon,
        "layernorm_error": torch.linalg.vector_norm(computed - theory.layernorm_path(x, gamma, epsilon), dim=-1),
        "layernorm_underflow": underflow(low.format, x.shape[-1]),
    }
    return pd.DataFrame(columns)[_in_range(low, computed).numpy()]


def observe_stack(x: Tensor, weights: Tensor, low: LowPrecision) -> pd.DataFrame:
    """Mismatch of linear residual stacks, and the two parts of its bound by Theorem 3 (`thm:unified`); one row a draw.

    ``x`` is (draws, n, d), ``weights`` (L, draws, d, d) in the format; rho_l = ||F_l||_2 is exact. The product errs
    by at most u c'_gemm ||X_{l-1}|| rho_l, the residual addition by at most u ||X_l||. So the bound is
    ``addition_bound`` + c'_gemm ``product_bound``.
    """
    computed = run_stack(x, weights, low).double().cpu()
    exact, weights = [x.double().cpu()], weights.double().cpu()
    for weight in weights:
        exact.append(exact[-1] + exact[-1] @ weight)
    rho = torch.linalg.matrix_norm(weights, 2).T  # (draws, L)
    norms = torch.linalg.matrix_norm(torch.stack(exact)).T  # (draws, L + 1)
    final, u = norms[:, -1], low.format.unit_roundoff
    columns = {
        "mismatch": theory.mismatch(computed[-1], exact[-1]),
        "addition_bound": theory.mismatch_bound(norms[:, 1:], rho, final, u),
        "product_bound": theory.mismatch_bound(
            theory.gemm_error_bound(norms[:, :-1], rho, 1.0, c_gemm_out=1.0), rho, final, u
        ),
    }
    return pd.DataFrame(columns)[_in_range(low, computed.transpose(0, 1)).numpy()]


def sample_attention(low: LowPrecision, seed: int) -> pd.DataFrame:
    """``observe_attention`` over ATTENTION_SHAPES x HEADS, with family and shape."""
    generator, tables = torch.Generator().manual_seed(seed), []
    for (n, m, d), family in product(ATTENTION_SHAPES, HEADS):
        draws = max(16, NUMBERS // (n * d + 2 * m * d + n * m * m))
        query, key, value = (x.to(device_of(low)) for x in draw_heads(family, (n, m, d), draws, low.format, generator))
        tables.append(observe_attention(query, key, value, low).assign(family=family, shape=f"{n}x{m}x{d}"))
    return pd.concat(tables, ignore_index=True)


def sample_layernorm(low: LowPrecision, seed: int) -> pd.DataFrame:
    """``observe_layernorm`` over FEATURES x EPSILONS x even and uneven gamma x families, with family and shape."""
    generator, tables = torch.Generator().manual_seed(seed), []
    for features, epsilon, even in product(FEATURES, EPSILONS, (True, False)):
        gamma = torch.ones(features) if even else _normal(generator, features).float()
        gamma = low.format.round(gamma).to(device_of(low))
        draws = max(16, NUMBERS // (16 * features))
        for family, x in draw_rows(features, draws, low.format, generator).items():
            observed = observe_layernorm(x.to(device_of(low)), gamma, epsilon, low)
            tables.append(observed.assign(family=family, shape=str(features)))
    return pd.concat(tables, ignore_index=True)


def sample_stacks(low: LowPrecision, seed: int) -> pd.DataFrame:
    """``observe_stack`` over STACKS x GAINS, with the gain as family and LxD as shape."""
    generator, tables = torch.Generator().manual_seed(seed), []
    for shape, gain in product(STACKS, GAINS):
        blocks, width = shape
        draws = max(16, NUMBERS // (blocks * width**2 * 16))
        x, weights = (part.to(device_of(low)) for part in draw_stacks(shape, gain, draws, low.format, generator))
        tables.append(observe_stack(x, weights, low).assign(family=f"rho={gain:g}", shape=f"{blocks}x{width}"))
    return pd.concat(tables, ignore_index=True)
