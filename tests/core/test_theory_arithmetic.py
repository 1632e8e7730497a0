"""The paper's bounds of single kernels and of attention, against the rounding errors of kernels that ran.

The low-precision kernels run natively in bf16 where the CPU can, and emulated otherwise. fp64 is the reference. The
constants are a priori, for the error model of ``kernel_samples``: inputs given exactly, fp32 accumulation, one
rounding for each result. They include O(u^2), underflow is added explicitly, and what the softmax's linearisation
leaves out has a closed form. So the only tolerance is fp64's own.
"""

import pandas as pd
import pytest
import torch
from drawn import assert_within, every_format, many, seeded, seeds
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fragility_core import theory
from fragility_lessons.constants import a_priori_constants, attention_terms, gamma_n
from fragility_lessons.kernel_samples import (
    HEADS,
    arithmetic,
    draw_heads,
    draw_rows,
    observe_attention,
    observe_layernorm,
    run_attention,
    run_layernorm,
    sample_attention,
    underflow,
)
from fragility_numerics.formats import get_format

executions = pytest.mark.parametrize("execution", ["auto", "emulated"])


def constants_for(format: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """The a-priori constants of the attention kernels for (n, m, d)."""
    constants = a_priori_constants(format, keys=shape[1], head_width=shape[2], features=1)
    return {name: constants[name] for name in ("c_softmax", "c_gemm", "c_gemm_out")}


shapes = st.tuples(st.integers(1, 24), st.integers(1, 48), st.integers(1, 96))


@every_format
@given(shape=shapes, family=st.sampled_from(sorted(HEADS)), seed=seeds)
@example(shape=(1, 2, 2), family="parallel", seed=0)  # where the constants are nearly attained
@example(shape=(1, 3, 3), family="heavy-tailed", seed=0)
@many
def test_lemmas_of_the_attention_kernels_hold(format, shape, family, seed):
    """Lemma 1 (`lem:score-bound`), Lemma 2 (`lem:gemm-out`) and Lemma 3 (`lem:softmax-kernel`) together."""
    low, (n, m, d) = arithmetic(format), shape
    draws = 4 + 2**14 // (n * d + 2 * m * d + n * m * m)
    observed = observe_attention(*draw_heads(family, shape, draws, low.format, seeded(seed)), low)
    assume(len(observed))  # some draw stayed in the format's range
    terms = attention_terms(observed.assign(family=family, shape=""), low.format)
    constants = a_priori_constants(format, keys=m, head_width=d, features=1)
    assert_within(terms.observed, terms.free + terms.constant.map(constants) * terms.unit)


def in_format(format: str, seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    """Normal numbers times ``scale``, exactly in the format."""
    generator = seeded(seed)
    return [get_format(format).round(scale * torch.randn(*shape, generator=generator)) for shape in shapes]


def score_errors(format: str, shape: tuple[int, int, int], family: str, seed: int) -> tuple:
    """||S~ - S|| of up to 2,000 draws in the format's range, and (||S||, ||Q||, ||K||, d, u) for their bound."""
    low, draws = arithmetic(format), max(4, min(2000, 2**14 // (shape[0] * shape[1] * shape[2])))
    query, key, value = draw_heads(family, shape, draws, low.format, seeded(seed))
    scores = run_attention(query, key, value, low)[0].double()
    products = query.double() @ key.double().mT
    inside = (products.abs().amax((-2, -1)) < low.format.largest) & scores.isfinite().all(-1).all(-1)
    exact, norm = products / shape[2] ** 0.5, torch.linalg.matrix_norm
    norms = (norm(x.double())[inside] for x in (exact, query, key))
    return norm(scores - exact)[inside], (*norms, shape[2], low.format.unit_roundoff)


@every_format
@given(shape=shapes, family=st.sampled_from(sorted(HEADS)), seed=seeds)
@example(shape=(1, 1, 2), family="parallel", seed=0)  # where the bound is nearly attained
@many
def test_score_bound_holds(format, shape, family, seed):
    """Lemma 1 (`lem:score-bound`), with the underflow of the product and of its scaling added."""
    errors, norms = score_errors(format, shape, family, seed)
    bound = theory.score_error_bound(*norms, constants_for(format, shape)["c_gemm"])
    assert_within(errors, bound + 2 * underflow(get_format(format), shape[0] * shape[1]))


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_the_score_bound_needs_both_of_its_terms(format):
    """Lemma 1 (`lem:score-bound`): the rounding of the scaling, u ||S||, and that of the product."""
    shape = (1, 1, 2)
    errors, (score_norm, *norms) = score_errors(format, shape, "parallel", 0)
    c_gemm = constants_for(format, shape)["c_gemm"]
    extra = 2 * underflow(get_format(format), 1)
    assert (errors > 1.2 * theory.score_error_bound(0.0, *norms, c_gemm) + extra).any()
    assert (errors > 1.2 * theory.score_error_bound(score_norm, *norms, 0.0) + extra).any()


@every_format
@given(n=st.integers(1, 8), m=st.integers(1, 48), scale=st.floats(0.1, 8), seed=seeds)
@many
def test_softmax_kernel_bound_holds(format, n, m, scale, seed):
    """Lemma 3 (`lem:softmax-kernel`), with underflow added: for the softmax of the scores that the kernel was given."""
    low = arithmetic(format)
    (scores,) = in_format(format, seed, (n, m), scale=scale)
    with low.running():
        computed = scores.softmax(-1).double()
    exact = scores.double().softmax(-1)
    constant = constants_for(format, (n, m, 1))["c_softmax"]
    bound = theory.softmax_error_bound(exact.norm(), low.format.unit_roundoff, constant)
    assert_within((computed - exact).norm(), bound + underflow(low.format, n * m))


@every_format
@given(shape=shapes, family=st.sampled_from(sorted(HEADS)), seed=seeds)
@many
def test_theorem_attn_holds(format, shape, family, seed):
    """The absolute bound with its O(u^2) written out. The relative bound is the same inequality divided by ||A||."""
    low, u = arithmetic(format), get_format(format).unit_roundoff
    query, key, value = draw_heads(family, shape, 4, low.format, seeded(seed))
    observed = observe_attention(query, key, value, low)
    norms, constants = theory.attention_norms(query, key, value), constants_for(format, shape)
    # No two score errors of a row differ by more than sqrt(2) times the row's own score error bound.
    rows = theory.attention_norms(query.unsqueeze(-2), key.unsqueeze(1), value.unsqueeze(1))
    row_error = theory.score_error_bound(
        rows.score_norm, rows.query_norm, rows.key_norm, shape[2], u, constants["c_gemm"]
    ) + 2 * underflow(low.format, shape[1])
    extra = (
        2 * underflow(low.format, shape[0] * shape[1]),
        underflow(low.format, shape[0] * shape[1]),
        underflow(low.format, shape[0] * shape[2]),
    )
    bound = theory.attention_error_bound_with_remainder(
        norms, 2**0.5 * row_error.amax(-1), u, **constants, underflow=extra
    )
    assert_within(observed.attention_error, bound.numpy()[observed.index])  # some may have left the range


def test_no_term_of_theorem_attn_can_be_left_out():
    """With constants 1 the bound holds for every draw in fp16. Without any one of its four terms it fails for some."""
    low = arithmetic("fp16")
    sample = sample_attention(low, seed=0)
    norms = theory.AttentionNorms(*(torch.tensor(sample[name]) for name in theory.AttentionNorms._fields))
    error, terms = torch.tensor(sample.attention_error), {"c_softmax": 1.0, "c_gemm": 1.0, "c_gemm_out": 1.0}

    def bound(kappa, chi, **constants):
        amplified = (norms.probability_norm, norms.value_spectral_norm, low.format.unit_roundoff)
        return theory.attention_error_bound(kappa, chi, *amplified, **terms | constants)

    assert_within(error, bound(norms.kappa_softmax, norms.chi_score))
    for reduced in (
        bound(norms.kappa_softmax, norms.chi_score, c_softmax=0.0),
        bound(0.0, norms.chi_score),
        bound(norms.kappa_softmax, 0.0),
        bound(norms.kappa_softmax, norms.chi_score, c_gemm_out=0.0),
    ):
        assert (error > 1.05 * reduced).any()


@executions
@given(shape=shapes, seed=seeds, scale=st.floats(0.1, 1.5))
@many
def test_theorem_attn_as_printed_holds_in_bf16_while_scores_are_small(execution, shape, seed, scale):
    """To first order only, absolute and relative: u ||S|| stays small for normal heads, so no remainder is needed."""
    low, u = arithmetic("bf16", execution=execution), 2.0**-8
    n, m, d = shape
    draws = [torch.randn(2, rows, d, generator=seeded(seed + rows)) for rows in (n, m, m)]
    query, key, value = (low.format.round(factor * x) for factor, x in zip((scale, scale, 1.0), draws))
    norms, constants = theory.attention_norms(query, key, value), constants_for("bf16", shape)
    error = torch.tensor(observe_attention(query, key, value, low).attention_error)
    assert_within(
        error,
        theory.attention_error_bound(
            norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm, u, **constants
        ),
    )
    assert_within(
        error / norms.context_norm,
        theory.attention_relative_error_bound(norms.kappa_softmax, norms.chi_score, norms.kappa_value, u, **constants),
    )


@every_format
@given(n=st.integers(1, 40), m=st.integers(1, 300), d=st.integers(1, 70), seed=seeds)
@many
def test_gemm_error_bound_holds_for_plain_matrices(format, n, m, d, seed):
    """Lemma 2 (`lem:gemm-out`) for the kernels of linear layers: matrix or, for n = 1, vector times matrix."""
    low = arithmetic(format)
    left, right = (low.format.round(torch.randn(*shape, generator=seeded(seed))) for shape in ((n, m), (m, d)))
    with low.running():
        computed = left @ right if n > 1 else left[0] @ right
    exact = left.double() @ right.double()
    inside = exact.abs() < low.format.largest  # the lemma is about roundings, not about the range
    error = (computed.double() - exact)[inside].norm()
    constant = a_priori_constants(format, keys=m, head_width=d, features=1)["c_gemm_out"]
    bound = theory.gemm_error_bound(
        left.double().norm(), torch.linalg.matrix_norm(right.double(), 2), low.format.unit_roundoff, constant
    )
    assert_within(error, bound + underflow(low.format, n * d))


@every_format
@given(features=st.integers(2, 300), exponent=st.floats(-12, 1), even=st.booleans(), seed=seeds)
@many
def test_proposition_ln_holds(format, features, exponent, even, seed):
    """For each row, absolute and, where Z is not 0, relative. Rows are centred, shifted, heavy-tailed or constant."""
    low, epsilon, generator = arithmetic(format), 10**exponent, seeded(seed)
    gamma = low.format.round(torch.ones(features) if even else torch.randn(features, generator=generator))
    rows = draw_rows(features, 4, low.format, generator).values()
    observed = pd.concat([observe_layernorm(x, gamma, epsilon, low) for x in rows])
    a_ln = a_priori_constants(format, keys=1, head_width=1, features=features)["a_ln"]
    u = low.format.unit_roundoff
    scaled = (observed.gamma_max, observed.variance, epsilon, observed.input_norm)
    error = observed.layernorm_error - observed.layernorm_underflow
    assert_within(error, theory.layernorm_error_bound(*scaled, u, a_ln=a_ln))
    relative = theory.layernorm_relative_error_bound(
        theory.layernorm_magnitude(*scaled, a_ln=a_ln), observed.path_norm, u
    )
    assert_within((error / observed.path_norm)[observed.path_norm > 0], relative[observed.path_norm > 0])


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3"])
@given(rows=st.integers(1, 12), features=st.integers(2, 64), exponent=st.floats(-12, 1), seed=seeds)
@many
def test_proposition_ln_holds_for_the_mean_variance_where_only_the_result_is_rounded(
    format, rows, features, exponent, seed
):
    """Rows whose variances span 2^-12 to 2^10. By Jensen's inequality their mean is enough for the whole matrix."""
    low, epsilon, generator = arithmetic(format), 10**exponent, seeded(seed)
    gamma = low.format.round(torch.randn(features, generator=generator))
    scales = 2 ** (11 * torch.rand(rows, 1, generator=generator) - 6)
    x = low.format.round(scales * torch.randn(rows, features, generator=generator))
    error = run_layernorm(x, gamma, epsilon, low).double() - theory.layernorm_path(x, gamma, epsilon)
    norms = theory.layernorm_norms(x, gamma, epsilon)
    a_ln = a_priori_constants(format, keys=1, head_width=1, features=features)["a_ln"]
    bound = theory.layernorm_error_bound(
        norms.gamma_max, norms.variance.mean(), epsilon, norms.input_norm.norm(), low.format.unit_roundoff, a_ln=a_ln
    )
    assert_within(error.norm(), bound + underflow(low.format, x.numel()))


NORMS = {"llama": (LlamaRMSNorm, 0.0, 2), "gemma": (GemmaRMSNorm, 1.0, 1)}  # class, gamma - weight, roundings


@pytest.mark.parametrize("name", NORMS)
@every_format
@given(features=st.integers(1, 300), exponent=st.floats(-12, 1), seed=seeds)
@many
def test_proposition_ln_holds_for_an_rmsnorm_with_the_mean_square(format, name, features, exponent, seed):
    """As in the score (see ``theory.layernorm``), with no order of u left out: nothing cancels in an RMSNorm."""
    low, epsilon, generator = arithmetic(format), 10**exponent, seeded(seed)
    kind, offset, roundings = NORMS[name]
    norm, u = kind(features, eps=epsilon), low.format.unit_roundoff
    norm.weight = torch.nn.Parameter(low.format.round(torch.randn(features, generator=generator)), requires_grad=False)
    gamma = norm.weight.double() + offset
    a_ln = ((1 + u) ** roundings * (1 + gamma_n(features + 16, 2.0**-24)) - 1) / u
    for x in draw_rows(features, 4, low.format, generator).values():
        with low.running():
            computed = norm(x).double()
        mean_square = x.double().square().mean(-1)
        normal = x.double() / (mean_square + epsilon).sqrt()[:, None]
        exact = gamma * normal
        inside = (1 + u) * torch.maximum(normal.abs(), exact.abs()) < low.format.largest
        bound = theory.layernorm_error_bound(
            gamma.abs().max(), mean_square, epsilon, x.double().norm(dim=-1), u, a_ln=a_ln
        )
        extra = (1 + gamma.abs().max()) * underflow(low.format, features)
        assert_within(torch.where(inside, computed - exact, 0.0).norm(dim=-1), bound + extra)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@given(features=st.integers(2, 64), exponent=st.floats(-4, 0), shift=st.floats(0, 30), seed=seeds)
@many
def test_proposition_ln_holds_for_a_layernorm_of_elementary_kernels(format, features, exponent, shift, seed):
    """Mean, variance and scale are rounded to the format too, as in models that spell LayerNorm out.

    Centring errs by at most 2u ||x||; squares, mean, sum with epsilon and root by 5/2 u; two products by 2u. So
    a_ln = 6.5 to first order. The bound holds with 8 where the centring error is at most an eighth of
    sqrt(d_model (sigma^2 + epsilon)): LayerNorm's divisor then moves by at most an eighth.
    """
    low, epsilon = arithmetic(format, execution="emulated"), 10**exponent
    u, generator = low.format.unit_roundoff, seeded(seed)
    x = low.format.round(torch.randn(16, features, generator=generator) + shift)
    gamma = low.format.round(torch.randn(features, generator=generator))
    with low.running():
        centred = x - x.mean(-1, keepdim=True)
        scale = ((centred * centred).mean(-1, keepdim=True) + epsilon).rsqrt()
        computed = (gamma * (centred * scale)).double()
    norms = theory.layernorm_norms(x, gamma, epsilon)
    change = (centred.double() - (x.double() - x.double().mean(-1, keepdim=True))).norm(dim=-1)
    assert_within(change, (2 * u * (1 + u) + gamma_n(features + 2, 2.0**-24)) * norms.input_norm)
    small = change <= (features * (norms.variance + epsilon)).sqrt() / 8
    error = (computed - theory.layernorm_path(x, gamma, epsilon)).norm(dim=-1)
    bound = theory.layernorm_error_bound(norms.gamma_max, norms.variance, epsilon, norms.input_norm, u, a_ln=8.0)
    assert_within(error[small], bound[small] + (1 + norms.gamma_max) * underflow(low.format, features))
