"""Self-attention: S = Q K^T / sqrt(d), P = softmax(S), A = P V.

Section 4.2 (`subsec:attn`); the proofs are in Appendix A.1 (`app:kernels-lemmas`) and Appendix A.2 (`app:attn-proof`).

One head: Q is (..., n, d), K and V are (..., m, d), S and P are (..., n, m), A is (..., n, d). Leading dimensions
are independent problems. ||.|| is the Frobenius norm, ||.||_2 the spectral norm. To treat several heads as one
problem, take the norms of Q, K, S, P and A over all heads, and the largest d_smx and ||V||_2 (protocol section
3). Every bound below then still holds.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fragility_numerics.real import Real

__all__ = [  # noqa: RUF022 (in the paper's order)
    "exact_attention", "softmax_jacobian", "softmax_sensitivity", "kappa_softmax", "chi_score", "kappa_value",
    "kappa_score", "AttentionNorms", "attention_norms", "score_error_bound", "gemm_error_bound",
    "softmax_error_bound", "attention_coefficient", "attention_magnitude", "attention_error_bound",
    "attention_relative_error_bound", "softmax_growth", "attention_error_bound_with_remainder",
]  # fmt: skip


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """S, P and A in fp64 (Section 4.2 (`subsec:attn`)).

    S is 0 where ``mask`` (n, m) is False, and so is P. In a row without any True, P and A are NaN.
    """
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (..., n, m)
    if mask is None:
        probabilities = scores.softmax(-1)
    else:
        probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1)
        scores = scores.masked_fill(~mask, 0.0)
    return scores, probabilities, probabilities @ value


def softmax_jacobian(p: Tensor) -> Tensor:
    """J(p) = Diag(p) - p p^T of probability rows ``p`` (..., n) -> (..., n, n) (Section 4.2 (`subsec:attn`))."""
    p = p.double()
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def softmax_sensitivity(p: Tensor) -> Tensor:
    """d_smx <= 1/2: the largest ||J(p)||_2 of the rows of ``p``, (..., n, m) -> (...) (Lemma 4 (`lem:softmax-jac`)).

    This is the operator norm of the row-wise softmax's differential (Section 4.2 (`subsec:attn`)). Only a row
    (1/2, 1/2, 0, ...) attains 1/2. Finite scores of more than two keys come near 1/2 without reaching it, and an
    even row of m entries has 1/m.
    """
    return torch.linalg.matrix_norm(softmax_jacobian(p), 2).amax(-1)


def kappa_softmax(score_norm: Real, probability_norm: Real, sensitivity: Real) -> Real:
    """kappa_softmax = (||S|| / ||P||) d_smx (Section 4.2 (`subsec:attn`)).

    ||S|| counts a masked entry as 0. The paper has no masks; with the usual -inf in S, ||S|| would be infinite.
    kappa_softmax changes when a constant is added to a row of S, although P does not.
    """
    return score_norm / probability_norm * sensitivity


def chi_score(query_norm: Real, key_norm: Real, probability_norm: Real, head_width: Real, sensitivity: Real) -> Real:
    """chi_score = ||Q|| ||K|| d_smx / (||P|| sqrt(d)) >= kappa_softmax (Section 4.2 (`subsec:attn`))."""
    return query_norm * key_norm / (probability_norm * head_width**0.5) * sensitivity


def kappa_value(probability_norm: Real, value_spectral_norm: Real, context_norm: Real) -> Real:
    """kappa_val = ||P|| ||V||_2 / ||A||, defined where ||A|| > 0 (Section 4.2 (`subsec:attn`))."""
    return probability_norm * value_spectral_norm / context_norm


def kappa_score(query_norm: Real, key_norm: Real, score_norm: Real, head_width: Real) -> Real:
    """kappa_score = ||Q|| ||K|| / (||S|| sqrt(d)) >= 1, where ||S|| > 0 (Appendix A.7 (`app:estimation`)).

    The paper names kappa_score without defining it. This definition is inferred from the identity chi_score =
    kappa_softmax kappa_score that the paper states.
    """
    return query_norm * key_norm / (score_norm * head_width**0.5)


class AttentionNorms(NamedTuple):
    """Norms of one exact head that the attention bounds need; tensors of the leading shape (...)."""

    query_norm: Tensor
    key_norm: Tensor
    score_norm: Tensor
    probability_norm: Tensor
    value_spectral_norm: Tensor
    context_norm: Tensor
    sensitivity: Tensor
    head_width: int

    @property
    def kappa_softmax(self) -> Tensor:
        """``kappa_softmax`` of the head."""
        return kappa_softmax(self.score_norm, self.probability_norm, self.sensitivity)

    @property
    def chi_score(self) -> Tensor:
        """``chi_score`` of the head."""
        return chi_score(self.query_norm, self.key_norm, self.probability_norm, self.head_width, self.sensitivity)

    @property
    def kappa_value(self) -> Tensor:
        """``kappa_value`` of the head: infinite where A = 0, NaN where V = 0."""
        return kappa_value(self.probability_norm, self.value_spectral_norm, self.context_norm)


def attention_norms(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> AttentionNorms:
    """The norms of a head's exact tensors, in fp64 (Section 4.2 (`subsec:attn`)); arguments of ``exact_attention``."""
    scores, probabilities, context = exact_attention(query, key, value, mask)
    frobenius = torch.linalg.matrix_norm
    return AttentionNorms(
        query_norm=frobenius(query.double()),
        key_norm=frobenius(key.double()),
        score_norm=frobenius(scores),
        probability_norm=frobenius(probabilities),
        value_spectral_norm=frobenius(value.double(), 2),
        context_norm=frobenius(context),
        sensitivity=softmax_sensitivity(probabilities),
        head_width=query.shape[-1],
    )


def score_error_bound(
    score_norm: Real, query_norm: Real, key_norm: Real, head_width: Real, unit_roundoff: Real, c_gemm: float
) -> Real:
    """u (||S|| + c_gemm ||Q|| ||K|| / sqrt(d)) >= ||S~ - S||, S~ = fl(Q K^T / sqrt(d)) (Lemma 1 (`lem:score-bound`)).

    To first order in u. The term u ||S|| is the rounding of the scaling, which is exact where sqrt(d) is a power
    of two. A kernel that accumulates in fp32 and rounds once then needs hardly any c_gemm.
    """
    return unit_roundoff * (score_norm + c_gemm * query_norm * key_norm / head_width**0.5)


def gemm_error_bound(left_norm: Real, right_spectral_norm: Real, unit_roundoff: Real, c_gemm_out: float) -> Real:
    """u c'_gemm ||M|| ||V||_2 >= ||fl(M V) - M V|| (Lemma 2 (`lem:gemm-out`)).

    To first order in u. The printed proof needs one perturbation of a row m that explains all its products, fl(m^T V) =
    (m + dm)^T V. Rounding perturbs each product differently, so no such dm exists, even for a 1 x 1 m. What holds is
    |E| <= gamma |M| |V| entry by entry, and so c'_gemm = sqrt(min(m, d)) gamma / u for V (m, d). The constant depends
    on the dimensions, and Hadamard matrices V attain the square root. The rounding of the stored result costs 1 only.
    """
    return unit_roundoff * c_gemm_out * left_norm * right_spectral_norm


def softmax_error_bound(probability_norm: Real, unit_roundoff: Real, c_softmax: float) -> Real:
    """u c_smx ||P|| >= ||fl_smx(S) - softmax(S)|| (Lemma 3 (`lem:softmax-kernel`)).

    To first order in u, and only without underflow: as ||P|| shrinks the bound vanishes, while the error of a
    subnormal result does not. In fp8_e4m3 an even row of 1024 keys rounds to zeros, an error of ||P|| = 16 u ||P||.
    """
    return unit_roundoff * c_softmax * probability_norm


def attention_coefficient(
    kappa: Real, chi: Real, c_softmax: float = 0.0, c_gemm: float = 1.0, c_gemm_out: float = 0.0
) -> Real:
    """c_smx + kappa_softmax + c_gemm chi_score + c'_gemm, the bracket of Theorem 1 (`thm:attn`)."""
    return c_softmax + kappa + c_gemm * chi + c_gemm_out


def attention_magnitude(
    kappa: Real, chi: Real, probability_norm: Real, value_spectral_norm: Real, c_softmax: float = 0.0,
    c_gemm: float = 1.0, c_gemm_out: float = 0.0,
) -> Real:  # fmt: skip
    """A = [c_smx + kappa_softmax + c_gemm chi_score + c'_gemm] ||P|| ||V||_2 (Eq. (7) (`eq:attn-contrib`)).

    At step t of a training run, A is Eq. (11) (`eq:bgss-attn`). u A bounds the forward error of P V (Theorem 1
    (`thm:attn`)). With the default constants this is the term (kappa_softmax + chi_score) ||P|| ||V||_2 of the
    practical score (Section 5.1 (`subsec:bgss_estimation`)).
    """
    return attention_coefficient(kappa, chi, c_softmax, c_gemm, c_gemm_out) * probability_norm * value_spectral_norm


def attention_error_bound(
    kappa: Real, chi: Real, probability_norm: Real, value_spectral_norm: Real, unit_roundoff: Real, *,
    c_softmax: float, c_gemm: float, c_gemm_out: float,
) -> Real:  # fmt: skip
    """u A >= ||A~ - A|| for Q, K and V given exactly (Theorem 1 (`thm:attn`), Eq. (2) (`eq:attn-bound`)).

    To first order in u. The neglected terms are small only while the errors of the scores are small. Once u ||S||
    reaches 1, a saturated row, whose J(P) vanishes, can err by much more than the bound
    (see ``attention_error_bound_with_remainder``).
    """
    return unit_roundoff * attention_magnitude(
        kappa, chi, probability_norm, value_spectral_norm, c_softmax, c_gemm, c_gemm_out
    )


def attention_relative_error_bound(
    kappa: Real, chi: Real, kappa_val: Real, unit_roundoff: Real, *, c_softmax: float, c_gemm: float, c_gemm_out: float
) -> Real:
    """u [c_smx + kappa + c_gemm chi + c'_gemm] kappa_val >= ||A~ - A|| / ||A||, ||A|| > 0 (Theorem 1 (`thm:attn`))."""
    return unit_roundoff * attention_coefficient(kappa, chi, c_softmax, c_gemm, c_gemm_out) * kappa_val


def softmax_growth(spread: Tensor) -> Tensor:
    """(e^r - 1) / r >= 1: what the first order of the softmax leaves out, in closed form; not in the paper.

    ||softmax(s + ds) - softmax(s)|| <= ||J(p)||_2 ||ds|| (e^r - 1) / r for every ds, where ``spread`` r =
    max(ds) - min(ds). Proof: between s and s + t ds no p_i grows by more than e^{tr}. v^T J(p) v is the
    variance of v under p, so it is at most the second moment of v about any point. Hence ||J(p(t))||_2 <=
    e^{tr} ||J(p)||_2. Integrate over t.
    """
    return torch.where(spread == 0, 1.0, torch.expm1(spread) / spread)


def attention_error_bound_with_remainder(
    norms: AttentionNorms, spread: Tensor, unit_roundoff: float, *, c_softmax: float, c_gemm: float, c_gemm_out: float,
    underflow: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Tensor:  # fmt: skip
    """Theorem 1 (`thm:attn`) with its O(u^2) written out: the three stages of Appendix A.2 (`app:attn-proof`).

    ``spread`` (...) is at least the largest max - min over a row of S~ - S; sqrt(2) times the score error of a
    row is enough. ``underflow`` is what the three kernels (scores, softmax, P V) may err beyond the standard
    model, in norm. Equals ``attention_error_bound`` up to O(u^2).
    """
    n, (score_underflow, softmax_underflow, context_underflow) = norms, underflow
    scores = score_error_bound(n.score_norm, n.query_norm, n.key_norm, n.head_width, unit_roundoff, c_gemm)
    score_error = score_underflow + scores
    # The softmax stretches nothing by more than 1/2, whatever the spread; fmin takes 1/2 where the spread is NaN.
    moved = torch.fmin(n.sensitivity * softmax_growth(spread), torch.full_like(n.sensitivity, 0.5)) * score_error
    softmax = softmax_error_bound(n.probability_norm + moved, unit_roundoff, c_softmax)
    probability_error = moved + softmax_underflow + softmax
    wide = n.probability_norm + probability_error
    context = gemm_error_bound(wide, n.value_spectral_norm, unit_roundoff, c_gemm_out)
    return probability_error * n.value_spectral_norm + context + context_underflow
