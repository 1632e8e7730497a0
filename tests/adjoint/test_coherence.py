"""Errors that act together: signed contributions against exact Jacobians, and errors that are alike by construction."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adjoint import Small, exact_effects
from tiny import TINY, low_hidden, random_gpt2
from torch import nn

from fragility_adjoint.explain.coherence import GROUPS, MOST, Coherence, coherence, in_bands
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.targets import Target, root_of_count
from fragility_adjoint.predictor.windows import random_signs
from fragility_core.models.paths import final_hidden
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_quantization.quantized import lower


def signs(shape, probes, seed=0):
    """The sign vectors (P, outputs) that an ``Adjoint`` draws from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([random_signs(torch.empty(shape), generator).flatten() for _ in range(probes)])


# --- Signed contributions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "tolerance"), [("bf16", 0.02), ("fp16", 0.02), ("fp8_e5m2", 0.2), ("fp8_e4m3_linear", 0.02)]
)
def test_every_signed_contribution_is_that_of_the_exact_jacobian(format, tolerance):
    """v.J e of every kernel and weight, for every probe v. The tolerance is in sizes of the largest contributions."""
    model, tokens = Small(), torch.tensor([[1, 2, 5, 6]])
    low = lower(model, format, "emulated")
    rows = Adjoint(low, model, probes=8, gradients="low")(tokens).contributions.sort_values(["kind", "place", "probe"])
    exact = torch.stack([x.sum(1) for x in exact_effects(model, low, tokens)])  # (places, outputs)
    wanted = exact @ signs((1, 4, 4), 8).double().T
    np.testing.assert_allclose(
        rows.signed.to_numpy().reshape(wanted.shape), wanted, atol=tolerance * wanted.abs().max()
    )


@pytest.mark.parametrize(
    ("execution", "gradients", "implementation"),
    [
        *(("emulated", "low", name) for name in ("eager", "sdpa", OBSERVED_EAGER)),
        *(("weights", gradients, "eager") for gradients in ("low", "fp32", "both")),
    ],
)
def test_signed_contributions_add_up_to_the_error_of_the_pass(execution, gradients, implementation, tiny_tokens):
    """Their sum is v.(X - X_low) to first order, here in fp16; weights have the same errors at both ends."""
    model = random_gpt2(TINY)
    low = lower(model, "fp16", execution)
    set_attention(low.model, implementation)
    rows = Adjoint(low, model, probes=4, gradients=gradients)(tiny_tokens).contributions
    with torch.no_grad():
        error = final_hidden(model, tiny_tokens) - low_hidden(low, tiny_tokens)
    wanted = error.flatten(1) @ signs((1, *error.shape[1:]), 4).T
    got = rows.groupby(["window", "probe"]).signed.sum().unstack().to_numpy()
    assert np.linalg.norm(got - wanted.numpy()) < 0.03 * np.linalg.norm(wanted)


# --- Errors that are alike by construction ---------------------------------------------------------


class Twice(nn.Module):
    """The sum over positions of two equal products, or their difference; one channel.

    Each product is rounded alike at every position. Nothing else rounds.
    """

    def __init__(self, sign):
        super().__init__()
        self.embedding = nn.Embedding(3, 1)
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.eval().requires_grad_(False)
        for weight in self.parameters():
            weight.fill_(1.5 + 2**-7)  # its square takes 15 bits
        self.sign = sign

    def forward(self, tokens):
        a, b = (layer(self.embedding(tokens)) for layer in self.layers)
        return (a + b if self.sign > 0 else a - b).float().sum(1, keepdim=True)


@pytest.mark.parametrize(("sign", "between"), [(1, 2.0), (-1, 0.0)])
def test_errors_that_are_alike_add_up_and_opposite_ones_cancel(sign, between):
    """T errors that are alike have T times the square of independent ones; two sites have twice it, or none."""
    model = Twice(sign)
    tokens, low = torch.zeros(3, 8, dtype=torch.long), lower(model, "bf16", "emulated")
    target = Target("sum", lambda model, tokens: model(tokens), root_of_count)
    found = coherence(Adjoint(low, model, probes=2, target=target, gradients="low"), tokens)
    with low.running():
        rounded = low.model.layers[0](low.model.embedding(tokens[0])).float().sum()
    error = 8 * model.embedding.weight[0, 0] * model.layers[0].weight[0, 0] - rounded
    assert found.between() == pytest.approx((between, 0.0)) and found.inside() == pytest.approx((8.0, 0.0))
    assert found.overall()[0] == pytest.approx(8 * between)
    active = found.gram[np.ix_(*[np.diag(found.gram) > 0] * 2)]
    np.testing.assert_allclose(active, error.item() ** 2 * np.array([[1, sign], [sign, 1]]), rtol=1e-5)
    (pair,) = found.pairs().query("matters").itertuples()
    assert pair.share == pytest.approx(sign)
    assert found.groups.loc[[pair.first, pair.second]].layer.tolist() == [0, 1]


# --- The Gram matrix ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def estimator():
    """That of a small GPT-2 in bf16."""
    model = random_gpt2(TINY)
    return Adjoint(lower(model, "bf16"), model, probes=2, gradients="low")


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), by=st.sampled_from([None, ("layer", "site"), ("site",), ("module", "name")]))
def test_the_gram_matrix_adds_up_to_the_square_of_the_sum(estimator, seed, by, tiny_tokens):
    """However sites are grouped, all entries sum to the mean square of the summed signed contributions."""
    estimator.seed = seed
    found = coherence(estimator, tiny_tokens, by)
    prediction = estimator(tiny_tokens, seeds=range(seed, seed + len(tiny_tokens)))
    sums = prediction.contributions.groupby(["window", "probe"]).signed.sum().unstack().to_numpy()
    norms = prediction.windows.norm.to_numpy()
    np.testing.assert_allclose(found.grams.sum((1, 2)), (sums**2).mean(1) / norms**2)
    np.testing.assert_allclose(found.squares, prediction.windows.predicted**2)
    assert found.grams.shape == (3, len(found.groups), len(found.groups))
    assert np.linalg.eigvalsh(found.gram).min() > -1e-12 * np.trace(found.gram)
    assert found.overall()[0] == pytest.approx(found.inside()[0] * found.between()[0])


def independent(windows, generator, groups=20, probes=2):
    """The Gram matrices of errors that are independent, with the standard deviations of unequal groups."""
    signed = generator.normal(size=(windows, probes, groups)) * generator.gamma(1, size=groups)
    return signed, np.einsum("wpa,wpb->wab", signed, signed) / probes


def of(grams):
    """The ``Coherence`` of Gram matrices without names."""
    groups = pd.DataFrame({"site": range(grams.shape[1])})
    return Coherence(groups, grams, np.trace(grams, axis1=1, axis2=2), grams.sum((1, 2)))


@pytest.mark.parametrize("windows", [4, 16])
def test_pairs_of_independent_errors_are_seldom_named(windows):
    """In 5 % of all cases at most, as the level says; the test allows for the scatter of 300 cases."""
    generator = np.random.default_rng(0)
    named = [of(independent(windows, generator)[1]).pairs().matters.any() for _ in range(300)]
    assert np.mean(named) < 0.09


def test_a_pair_that_acts_together_is_named_and_the_ratio_is_in_its_interval():
    generator = np.random.default_rng(0)
    signed, _ = independent(200, generator)
    signed[..., 3] = -0.9 * signed[..., 7] + 0.1 * signed[..., 3]
    found = of(np.einsum("wpa,wpb->wab", signed, signed) / 2)
    (pair,) = found.pairs().query("matters").itertuples()
    assert (pair.first, pair.second) == (3, 7) and pair.share < 0
    ratio, error = found.between()
    assert abs(ratio - 1 - pair.share) < 3 * error


def test_the_limit_of_a_pair_is_students_quantile():
    grams = np.stack([[[1.0, half], [half, 1.0]] for half in (0.1, 0.2, 0.6)])
    (pair,) = of(grams).pairs().itertuples()
    assert pair.share == pytest.approx(0.3) and pair.standard_error == pytest.approx((0.07 / 3) ** 0.5)
    assert pair.limit / pair.standard_error == pytest.approx(4.3027, rel=1e-4)  # 97.5 % at two degrees of freedom


def test_one_window_names_no_pair():
    found = of(independent(1, np.random.default_rng(0))[1])
    assert np.isinf(found.pairs().limit).all() and not found.pairs().matters.any() and np.isnan(found.between()[1])


def test_a_model_without_blocks_has_no_bands():
    found = in_bands(pd.DataFrame({"layer": pd.array([None], "Int64"), "site": "head", "kind": "kernel", "place": 0}))
    assert found[["layer", "last"]].isna().all(axis=None)


def test_what_has_no_known_signs_is_refused(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "bf16", "emulated")
    for estimator in (Adjoint(low), Adjoint(low.stochastic(0), tiny_gpt2, gradients="low")):
        assert estimator(tiny_tokens).contributions.signed.isna().all()
        with pytest.raises(ValueError, match="needs errors with known signs, got expected sizes"):
            coherence(estimator, tiny_tokens)


def test_windows_that_overflow_are_left_out(tiny_gpt2, tiny_tokens):
    tiny_gpt2.transformer.wte.weight[3, 0] = tiny_gpt2.transformer.wpe.weight[0, 0] = 4e4
    tokens = tiny_tokens.clone()
    tokens[:, 0] = torch.tensor([3, 4, 5])
    estimator = Adjoint(lower(tiny_gpt2, "fp16"), tiny_gpt2, gradients="low")
    assert len(coherence(estimator, tokens).grams) == 2
    with pytest.raises(ValueError, match="needs a window whose prediction is finite, got none"):
        coherence(estimator, tokens[:1])


def test_seeds_are_one_a_window(estimator, tiny_tokens):
    with pytest.raises(ValueError, match="seeds must be one a window, 3, got 2"):
        estimator(tiny_tokens, seeds=[0, 1])
    alone = estimator(tiny_tokens[1:2], seeds=[7]).windows.predicted[0]
    assert estimator(tiny_tokens, seeds=[0, 7, 0]).windows.predicted[1] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("depth", "kinds", "size"), [(2, 14, 1), (12, 12, 1), (29, 14, 3), (30, 14, 3), (80, 14, 8), (5, 200, 5)]
)
def test_blocks_of_deep_models_are_taken_together_in_bands(depth, kinds, size):
    places = [(layer, f"site {kind}") for layer in range(depth) for kind in range(kinds)]
    rows = pd.DataFrame(places, columns=["layer", "site"]).astype({"layer": "Int64"})
    rows = pd.concat([rows, pd.DataFrame({"layer": pd.array([None], "Int64"), "site": ["head"]})])
    found = in_bands(rows.assign(kind="kernel", place=range(len(rows))))
    groups = found[GROUPS].drop_duplicates()
    assert len(groups) <= MOST or size == depth
    first = found.layer.dropna()
    assert sorted({*first}) == [*range(0, depth, size)]
    assert (found["last"].dropna() == (first + size - 1).clip(upper=depth - 1)).all()
    assert found[found.site == "head"][["layer", "last"]].isna().all(axis=None)
