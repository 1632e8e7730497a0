"""Faults of configurations, injected by other configurations, are named; a correct engine is not accused."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from test_suspects import SIZES
from tiny import random_model, random_tokens
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    SmolLM3Config,
    StableLmConfig,
)

from fragility_core.models.paths import is_norm
from fragility_engines.comparison.compare import explained, told
from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.slopes import Directions
from fragility_engines.comparison.verdict import judge
from fragility_engines.logs.sequences import Scored
from fragility_engines.proving.changes import attention_scale, base, frequencies
from fragility_engines.proving.ground import Ground, given
from fragility_engines.proving.variations import Variation, by_window, epsilon, native
from fragility_engines.suspects.catalogue import Facts, beginnings, heads, suspects
from fragility_engines.suspects.suspect import Suspect, logprobs, score

WINDOWS = random_tokens(6, 48, seed=11, smallest=3)
DEPTHS = (2, 40)
DEFAULT = {"rope_theta": 1e4, "rope_type": "default"}
LLAMA3 = DEFAULT | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = DEFAULT | {"rope_type": "linear", "factor": 8.0}
MIXED = {"use_sliding_window": True, "sliding_window": 16}
CONFIGS = {
    "plain": (LlamaConfig, {"rope_parameters": DEFAULT}),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "window": (MistralConfig, {"sliding_window": 16}),
    "mixed": (Qwen2Config, MIXED | {"max_window_layers": 1}),
    "no rope": (SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 2}),
    "partial": (StableLmConfig, {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}, "qk_layernorm": True}),
    "multiplied": (GraniteConfig, {"residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 0.5}),
}


def config_of(name, depth, **others):
    kind, entries = CONFIGS[name]
    return kind(**(SIZES | {"num_hidden_layers": depth, "tie_word_embeddings": False} | entries | others))


def quieted(model, depth):
    """``model`` with branches that add as little as many do: a deep random model is chaotic, unlike trained ones."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_((2 / depth) ** 0.5)
    return model


def configured(name, depth, model, windows, **others):
    """The log-probabilities of an engine in bf16, which has another configuration."""
    other = AutoModelForCausalLM.from_config(config_of(name, depth, **others), attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict(), strict=False)  # an engine without norms has no place for them
    return by_window(partial(logprobs, other.bfloat16()), windows)


def tied(name, depth, model, windows):
    other = quieted(random_model(config_of(name, depth)), depth)
    other.lm_head.weight.data = other.model.embed_tokens.weight.data
    return by_window(partial(logprobs, other.bfloat16()), windows)


def shifted(ahead, name, depth, model, windows):
    other = quieted(random_model(config_of(name, depth)), depth).bfloat16()
    found = by_window(lambda window: score(other, window, Suspect("", "", ahead=ahead)), windows)
    return found.nan_to_num(-np.log(101))  # an engine gives something


FAULTS = [
    ("RoPE without its scaling (llama3)", "llama3", partial(configured, rope_parameters=DEFAULT)),
    ("RoPE scaling linear in place of llama3", "llama3", partial(configured, rope_parameters=LINEAR)),
    ("RoPE without its scaling (yarn)", "yarn", partial(configured, rope_parameters=DEFAULT)),
    (
        "RoPE scaling yarn without its factor of attention", "yarn",
        partial(configured, rope_parameters=YARN | {"attention_factor": 1.0}),
    ),
    ("RoPE scaling yarn, factor 4, in place of none", "plain", partial(configured, rope_parameters=YARN)),
    ("full attention in place of a window of 16", "window", partial(configured, sliding_window=None)),
    ("full attention in place of a window of 16", "mixed", partial(configured, layer_types=None, max_window_layers=99)),
    ("a window of 16 in place of full attention", "mixed", partial(configured, layer_types=None, max_window_layers=0)),
    ("the embedding in place of the head (tied)", "plain", tied),
    ("RoPE in layers that have none", "no rope", partial(configured, no_rope_layers=None, no_rope_layer_interval=99)),
    (
        "RoPE of whole heads, in place of 0.5 of each", "partial",
        partial(configured, rope_parameters=DEFAULT | {"partial_rotary_factor": 1.0}),
    ),
    (
        "no self_attn.q_layernorm and self_attn.k_layernorm of all blocks", "partial",
        partial(configured, qk_layernorm=False),
    ),
    ("no residual multiplier", "multiplied", partial(configured, residual_multiplier=1.0)),
    ("no embedding multiplier", "multiplied", partial(configured, embedding_multiplier=1.0)),
    ("log-probabilities taken one position too late", "plain", partial(shifted, 1)),
    ("log-probabilities taken one position too early", "plain", partial(shifted, -1)),
]  # fmt: skip


@cache
def ground_of(name, depth):
    """The prediction and the suspects of a random model, which judging leaves as they are."""
    return Ground(quieted(random_model(config_of(name, depth)), depth), WINDOWS, 0)


@pytest.fixture(scope="module", params=DEPTHS)
def grounds(request):
    """A ground for each configuration, made when it is asked for."""
    return lambda name: (ground_of(name, request.param), request.param)


@pytest.mark.parametrize(("cause", "name", "run"), FAULTS, ids=[f"{cause}, {name}" for cause, name, _ in FAULTS])
def test_a_fault_of_the_configuration_is_named(grounds, cause, name, run):
    ground, depth = grounds(name)
    _, verdict = ground.judged(Variation(cause, partial(run, name, depth)))
    assert verdict.kind == "more" and verdict.cause is not None, verdict
    assert verdict.cause.suspect.name == cause


@pytest.mark.parametrize("name", CONFIGS)
def test_a_correct_engine_is_not_accused(grounds, name):
    ground, depth = grounds(name)
    _, verdict = ground.judged(Variation(name, partial(configured, name, depth)))
    assert verdict.kind in ("rounding", "few") and verdict.cause is None, verdict


def other(change, name, depth, model, windows):
    """The log-probabilities of an engine in bf16 after a ``change`` of its weights."""
    low = quieted(random_model(config_of(name, depth)), depth)
    change(low)
    return by_window(partial(logprobs, low.bfloat16()), windows)


def add_one(model):
    for module in model.modules():
        if is_norm(module):
            module.weight.add_(1)


def test_norms_of_the_other_convention_are_named(grounds):
    ground, depth = grounds("plain")
    _, verdict = ground.judged(Variation("1 + weight", partial(other, add_one, "plain", depth)))
    assert verdict.cause.suspect.name == "norms that multiply by 1 + weight in place of their weight"


FITTED = {
    "epsilon {} of norms": (0.03, native(epsilon(0.03))),
    "another scale of attention, {} times its own": (0.3, native(attention_scale(0.3))),
    "RoPE base {} times its own": (0.3, native(base(0.3))),
    "RoPE positions divided by {}": (5.5, native(frequencies(lambda x: x / 5.5))),
    "a window of {} in place of full attention": (23, native(window_size=23)),
}


@pytest.mark.parametrize("cause", FITTED)
def test_an_unusual_value_of_a_number_is_fitted(grounds, cause):
    """No suspect has it, and some that have another value explain most of the gap."""
    ground, depth = grounds("plain")
    value, run = FITTED[cause]
    _, verdict = ground.judged(Variation(cause, run))
    before, after = cause.split("{}")
    name = verdict.cause.suspect.name
    assert name.startswith(before) and name.endswith(after), verdict.line
    share, off = (0.8, 0.1) if depth == 2 else (0.5, 0.3)  # deep random models round more
    assert float(name[len(before) : len(name) - len(after)]) == pytest.approx(value, rel=off)
    assert verdict.cause.share > share


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_window_that_opens_late_in_the_text_is_named(depth):
    """Its first 160 tokens are as they must be."""
    sizes = {"sliding_window": 160, "max_position_embeddings": 400}
    model = quieted(random_model(config_of("window", depth, **sizes)), depth)
    ground = Ground(model, random_tokens(2, 400, seed=3, smallest=3), 0)
    whole = partial(configured, "window", depth, **(sizes | {"sliding_window": None}))
    _, verdict = ground.judged(Variation("no window", whole))
    assert verdict.kind == "more" and verdict.cause.suspect.name == "full attention in place of a window of 160"


TEMPLATE = (7, 9, 11, 4)
SHARED = torch.tensor([3, 5, 5, 8, 13, 21])
ALIKE = torch.cat([SHARED.expand(6, 6), WINDOWS[:, :42]], 1)


def engine(windows, score, unscored=1):
    """A log of ``windows``, by the function ``score``; the first tokens have no number."""
    found = [np.concatenate([[np.nan], score(window).numpy()]) for window in windows]
    return [
        Scored(w.numpy(), np.where(np.arange(len(w)) < unscored, np.nan, values)) for w, values in zip(windows, found)
    ]


def padded(found, length):
    return torch.cat([found.new_full((length - 1 - len(found),), -1.0), found])


BEGINNINGS = {
    "a chat template that the tokens do not show": (
        WINDOWS, 1, lambda low, w: logprobs(low, torch.cat([torch.tensor(TEMPLATE), w]))[len(TEMPLATE) :],
    ),
    "a prompt cut to its last 12 tokens": (WINDOWS, 24, lambda low, w: padded(logprobs(low, w[12:]), len(w))),
    "a prompt cut to its last 1 tokens": (WINDOWS, 24, lambda low, w: padded(logprobs(low, w[23:]), len(w))),
    "the first 6 tokens, which all sequences share, not seen": (
        ALIKE, 7, lambda low, w: padded(logprobs(low, w[6:]), len(w)),
    ),
    "the first 6 tokens, which all sequences share, seen twice": (
        ALIKE, 1, lambda low, w: logprobs(low, torch.cat([SHARED, w]))[6:],
    ),
}  # fmt: skip


DEEP = ("a chat template that the tokens do not show", "a prompt cut to its last 12 tokens")
CASES = [*((cause, 2) for cause in BEGINNINGS), *((cause, 40) for cause in DEEP)]


@pytest.mark.parametrize(("cause", "depth"), CASES, ids=str)
def test_another_beginning_is_named_and_a_correct_one_is_not(cause, depth):
    windows, unscored, run = BEGINNINGS[cause]
    model = quieted(random_model(config_of("plain", depth)), depth)
    low = quieted(random_model(config_of("plain", depth)), depth).bfloat16()
    log = engine(windows, partial(run, low), unscored)
    gap = measure(model, log, "bf16", probes=1)
    directed = Directions(model, log, suspects(model, Facts.of(log, 0, preambles={"a chat template": TEMPLATE})))
    every = [logprobs(low, w).numpy() for w in windows]
    right = np.array([every[token.sequence][token.position - 1] for token in gap.tokens.itertuples()])
    for each, expected in ((gap, cause), (given(gap, right), None)):
        found, further = explained(each, directed)
        named = judge(each, [*found, *further]).cause
        assert (named and named.suspect.name) == expected, [(one.suspect.name, one.size, one.share) for one in found]


def test_a_head_of_its_own_in_the_file_is_a_suspect_of_a_tied_model():
    model = random_model(config_of("plain", 2, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight and not [*heads(model)]
    (suspect,) = heads(model, torch.ones_like(model.lm_head.weight))
    before = logprobs(model, WINDOWS[0])
    with suspect.change(model):
        assert logprobs(model, WINDOWS[0]).std() < 1e-6  # all tokens are alike
    assert torch.equal(logprobs(model, WINDOWS[0]), before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_suspects_of_windows_and_prompts_are_those_that_the_log_can_show():
    model = random_model(config_of("window", 2, sliding_window=None))
    names = [each.name for each in suspects(model, Facts(5, longest=200, before=150))]
    assert "a window of 128 in place of full attention" in names and not any("256" in name for name in names)
    assert [name for name in names if "cut" in name] == [
        f"a prompt cut to its last {kept} tokens" for kept in (128, 75, 1)
    ]
    none = [each.name for each in suspects(model, Facts(5, longest=100))]
    assert not any("window" in name or "cut" in name for name in none)


@pytest.mark.parametrize("size", [12, 15, 17])
def test_a_sliding_window_of_another_size_is_named(size):
    ground = ground_of("window", 2)
    _, verdict = ground.judged(Variation("window", partial(configured, "window", 2, sliding_window=size)))
    assert verdict.cause.suspect.name == f"a window of {size} in place of 16", verdict.line


@pytest.mark.parametrize(("bos", "expected"), [(5, 5), (None, None), (500, None), (0, 0)])
def test_ids_of_the_configuration_stand_in_for_a_tokenizer(tmp_path, bos, expected):
    config_of("plain", 2, bos_token_id=bos, eos_token_id=[1, 7]).save_pretrained(tmp_path)
    facts = told([Scored(np.array([0, 4, 9]), np.array([np.nan, -1.0, -2.0]))], str(tmp_path))
    assert facts.bos == expected and facts.preambles == {"an EOS token": (1,), "padding": (2,) * 8}
    assert ("a second BOS token" in [each.name for each in beginnings(facts)]) == (expected == 0)
