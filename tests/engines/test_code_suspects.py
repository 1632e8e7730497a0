"""Faults of an engine's code and loader that all blocks have, or one alone, are named, at 2 and 40 blocks."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_catalogue import DEPTHS, WINDOWS
from test_structure_suspects import SIZES, ground_of_model, model_of
from tiny import random_model
from transformers import Gemma3TextConfig, Qwen3Config
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from fragility_engines.comparison.signs import begins, begins_with, described, patterns
from fragility_engines.comparison.slopes import Directions, Slope, slope
from fragility_engines.comparison.verdict import judge
from fragility_engines.proving.ground import Ground, given
from fragility_engines.proving.variations import Variation, narrow, native
from fragility_engines.suspects.rotary import rotary
from fragility_engines.suspects.suspect import Suspect, logprobs, score
from fragility_engines.suspects.windows import masks, without_first

NORMED = SIZES | {"num_key_value_heads": 2}


@pytest.fixture(scope="module", params=DEPTHS)
def ground(request):
    return ground_of_model("qwen2", request.param)


def traded(one, other):
    for a, b in zip(one.parameters(), other.parameters()):
        a.data, b.data = b.data, a.data


def middle(model):
    return model.model.layers[len(model.model.layers) // 2]


def norms_traded(model):
    for block in model.model.layers:
        traded(block.input_layernorm, block.post_attention_layernorm)


def norms_of_a_block_traded(model):
    traded(middle(model).input_layernorm, middle(model).post_attention_layernorm)


def keys_for_values(model):
    traded(middle(model).self_attn.k_proj, middle(model).self_attn.v_proj)


def no_bias_of_values(model):
    for block in model.model.layers:
        block.self_attn.v_proj.bias.zero_()


def normed_twice(model):
    norm = model.model.norm
    once = norm.forward
    norm.forward = lambda x: once(once(x))


def without_a_block(model):
    del model.model.layers[len(model.model.layers) // 2]


def a_block_twice(model):
    block = middle(model)
    once = block.forward
    block.forward = lambda hidden, **options: once(once(hidden, **options), **options)


def neighbours(model):
    at = len(model.model.layers) // 2
    traded(model.model.layers[at - 1], model.model.layers[at])


FAULTS = {
    "input_layernorm and post_attention_layernorm in each other's place": norms_traded,
    "input_layernorm and post_attention_layernorm in each other's place in model.layers.{middle}": (
        norms_of_a_block_traded
    ),
    "k_proj and v_proj in each other's place in model.layers.{middle}": keys_for_values,
    "no biases of v_proj in self_attn": no_bias_of_values,
    "model.norm applied twice": normed_twice,
    "model.layers.{middle} left out": without_a_block,
    "model.layers.{middle} run twice": a_block_twice,
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_of_all_blocks_or_of_one_is_named(ground, cause):
    _, verdict = ground.judged(Variation(cause, native(FAULTS[cause])))
    name = cause.format(middle=len(ground.model.model.layers) // 2)
    assert verdict.cause is not None and verdict.cause.suspect.name == name and not verdict.partial, verdict.line


def test_a_branch_left_out_is_not_called_its_block():
    """The attention makes most of what this model's blocks do."""
    model = model_of("qwen2", 2)
    for block in model.model.layers:
        block.mlp.down_proj.weight.mul_(0.25)

    def without(low):
        middle(low).self_attn.o_proj.weight.zero_()

    _, verdict = Ground(model, WINDOWS, 0).judged(Variation("no attention", native(without)))
    assert verdict.cause is not None, verdict.line
    assert verdict.cause.suspect.name == "something in model.layers.1.self_attn", verdict.line


@pytest.mark.parametrize("depth", [2, 6])
def test_blocks_in_each_others_place_are_named(depth):
    """One of the two must be the place that explains most, as in no random model of 40 blocks."""
    _, verdict = ground_of_model("qwen2", depth).judged(Variation("neighbours", native(neighbours)))
    pair = {f"model.layers.{depth // 2 - 1}", f"model.layers.{depth // 2}"}
    assert {*verdict.cause.suspect.name.removesuffix(" in each other's place").split(" and ")} == pair, verdict.line


@pytest.mark.parametrize("depth", DEPTHS)
def test_norms_of_queries_and_keys_that_are_left_out_are_named(depth):
    def without(model):
        for block in model.model.layers:
            block.self_attn.q_norm.forward = block.self_attn.k_norm.forward = lambda x: x

    _, verdict = ground_of_model("olmo2", depth).judged(Variation("no norms", native(without)))
    assert verdict.cause.suspect.name == "no self_attn.q_norm and self_attn.k_norm of all blocks", verdict.line


def test_blocks_sorted_by_name_are_named():
    """A loader that sorts "10" before "2"."""

    def sort(low):
        blocks = [*low.model.layers]
        for at, number in enumerate(sorted(range(12), key=str)):
            low.model.layers[at] = blocks[number]

    _, verdict = ground_of_model("qwen2", 12).judged(Variation("sorted", native(sort)))
    assert verdict.cause.suspect.name.startswith("blocks in the order of their numbers as text"), verdict.line


def seeing(visible, model, windows):
    """An engine whose mask has these places ``visible`` (T, T)."""
    low, size = narrow(model), windows.shape[1]
    mask = torch.zeros(size, size).masked_fill(~visible(torch.arange(size)), torch.finfo(torch.bfloat16).min)
    with torch.no_grad():
        z = [
            low(w[None], attention_mask=mask.bfloat16()[None, None], use_cache=False).logits[0].double()
            for w in windows
        ]
    z = torch.stack(z)[:, :-1]
    return z.gather(-1, windows[:, 1:, None])[..., 0] - z.logsumexp(-1)


def ahead(places):
    return places[:, None] - places >= -1


def others(places):
    return (places[:, None] > places) | (places == 0)


@pytest.mark.parametrize(("name", "visible"), [("sees the next token", ahead), ("does not see its own token", others)])
def test_a_mask_that_is_off_by_one_is_named(ground, name, visible):
    _, verdict = ground.judged(Variation(name, partial(seeing, visible)))
    assert verdict.cause.suspect.name == f"attention that {name}", verdict.line


def test_masks_keep_the_window_of_a_model():
    """What masks hide comes beside the window of a layer: with nothing more hidden, the pass is the model's own."""
    sizes = NORMED | {"head_dim": 8, "num_hidden_layers": 2}
    model = random_model(
        Gemma3TextConfig(sliding_window=8, layer_types=["sliding_attention", "full_attention"], **sizes)
    )
    before = logprobs(model, WINDOWS[0])
    with torch.no_grad():
        for suspect in masks(model):
            found = score(model, WINDOWS[0], suspect)
            assert (found - before).abs().max() > 1e-3
    with without_first(0, model):
        torch.testing.assert_close(logprobs(model, WINDOWS[0]), before, rtol=0, atol=1e-5)


def test_the_number_of_first_tokens_that_are_not_seen_is_fitted(ground):
    """Its neighbours may leave more than numbers that are further off."""
    for count in (8, 5) if len(ground.model.model.layers) > 2 else (2, 3, 5, 6, 7, 11):
        _, verdict = ground.judged(Variation("dropped", native(drop=count)))
        assert verdict.cause.suspect.name == f"the first {count} tokens not seen by later ones", verdict.line


def half_turned(x, cos, sin, size):
    """The first ``size`` entries of heads (..., d) turned by pairs of halves, the others as they are."""
    turned, kept = x[..., :size], x[..., size:]
    other = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    return torch.cat([turned * cos + other * sin, kept], -1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_rope_of_the_first_half_of_each_head_is_that_of_a_partial_factor(family, monkeypatch):
    of = {"qwen2": modeling_qwen2, "qwen3": modeling_qwen3}[family]
    model = (
        random_model(Qwen3Config(num_hidden_layers=2, head_dim=16, **NORMED))
        if family == "qwen3"
        else model_of(family, 2)
    )
    suspect = next(each for each in rotary(model) if each.name == "RoPE of the first half of each head alone")
    found = score(model, WINDOWS[0], suspect)

    def partly(q, k, cos, sin, unsqueeze_dim=1):
        size = q.shape[-1] // 2
        one, two = (torch.cat([x[..., :size:2], x[..., :size:2]], -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
        return half_turned(q, one, two, size), half_turned(k, one, two, size)

    before = logprobs(model, WINDOWS[0])
    monkeypatch.setattr(of, "apply_rotary_pos_emb", partly)
    torch.testing.assert_close(found, logprobs(model, WINDOWS[0]), rtol=0, atol=2e-5)
    assert (found - before).abs().max() > 1e-2


def test_half_of_rope_is_not_taken_for_a_scaling(ground):
    def halved(model):
        x = model.model.rotary_emb.inv_freq
        model.model.rotary_emb.inv_freq = torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])

    _, verdict = ground.judged(Variation("half", native(halved)))
    assert verdict.cause.suspect.name == "RoPE of the faster half of its frequencies alone", verdict.line


def test_a_setting_of_another_size_is_only_like_the_gap():
    """Where the engine has the setting its size is 1; one of 0.6 that goes with the gap is another fault."""
    gap = ground_of_model("qwen2", 2).gap
    loud = given(gap, (gap.tokens.exact + 300 * gap.tokens.rounding).to_numpy())
    for size, share, partial_ in ((0.6, 0.99999, True), (1.03, 0.99999, False), (1.03, 0.97, True)):
        verdict = judge(loud, [Slope(Suspect("epsilon 0.28 of norms", "eps"), size, 0.01, share, 20)])
        assert verdict.partial is partial_, verdict.line
    assert judge(loud, [Slope(Suspect("a scale", "", slope=True), -7.0, 0.1, 0.99999, 20)]).partial is False


def test_the_error_of_a_slope_is_that_of_what_the_emulated_pass_leaves():
    """An engine near the emulated pass has a smaller one, but no smaller than half of both together."""
    gap, generator = ground_of_model("qwen2", 2).gap, np.random.default_rng(0)
    along = generator.normal(size=len(gap.tokens)) * gap.predicted
    near = given(gap, (gap.tokens.exact + gap.tokens.rounding * generator.normal(1, 0.1, len(along))).to_numpy())
    alone = replace(near, tokens=near.tokens.assign(emulated=0.0))
    suspect = Suspect("a scale", "", slope=True)
    error, whole = (slope(each, suspect, along).error for each in (near, alone))
    assert 0.6 * whole < error < 0.8 * whole


def test_suspects_that_explain_alike_are_both_named():
    gap = ground_of_model("qwen2", 2).gap
    loud = given(gap, (gap.tokens.exact + 2 * gap.tokens.rounding).to_numpy())
    best, near, far = (
        Slope(Suspect(name, "weights", slope=True), 1.0, 0.01, share, 20)
        for name, share in (("a", 0.7), ("b", 0.69), ("c", 0.6))
    )
    verdict = judge(loud, [far, near, best])
    assert verdict.cause is best and verdict.alike == "b"
    assert "A explains 70% of it, and so does b: look at weights" in verdict.line
    assert not judge(loud, [best, far]).alike


@pytest.mark.parametrize("start", [20, 30])
def test_a_change_that_begins_at_a_position_is_told(start):
    """Tokens from there on lack those before them, as behind a block of the cache that was lost."""
    ground = ground_of_model("qwen2", 2)

    def lost(places):
        return (places[:, None] >= places) & ~((places[:, None] >= start) & (places < start) & (places > start - 8))

    gap = given(ground.gap, seeing(lost, ground.model, WINDOWS).numpy().ravel())
    assert begins(gap) == start + 1  # the token after the first one that sees less
    assert any(f"up to position {start} of the sequences" in text for text in described(patterns(gap)))
    assert begins(given(ground.gap, native()(ground.model, WINDOWS).numpy().ravel())) == 0


TOKEN = 61  # in several of the windows


def other_row(name, low):
    """A row of the embedding, or of the head, that another token has."""
    weight = getattr(low, name)().weight
    weight.data[TOKEN] = weight.data[TOKEN - 1].clone()


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("get_input_embeddings", f"rounding until token {TOKEN} is read"),
        ("get_output_embeddings", f"is where token {TOKEN} is scored"),
    ],
)
def test_a_token_whose_row_is_wrong_is_told(ground, name, sign):
    gap, verdict = ground.judged(Variation(name, native(partial(other_row, name))))
    assert verdict.kind == "more" and (verdict.cause is None or verdict.partial), verdict.line
    assert any(sign in text for text in described(patterns(gap)))
    harmless = given(ground.gap, native()(ground.model, WINDOWS).numpy().ravel())
    assert patterns(harmless)["read"] is patterns(harmless)["scored"] is None


@pytest.mark.parametrize("elsewhere", [1, 30])
def test_a_row_of_the_head_is_told_only_if_the_gap_is_rounding_elsewhere(elsewhere):
    """Experts in each other's place change every token, and one of them most."""
    gap = ground_of_model("qwen2", 2).gap
    change = gap.tokens.rounding * np.where(gap.tokens.token == TOKEN, 900, elsewhere)
    gap = replace(gap, tokens=gap.tokens.assign(change=change))
    assert patterns(gap)["scored"] == (TOKEN if elsewhere == 1 else None)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_token_is_told_only_if_it_is_so_in_every_sequence_that_has_it(sequences):
    """One sequence that goes wrong from some token on has no other to tell which of its tokens it was."""
    gap = ground_of_model("qwen2", 2).gap
    tokens = gap.tokens.assign(change=gap.tokens.rounding)
    read = tokens[tokens.token == TOKEN].groupby("sequence").position.min().sort_values()[:sequences]
    wrong = tokens.position > tokens.sequence.map(read)
    assert len(read) == sequences and wrong.sum() > 16
    gap = replace(gap, tokens=tokens.assign(change=tokens.change.where(~wrong, 20 * tokens.rounding)))
    assert begins_with(gap) == (TOKEN if sequences > 1 else None)
    assert sequences > 1 or begins(gap) == 0


def test_the_blocks_of_the_likeliest_places_are_tried_one_after_the_other():
    """Where what is wrong in one block is most like another block left out, that one's own mistakes explain less."""
    model = model_of("qwen2", 4)
    shares = {"3.self_attn": 0.8, "3.mlp": 0.3, "1.self_attn": 0.5, "2.mlp": 0.4, "0.mlp": 0.1}
    found = [
        Slope(Suspect(f"something in model.layers.{name}", "", place=True), 1.0, 0.1, share, 6)
        for name, share in shares.items()
    ]
    directed = Directions(model, [])
    for rank, block in enumerate((3, 1, 2, 0)):
        names = [suspect.name for suspect in directed.around(found, rank)]
        assert f"no biases of q_proj and k_proj and v_proj in self_attn in model.layers.{block}" in names
        assert all(f"model.layers.{block}" in name for name in names)
    assert directed.around(found, 4) == [] == directed.around([])
