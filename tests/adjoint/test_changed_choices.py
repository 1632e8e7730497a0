"""Changed choices: realised errors against contributions and fp64, probabilities against Phi, lengths against a sum."""

from itertools import product

import pytest
import torch
from drawn import normal
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from tiny import TINY, random_gpt2, random_tokens
from torch import nn

from fragility_adjoint.explain.changed_choices import Competition, expected_length, next_tokens
from fragility_adjoint.explain.error_samples import ErrorSamples, with_random_signs
from fragility_adjoint.predictor import Adjoint, predict
from fragility_adjoint.predictor.targets import Target, logits, root_of_count
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

TOKENS = random_tokens(2, 24)
LOGITS = Target("logits", logits, root_of_count)


@pytest.mark.parametrize("deviation", [0.01, 0.3, 2.0])
def test_two_values_change_places_as_often_as_a_normal_difference_is_below_zero(deviation):
    margins = torch.linspace(0, 3, 500)
    exact = torch.stack([margins, torch.zeros_like(margins)], -1)
    found = Competition(exact, normal(800, 500, 2) * 2**-0.5)
    want = ndtr(-margins.double().numpy() / deviation)
    assert found.probabilities(deviation).numpy() == pytest.approx(want, abs=0.09)  # 800 draws each
    assert float(found.probabilities(deviation).mean()) == pytest.approx(want.mean(), abs=2e-3)


def test_of_values_that_are_stored_alike_the_first_counts():
    """Rounding keeps the order but for ties."""
    bf16, none = get_recipe("bf16").kernels, torch.zeros(1, 2)
    tied = torch.tensor([[20.01, 20.0], [20.0, 20.01], [20.2, 20.0]])
    assert [float(Competition(row, none, bf16).probabilities()) for row in tied] == [0, 1, 0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_the_expected_length_is_the_mean_over_all_outcomes(changes):
    """Every position changes or not: the length is the number of tokens before the first that does."""
    want = 0.0
    for outcome in product([False, True], repeat=len(changes)):
        chance = 1.0
        for p, changed in zip(changes, outcome):
            chance *= p if changed else 1 - p
        want += chance * (outcome.index(True) if any(outcome) else len(outcome))
    assert float(expected_length(torch.tensor(changes, dtype=torch.float64))) == pytest.approx(want, abs=1e-9)


@given(st.integers(1, 5), st.integers(2, 9), st.floats(0, 10), st.randoms())
def test_probabilities_do_not_depend_on_a_common_change_nor_on_the_order(draws, count, scale, random):
    generator = torch.Generator().manual_seed(random.getrandbits(30))
    exact, changes = (torch.randn(*shape, generator=generator) for shape in ((6, count), (draws, 6, count)))
    found = Competition(exact, changes).probabilities(scale)
    order = torch.randperm(count, generator=generator)
    assert torch.equal(found, Competition(exact[:, order], changes[..., order]).probabilities(scale))
    assert (Competition(exact, changes + 0.5).probabilities(scale) - found).abs().max() < 1e-6
    assert not Competition(exact, changes).probabilities(0.0).any()


@pytest.mark.parametrize(
    ("name", "gradients", "attention"),
    [
        ("bf16", "fp32", "sdpa"),
        ("bf16", "low", "eager"),
        ("bf16", "fp32", "eager"),
        ("fp8-dynamic", "fp32", "sdpa"),
        ("w8a16-g32", "both", "sdpa"),
    ],
)
def test_realised_errors_have_the_squares_that_contributions_add_up_to(name, gradients, attention):
    model = random_gpt2(TINY)
    model.set_attn_implementation(attention)
    adjoint = Adjoint(lower(model, name), model, 64, target=LOGITS, gradients=gradients)
    found = adjoint(TOKENS)
    rows = found.contributions
    head = (rows.site == "head") & (rows.kind == "kernel")  # realisations leave the rounding of logits out
    want = float((predict(rows[~head], found.windows).predicted ** 2).mean())
    realisations = ErrorSamples(adjoint, seed=3)

    def run(model):
        return logits(model, TOKENS)

    exact, draws = realisations.exact(run), 48
    changes = torch.stack([realisations.draw(run) - exact for _ in range(draws)])
    assert float(changes.square().sum(-1).mean()) == pytest.approx(want, rel=0.2)
    if gradients != "low":
        assert torch.allclose(exact, logits(model, TOKENS), rtol=1e-3, atol=1e-3)


def test_errors_of_a_channel_keep_their_signs_relative_to_each_other():
    error, generator = normal(40, 6), torch.Generator().manual_seed(0)
    alike, apart = (torch.stack([with_random_signs(error, generator, x) for _ in range(200)]) for x in (True, False))
    assert torch.equal(alike.abs(), error.abs().expand(200, 40, 6)) and torch.equal(apart.abs(), alike.abs())
    signs = (alike / error).sign()
    assert torch.equal(signs, signs[:, :1].expand_as(signs)) and signs[:, 0].mean(0).abs().max() < 0.3
    assert (apart / error).sign().mean(0).abs().max() < 0.4 and (apart / error).sign().std(1).min() > 0.5
    keys = normal(1, 2, 40, 6)  # heads are rounded apart
    signs = (with_random_signs(keys, generator, True) / keys).sign()
    assert torch.equal(signs, signs[:, :, :1].expand_as(signs)) and not torch.equal(signs[0, 0, 0], signs[0, 1, 0])


def test_errors_of_weights_move_an_output_as_in_fp64():
    """For one linear layer the variance of y_j is sum_k (dW_jk x_k)^2, and errors of y's own rounding add to it."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 8, bias=False)])
            self.layers[0].weight = nn.Parameter(normal(8, 16), requires_grad=False)

        def forward(self, x):
            return self.layers[0](x)

    model, x = Linear().eval(), normal(1, 5, 16)
    low = lower(model, "w4a16-g32@fp32")
    realisations = ErrorSamples(Adjoint(low, model, gradients="fp32"))
    changes = torch.stack([realisations.draw(lambda m: m(x)) - model(x) for _ in range(4000)])
    error = (model.layers[0].weight - low.model.layers[0].weight).double()
    want = x[0].double().square() @ error.square().mT
    assert changes.square().mean(0)[0].numpy() == pytest.approx(want.numpy(), rel=0.15)


def test_flips_of_a_model_are_those_of_all_its_tokens():
    model = random_gpt2(TINY)
    realisations = ErrorSamples(Adjoint(lower(model, "w4a16-g32"), model, target="flips", gradients="both"))
    found = next_tokens(realisations, TOKENS, 8)
    assert found.changes.shape == (8, 2, 24, 32) and found.stored.name == "bf16"
    again = next_tokens(ErrorSamples(realisations.adjoint), TOKENS, 8)
    assert torch.equal(found.changes, again.changes)
    assert 0 < found.probabilities(0.2).mean() < found.probabilities().mean() < 1
    with pytest.raises(ValueError, match="draws, the realisations of the errors, must be at least 1, got 0"):
        next_tokens(realisations, TOKENS, 0)
