"""Self-attention: S = Q K^T / sqrt(d), P = softmax(S), A = P V (Section 4.2 (`subsec:attn`), Appendix A.2 (`app:attn-proof`)).

One head: Q is (..., n, d), K and V are (..., m, d), S and P are (..., n, m), A is (..., n, d); leading
dimensions are independent problems. ||.|| is the Frobenius norm, ||.||_2 the spectral norm. Several
heads make one problem in which Q, K and P are stacked: take norms over all of them and the largest
d_smx and ||V||_2 (protocol section 3); every bound below then still holds.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def softmax_jacobian(p: Tensor) -> Tensor:
    """J(p) = Diag(p) - p p^T of probability rows ``p`` (..., n) -> (..., n, n) (Section 4.2 (`subsec:attn`))."""
    p = p.double()
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def softmax_sensitivity(p: Tensor) -> Tensor:
    """d_smx: the largest ||J(p)||_2 over the rows of ``p`` (..., n, m), at most 1/2 (Lemma 4 (`lem:softmax-jac`)).

    This is the operator norm of the row-wise softmax's differential (Section 4.2 (`subsec:attn`)). Equality holds
    only at (1/2, 1/2, 0, ...): an even row of m entries has 1/m, and finite scores of more than two
    keys come near 1/2 without reaching it.
    """
    return torch.linalg.matrix_norm(softmax_jacobian(p), 2).amax(-1)


def kappa_softmax(score_norm, probability_norm, sensitivity):
    """kappa_softmax = (||S|| / ||P||) d_smx (Section 4.2 (`subsec:attn`)).

    ||S|| is over the entries that are not masked (a masked one counts as 0): printed without masks,
    S would hold -inf. Unlike P, it changes when a constant is added to a row of S.
    """
    return score_norm / probability_norm * sensitivity


def chi_score(query_norm, key_norm, probability_norm, head_width, sensitivity):
    """chi_score = ||Q|| ||K|| d_smx / (||P|| sqrt(d)) (Section 4.2 (`subsec:attn`)), never below kappa_softmax."""
    return query_norm * key_norm / (probability_norm * head_width**0.5) * sensitivity


def kappa_score(query_norm, key_norm, score_norm, head_width):
    """kappa_score = ||Q|| ||K|| / (||S|| sqrt(d)) >= 1 (Appendix A.7 (`app:estimation`)), defined where ||S|| > 0.

    There chi_score = kappa_softmax kappa_score.
    """
    return query_norm * key_norm / (score_norm * head_width**0.5)


def kappa_value(probability_norm, value_spectral_norm, context_norm):
    """kappa_val = ||P|| ||V||_2 / ||A||, defined where ||A|| > 0 (Section 4.2 (`subsec:attn`))."""
    return probability_norm * value_spectral_norm / context_norm


class AttentionNorms(NamedTuple):
    """What the attention bounds need of one exact head; tensors of the leading shape (...)."""

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
        """kappa_softmax (Section 4.2 (`subsec:attn`))."""
        return kappa_softmax(self.score_norm, self.probability_norm, self.sensitivity)

    @property
    def chi_score(self) -> Tensor:
        """chi_score (Section 4.2 (`subsec:attn`))."""
        return chi_score(self.query_norm, self.key_norm, self.probability_norm, self.head_width, self.sensitivity)

    @property
    def kappa_value(self) -> Tensor:
        """kappa_val (Section 4.2 (`subsec:attn`)), infinite where A = 0, NaN where V = 0."""
        return kappa_value(self.probability_norm, self.value_spectral_norm, self.context_norm)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """S, P and A in fp64 (Section 4.2 (`subsec:attn`)); where ``mask`` (n, m) is False, S and P are 0."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (..., n, m)
    if mask is None:
        probabilities = scores.softmax(-1)
    else:
        probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1)
        scores = scores.masked_fill(~mask, 0.0)
    return scores, probabilities, probabilities @ value


def attention_norms(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> AttentionNorms:
    """The norms of a head's exact tensors, in fp64 (Section 4.2 (`subsec:attn`))."""
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


# --- What each kernel adds (Appendix A.1 (`app:kernels-lemmas`)) ----------------------------------------------


def score_error_bound(score_norm, query_norm, key_norm, head_width, unit_roundoff, c_gemm):
    """u (||S|| + c_gemm ||Q|| ||K|| / sqrt(d)) >= ||S~ - S||, S~ = fl(Q K^T / sqrt(d)) (Lemma 1 (`lem:score-bound`)).

    To first order in u. The lone ||S|| is the scaling's rounding, which a power of two does not make:
    a kernel that accumulates in fp32 and rounds once then needs hardly any c_gemm.
    """
    return unit_roundoff * (score_norm + c_gemm * query_norm * key_norm / head_width**0.5)


def gemm_error_bound(left_norm, right_spectral_norm, unit_roundoff, c_gemm_out):
    """u c'_gemm ||M|| ||V||_2 >= ||fl(M V) - M V|| (Lemma 2 (`lem:gemm-out`)).

    To first order in u. The printed proof asks for one perturbation of a row m that explains all
    its products at once, fl(m^T V) = (m + dm)^T V; rounding perturbs each product differently, so
    no such dm exists even for a 1 x 1 m. What does hold is |E| <= gamma |M| |V| entry by entry,
    hence c'_gemm = sqrt(min(m, d)) gamma / u for V (m, d): the constant depends on the dimensions,
    and the square root is attained (Hadamard V). The rounding of the stored result costs 1 only.
    """
    return unit_roundoff * c_gemm_out * left_norm * right_spectral_norm


def softmax_error_bound(probability_norm, unit_roundoff, c_softmax):
    """u c_smx ||P|| >= ||fl_smx(S) - softmax(S)|| (Lemma 3 (`lem:softmax-kernel`)).

    To first order in u, and with no underflow: u c_smx ||P|| vanishes with ||P||, a subnormal's
    error does not. In fp8_e4m3 an even row of 1024 keys rounds to zeros, an error of ||P|| = 16 u ||P||.
    """
    return unit_roundoff * c_softmax * probability_norm


# --- Theorem 1 (`thm:attn`) -----------------------------------------------------------------------------


def attention_coefficient(kappa, chi, c_softmax=0.0, c_gemm=1.0, c_gemm_out=0.0):
    """c_smx + kappa_softmax + c_gemm chi_score + c'_gemm, the bracket of Theorem 1 (`thm:attn`)."""
    return c_softmax + kappa + c_gemm * chi + c_gemm_out


def attention_magnitude(kappa, chi, probability_norm, value_spectral_norm, c_softmax=0.0, c_gemm=1.0, c_gemm_out=0.0):
    """A = [c_smx + kappa_softmax + c_gemm chi_score + c'_gemm] ||P|| ||V||_2 (Eq. (7) (`eq:attn-contrib`)).

    u A bounds the forward error of PV (Theorem 1 (`thm:attn`)). The default constants are those of the
    practical score (Section 5.1 (`subsec:bgss_estimation`)): (kappa_softmax + chi_score) ||P|| ||V||_2. At step t of a
    training run, A is Eq. (11) (`eq:bgss-attn`).
    """
    return attention_coefficient(kappa, chi, c_softmax, c_gemm, c_gemm_out) * probability_norm * value_spectral_norm


def attention_error_bound(
    kappa, chi, probability_norm, value_spectral_norm, unit_roundoff, *, c_softmax, c_gemm, c_gemm_out
):
    """u [c_smx + kappa + c_gemm chi + c'_gemm] ||P|| ||V||_2 >= ||A~ - A|| (Eq. (2) (`eq:attn-bound`), Theorem 1 (`thm:attn`)).

    To first order in u, for Q, K, V given exactly. The neglected terms are small only while the
    scores' own errors are: once u ||S|| reaches 1, a saturated row, with its vanishing J(P), can be
    off by much more (see ``attention_error_bound_with_remainder``).
    """
    return unit_roundoff * attention_magnitude(
        kappa, chi, probability_norm, value_spectral_norm, c_softmax, c_gemm, c_gemm_out
    )


def attention_relative_error_bound(kappa, chi, kappa_val, unit_roundoff, *, c_softmax, c_gemm, c_gemm_out):
    """u [c_smx + kappa + c_gemm chi + c'_gemm] kappa_val >= ||A~ - A|| / ||A|| where ||A|| > 0 (Theorem 1 (`thm:attn`))."""
    return unit_roundoff * attention_coefficient(kappa, chi, c_softmax, c_gemm, c_gemm_out) * kappa_val


def softmax_growth(spread: Tensor) -> Tensor:
    """(e^r - 1) / r >= 1: what the first order of the softmax leaves out, in closed form.

    ||softmax(s + ds) - softmax(s)|| <= ||J(p)||_2 ||ds|| (e^r - 1) / r for every ds, r = max(ds) - min(ds)
    its ``spread``. On the way no p_i grows by more than e^{tr}, and the variance J stands for is at
    most the second moment about any centre, so ||J(p(t))||_2 <= e^{tr} ||J(p)||_2; integrate over t.
    Closes the O(u^2) of Theorem 1 (`thm:attn`); not in the paper.
    """
    return torch.where(spread == 0, 1.0, torch.expm1(spread) / spread)


def attention_error_bound_with_remainder(
    norms: AttentionNorms,
    spread: Tensor,
    unit_roundoff: float,
    *,
    c_softmax: float,
    c_gemm: float,
    c_gemm_out: float,
    underflow: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Tensor:
    """Theorem 1 (`thm:attn`) with its O(u^2) written out: the three stages of Appendix A.2 (`app:attn-proof`), no term dropped.

    ``spread`` (...) is at least the largest max - min over a row of S~ - S; sqrt(2) times the score
    error of a row will do. ``underflow`` is what the three kernels (scores, softmax, PV) may err
    beyond the standard model, in norm. Equals ``attention_error_bound`` up to O(u^2).
    """
    score_underflow, softmax_underflow, context_underflow = underflow
    score_error = score_underflow + score_error_bound(
        norms.score_norm, norms.query_norm, norms.key_norm, norms.head_width, unit_roundoff, c_gemm
    )
    # Nor does the softmax stretch anything by more than 1/2, whatever the spread: fmin takes that for a NaN.
    stretch = torch.fmin(norms.sensitivity * softmax_growth(spread), torch.full_like(norms.sensitivity, 0.5))
    moved = stretch * score_error
    probability_error = (
        moved + softmax_underflow + softmax_error_bound(norms.probability_norm + moved, unit_roundoff, c_softmax)
    )
    return (
        probability_error * norms.value_spectral_norm
        + gemm_error_bound(
            norms.probability_norm + probability_error, norms.value_spectral_norm, unit_roundoff, c_gemm_out
        )
        + context_underflow
    )
