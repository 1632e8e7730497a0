"""One attention head in a low format: its error, Theorem 1 (`thm:attn`), and the steps of the theorem's proof.

A head is a triple of queries, keys and values (..., T, d); leading dimensions are independent draws.
Its kernels run as a device runs them (fp32 accumulation, one rounding of each result) and are
compared with fp64 on the same inputs.
"""

import math

import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_core.arithmetic.emulation import Emulation
from fragility_core.arithmetic.formats import get_format
from fragility_core.theory import AttentionNorms

KEYS, WIDTH, DRAWS = 8, 24, 4  # of the heads below; sqrt(24) is no power of two, so that dividing by it rounds

# A kernel that rounds its result once errs by at most u in every entry: by u ||QK^T|| <= u ||Q|| ||K||, u ||P|| and
# u ||PV|| <= u ||P|| ||V||_2. What fp32 accumulation adds is far below.
CONSTANTS = {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}

Head = tuple[Tensor, Tensor, Tensor]


def stored(head: Head, format: str) -> Head:
    """``head`` rounded to ``format``, in its compute_dtype dtype."""
    return tuple(get_format(format).round(part.float()) for part in head)


def low_attention(head: Head, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """S, P and A of ``head`` stored and computed in ``format``, as fp64."""
    query, key, value = stored(head, format)
    with Emulation(get_format(format)):
        scores = query @ key.mT / math.sqrt(query.shape[-1])  # (..., T, T)
        probabilities = scores.softmax(-1)
        context = probabilities @ value  # (..., T, d)
    return scores.double(), probabilities.double(), context.double()


def error_bound(norms: AttentionNorms, format: str) -> Tensor:
    """The right-hand side of Theorem 1 (`thm:attn`) for one rounding a kernel, of the leading shape (...)."""
    amplified = (norms.probability_norm, norms.value_spectral_norm, get_format(format).unit_roundoff)
    return theory.attention_error_bound(norms.kappa_softmax, norms.chi_score, *amplified, **CONSTANTS)


def errors(head: Head, format: str) -> pd.DataFrame:
    """One row a draw of ``head``: observed error and bound, absolute and relative, and the condition numbers."""
    norms = theory.attention_norms(*head)
    *_, exact = theory.exact_attention(*head)
    *_, low = low_attention(head, format)
    columns = {
        "observed": torch.linalg.matrix_norm(low - exact),
        "bound": error_bound(norms, format),
        "context": norms.context_norm,
        "κ_softmax": norms.kappa_softmax,
        "χ_score": norms.chi_score,
    }
    table = pd.DataFrame({name: column.flatten().numpy() for name, column in columns.items()})
    return table.assign(relative=table.observed / table.context, relative_bound=table.bound / table.context)


STEPS = ["observed error", "norms multiplied", "worst ‖J‖ of the rows", "worst rounding (bound)"]


def ladder(head: Head, format: str) -> pd.DataFrame:
    """The steps of the proof of Theorem 1 (`thm:attn`), one row a draw: each column bounds the one before up to O(u^2).

    Errors that really happened are put in place of their bounds as far as the step goes: first the
    norms of (P~ - P) and V are multiplied and the error of PV added, then ||P~ - P|| is replaced by
    d_smx ||S~ - S|| plus the kernel's error, at last every error by its largest possible value.
    """
    norm = torch.linalg.matrix_norm
    norms, exact, low = theory.attention_norms(*head), theory.exact_attention(*head), low_attention(head, format)
    scores, probabilities, context = (norm(there - here) for there, here in zip(low, exact))
    kernel = norm(low[1] - low[0].softmax(-1))
    product = norm(low[2] - low[1] @ head[2].double())
    columns = [
        context,
        probabilities * norms.value_spectral_norm + product,
        (norms.sensitivity * scores + kernel) * norms.value_spectral_norm + product,
        error_bound(norms, format),
    ]
    return pd.DataFrame(torch.stack(columns, -1).numpy(), columns=STEPS)


# --- Heads to look at ---------------------------------------------------------------------------


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def peaked(margin: Tensor, value_scale: float = 1.0) -> Head:
    """Heads in which every query prefers one key by ``margin`` (M,): S = margin I; (M, DRAWS, KEYS, WIDTH).

    Queries and keys are the rows of random orthogonal matrices, alike and scaled. Values are normal
    with mean zero over the keys, so that they cancel where attention is even.
    """
    rows = torch.linalg.qr(_normal(DRAWS, WIDTH, KEYS)).Q.mT
    directions = rows * (margin.double() * math.sqrt(WIDTH)).sqrt()[:, None, None, None]
    values = _normal(DRAWS, KEYS, WIDTH)
    values = value_scale * (values - values.mean(-2, keepdim=True))
    return directions, directions, values.expand_as(directions)


def normal(spread: float, draws: int) -> Head:
    """Normal queries, keys and values, with scores of standard deviation ``spread``; (draws, KEYS, WIDTH)."""
    queries, keys, values = _normal(3, draws, KEYS, WIDTH)
    return queries * math.sqrt(spread), keys * math.sqrt(spread), values
