"""One attention head in a low format: the error, the bound of Theorem 1 (`thm:attn`), the steps of its proof.

A head is a triple of queries, keys and values (..., T, d). Leading dimensions are independent draws. The kernels
accumulate in fp32 and round each result once, as those of a device. Errors are differences from fp64 on the same
inputs.
"""

import math

import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_core.arithmetic.emulation import Emulation
from fragility_core.arithmetic.formats import get_format
from fragility_core.theory import AttentionNorms

KEYS, WIDTH, DRAWS = 8, 24, 4  # of the heads below; dividing by sqrt(24) rounds, as it is no power of two

# A kernel that rounds its result once has a relative error of at most u in every entry. So the three kernels err by
# at most u ||QK^T|| <= u ||Q|| ||K||, u ||P|| and u ||PV|| <= u ||P|| ||V||_2. fp32 accumulation adds far less.
CONSTANTS = {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}

Head = tuple[Tensor, Tensor, Tensor]


def stored(head: Head, format: str) -> Head:
    """``head`` rounded to ``format``, in the format's ``compute_dtype``."""
    return tuple(get_format(format).round(part.float()) for part in head)


def low_attention(head: Head, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """S, P and A of ``head``, stored and computed in ``format`` and returned as fp64."""
    query, key, value = stored(head, format)
    with Emulation(get_format(format)):
        scores = query @ key.mT / math.sqrt(query.shape[-1])  # (..., T, T)
        probabilities = scores.softmax(-1)
        context = probabilities @ value  # (..., T, d)
    return scores.double(), probabilities.double(), context.double()


def error_bound(norms: AttentionNorms, format: str) -> Tensor:
    """The bound of Theorem 1 (`thm:attn`) for kernels that round once, for each draw (...)."""
    amplified = (norms.probability_norm, norms.value_spectral_norm, get_format(format).unit_roundoff)
    return theory.attention_error_bound(norms.kappa_softmax, norms.chi_score, *amplified, **CONSTANTS)


def errors(head: Head, format: str) -> pd.DataFrame:
    """Observed error and bound, absolute and relative, and the condition numbers, one row for each draw of ``head``."""
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


STEPS = ["observed error", "norms multiplied", "largest ‖J‖ of the rows", "largest rounding (bound)"]


def ladder(head: Head, format: str) -> pd.DataFrame:
    """The steps of the proof of Theorem 1 (`thm:attn`), one row for each draw.

    Each column bounds the column before it, up to O(u^2). First the norms of P~ - P and V are multiplied, and the
    error of the product PV is added. Then d_smx ||S~ - S|| plus the error of the softmax kernel replaces ||P~ - P||.
    Last, the largest possible error replaces each measured one.
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


# --- Example heads ------------------------------------------------------------------------------


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def peaked(margin: Tensor, value_scale: float = 1.0) -> Head:
    """Heads (M, DRAWS, KEYS, WIDTH) in which every query prefers one key by ``margin`` (M,): S = margin I.

    Queries and keys are the same scaled rows of random orthogonal matrices. Values are normal with mean zero over
    the keys, so that they cancel if attention is uniform.
    """
    rows = torch.linalg.qr(_normal(DRAWS, WIDTH, KEYS)).Q.mT
    directions = rows * (margin.double() * math.sqrt(WIDTH)).sqrt()[:, None, None, None]
    values = _normal(DRAWS, KEYS, WIDTH)
    values = value_scale * (values - values.mean(-2, keepdim=True))
    return directions, directions, values.expand_as(directions)


def normal(spread: float, draws: int) -> Head:
    """Normal queries, keys and values (draws, KEYS, WIDTH) whose scores have the standard deviation ``spread``."""
    queries, keys, values = _normal(3, draws, KEYS, WIDTH)
    return queries * math.sqrt(spread), keys * math.sqrt(spread), values
