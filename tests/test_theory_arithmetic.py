"""The paper's bounds against rounding errors that really happened.

The low-precision kernels run (bf16 natively where the CPU can, the other formats emulated), fp64 is the
reference, and the kernel constants are those of the error model in ``kernel_samples``: inputs given
exactly, fp32 accumulation, one rounding per result. Those constants include O(u^2), underflow is added
explicitly, and what the softmax's linearisation leaves out has a closed form, so no tolerance is
needed but fp64's own.
"""

import pandas as pd
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.func import jacrev
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fragility_core import theory
from fragility_core.arithmetic.formats import FORMATS, get_format
from fragility_lab.experiments.calibration import a_priori_constants, attention_terms, gamma_n
from fragility_lab.experiments.kernel_samples import (
    HEADS,
    arithmetic,
    draw_heads,
    draw_rows,
    draw_stacks,
    observe_attention,
    observe_layernorm,
    run_attention,
    run_layernorm,
    run_stack,
    sample_attention,
    underflow,
)

FP64 = 1e-12  # relative error of the reference, and far below any unit roundoff tested
every_format = pytest.mark.parametrize("format", FORMATS)
executions = pytest.mark.parametrize("execution", ["auto", "emulated"])
seeds = st.integers(0, 2**32 - 1)
many = settings(deadline=None, max_examples=40)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def constants_for(format: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """The a-priori constants of the attention kernels for (n, m, d)."""
    constants = a_priori_constants(format, keys=shape[1], head_width=shape[2], features=1)
    return {name: constants[name] for name in ("c_softmax", "c_gemm", "c_gemm_out")}


def assert_within(observed, bound):
    """Not one draw beyond its bound."""
    assert (observed <= bound * (1 + FP64)).all(), f"observed is {(observed / bound).max()} times the bound"


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


@every_format
@given(shape=shapes, scale=st.floats(0.1, 4), seed=seeds)
@many
def test_score_bound_holds(format, shape, scale, seed):
    """Lemma 1 (`lem:score-bound`), with the underflow of the product and of its scaling added."""
    low, (n, m, d) = arithmetic(format), shape
    query, key = in_format(format, seed, (n, d), (m, d), scale=scale)
    scores = run_attention(query, key, torch.zeros_like(key), low)[0].double()
    query, key = query.double(), key.double()
    exact = query @ key.T / d**0.5
    assume((query @ key.T).abs().max() < low.format.largest / 2)
    bound = theory.score_error_bound(
        exact.norm(), query.norm(), key.norm(), d, low.format.unit_roundoff, constants_for(format, shape)["c_gemm"]
    )
    assert_within((scores - exact).norm(), bound + 2 * underflow(low.format, n * m))


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_the_score_bound_needs_both_of_its_terms(format):
    """Lemma 1 (`lem:score-bound`): the product's rounding and the scaling's, each of which can be the larger one."""
    low, generator = arithmetic(format), seeded(0)
    u, excess = low.format.unit_roundoff, {"scaling": 0.0, "product": 0.0}
    for _ in range(50):
        query, key = (low.format.round(torch.randn(2, 3, generator=generator)) for _ in range(2))
        scores = run_attention(query, key, torch.zeros_like(key), low)[0].double()
        query, key = query.double(), key.double()
        exact = query @ key.T / 3**0.5
        error = (scores - exact).norm()
        bounds = {
            "scaling": theory.score_error_bound(0.0, query.norm(), key.norm(), 3, u, c_gemm=0.5),
            "product": theory.score_error_bound(exact.norm(), query.norm(), key.norm(), 3, u, c_gemm=0.0),
        }
        for left_out, bound in bounds.items():
            excess[left_out] = max(excess[left_out], (error / bound).item())
    assert min(excess.values()) > 1


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
    """With its O(u^2) written out, absolute form; the relative form is the same inequality over ||A||."""
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
    """With constants 1 it holds for every draw of the sample in fp16; without any one of its four terms it does not."""
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
    """First order only, absolute and relative: u ||S|| stays small for normal heads, and no remainder is needed."""
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
    error = (computed.double() - left.double() @ right.double()).norm()
    constant = a_priori_constants(format, keys=m, head_width=d, features=1)["c_gemm_out"]
    bound = theory.gemm_error_bound(
        left.double().norm(), torch.linalg.matrix_norm(right.double(), 2), low.format.unit_roundoff, constant
    )
    assert_within(error, bound + underflow(low.format, n * d))


@every_format
@given(features=st.integers(2, 300), exponent=st.floats(-12, 1), even=st.booleans(), seed=seeds)
@many
def test_proposition_ln_holds(format, features, exponent, even, seed):
    """Row by row, absolute and, where Z is not 0, relative; rows shifted, heavy-tailed, constant."""
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
    """As the score takes it (``theory.layernorm``). No order of u is left out: nothing cancels in an RMSNorm."""
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
        exact = gamma * x.double() / (mean_square + epsilon).sqrt()[:, None]
        bound = theory.layernorm_error_bound(
            gamma.abs().max(), mean_square, epsilon, x.double().norm(dim=-1), u, a_ln=a_ln
        )
        extra = (1 + gamma.abs().max()) * underflow(low.format, features)
        assert_within((computed - exact).norm(dim=-1), bound + extra)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@given(features=st.integers(2, 64), exponent=st.floats(-4, 0), shift=st.floats(0, 30), seed=seeds)
@many
def test_proposition_ln_holds_for_a_layernorm_of_elementary_kernels(format, features, exponent, shift, seed):
    """Mean, variance and scale rounded to the format too, as models that spell LayerNorm out run it.

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


@every_format
@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 24)), gain=st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0]), seed=seeds
)
@many
def test_theorem_unified_holds_for_linear_residual_stacks(format, shape, gain, seed):
    """No O(u^2) is left: the recursion is exact for linear blocks, and magnitudes are those of the computed states."""
    low = arithmetic(format)
    u, width = low.format.unit_roundoff, shape[1]
    x, weights = draw_stacks(shape, gain, 4, low.format, seeded(seed))
    states = run_stack(x, weights, low).double()  # (L + 1, draws, n, d)
    assume(states.abs().max() < low.format.largest)
    exact = x.double()
    for weight in weights.double():
        exact = exact + exact @ weight
    assume(torch.linalg.matrix_norm(exact).min() > 0)
    norms, rho = torch.linalg.matrix_norm(states).T, torch.linalg.matrix_norm(weights.double(), 2).T  # (draws, L)
    constant = a_priori_constants(format, keys=width, head_width=width, features=1)["c_gemm_out"]
    magnitude = theory.remainder_magnitude(
        theory.gemm_error_bound(norms[:, :-1], rho, 1.0, constant),
        norms[:, 1:] / (1 - u),  # the addition, u times its exact result
        2 * underflow(low.format, x[0].numel()) / u,
    )
    bound = theory.mismatch_bound(magnitude, rho, torch.linalg.matrix_norm(exact), u)
    assert_within(theory.mismatch(states[-1], exact), bound)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_no_transport_factor_can_be_left_out(format):
    """A state that shrinks by 1 - rho in every block while its rounding errors grow by up to 1 + rho."""
    low, rho, blocks = arithmetic(format), 0.75, 6
    u = low.format.unit_roundoff
    basis = torch.linalg.qr(torch.randn(8, 8, generator=seeded(0), dtype=torch.float64)).Q
    gains = rho * torch.tensor([-1.0] + [1.0] * 7, dtype=torch.float64)
    weight = low.format.round((basis @ gains.diag() @ basis.T).float())
    states = run_stack(low.format.round(basis[:, :1].T.float())[None], weight.expand(blocks, 1, 8, 8), low).double()
    exact = states[0] @ torch.linalg.matrix_power(torch.eye(8, dtype=torch.float64) + weight.double(), blocks)
    norms, gain = torch.linalg.matrix_norm(states).T, torch.linalg.matrix_norm(weight.double(), 2).expand(1, blocks)
    constant = a_priori_constants(format, keys=8, head_width=8, features=1)["c_gemm_out"]
    magnitude = theory.gemm_error_bound(norms[:, :-1], gain, 1.0, constant) + norms[:, 1:] / (1 - u)
    mismatch, final = theory.mismatch(states[-1], exact), torch.linalg.matrix_norm(exact)
    assert_within(mismatch, theory.mismatch_bound(magnitude, gain, final, u))
    assert mismatch > 2 * theory.mismatch_bound(magnitude, torch.zeros_like(gain), final, u)


def pre_norm_block(x, gamma, query, key, value, out):
    """x + attention(LayerNorm(x)) W_O of one head, each line one kernel."""
    path = torch.nn.functional.layer_norm(x, gamma.shape, gamma, None, 1e-5)
    q, k, v = path @ query, path @ key, path @ value
    probabilities = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1)
    return x + (probabilities @ v) @ out


def block_magnitude(x, gamma, query, key, value, out, u, constants) -> tuple[float, float]:
    """M_l of ``pre_norm_block`` at ``x``, every error brought to the block's output, and rho_l.

    Gains are exact spectral norms of Jacobians of what follows a site inside the branch.
    """

    def attend(heads):
        return theory.exact_attention(*heads)[2] @ out

    def gain(function, at) -> float:
        return torch.linalg.matrix_norm(jacrev(function)(at).reshape(x.numel(), -1), 2).item()

    path = theory.layernorm_path(x, gamma, 1e-5)
    heads = torch.stack([path @ query, path @ key, path @ value])
    norms, ln = theory.attention_norms(*heads), theory.layernorm_norms(x, gamma, 1e-5)
    attention = theory.attention_magnitude(
        norms.kappa_softmax, norms.chi_score, norms.probability_norm, norms.value_spectral_norm,
        *(constants[name] for name in ("c_softmax", "c_gemm", "c_gemm_out")),
    )  # fmt: skip
    layernorm = theory.layernorm_magnitude(ln.gamma_max, ln.variance, 1e-5, ln.input_norm, constants["a_ln"]).norm()
    spectral = [torch.linalg.matrix_norm(weight, 2).item() for weight in (query, key, value, out)]
    projections = torch.tensor([constants["c_gemm_out"] * path.norm().item() * one for one in spectral[:3]]).norm()
    context, result = theory.exact_attention(*heads)[2], x + attend(heads)
    remainder = theory.remainder_magnitude(
        gain(attend, heads) * projections,
        theory.gemm_error_bound(context.norm(), spectral[3], 1.0, constants["c_gemm_out"]),
        result.norm(),
    )
    stacked = torch.stack([query, key, value])
    magnitude = theory.local_magnitude(
        remainder, spectral[3] * attention, gain(lambda z: attend(z @ stacked), path) * layernorm
    )
    rho = gain(lambda x: attend(theory.layernorm_path(x, gamma, 1e-5) @ stacked), x)
    return magnitude.item(), rho


@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
@given(seed=seeds, blocks=st.integers(1, 4), scale=st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=15)
def test_theorem_unified_holds_for_pre_norm_attention_blocks(format, seed, blocks, scale):
    """Attention, LayerNorm, remainder and transport together, errors brought through their branch."""
    low, generator, (n, d) = arithmetic(format), seeded(seed), (4, 6)
    u, constants = low.format.unit_roundoff, a_priori_constants(format, keys=d, head_width=d, features=d)
    stored = [[1 + 0.2 * torch.randn(d, generator=generator)] for _ in range(blocks)]
    for weights in stored:
        weights.extend(scale * torch.randn(4, d, d, generator=generator))
    stored = [[low.format.round(weight) for weight in weights] for weights in stored]
    computed = low.format.round(torch.randn(n, d, generator=generator))
    exact, terms = computed.double(), []
    for weights in stored:
        wide = [weight.double() for weight in weights]
        terms.append(block_magnitude(exact, *wide, u, constants))
        with low.running():
            computed = pre_norm_block(computed, *weights)
        exact = pre_norm_block(exact, *wide)
    magnitude, rho = torch.tensor(terms, dtype=torch.float64).T
    assert_within(theory.mismatch(computed, exact), theory.mismatch_bound(magnitude, rho, exact.norm(), u))
