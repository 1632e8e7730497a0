"""Errors by token: bulk and tail, realisations of rounding, and where the error of a token begins."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, random_gpt2, random_tokens
from transformers import LlamaConfig, LlamaForCausalLM

from fragility_adjoint.explain.error_samples import ErrorSamples, Rescaled, scales
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.targets import logits
from fragility_lab.diagnosis.passes import estimator, predict
from fragility_lab.diagnosis.steady import MOST, probes_of, scatters, steady
from fragility_lab.diagnosis.tails import SINK, origins
from fragility_lab.diagnosis.tokens import TAIL, ErrorsByToken, errors_by_token, squares
from fragility_numerics.formats import FORMATS
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

ROUNDING = [name for name in FORMATS if name not in ("fp32", "tf32")]
TOKENS = random_tokens(2, 24)


def sharp_llama(layers: int = 2, factor: float = 128.0, only: int | None = None) -> LlamaForCausalLM:
    """A random Llama whose attention chooses one key, in all blocks or ``only`` in one: some tokens are near a tie."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.0 if "emb" in name else parameter.shape[-1] ** -0.5)
        if "q_proj" in name and (only is None or f"layers.{only}." in name):
            parameter.mul_(factor)
    return model


def by_token_of(low, model, tokens, draws, passes):
    """``errors_by_token`` of windows (B, T)."""
    realisations = ErrorSamples(Adjoint(low, model, target="flips", gradients="fp32"))
    return errors_by_token(low, realisations, dict(enumerate(tokens.split(1))), draws, passes)


def random_words(windows: int, length: int = 64) -> torch.Tensor:
    return random_tokens(windows, length, seed=0, vocabulary=257)


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("count", [1, 4, 500])
def test_scales_are_numbers_of_the_format_from_1_to_2(name, count):
    format = FORMATS[name]
    found = torch.tensor(scales(format, count))
    assert found[0] == 1 and (found.diff() > 0).all() and found[-1] < 2
    assert torch.equal(format.round(found).float(), found)
    assert len(found) == min(count, 2 ** (format.significand - 1)) or len(found) < count <= 4


@settings(max_examples=40)
@given(st.sampled_from(ROUNDING), st.integers(0, 9), st.floats(-60, 60))
def test_rounding_to_a_rescaled_format_is_as_accurate(name, number, exponent):
    format = FORMATS[name]
    grids = scales(format, 10)
    scale = grids[number % len(grids)]
    x = torch.randn(64, generator=torch.Generator().manual_seed(number)) * 2**exponent
    rounded, plain = Rescaled(scale)(x, format), format.round(x).float()
    inside = (x.abs() >= 2 * format.smallest_normal) & (x.abs() <= format.largest / 2)
    assert torch.equal(rounded[~inside], plain[~inside])
    # the division by the scale rounds in fp32
    assert ((rounded - x).abs()[inside] <= (format.unit_roundoff + 2**-23) * 2 * x.abs()[inside]).all()
    whole = torch.arange(1, 9) * 2.0 ** round(max(-4, min(3, exponent)))  # sums of the format's numbers stay exact
    few = whole[:4][(whole[:4] <= format.largest) & (whole[:4] / scale >= 2 * format.smallest_normal)]
    assert format.significand < 4 or torch.equal(Rescaled(scale)(few / scale, format), few / scale)


@pytest.mark.parametrize("name", ["bf16", "fp16", "w4a16-g32", "w8a8-int8", "kv-fp8"])
def test_at_scale_1_it_is_the_pass_that_runs_and_at_others_as_far_off(name):
    model = random_gpt2(TINY)
    low = lower(model, get_recipe(name), "emulated")
    realisations = ErrorSamples(Adjoint(low, model, target="flips", gradients="fp32"))

    def run(model):
        return logits(model, TOKENS)

    with torch.no_grad(), low.running():
        rounded = run(low.model)
    assert torch.equal(realisations.again(run, 1.0), rounded)
    exact = run(model)
    ratios = [
        float((realisations.again(run, scale) - exact).norm() / (rounded - exact).norm())
        for scale in scales(low.format, 6)
    ]
    assert len({*ratios}) == 6 and 0.6 < np.mean(ratios) < 1.6


def test_realisations_need_errors_of_the_fp32_model():
    model = random_gpt2(TINY)
    with pytest.raises(ValueError, match="scaled errors need the fp32 pass, got none"):
        ErrorSamples(Adjoint(lower(model, "bf16"), model, gradients="low")).again(lambda m: logits(m, TOKENS), 1.5)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        scales(FORMATS["bf16"], 0)


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_squares_by_definition(vocabulary, monkeypatch):
    monkeypatch.setattr("fragility_lab.measurement.comparison.AT_ONCE", 3 * vocabulary)  # several chunks of positions
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, 10), generator=generator)
    exact, moved = ((torch.randn(1, 10, 4, generator=generator), torch.randn(1, 10, vocabulary, generator=generator))
                    for _ in range(2))  # fmt: skip
    found = squares(moved, exact, tokens)
    for t in range(10):
        p, q = (torch.softmax(state[1][0, t].double(), 0) for state in (exact, moved))
        assert found.kl[t] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
        apart = (moved[0][0, t].double() - exact[0][0, t].double()).norm() / exact[0][0, t].double().norm()
        assert found.error[t] == pytest.approx(float(apart) ** 2)
        assert found.changed[t] == (p.argmax() != q.argmax())
        if t < 9:
            assert found.logprob[t] == pytest.approx(float((q / p)[tokens[0, t + 1]].log()) ** 2)
    assert np.isnan(found.logprob[9])


def test_a_divergence_far_below_fp32_is_measured():
    exact = torch.randn(1, 5, 300, generator=torch.Generator().manual_seed(0))
    moved = exact * (1 + 2.0**-20)
    p = torch.softmax(exact.double(), -1)
    change = moved.double() - exact.double()
    want = ((p * change**2).sum(-1) - (p * change).sum(-1) ** 2)[0] / 2
    found = squares((exact, moved), (exact, exact), torch.zeros(1, 5, dtype=torch.long))
    assert 0 < want.max() < 1e-11
    assert found.kl.to_numpy() == pytest.approx(want.numpy(), rel=1e-3)


def test_predictions_by_token_are_those_of_backward_passes_for_a_single_position():
    model = sharp_llama(factor=1.0)
    tokens, low = random_words(1, 12), lower(model, "bf16", "emulated")
    by_token = by_token_of(low, model, tokens, draws=60, passes=1)
    for position in (3, 11):
        counted = torch.zeros(1, 12, dtype=torch.bool)
        counted[0, position] = True
        adjoint = Adjoint(low, model, probes=32, target="kl", gradients="both")
        alone = adjoint(tokens, counted=counted).windows.predicted.item()
        assert by_token.predicted.kl[position] == pytest.approx(alone, rel=0.5)


def test_a_few_tokens_near_a_tie_make_the_error_and_draws_predict_it():
    """The prediction to first order is several times too large there; draws of the errors are not."""
    model, tokens = sharp_llama(), random_words(2)
    low = lower(model, "bf16", "emulated")
    found = by_token_of(low, model, tokens, draws=16, passes=16)
    summary = found.summary("kl")
    assert (
        (summary.share > 0.9).all()
        and (summary.in_tail >= 3).all()
        and (summary["median"] < summary["mean"] / 50).all()
    )
    assert summary.predicted.sum() == pytest.approx(summary["mean"].sum(), rel=0.5)
    first_order = Adjoint(low, model, probes=8, target="kl", gradients="both")(tokens).windows.predicted
    assert first_order.sum() > 2 * summary["mean"].sum()
    tail = found.tail("kl", 4)
    assert (tail.times > TAIL).all() and tail.times.is_monotonic_decreasing
    assert (tail.predicted > TAIL * summary["median"].max()).all()  # the same tokens are predicted
    assert tail.token.tolist() == [int(tokens[row.window, row.position]) for row in tail.itertuples()]


def test_where_nothing_is_sharp_no_few_tokens_decide():
    model, tokens = sharp_llama(factor=1.0), random_words(2)
    summary = by_token_of(lower(model, "bf16", "emulated"), model, tokens, 4, 4).summary("kl")
    assert not summary.few.any() and not summary.in_tail.any() and (summary.half > 15).all()


def test_without_a_reference_only_draws_are_known():
    model = sharp_llama(factor=1.0)
    found = by_token_of(lower(model, "bf16", "emulated"), model, random_words(1, 8), 2, 0)
    assert found.measured is None and found.known is found.predicted


def test_one_large_token_decides_a_window():
    values = np.full(100, 1e-4)
    values[7] = 1.0
    table = pd.DataFrame({"window": 0, "position": range(100), "kl": values})
    found = ErrorsByToken({0: torch.arange(100)}, table, table, {}, 1, 1)
    row = found.summary("kl").iloc[0]
    assert row.few and row.half == 1 and row.in_tail == 1 and row.share > 0.99 and row["median"] == 1e-4
    assert found.tail("kl", 5).position.tolist() == [7]


@pytest.mark.parametrize(("tokens", "few"), [(1, False), (2, False), (7, False), (8, True)])
def test_two_tokens_of_very_few_decide_nothing(tokens, few):
    table = pd.DataFrame({"window": 0, "position": range(tokens), "kl": [1.0, 1.0, *([1e-4] * 8)][:tokens]})
    row = ErrorsByToken({0: torch.arange(tokens)}, table, table, {}, 1, 1).summary("kl").iloc[0]
    assert row.few == few


@pytest.mark.parametrize(("layers", "block"), [(4, 1), (40, 22)])
def test_the_error_of_a_token_near_a_tie_begins_in_the_attention_that_has_it(layers, block):
    model, tokens = sharp_llama(layers, only=block), random_words(2)
    low = lower(model, "bf16", "emulated")
    tail = by_token_of(low, model, tokens, 1, 4).tail("kl", 3)
    assert len(tail)
    for row in tail.itertuples():
        (found,) = origins(low, model, tokens[row.window : row.window + 1], [row.position])
        assert found.branch == f"model.layers.{block}.self_attn" and found.kind == "attention"
        assert f"begins in attention model.layers.{block}.self_attn" in str(found)


def test_a_sink_is_named_by_its_block():
    model, tokens = sharp_llama(factor=1.0), random_words(1)
    tokens[0, 0] = 200
    tokens[0, 1:] %= 200
    model.model.embed_tokens.weight[200] *= 3 * SINK
    low = lower(model, "bf16", "emulated")
    first, other = origins(low, model, tokens, [0, 30])
    assert first.sink == 0 and first.norm > SINK and "(a sink)" in str(first)
    assert other.sink is None and "(a sink)" not in str(other)


def test_windows_that_scatter_get_more_probes():
    calm, sharp = sharp_llama(factor=1.0), sharp_llama(factor=512.0)

    def estimates(model):
        estimator = Adjoint(lower(model, "bf16", "emulated"), model, 2, target="kl", gradients="low")
        return lambda seed: estimator(random_words(2), seeds=[seed] * 2)

    assert probes_of(steady(estimates(calm))) == 2
    found = steady(estimates(sharp))
    assert 2 < probes_of(found) <= MOST and (probes_of(found) == MOST or not scatters(found))
    each = [estimates(sharp)(seed).windows.predicted for seed in range(probes_of(found) // 2)]
    assert found.windows.predicted.to_numpy() == pytest.approx(np.mean(each, 0), rel=1e-6)
    assert probes_of(steady(estimates(sharp), most=4)) == 4
    assert probes_of(predict(estimator(lower(calm, "bf16", "emulated"), calm, 2, "kl"), random_words(2).split(1))) == 2
