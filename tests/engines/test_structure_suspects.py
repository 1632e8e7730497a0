"""Faults that all blocks have in common, and those of the log's own numbers, are named."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from test_catalogue import DEPTHS, WINDOWS, config_of, ground_of, quieted
from tiny import TINY, random_gpt2, random_model
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
)

from fragility_engines.comparison.grid import coarsest
from fragility_engines.comparison.verdict import judge
from fragility_engines.logs.sequences import read
from fragility_engines.proving.ground import Ground
from fragility_engines.proving.variations import Variation, by_window, narrow, native
from fragility_engines.suspects.sampling import best, capped, nucleus, present, repeated
from fragility_engines.suspects.structure import structure
from fragility_engines.suspects.suspect import logits, logprobs, score

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 101,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "qwen2": lambda depth: Qwen2Config(num_key_value_heads=2, num_hidden_layers=depth, **SIZES),
    "phi3": lambda depth: Phi3Config(num_key_value_heads=2, num_hidden_layers=depth, **SIZES),
    "neox": lambda depth: GPTNeoXConfig(num_hidden_layers=depth, **SIZES),
    "olmo2": lambda depth: Olmo2Config(num_key_value_heads=2, num_hidden_layers=depth, **SIZES),
}
LAST = {  # what a branch adds to the stream comes from these
    "olmo2": ("feedforward_layernorm.weight", "post_attention_layernorm.weight"),
}
OUTPUTS = ("o_proj.weight", "down_proj.weight", "attention.dense.weight", "dense_4h_to_h.weight")


def model_of(family, depth):
    model = random_model(FAMILIES[family](depth))
    for name, parameter in model.named_parameters():
        if name.endswith(LAST.get(family, OUTPUTS)):
            parameter.mul_((2 / depth) ** 0.5)
    return model


@cache
def ground_of_model(family, depth):
    """The prediction and the suspects of a model, which judging leaves as they are."""
    return Ground(model_of(family, depth), WINDOWS, 0)


def without_biases(model):
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(block.self_attn, name).bias.zero_()


def swapped(model):
    for block in model.model.layers:
        one, other = block.mlp.gate_proj, block.mlp.up_proj
        one.weight.data, other.weight.data = other.weight.data, one.weight.data


def repeating(model):
    """The engine gives query head h the keys of head h modulo their number: as if query heads stood in that order."""
    for block in model.model.layers:
        attention = block.self_attn
        width = attention.head_dim
        order = torch.cat([torch.arange(h * width, (h + 1) * width) for h in (0, 2, 1, 3)])
        q, o = attention.q_proj, attention.o_proj
        q.weight.data, q.bias.data, o.weight.data = q.weight[order], q.bias[order], o.weight[:, order]


def halves(model):
    for block in model.model.layers:
        block.mlp.gate_up_proj.weight.data = block.mlp.gate_up_proj.weight.roll(48, 0)


def unfused(model):
    """The file has queries of all heads first, and the engine takes them head by head."""
    for block in model.gpt_neox.layers:
        fused = block.attention.query_key_value
        for x in (fused.weight, fused.bias):
            x.data = x.unflatten(0, (3, 4, -1)).transpose(0, 1).reshape(x.shape)


def added_by_ranks(model):
    """Each of four ranks adds the whole bias to its part of the sum."""
    for block in model.gpt_neox.layers:
        for layer in (block.attention.dense, block.mlp.dense_4h_to_h):
            layer.bias.data *= 4


def unnormed(model):
    model.model.norm.weight.data.fill_(1.0)


FAULTS = {
    "no biases of q_proj and k_proj and v_proj in self_attn": ("qwen2", without_biases),
    "gate_proj and up_proj in each other's place": ("qwen2", swapped),
    "query heads that take turns at the heads of keys (repeat, not repeat_interleave)": ("qwen2", repeating),
    "model.norm without the weights of the file": ("qwen2", unnormed),
    "the halves in each other's place in gate_up_proj": ("phi3", halves),
    "queries, keys and values head by head, not each together, in query_key_value": ("neox", unfused),
    "biases of the last layers of branches added 4 times, as by each of 4 ranks": ("neox", added_by_ranks),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_of_all_blocks_is_named(cause, depth):
    family, change = FAULTS[cause]

    def run(model, windows):
        return by_window(partial(logprobs, narrow(model, change)), windows)

    _, verdict = ground_of_model(family, depth).judged(Variation(cause, run))
    assert verdict.kind == "more" and verdict.cause is not None, verdict.line
    assert verdict.cause.suspect.name == cause and not verdict.partial, verdict.line


def test_both_norms_behind_branches_left_out_are_one_suspect():
    """As of an engine that runs a Gemma 2 or an OLMo 2 by the code of a Llama."""

    def without(model):
        for block in model.model.layers:
            block.post_attention_layernorm = block.post_feedforward_layernorm = torch.nn.Identity()

    def run(model, windows):
        return by_window(partial(logprobs, narrow(model, without)), windows)

    _, verdict = ground_of_model("olmo2", 2).judged(Variation("no norms", run))
    name = "no post_attention_layernorm and post_feedforward_layernorm of all blocks"
    assert verdict.cause is not None and verdict.cause.suspect.name == name and not verdict.partial, verdict.line


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_every_suspect_of_the_structure_changes_the_model_for_a_while(family):
    model = random_gpt2(TINY) if family == "gpt2" else model_of(family, 2)
    before, weights = logprobs(model, WINDOWS[0]), {name: p.clone() for name, p in model.named_parameters()}
    found = structure(model)
    assert len({each.name for each in found}) == len(found) > 10
    for suspect in found:
        assert not torch.equal(score(model, WINDOWS[0], suspect), before), suspect.name
        assert torch.equal(logprobs(model, WINDOWS[0]), before), suspect.name
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert any("positions moved by 1" in each.name for each in found) == (family == "gpt2")


def test_positions_that_start_at_one_are_those_of_the_next_place():
    model = random_gpt2(TINY)
    suspect = next(each for each in structure(model) if each.name == "positions moved by 1")
    window = WINDOWS[0]
    with torch.no_grad():
        z = model(window[None], position_ids=torch.arange(1, 49)[None]).logits[0].double().log_softmax(-1)
    torch.testing.assert_close(
        score(model, window, suspect), z[:-1].gather(-1, window[1:, None])[:, 0], rtol=0, atol=1e-4
    )


def test_what_sampling_does_to_logits():
    z, tokens = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 1.0, 2.0, -1.0]]), torch.tensor([0, 3])
    assert best(2, z, tokens).isfinite().tolist() == [[True, True, False, False], [False, True, True, False]]
    p = z.softmax(-1)  # 0.64, 0.24, 0.09, 0.03
    assert p[0, 0] < 0.8 < p[0, :2].sum()
    assert nucleus(0.8, z, tokens).isfinite().sum(-1).tolist() == [2, 2]
    assert nucleus(0.6, z, tokens).isfinite().sum(-1).tolist() == [1, 1]
    assert repeated(1.01, z, tokens).tolist() == [pytest.approx([2 / 1.01, 1, 0, -1]), pytest.approx([0, 1, 2, -1.01])]
    assert present(0.01, z, tokens).tolist() == [pytest.approx([1.99, 1, 0, -1]), pytest.approx([-0.01, 1, 2, -1.01])]


def test_a_softcap_that_the_model_does_not_have_is_named():
    """With a head so much larger that logits reach the cap."""
    model = quieted(random_model(config_of("plain", 2)), 2)
    model.lm_head.weight.mul_(20)

    def run(model, windows):
        low = narrow(model)
        z = [capped(30.0, logits(low, w).double(), w)[:-1] for w in windows]
        return torch.stack([x.gather(-1, w[1:, None])[:, 0] - x.logsumexp(-1) for x, w in zip(z, windows)])

    with torch.no_grad():
        _, verdict = Ground(model, WINDOWS, 0).judged(Variation("capped", run))
    assert verdict.cause.suspect.name == "a softcap of logits, 30", verdict.line


@pytest.fixture(scope="module")
def ground():
    return ground_of("plain", 2)


def top(count, model, windows):
    low = narrow(model)

    def run(window):
        z = best(count, logits(low, window).double()[:-1], window)
        return (z.gather(-1, window[1:, None])[:, 0] - z.logsumexp(-1)).clamp(min=-20)

    with torch.no_grad():
        return by_window(run, windows)


def rounded(to, model, windows):
    low = narrow(model)
    return to(by_window(partial(logprobs, low), windows))


def test_log_probabilities_among_the_most_probable_tokens_are_named(ground):
    """Tokens that are left out have no number in a log, so that this ground's tokens are all among the first ones."""
    with torch.no_grad():
        texts = torch.stack([logits(ground.model, w).topk(20).indices[:, 7] for w in WINDOWS])
    windows = torch.cat([WINDOWS[:, :1], texts[:, :1]], 1)
    for _ in range(40):  # each token is one of the 20 most probable after those before it
        with torch.no_grad():
            z = ground.model(windows).logits[:, -1]
        windows = torch.cat([windows, z.topk(12).indices[:, [windows.shape[1] % 12]]], 1)
    _, verdict = Ground(ground.model, windows, 0).judged(Variation("top-k", partial(top, 20)))
    assert verdict.cause.suspect.name == "log-probabilities among the 20 most probable tokens (top-k)", verdict.line


def without_a_rank(model):
    """The third of four ranks, 26 tokens each, gives no logits."""
    model.lm_head.weight[52:78] = 0


def swapped_ranks(model):
    model.lm_head.weight.data = torch.cat([model.lm_head.weight[51:], model.lm_head.weight[:51]])


RANKS = {
    "logits of 0 in part 3 of 4 of the vocabulary": without_a_rank,
    "logits of both halves of the vocabulary in each other's place": swapped_ranks,
}


@pytest.mark.parametrize("cause", RANKS)
def test_ranks_of_a_split_head_are_named(ground, cause):
    _, verdict = ground.judged(Variation(cause, native(RANKS[cause])))
    assert verdict.kind == "more" and verdict.cause.suspect.name == cause and not verdict.partial, verdict.line


@pytest.mark.parametrize(
    ("to", "name"),
    [(lambda x: x.bfloat16().double(), "bf16"), (lambda x: (x * 10).round() / 10, "1 decimals")],
    ids=["bf16", "decimals"],
)
def test_numbers_that_the_engine_rounded_are_seen_in_the_log(ground, to, name):
    gap, verdict = ground.judged(Variation(name, partial(rounded, to)))
    values = gap.tokens.change + gap.tokens.exact
    found, square = coarsest(values.to_numpy())
    assert found == name
    change = to(torch.from_numpy(np.linspace(-8, -0.5, 5000))).numpy() - np.linspace(-8, -0.5, 5000)
    assert 0.2 < square / (change**2).mean() < 5
    named = verdict.cause is not None and name in verdict.cause.suspect.name
    assert named == (square > 0.01 * gap.predicted**2), verdict.line
    assert not named or "is seen in its numbers, and alone explains" in verdict.line


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_log_softmax_in_bf16_is_seen_where_the_gap_is_that_of_rounding(depth):
    """Its sums are rounded, too, so that the grid of the log explains the less of the gap."""
    _, found = ground_of_model("qwen2", depth).judged(Variation("log-softmax", native(dtype=torch.bfloat16)))
    assert (found.kind, found.partial) == ("more", False), found.line
    assert found.cause.suspect.name == "rounding of the log to bf16"


def test_other_numbers_lie_on_no_grid():
    values = -np.random.default_rng(0).exponential(3, 400)
    assert coarsest(values) == coarsest(values.astype(np.float32).astype(float)) == ("", 0.0)
    assert coarsest(values[:8].round(1)) == ("", 0.0)
    assert coarsest(np.linspace(-9e-4, -1e-5, 40)) == ("", 0.0)  # of sure tokens: all near 0, a number of any grid
    assert coarsest(np.concatenate([values.round(1), np.full(8, -1e-9)])) == ("", 0.0)
    assert coarsest(values.astype(np.float16).astype(float))[0] == "fp16"
    assert coarsest(values.astype(np.float32).round(3).astype(float))[0] == "3 decimals"


@pytest.mark.parametrize("temperature", [1.2, 1.5])
def test_a_cause_that_leaves_more_than_rounding_is_only_like_the_gap(ground, temperature):
    """A temperature beside halved queries: with a higher one it explains 92 % of the gap, with a lower one 69 %."""

    def run(model, windows):
        other = narrow(model, lambda low: [x.self_attn.q_proj.weight.mul_(0.5) for x in low.model.layers])
        return by_window(lambda w: logprobs(other, w, temperature), windows)

    _, verdict = ground.judged(Variation("two faults", run))
    assert (verdict.kind, verdict.partial) == ("more", True), verdict.line
    assert "temperature" in verdict.cause.suspect.name
    assert "No suspect explains all of it. Most like it, with" in verdict.line


def test_a_floor_that_the_engine_put_under_its_numbers_is_refused(tmp_path):
    values = [-5.0 if at % 3 == 0 else -1 - at / 100 for at in range(60)]
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"tokens": {[*range(61)]}, "logprobs": {[None, *values]}}}'.replace("None", "null"))
    with pytest.raises(ValueError, match="got -5, the smallest, at 20 tokens"):
        read(path)


def test_the_verdict_without_a_cause_is_not_partial(ground):
    assert not judge(ground.gap).partial


@pytest.mark.parametrize("config", [Qwen2Config, Phi3Config, Olmo2Config, Gemma3TextConfig, GptOssConfig, CohereConfig])
def test_query_heads_that_take_turns_are_those_of_an_engine_that_repeats(config, monkeypatch):
    """Norms over all heads and sinks, one for each, stay with their heads."""
    own = {
        GptOssConfig: {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
        CohereConfig: {"use_qk_norm": True},
    }
    own |= {Gemma3TextConfig: {"head_dim": 8}}
    model = random_model(config(**SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 2} | own.get(config, {})))
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "sinks" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    suspect = next(each for each in structure(model) if "take turns" in each.name)
    found = score(model, WINDOWS[0], suspect)
    code = __import__(type(model).__module__, fromlist=["repeat_kv"])
    with monkeypatch.context() as patch:
        patch.setattr(code, "repeat_kv", lambda x, groups: x.repeat(1, groups, 1, 1))
        torch.testing.assert_close(found, logprobs(model, WINDOWS[0]), rtol=0, atol=1e-4)
    assert not torch.allclose(found, logprobs(model, WINDOWS[0]), atol=1e-2)
