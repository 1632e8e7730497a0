"""The gap of an engine, what rounding alone must give, and the slopes along suspects."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from test_suspects import LLAMA
from tiny import random_model, random_tokens
from transformers import LlamaConfig

from fragility_adjoint.predictor import Adjoint
from fragility_engines.comparison import verdict
from fragility_engines.comparison.compare import explained
from fragility_engines.comparison.eager import as_eager
from fragility_engines.comparison.gap import Gap, pooled
from fragility_engines.comparison.grid import grids
from fragility_engines.comparison.measuring import AtPositions, measure
from fragility_engines.comparison.signs import described, patterns
from fragility_engines.comparison.slopes import Directions, Slope, screened, slope, slope_of, slopes
from fragility_engines.comparison.verdict import judge
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.sampling import after, frequent, heated, likely, nucleus, padded, repeated
from fragility_engines.suspects.suspect import Suspect, logits, logprobs, read
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

WINDOWS = random_tokens(6, 48, seed=7, smallest=3)


def engine(score):
    """A log of WINDOWS by the function ``score`` of a window."""
    return [Scored(w.numpy(), np.concatenate([[np.nan], score(w).numpy()])) for w in WINDOWS]


def over_all(gap, model, sequences):
    """The slopes of all suspects over all tokens."""
    return slopes(gap, suspects(model, Facts.of(sequences, 0)), Directions(model, sequences))


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.fixture(scope="module")
def native(model):
    """The log of native bf16."""
    low = random_model(LLAMA).bfloat16()
    return engine(lambda window: logprobs(low, window))


def test_a_prediction_counts_the_scored_positions_alone(model):
    low, positions = lower(model, "bf16"), AtPositions()
    positions.chosen = torch.tensor([3, 4, 20])
    whole = Adjoint(low, model, 64, target="logprob", gradients="both")(WINDOWS[:1]).windows.predicted.item()
    some = Adjoint(low, model, 64, target=positions.target, gradients="both")(WINDOWS[:1]).windows.predicted.item()
    positions.chosen = torch.arange(WINDOWS.shape[1] - 1)
    every = Adjoint(low, model, 64, target=positions.target, gradients="both")(WINDOWS[:1]).windows.predicted.item()
    assert every == whole and some != whole


def test_unscored_tokens_count_nowhere(model, native):
    cut = [Scored(each.tokens, np.where(np.arange(48) < 30, np.nan, each.logprobs)) for each in native]
    gap = measure(model, cut[:2], "bf16")
    assert gap.tokens.position.min() == 30 and (gap.sequences.tokens == 18).all()


def test_native_bf16_is_rounding_and_fp32_is_less(model, native):
    gap = measure(model, native, "bf16")
    found = over_all(gap, model, native)
    assert not any(each.as_tested for each in found)
    assert judge(gap, found).kind == "rounding"
    assert 0.8 < gap.ratio[0] < 1.25
    exact = measure(model, engine(lambda window: logprobs(model, window)), "bf16")
    assert judge(exact).kind == "less" and exact.ratio[0] < 1e-5


FAULTS = {
    "RoPE base 10000 in place of 100000": lambda m: setattr(
        m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq ** (np.log(1e4) / np.log(1e5))
    ),
    "another scale of attention": lambda m: [
        setattr(x.self_attn, "scaling", 1.1 * x.self_attn.scaling) for x in m.model.layers
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(model, name):
    low = random_model(LLAMA)
    FAULTS[name](low)
    low = low.bfloat16()
    log = engine(lambda window: logprobs(low, window))
    gap = measure(model, log, "bf16")
    found = over_all(gap, model, log)
    verdict = judge(gap, found)
    assert verdict.kind == "more" and verdict.cause is not None
    assert verdict.cause.suspect.name == name, [(each.suspect.name, each.size, each.share) for each in found[:3]]


def test_a_second_beginning_is_named(model, native):
    low = random_model(LLAMA).bfloat16()
    log = engine(lambda window: logprobs(low, torch.cat([torch.tensor([0]), window]))[1:])
    gap = measure(model, log, "bf16")
    found = over_all(gap, model, log)
    cause = judge(gap, found).cause
    assert cause is not None and cause.suspect.name == "a BOS token that the tokens do not show"
    assert cause.size == pytest.approx(1, abs=0.1)


def test_a_wrong_matrix_is_found_by_its_branch(model):
    low = random_model(LLAMA)
    low.model.layers[1].mlp.down_proj.weight.copy_(low.model.layers[0].mlp.down_proj.weight)
    low = low.bfloat16()
    log = engine(lambda window: logprobs(low, window))
    gap = measure(model, log, "bf16")
    found, further = explained(gap, Directions(model, log, suspects(model, Facts.of(log, 0))))
    assert judge(gap, found).cause is None
    assert further[0].suspect.name == "something in model.layers.1.mlp" and further[0].as_tested
    few = [replace(each, logprobs=np.where(np.arange(48) < 40, np.nan, each.logprobs)) for each in log]
    gap = measure(model, few, "bf16")
    assert len(gap.tokens) == 48 and judge(gap).kind == "more"
    found, further = explained(gap, Directions(model, few, suspects(model, Facts.of(few, 0))))
    assert not any(each.suspect.place for each in further)  # of 48 tokens the best of many places tells nothing


def test_suspects_that_read_the_same_logits_need_no_pass_of_their_own(model, native):
    tried = suspects(model, Facts.of(native, 0))
    directed = Directions(model, native, tried)
    gap = measure(model, native, "bf16", seen=directed.see)
    seen = [suspect for suspect, number in directed.scores if number == 0]
    assert {suspect.name for suspect in seen} == {each.name for each in tried if each.same_pass} and len(seen) == 8
    for suspect in seen:
        np.testing.assert_array_equal(directed(gap, suspect), Directions(model, native)(gap, suspect))


def test_the_tokens_tried_first_are_where_the_excess_is():
    """Harmless engines have theirs at the beginning, which takes the shortest passes."""
    gap = made([1.0, 1.0, 1.0], [1.0] * 3, tokens=400)
    assert {*screened(gap).tokens.position} == {*range(1, 129)}
    late = gap.tokens.assign(change=gap.tokens.change.where(gap.tokens.position <= 300, 9.0))
    part = screened(Gap(gap.recipe, late, gap.sequences, gap.sites)).tokens
    assert {*part.position} == {*range(257, 385)} and part.sequence.nunique() == 2


def test_what_many_tokens_cannot_decide_is_not_tried_over_them():
    suspect = Suspect("a window", "window")
    assert Slope(suspect, 0.9, 0.1, 0.3, 8).undecided(4)
    assert not Slope(suspect, 0.1, 0.05, 0.3, 8).undecided(4)  # the engine does not do it
    assert not Slope(suspect, 0.9, 0.7, 0.3, 8).undecided(4)  # below the noise of all tokens
    assert Slope(suspect, 0.9, 0.7, 0.3, 8).undecided(40)


def test_a_temperature_below_the_noise_is_noticed_by_its_slope(model, native):
    low = random_model(LLAMA).bfloat16()
    log = engine(lambda window: logprobs(low, window, 1.01))
    gap = measure(model, log, "bf16")
    found = next(each for each in over_all(gap, model, log) if "temperature" in each.suspect.name)
    assert found.size == pytest.approx(1, abs=3 * found.error)


def test_two_runs_of_a_recipe_differ_by_their_kernels_alone(model, native):
    """Weights round alike on both sides."""
    gap = measure(model, native, "bf16", 2, reference=native)
    assert gap.ratio[0] < 1e-5  # the same engine twice
    single = measure(model, native, "bf16", 2)
    kernels = Adjoint(lower(model, "bf16"), model, 2, 0, "logprob", gradients="low")(WINDOWS[:1])
    rows = kernels.contributions
    share = rows.c2[rows.kind == "kernel"].sum() / rows.c2.sum()
    assert gap.sequences.predicted[0] == pytest.approx(2 * share * single.sequences.predicted[0], rel=1e-6)


def test_logs_of_other_tokens_and_of_other_models_are_refused(model, native):
    with pytest.raises(ValueError, match="the same tokens in the same order, got others in sequence 0"):
        measure(model, native, "bf16", reference=native[1:])
    with pytest.raises(ValueError, match="must have the same sequences, got 2 and, of AGAINST, 6"):
        measure(model, native[:2], "bf16", reference=native)
    strange = Scored(np.array([5, 300]), np.array([np.nan, -1.0]))
    with pytest.raises(ValueError, match="below the model's vocabulary of 101, got 300 in sequence 0"):
        measure(model, [strange])
    long = Scored(np.full(70, 5), np.full(70, -1.0))
    with pytest.raises(ValueError, match="must fit the context, 64 tokens, got 70 in 0"):
        measure(model, [long])


def test_sequences_that_overflow_do_not_count_and_all_of_them_are_refused():
    model = random_model(LLAMA)
    model.model.embed_tokens.weight[5] *= 1e6  # beyond fp16
    outside = Scored(np.full(20, 5), np.full(20, -1.0))
    inside = Scored(np.arange(6, 26), np.full(20, -1.0))
    with pytest.raises(ValueError, match="in fp16 all overflow, first in "):
        measure(model, [outside], "fp16")
    gap = measure(model, [outside, inside], "fp16")
    assert {*gap.tokens.sequence} == {1} and len(gap.known) == 1
    assert over_all(gap, model, [outside, inside])[0].share <= 1
    assert judge(gap).kind == "more"  # a hundred times the prediction, however short it is


def test_logs_without_a_token_in_common_are_refused(model):
    first, second = (
        Scored(np.arange(5, 9), np.array(values)) for values in ([np.nan, -1, -1, np.nan], [np.nan] * 3 + [-1])
    )
    with pytest.raises(ValueError, match="a token in common, got none in sequence 0"):
        measure(model, [first], "bf16", reference=[second])


def made(observed, predicted, tokens=100, emulated=None):
    """A gap of sequences with these mean squares; that of the emulated pass is the predicted one unless given."""
    generator = np.random.default_rng(0)
    rows = [
        pd.DataFrame({
            "sequence": i, "position": np.arange(1, tokens + 1), "token": 5, "exact": -generator.random(tokens),
            "change": np.sqrt(square) * generator.choice([-1.0, 1.0], tokens), "emulated": 0.0, "rounding": 1.0,
        })
        for i, square in enumerate(observed)
    ]  # fmt: skip
    table = pd.DataFrame(
        {"sequence": range(len(observed)), "tokens": tokens, "observed": observed, "predicted": predicted}
    ).assign(emulated=predicted if emulated is None else emulated)
    return Gap(get_recipe("bf16"), pd.concat(rows, ignore_index=True), table, pd.Series({"mlp": 1.0}))


def test_the_interval_is_that_of_logarithms():
    observed, predicted = np.array([1.0, 1.4, 0.7, 1.2]), np.array([1.0, 1.1, 0.9, 1.0])
    value, low, high = made(observed, predicted).ratio
    logs = np.log(observed / predicted) / 2
    half = 3.182446 * logs.std(ddof=1) / 2
    assert (value, low, high) == pytest.approx(tuple(np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 31])
def test_answers_of_few_tokens_are_rounding(tokens):
    """The mean square of one normal error is 1, and the exponential of its mean logarithm 0.28."""
    errors = np.random.default_rng(1).normal(size=(480, tokens))
    gap = made((errors**2).mean(1), [1.0] * len(errors), tokens)
    value, low, high = gap.ratio
    assert 0.85 < value < 1.15 and low < 1.1 and high > 0.9 and judge(gap).kind == "rounding"
    assert not gap.fails and judge(made((errors[:20] ** 2).mean(1), [1.0] * 20, 1)).kind == "few"


def test_short_sequences_are_put_together_and_long_ones_are_not():
    assert pooled(pd.Series([40, 32, 100])).tolist() == [0, 1, 2]
    assert pooled(pd.Series([16, 16, 31, 1, 5])).tolist() == [0, 0, 1, 1, 1]
    assert pooled(pd.Series([3, 4])).tolist() == [0, 0]


def test_parts_of_short_sequences_have_as_many_tokens():
    gap = made(np.linspace(1, 2, 80), [1.0] * 80, tokens=2)
    assert len(screened(gap).tokens) == 64 and screened(gap).tokens.sequence.min() == 48
    assert gap.loudest == [*range(79, 63, -1)]
    assert len(screened(made([1.0, 2.0, 3.0], [1.0] * 3, tokens=48)).tokens) == 96


@pytest.mark.parametrize("routed", [True, False])
def test_one_token_at_a_tie_of_a_router_makes_no_slope_certain(routed):
    """Rounding and a suspect send it to the same other experts."""
    gap = made([1e-4] * 4, [1e-4] * 4)
    rng = np.random.default_rng(2)
    along = rng.normal(0, 1e-4, len(gap.tokens))
    tokens = gap.tokens.copy()
    tokens.loc[17, "change"] = along[17] = 0.8
    gap = replace(gap, tokens=tokens, sites=pd.Series({"router": 0.5, "mlp": 0.5} if routed else {"mlp": 1.0}))
    found = slope(gap, Suspect("epsilon", "rms_norm_eps"), along)
    assert found.size == pytest.approx(1, abs=0.01) and found.certain != routed
    everywhere = rng.normal(0, 1e-2, len(tokens))
    along = np.where(np.arange(len(tokens)) == 17, 0.8, everywhere)
    changed = tokens.assign(change=along + tokens.change.where(tokens.index != 17, 0.0))
    assert slope(replace(gap, tokens=changed), Suspect("epsilon", "rms_norm_eps"), along).certain


def test_an_emulated_pass_that_may_be_as_far_is_in_doubt_for_the_engine():
    """A mixture of experts, four windows: rounding moves tokens to other experts in each, by luck more or less."""
    observed, emulated = [4.2, 21.5, 32.0, 6.1], [3.5, 21.4, 18.0, 1.3]
    routed = pd.Series({"router": 0.1, "mlp": 0.9})
    gap = replace(made(observed, [1.0] * 4, emulated=emulated), sites=routed)
    assert gap.ratio[1] > 1.25 and not gap.fails and judge(gap).kind == "few"
    assert judge(replace(made(observed, [1.0] * 4), sites=routed)).kind == "more"
    far = made([100.0 * each for each in observed], [1.0] * 4, emulated=emulated)
    assert judge(replace(far, sites=routed)).kind == "more"


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        ([1.0, 1.1, 0.9, 1.0], "rounding"),
        ([4.0, 4.2, 3.9, 4.1], "more"),
        ([0.2, 0.22, 0.19, 0.2], "less"),
        ([1.0, 9.0, 0.2, 1.5], "few"),
        ([1.0], "few"),
    ],
)
def test_the_verdict_follows_the_interval(observed, kind):
    verdict = judge(made(observed, [1.0] * len(observed)))
    assert verdict.kind == kind
    assert (verdict.needed is not None and verdict.needed > len(observed)) == (kind == "few")


def test_as_many_sequences_as_are_said_to_be_needed_are_about_enough():
    """Of harmless ones, from which two or three are drawn: six and more decide."""
    rng = np.random.default_rng(0)
    for count in (2, 3, 4):
        drawn = [judge(made(1 + 0.3 * rng.normal(size=count).clip(-2, 2), [1.0] * count)) for _ in range(100)]
        needed = [verdict.needed for verdict in drawn if verdict.kind == "few"]
        assert len(needed) >= 10 and count < np.median(needed) <= 40 and max(needed) < 200


def test_a_sequence_far_beyond_rounding_is_more_whatever_the_others_are():
    """One request with a fault, as by a wrong prefix in a cache, makes the interval wide; so does one window alone."""
    verdict = judge(made([1.0, 400.0, 0.9, 1.1], [1.0] * 4))
    assert verdict.kind == "more" and verdict.far == [1] and "by itself: sequence 1 (counted from 0)" in verdict.line
    assert judge(made([400.0], [1.0])).kind == "more"
    assert judge(made([400.0], [1.0], tokens=8)).kind == "few"  # so few tokens may be rare ones
    # Where a pass of the recipe is as far off, the prediction was too small.
    assert judge(made([400.0], [1.0], emulated=[400.0])).kind == "few"


@pytest.mark.parametrize(
    ("observed", "emulated", "kind", "fails"),
    [
        ([5.0, 6.0, 5.0, 7.0], [5.5, 5.5, 5.5, 6.5], "rounding", True),
        ([20.0, 24.0, 20.0, 28.0], [5.5, 5.5, 5.5, 6.5], "more", True),
        ([0.2, 0.22, 0.19, 0.2], [0.21, 0.2, 0.2, 0.2], "rounding", True),
        ([0.01, 0.012, 0.01, 0.01], [0.21, 0.2, 0.2, 0.2], "less", True),
        ([5.0, 6.0, 5.0, 7.0], [1.1, 0.9, 1.0, 9.0], "more", False),  # one sequence alone: a draw from a heavy tail
        ([5.0, 6.0, 5.0, 7.0], [1.4, 1.3, 1.4, 1.3], "more", False),  # within the prediction's own error
    ],
)
def test_an_emulated_pass_is_the_yardstick_where_the_prediction_fails(observed, emulated, kind, fails):
    verdict = judge(made(observed, [1.0] * 4, emulated=emulated))
    assert verdict.kind == kind
    assert ("times that of an emulated pass" in verdict.line and "the prediction fails here" in verdict.line) == fails


@pytest.mark.parametrize("depth", [2, 40])
def test_errors_of_weights_that_add_up_are_rounding(depth):
    """All positions are much alike, and the weights of values lie so that all are rounded along their inputs."""
    model = random_model(LlamaConfig(**(LLAMA.to_dict() | {"num_hidden_layers": depth})))
    model.model.embed_tokens.weight += 20 * model.model.embed_tokens.weight[:1]
    for block in model.model.layers:
        signs, weight = (
            block.input_layernorm(model.model.embed_tokens.weight).mean(0).sign(),
            block.self_attn.v_proj.weight,
        )
        step = weight.abs().amax(1, keepdim=True) / 127
        weight[:] = ((weight / step).round().clamp(-126, 126) + 0.45 * signs) * step
        weight[:, 0] = 127 * step[:, 0]
    low = lower(model, RECIPE := "w8a16-channel@fp32")
    with low.running():
        right = engine(lambda window: logprobs(low.model, window))
    gap = measure(model, right, RECIPE)
    verdict = judge(gap)
    assert gap.emulated_ratio[0] > 1.5 and gap.fails and verdict.kind == "rounding", verdict.line
    exact = engine(lambda window: logprobs(model, window))
    far = [Scored(one.tokens, 3 * one.logprobs - 2 * other.logprobs) for one, other in zip(right, exact)]
    assert judge(measure(model, far, RECIPE)).kind == "more"


def test_texts_that_a_log_repeats_count_once(model, native):
    whole = measure(model, native[:2])
    gap = measure(model, [native[0], native[1], native[0], native[1]], reference=None)
    assert gap.repeated == 2 and gap.ratio == whole.ratio and {*gap.tokens.sequence} == {0, 1}


def test_answers_to_one_prompt_have_its_tokens_once(model):
    """Eight answers to a prompt of 40 tokens, which engines score again with each; so do two logs of them."""
    low, prompt = random_model(LLAMA).bfloat16(), WINDOWS[0][:40]
    tokens = [torch.cat([prompt, random_tokens(1, 8, seed=seed, smallest=3)[0]]) for seed in range(8)]
    answers = [Scored(w.numpy(), np.concatenate([[np.nan], logprobs(low, w).numpy()])) for w in tokens]
    gap = measure(model, answers)
    assert len(gap.tokens) == 39 + 8 * 8 and gap.repeated == 0
    assert gap.sequences.tokens.tolist() == [47] + [8] * 7 and (gap.tokens.position >= 40)[47:].all()
    completions = [replace(each, logprobs=np.where(np.arange(48) < 40, np.nan, each.logprobs)) for each in answers]
    assert len(measure(model, [completions[0], answers[1]]).tokens) == 8 + 47  # nobody scored the prompt before
    both = measure(model, answers, reference=answers[::-1][::-1])
    assert both.sequences.tokens.tolist() == [47] + [8] * 7


@pytest.mark.parametrize("base", [2, 10])
def test_logs_in_another_base_are_named(model, native, base):
    other = [Scored(each.tokens, each.logprobs / np.log(base)) for each in native]
    gap = measure(model, other)
    verdict = judge(gap, over_all(gap, model, other))
    assert verdict.cause.suspect.name == f"a log in base {base}" and verdict.cause.share > 0.99


def test_tokens_of_another_tokenizer_have_no_temperature_as_their_cause(model, native):
    """The engine is sure of its text, and to the model other tokens are noise: any temperature above 1 fits that."""
    generator = np.random.default_rng(1)
    other = [Scored(generator.permutation(each.tokens), np.full(48, -0.5)) for each in native]
    gap = measure(model, other)
    verdict = judge(gap, over_all(gap, model, other))
    assert verdict.kind == "more" and verdict.cause is None
    assert any("this is another model" in text for text in described(patterns(gap)))


def test_a_certain_suspect_makes_a_small_gap_more_than_rounding():
    found = Slope(Suspect("another temperature", "temperature", slope=True), 0.5, 0.05, 0.1, 20)
    assert judge(made([1.0, 1.1, 0.9, 1.0], [1.0] * 4), [found]).cause is found
    uncertain = Slope(found.suspect, 0.2, 0.05, 0.1, 20)
    assert judge(made([1.0, 1.1, 0.9, 1.0], [1.0] * 4), [uncertain]).kind == "rounding"


def test_a_slope_from_few_tokens_is_not_certain():
    """One unit has no standard error, whatever the residuals are."""
    gap, suspect = made([9.0], [1.0], tokens=8), Suspect("another temperature", "temperature", slope=True)
    found = slope(gap, suspect, gap.tokens.change.to_numpy())
    assert found.share == pytest.approx(1) and not found.certain
    assert judge(gap, [found]).kind == "few"


def test_a_slope_and_its_error_are_those_of_white():
    generator = np.random.default_rng(1)
    along = generator.normal(size=400)

    def drawn():
        return 0.3 * along + generator.normal(size=400) * (0.1 + along**2)

    size, square = slope_of(drawn(), along, np.arange(400))
    others = [slope_of(drawn(), along, np.arange(400))[0] for _ in range(400)]
    assert size == pytest.approx(0.3, abs=4 * square**0.5)
    assert square**0.5 == pytest.approx(np.std(others), rel=0.25)


def test_log_probabilities_of_drawn_tokens_are_told_from_those_of_the_text(model, native):
    """Of eight logs of drawn tokens each is told; of the text's own, in bf16, heated or of other weights, none is."""

    def drawn(seed):
        choice = torch.Generator().manual_seed(seed)

        def score(window):
            values = logits(model, window).log_softmax(-1)[:-1]
            return values.gather(-1, torch.multinomial(values.exp(), 1, generator=choice))[:, 0].double()

        return score

    def told(log):
        return patterns(measure(model, log, "bf16", probes=1))["drawn"]

    with torch.no_grad():
        assert all(told(engine(drawn(seed))) for seed in range(8))
    others = [engine(lambda window, heat=heat: logprobs(model, window, heat)) for heat in (0.5, 2.0)]
    assert not any(map(told, [native, *others]))
    (text,) = described({**patterns(measure(model, native, "bf16", probes=1)), "drawn": True})
    assert "tokens that the engine drew, not of the text's" in text


def test_patterns_tell_kinds_of_excess_apart():
    gap = made([1.0] * 4, [1.0] * 4)
    early, late, few = (gap.tokens.copy() for _ in range(3))
    early.loc[early.position <= 16, "change"] *= 10
    late.loc[late.position > 36, "change"] *= 10
    few["change"] *= 0.01
    few.loc[few.index[:2], "change"] = 5.0
    flat, *others = (
        patterns(Gap(gap.recipe, table, gap.sequences, gap.sites)) for table in (gap.tokens, early, late, few)
    )
    assert flat["start"] == pytest.approx(1) and flat["end"] == pytest.approx(1)
    assert others[0]["start"] == pytest.approx(10) and others[1]["end"] == pytest.approx(10)
    assert others[2]["few"] < 0.01 < flat["few"]
    assert (flat["ends"], others[0]["ends"], others[1]["ends"]) == (0, 17, 0)
    assert (flat["begins"], others[0]["begins"], others[1]["begins"]) == (0, 0, 37)
    (told,) = (text for text in described(others[0]) if "The change is" in text)
    assert told.startswith("The change is rounding from position 17 of the sequences on, and more before it")


@pytest.mark.parametrize(("floor", "places"), [(-100.0, [5, 20, 31]), (0.0, [1])])
def test_a_number_that_stands_for_no_score_is_told(model, native, floor, places):
    """In too few places to be refused at once; positions and routers have nothing to do with it."""
    values = [np.where(np.isin(np.arange(48), places), floor, each.logprobs) for each in native[:4]]
    signs = patterns(measure(model, [replace(each, logprobs=v) for each, v in zip(native, values)], "bf16", 1))
    (text,) = described(signs)
    assert signs["number"] == floor and f"where the log has {floor:g}, at several tokens" in text
    rounded = [replace(each, logprobs=each.logprobs.round(1)) for each in native]
    assert patterns(measure(model, rounded, "bf16", 1))["number"] is None


def test_a_log_that_clamps_few_numbers_is_told(model, native):
    floor = np.sort(np.concatenate([each.logprobs[1:] for each in native]))[5]
    clamped = [replace(each, logprobs=np.maximum(each.logprobs, floor)) for each in native]
    assert patterns(measure(model, clamped, "bf16", 1))["number"] == pytest.approx(floor)


def gap_of(observed, predicted=1.0, emulated=1.0, two=False, tokens=64):
    """A gap whose sequences have these mean squares, and no token that changes."""
    table = pd.DataFrame({"observed": observed, "predicted": predicted, "emulated": emulated, "tokens": tokens})
    return Gap(
        get_recipe("bf16"),
        pd.DataFrame({"change": [0.0]}),
        table.assign(sequence=range(len(observed))),
        pd.Series(),
        two=two,
    )


def test_sequences_that_do_not_change_do_not_count_beside_others(model, native):
    """As of an engine whose log has some lines of the other one."""
    noise = np.random.default_rng(0).normal(0, 0.01, 48)
    changed = [replace(each, logprobs=each.logprobs - np.abs(noise) * (n > 1)) for n, each in enumerate(native)]
    gap = measure(model, native, "bf16", reference=changed)
    assert gap.unchanged == 2 and gap.ratio[1] > 0.1 * gap.ratio[0]
    assert "no number differs in 2 of the sequences, which do not count" in judge(gap).line
    same = measure(model, native, "bf16", reference=native)
    assert judge(same).kind == "less" and "it is the same engine" in judge(same).line
    assert "do not count" not in judge(same).line
    assert judge(gap_of([1.0, 0.0, 0.0, 0.0])).needed == 5


def test_a_sequence_is_not_far_where_the_emulated_pass_is_as_far():
    for two in (True, False):
        assert gap_of([1.0, 1.0, 100.0], two=two).far == [2]
        assert gap_of([1.0, 1.0, 100.0], emulated=150.0, two=two).far == []
        # Tokens go to other experts in one sequence of the emulated pass, and in another of the engine's.
        assert gap_of([1.0, 1.0, 100.0], emulated=[100.0, 1.0, 1.0], two=two).far == []
        assert gap_of([1.0, 1.0, 100.0], emulated=[4.0, 1.0, 1.0], two=two).far == [2]


def test_two_engines_are_held_against_what_emulated_passes_make_of_the_prediction(model, native):
    """By the factor of one run, whose weights round alike on both sides."""
    one, two = (measure(model, native, "bf16", 2, reference=each).sequences for each in (None, native))
    np.testing.assert_allclose(two.emulated / two.predicted, one.emulated / one.predicted, rtol=1e-6)
    verdict = judge(gap_of([4.8, 5.0, 4.9, 5.1], emulated=4.84, two=True))
    assert verdict.kind == "rounding" and "the prediction fails here" in verdict.line
    assert judge(gap_of([4.8, 5.0, 4.9, 5.1], two=True)).kind == "more"
    assert judge(gap_of([1.0, 1.1, 0.9, 1.0], emulated=0.1, two=True)).kind == "rounding"


FLIPS = [1.23**2, 1.5**2, 2.0**2, 2.38**2]  # of routers, by sequence


@pytest.mark.parametrize(
    ("observed", "emulated", "kind"),
    [
        ([1.3**2, 1.6**2, 2.1**2, 2.5**2], FLIPS, "rounding"),
        ([16.0, 17.0, 16.5, 300.0], FLIPS, "more"),
        ([1.35**2, 1.36**2, 1.34**2, 1.35**2], [1.19**2, 1.2**2, 1.21**2, 1.2**2], "rounding"),  # what it explains
        ([1.7**2, 1.71**2, 1.69**2, 1.7**2], [1.19**2, 1.2**2, 1.21**2, 1.2**2], "more"),
    ],
)
def test_a_change_within_an_emulated_pass_that_is_larger_than_predicted_is_no_more(observed, emulated, kind):
    gap = made(observed, [1.0] * 4, emulated=emulated)
    assert gap.emulated_ratio[1] > 1 and judge(gap).kind == kind, judge(gap).line


def test_an_enormous_gap_of_a_short_log_is_more():
    """Kept is "few" where the emulated pass is far from the prediction, or the gap is moderate."""
    assert judge(made([78.0**2], [1.0], tokens=30)).kind == "more"
    assert judge(made([445.0**2], [1.0], tokens=8)).kind == "more"
    assert judge(made([445.0**2], [1.0], tokens=8, emulated=[9.0])).kind == "few"
    assert judge(made([15.0**2], [1.0], tokens=8)).kind == "few"


def test_eager_attention_is_held_against_fused_attention_by_one_yardstick():
    """An emulated pass that is larger than predicted for both alike tells nothing of eager attention."""
    model, observed = random_model(LLAMA), [2.2, 2.3, 2.2, 2.3]
    model.set_attn_implementation("sdpa")
    first = made(observed, [1.0] * 4)
    _, verdict = as_eager(model, first, judge(first), lambda: made(observed, [2.0] * 4))
    assert verdict.fused == pytest.approx(first.ratio)
    doubtful = made(observed, [1.0] * 4, emulated=[1.1, 9.0, 0.9, 2.2])  # no failure beyond doubt
    alike = made(observed, [1.0] * 4, emulated=[2.2, 2.3, 2.2, 2.3])
    assert judge(doubtful).kind == "more" and judge(alike).kind == "rounding"
    assert as_eager(model, doubtful, judge(doubtful), lambda: alike)[0] is doubtful


def test_the_grid_of_both_logs_is_not_between_them(model, native):
    rounded = [replace(each, logprobs=each.logprobs.round(2)) for each in native]
    other = [replace(each, logprobs=(each.logprobs - 0.011).round(2)) for each in native]
    assert not [*grids(measure(model, rounded, "bf16", reference=rounded))]
    assert not [*grids(measure(model, other, "bf16", reference=rounded))]
    (found,) = grids(measure(model, rounded, "bf16", reference=native))
    assert found.share == pytest.approx(1.0, abs=0.3) and found.share <= 1


def test_three_tokens_have_no_slope():
    """A line and a slope fit any three."""
    table = pd.DataFrame({"sequence": 0, "position": [1, 2, 3], "fp32": [-1.0, -2.0, -4.0]})
    table = table.assign(change=[0.1, -0.2, 0.3], emulated=0.0, rounding=0.0, exact=table.fp32)
    found = slope(replace(gap_of([1.0]), tokens=table), Suspect("", ""), np.array([0.3, 0.1, -0.2]))
    assert not found.certain and found.error == np.inf


def test_the_first_of_repeated_texts_counts_in_the_order_of_the_log(model, native):
    gap = measure(model, [native[0], native[1], native[0]], "bf16")
    assert [*gap.sequences.sequence] == [0, 1] and gap.repeated == 1


def test_zeros_that_stand_for_no_number_are_refused(model, native):
    """As of a trainer whose prompt has zeros. A sure token may have 0, and the best one of an engine that draws it."""
    zeros = [replace(each, logprobs=np.where(np.arange(48) < 24, 0.0, each.logprobs)) for each in native]
    with pytest.raises(ValueError, match="of 0 must be that of a sure token, got it at .*: .* so write null there"):
        measure(model, zeros, "bf16")
    few = [replace(each, logprobs=np.where(np.arange(48) == 5, 0.0, each.logprobs)) for each in native]
    assert len(measure(model, few, "bf16").sequences) == 6


def sampled(model, change):
    """The log of an engine that changes its logits (T, V), and has no number for what it leaves out."""
    low, found = random_model(model.config).bfloat16(), []
    for window in WINDOWS:
        values = read(change(logits(low, window), window), window, Suspect("", "")).numpy()
        found.append(Scored(window.numpy(), np.concatenate([[np.nan], np.where(values < -50, np.nan, values)])))
    return found


SAMPLED = {
    "a temperature of 0.8": partial(heated, 0.8),
    "a temperature of 0.7 and top-p 0.9": partial(after, partial(heated, 0.7), partial(nucleus, 0.9)),
    "a frequency penalty of 0.5": partial(frequent, 0.5),
    "a repetition penalty of 1.3": partial(repeated, 1.3),
    "100 rows of padding with logits 0 in the softmax": padded(100),
    "log-probabilities among tokens of 5% of the best one (min-p)": partial(likely, 0.05),
}


@pytest.mark.parametrize("cause", SAMPLED)
def test_how_tokens_are_drawn_is_named_with_its_numbers(model, cause):
    log = sampled(model, SAMPLED[cause])
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)))
    gap = measure(model, log, "bf16", seen=directed.see)
    verdict = judge(gap, [*explained(gap, directed)[0], *explained(gap, directed)[1]])
    numbers = re.compile(r"\d+(?:\.\d+)?")
    found = verdict.cause.suspect.name
    assert numbers.sub("", found) == numbers.sub("", cause), verdict.line
    sizes, right = ([*map(float, numbers.findall(name))] for name in (found, cause))
    assert sizes == pytest.approx(right, rel=0.05), verdict.line


def test_log_probabilities_of_the_most_probable_tokens_are_named(model):
    low, greedy = random_model(LLAMA).bfloat16(), Suspect("", "", top=True)
    log = engine(lambda window: read(logits(low, window), window, greedy))
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)))
    found, further = explained(gap := measure(model, log, "bf16", seen=directed.see), directed)
    assert "of the most probable tokens, not of the text's" in judge(gap, [*found, *further]).line


def test_rows_in_another_order_are_told(model, native):
    """As of a batch whose answers come in the order in which they end."""
    moved = [replace(each, logprobs=native[(number + 1) % 3].logprobs) for number, each in enumerate(native[:3])]
    signs = patterns(measure(model, moved, "bf16"))
    assert signs["rows"] == {0: 1, 1: 2, 2: 0}
    assert "sequence 0 (from 0) are those of sequence 1" in " ".join(described(signs))
    assert patterns(measure(model, native, "bf16"))["rows"] == {}
    (text, *_) = described({**signs, "drawn": True})  # over many tokens it has the mean of drawn ones, too
    assert "the engine drew" not in text and "are those of sequence" in " ".join(described({**signs, "drawn": True}))


def test_a_cause_of_some_sequences_is_named_for_these(model, native):
    """Two requests came with a temperature of their own."""
    low = random_model(LLAMA).bfloat16()
    hot = engine(lambda window: logprobs(low, window, 0.6))
    mixed = [*hot[:2], *native[2:]]
    directed = Directions(model, mixed, suspects(model, Facts.of(mixed, 0)))
    gap = measure(model, mixed, "bf16", seen=directed.see)
    found, further = explained(gap, directed)
    verdict = judge(gap, [*found, *further])
    assert gap.far == [0, 1] and verdict.cause.where == "in these" and not verdict.partial
    assert "a temperature of 0.6" in verdict.cause.suspect.name and "of it in these: look at" in verdict.line


@pytest.mark.parametrize("stored", [False, True])
def test_a_plain_format_that_is_coarser_than_said_is_named(stored):
    """Where the weights are ``stored`` in bf16, kernels alone round."""
    model, low = random_model(LLAMA), random_model(LLAMA).bfloat16()
    if stored:
        model.load_state_dict(low.state_dict())
    log = engine(lambda window: logprobs(low, window))
    gap = measure(model, log, "fp16")
    found, further = explained(gap, Directions(model, log, suspects(model, Facts.of(log, 0))))
    verdict = judge(gap, [*found, *further])
    assert verdict.kind == "more" and verdict.cause.suspect.name == "the recipe bf16 in place of fp16", verdict.line


def test_a_certain_slope_asks_for_more_where_the_interval_is_too_wide(monkeypatch):
    """RoPE of 0.8 times its base: 1.49 times the predicted change, from 1.248 on, and a slope along half the base."""
    few = verdict.Verdict("few", (1.49, 1.248, 1.78), needed=8)
    monkeypatch.setattr(verdict, "judge", lambda gap, found: few)
    certain, other = SimpleNamespace(certain=True), SimpleNamespace(certain=False)
    assert verdict.unexplained(None, [other, certain], 0.8)
    assert not verdict.unexplained(None, [other], 0.8)
    few = verdict.Verdict("rounding", (1.1, 1.0, 1.2))
    assert not verdict.unexplained(None, [certain], 0.8)
