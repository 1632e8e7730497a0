"""Statistics of the weights: exact norms against SVDs, followed norms against exact ones."""

import pytest
import torch
from torch import nn

from fragility_core.models.blocks import blocks
from fragility_core.surrogates.weights import WeightStatistics, activation_lipschitz, followed_norms


@pytest.mark.parametrize(
    ("activation", "slope"),
    [
        (nn.ReLU(), 1.0),
        (nn.Tanh(), 1.0),
        (nn.Sigmoid(), 0.25),
        # erf GELU: Phi(x) + x phi(x), whose derivative (2 - x^2) phi(x) vanishes at sqrt 2: 1.12890.
        (nn.GELU(), 1.1289),
    ],
    ids=["relu", "tanh", "sigmoid", "gelu"],
)
def test_activation_lipschitz(activation, slope):
    assert activation_lipschitz(activation) == pytest.approx(slope, abs=1e-4)


def test_weight_statistics(tiny_gpt2):
    """The norms agree with SVDs in fp64, with query, key and value cut out of c_attn by hand."""
    block = blocks(tiny_gpt2)[1]
    measured = {name: values[1] for name, values in WeightStatistics(blocks(tiny_gpt2)).measure().items()}
    joint = block.attention.c_attn.weight.double()  # (32, 96)
    want = {
        "query_weight_norm": joint[:, :32],
        "key_weight_norm": joint[:, 32:64],
        "value_weight_norm": joint[:, 64:],
        "attention_out_weight_norm": block.attention_out.weight.double(),
        "mlp_in_weight_norm": block.mlp_in.weight.double(),
        "mlp_out_weight_norm": block.mlp_out.weight.double(),
    }
    for name, weight in want.items():
        assert measured[name] == pytest.approx(torch.linalg.matrix_norm(weight, 2).item(), rel=1e-6), name
    assert measured["gamma_1_max"] == block.norm_1.gamma.abs().max().item()
    assert measured["gamma_2_max"] == block.norm_2.gamma.abs().max().item()
    assert (measured["head_width"], measured["d_model"], measured["score_scaling"]) == (16, 32, 0.25)


def drifting(model, rate: float, seed: int) -> None:
    """Move every weight by ``rate`` up or down, as a step of Adam does at most."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(rate * torch.randn(parameter.shape, generator=generator).sign())


@pytest.mark.parametrize(("rate", "tolerance"), [(0.0, 1e-6), (6e-4, 1e-5), (6e-3, 1e-3)])
def test_followed_norms_stay_with_the_exact_ones(tiny_gpt2, rate, tolerance):
    """The weights are about 0.16, so the largest rate moves them by 4 % a step."""
    followed = WeightStatistics(blocks(tiny_gpt2))
    for step in range(20):
        current, exact = followed.follow(), WeightStatistics(blocks(tiny_gpt2)).measure()
        assert current.keys() == exact.keys()
        for name, values in exact.items():
            assert current[name] == pytest.approx(values, rel=tolerance), (step, name)
        drifting(tiny_gpt2, rate, seed=step)


def test_followed_norms_are_never_above_the_exact_ones():
    weights = torch.randn(6, 40, 24, generator=torch.Generator().manual_seed(0))
    _, subspace = followed_norms(weights, None)
    other = torch.randn(6, 40, 24, generator=torch.Generator().manual_seed(1))
    norms, _ = followed_norms(other, subspace)
    exact = torch.linalg.matrix_norm(other.double(), 2)
    assert (norms <= exact * (1 + 1e-5)).all()
    assert (norms < 0.999 * exact).any(), "an unrelated subspace is not exact, or the test shows nothing"


def test_following_again_from_the_same_state_gives_the_same_bits(tiny_gpt2):
    first = WeightStatistics(blocks(tiny_gpt2))
    first.follow()
    drifting(tiny_gpt2, 1e-3, seed=0)
    second = WeightStatistics(blocks(tiny_gpt2))
    second.subspaces = {shape: subspace.clone() for shape, subspace in first.subspaces.items()}
    assert first.follow() == second.follow()


def test_nonfinite_weights_show(tiny_gpt2):
    statistics = WeightStatistics(blocks(tiny_gpt2))
    statistics.follow()
    tiny_gpt2.transformer.h[1].mlp.c_fc.weight[3, 4] = torch.inf
    for norms in (statistics.follow(), statistics.measure(), WeightStatistics(blocks(tiny_gpt2)).follow()):
        assert [norm != norm for norm in norms["mlp_in_weight_norm"]] == [False, True, False]
