"""The unified bound against the rounding errors of stacks that ran; test_theory_arithmetic.py has the error model."""

import pytest
import torch
from drawn import assert_within, every_format, many, seeded, seeds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.func import jacrev

from fragility_core import theory
from fragility_lessons.constants import a_priori_constants
from fragility_lessons.kernel_samples import (
    arithmetic,
    draw_stacks,
    run_stack,
    underflow,
)


@every_format
@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 24)), gain=st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0]), seed=seeds
)
@many
def test_theorem_unified_holds_for_linear_residual_stacks(format, shape, gain, seed):
    """No O(u^2) is left out: linear blocks obey the recursion exactly, and magnitudes are of the computed states."""
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
    """The state shrinks by 1 - rho in every block while its rounding errors grow by up to 1 + rho."""
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
    """M_l and rho_l of ``pre_norm_block`` at ``x``, with every error carried to the block's output.

    The gain of an error is the exact spectral norm of the Jacobian of what follows its site in the branch.
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
@settings(max_examples=15)
def test_theorem_unified_holds_for_pre_norm_attention_blocks(format, seed, blocks, scale):
    """Attention, LayerNorm, remainder and transport together, with errors carried through their branch."""
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
