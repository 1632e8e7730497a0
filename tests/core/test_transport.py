"""Residual transport: the three estimators against the exact Jacobian of the library's own block."""

import itertools

import pandas as pd
import pytest
import torch
from tiny import random_tokens
from torch import nn

from fragility_core.models.blocks import blocks
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.transport import (
    TRANSPORTS,
    block_gain,
    branch_jacobian_norm,
    operator_norm_transport,
    release_transport,
    residual_transport,
)
from fragility_core.surrogates.weights import activation_lipschitz
from fragility_quantization.quantized import lower

LENGTH = 6  # the exact Jacobian of a block is (6 * 32) x (6 * 32)


@pytest.fixture
def tokens() -> torch.Tensor:
    return random_tokens(2, LENGTH, seed=3)


def exact_norms(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """||J_f||_2 of f(x) = block(x) - x at every block's input, by autograd in fp64, (B * L,)."""
    base = model.base_model.double()
    base.set_attn_implementation("eager")
    causal = torch.zeros(1, 1, LENGTH, LENGTH).double().masked_fill_(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e300)
    norms = []
    for window in tokens:
        hidden = base(window[None], output_hidden_states=True).hidden_states
        for x, block in zip(hidden, base.h):

            def branch(x, block=block):
                return block(x, attention_mask=causal) - x

            jacobian = torch.autograd.functional.jacobian(branch, x).view(x.numel(), x.numel())
            norms.append(torch.linalg.matrix_norm(jacobian, 2))
    return torch.stack(norms)


@pytest.mark.parametrize("weight_scale", [0.1, 1.0])
def test_estimators_enclose_the_exact_norm(weight_scale, tiny_gpt2, tokens):
    """power_iteration <= ||J_f||_2 <= operator_norm, at contracting and at expanding blocks."""
    for block in tiny_gpt2.transformer.h:
        for name, parameter in block.named_parameters():
            if "ln_" not in name:
                parameter.mul_(weight_scale)
    layers = Monitor(lower(tiny_gpt2, "fp32"), power_iteration=True)(tokens).layers
    exact = exact_norms(tiny_gpt2, tokens).numpy()
    below, above = (residual_transport(layers, name).to_numpy() for name in ("power_iteration", "operator_norm"))
    assert (below <= exact * (1 + 1e-4)).all()  # fp32
    assert (below >= 0.3 * exact).all()  # two steps from a random direction: measured 0.5 and more
    assert (above >= exact).all()


def test_power_iteration_converges_to_the_exact_norm(tiny_gpt2, tokens):
    calls = []
    for block in blocks(tiny_gpt2):
        block.module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, args, kwargs)), with_kwargs=True
        )
    tiny_gpt2.base_model.set_attn_implementation("eager")
    tiny_gpt2.base_model(tokens, use_cache=False)
    calls = calls[:3]
    for module, *_ in calls:
        module._forward_pre_hooks.clear()
    by_steps = [torch.stack([branch_jacobian_norm(*call, steps=steps) for call in calls]) for steps in (1, 2, 40)]
    for fewer, more in itertools.pairwise(by_steps):
        assert (fewer <= more * (1 + 1e-5)).all()  # a power iteration never falls back
    # The two largest singular values lie near each other: measured 0.9 % below after 60 steps, 0.2 % after 200.
    torch.testing.assert_close(by_steps[-1].T.flatten().double(), exact_norms(tiny_gpt2, tokens), rtol=0.02, atol=0)


def test_ratios_of_norms_see_no_direction(tiny_gpt2, tokens):
    """Behind a LayerNorm J_a h is about 0, whatever ||a|| / ||h|| says."""
    block, tokens = blocks(tiny_gpt2)[1], tokens[:1]
    attention = block.module.attn
    layers = Monitor(lower(tiny_gpt2, "fp32"))(tokens).layers
    tiny_gpt2.set_attn_implementation("eager")  # the fused kernel has no forward derivative
    h = tiny_gpt2.base_model(tokens, output_hidden_states=True).hidden_states[1]
    _, image = torch.func.jvp(lambda x: attention(block.norm_1.module(x))[0], (h,), (h,))
    alpha = layers.attention_norm[1] / layers.input_1_norm[1]
    assert alpha > 0.1
    assert torch.linalg.vector_norm(image) / torch.linalg.vector_norm(h) < 1e-3 * alpha


def test_a_branch_that_does_nothing_transports_nothing(tiny_gpt2, tokens):
    """Both output projections are zero, as in some initialisations."""
    for block in blocks(tiny_gpt2):
        for out in (block.attention_out, block.mlp_out):
            out.weight.zero_()
    assert (Monitor(lower(tiny_gpt2, "fp32"), power_iteration=True)(tokens).layers.branch_jacobian_norm == 0).all()


def test_power_iteration_under_emulation_is_of_the_exact_function(tiny_gpt2, tokens):
    """The norm is near the fp32 model's: weights and inputs are rounded, products with the Jacobian are not."""
    exact, rounded = (
        Monitor(lower(tiny_gpt2, format, "emulated"), power_iteration=True)(tokens).layers.branch_jacobian_norm
        for format in ("fp32", "bf16")
    )
    assert rounded.tolist() == pytest.approx(exact.tolist(), rel=0.1)
    assert rounded.tolist() != exact.tolist()


def row(**columns: float) -> pd.DataFrame:
    return pd.DataFrame({name: [value] for name, value in columns.items()})


def test_block_gain_by_hand():
    alpha, beta = pd.Series([0.5, 0.5]), pd.Series([2.0, 2.0])
    assert block_gain(row(window=0), alpha, beta).tolist() == [3.5, 3.5]  # 0.5 + 2 * 1.5
    layers = pd.DataFrame({"parallel": [False, True]})
    assert block_gain(layers, alpha, beta).tolist() == [3.5, 2.5]


def test_release_transport_by_hand():
    layers = row(attention_norm=1.0, input_1_norm=2.0, mlp_norm=6.0, input_2_norm=3.0)
    assert release_transport(layers).tolist() == [3.5]  # alpha = 1/2, beta = 2
    assert residual_transport(layers, "release").tolist() == [3.5]


def test_operator_norm_transport_by_hand():
    # LayerNorms 2 / sqrt(3 + 1) = 1 and 3 / sqrt(8 + 1) = 1; scores 0.5 * 0.5 * 4 (3 * 1 + 2 * 2) = 7;
    # values 5 * 2 = 10; attention 0.1 * 17 = 1.7; MLP 0.5 * 1 * 2 = 1; 1.7 + 1 * 2.7 = 4.4.
    layers = row(
        gamma_1_max=2.0, variance_1_min=3.0, epsilon_1=1.0, gamma_2_max=3.0, variance_2_min=8.0, epsilon_2=1.0,
        score_scaling=0.5, value_spectral_norm=4.0, key_norm=3.0, query_weight_norm=1.0, query_norm=2.0,
        key_weight_norm=2.0, probability_norm=5.0, value_weight_norm=2.0, attention_out_weight_norm=0.1,
        mlp_out_weight_norm=0.5, activation_lipschitz=1.0, mlp_in_weight_norm=2.0,
    )  # fmt: skip
    assert operator_norm_transport(layers).tolist() == [pytest.approx(4.4, rel=1e-14)]
    assert residual_transport(layers, "operator_norm").tolist() == operator_norm_transport(layers).tolist()


def test_operator_norm_transport_of_other_blocks_by_hand():
    """The row above with norms of queries and keys and a gated MLP, in sequence and in parallel."""
    # Scores 0.5 * 0.5 * 4 (3 * 1 * 2 + 2 * 2 * 0.5) = 8; attention 0.1 * (8 + 10) = 1.8; the gated product
    # changes by at most sqrt((1 * 3)^2 + 4^2) = 5: MLP 0.5 * 5 * 2 = 5.
    layers = row(
        gamma_1_max=2.0, variance_1_min=3.0, epsilon_1=1.0, gamma_2_max=3.0, variance_2_min=8.0, epsilon_2=1.0,
        score_scaling=0.5, value_spectral_norm=4.0, key_norm=3.0, query_weight_norm=1.0, query_norm=2.0,
        key_weight_norm=2.0, probability_norm=5.0, value_weight_norm=2.0, attention_out_weight_norm=0.1,
        mlp_out_weight_norm=0.5, activation_lipschitz=1.0, mlp_in_weight_norm=2.0,
        query_gain=2.0, key_gain=0.5, up_max=3.0, activated_max=4.0,
    )  # fmt: skip
    assert operator_norm_transport(layers).tolist() == [pytest.approx(1.8 + 5 * 2.8, rel=1e-14)]
    assert operator_norm_transport(layers.assign(parallel=True)).tolist() == [pytest.approx(6.8, rel=1e-14)]
    assert operator_norm_transport(layers.assign(parallel=False)).tolist() == [pytest.approx(15.8, rel=1e-14)]


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.ReLU()])
def test_gated_products_change_by_at_most_their_bound(activation):
    """||J|| of act(a) b is at most sqrt(L^2 max|b|^2 + max|act(a)|^2), and comes near that bound."""
    generator, lipschitz, shares = torch.Generator().manual_seed(0), activation_lipschitz(activation), []
    for _ in range(200):
        a, b = 4 * torch.randn(2, 4, generator=generator, dtype=torch.float64)
        jacobian = torch.cat(torch.autograd.functional.jacobian(lambda a, b: activation(a) * b, (a, b)), 1)
        bound = (lipschitz * b.abs().max()).hypot(activation(a).abs().max())
        shares.append((torch.linalg.matrix_norm(jacobian, 2) / bound).item())
    assert 0.85 < max(shares) <= 1 + 1e-12


def test_unknown_transport():
    with pytest.raises(
        ValueError, match="transport must be one of release, operator_norm, power_iteration, got 'exact'"
    ):
        residual_transport(row(), "exact")
    assert TRANSPORTS == ("release", "operator_norm", "power_iteration")


def test_power_iteration_that_was_not_measured():
    with pytest.raises(
        ValueError, match="branch_jacobian_norm, which was not measured: monitor with power_iteration=True"
    ):
        residual_transport(row(attention_norm=1.0), "power_iteration")
