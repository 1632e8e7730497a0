"""Suspects: each does what its name says, and leaves the model as it was."""

import pytest
import torch
from tiny import TINY, random_gpt2, random_model, random_tokens
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    Qwen3NextConfig,
)

from fragility_engines.suspects.catalogue import Facts, places
from fragility_engines.suspects.catalogue import suspects as listed
from fragility_engines.suspects.numbers import numbers
from fragility_engines.suspects.rotary import cut
from fragility_engines.suspects.suspect import logprobs, score
from fragility_engines.suspects.windows import fully_attending

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 101, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e5, "rope_type": "default"}, rms_norm_eps=1e-5)
GEMMA = Gemma2Config(
    **SIZES, head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=16
)
GEMMA3 = Gemma3TextConfig(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window_pattern=2)
MODELS = {
    "gpt2": lambda: random_gpt2(TINY),
    "llama": lambda: random_model(LLAMA),
    "gemma2": lambda: random_model(GEMMA),
    "gemma3": lambda: random_model(GEMMA3),
}
WINDOW = random_tokens(24, seed=5, smallest=3)


def suspects(model, first, bos=None, **facts):
    return listed(model, Facts(first, bos, longest=len(WINDOW), **facts))


def tried(model):
    usual = [suspect for number in numbers(model, len(WINDOW)) for suspect in number.usual]
    usual = [each for each in usual if not each.name.startswith("epsilon 1e-0")]  # its own, or below fp32's resolution
    return [*suspects(model, int(WINDOW[0]), 0), *suspects(model, 0, 0), *places(model), *usual]


@pytest.mark.parametrize("name", MODELS)
def test_every_suspect_changes_what_is_scored_and_nothing_afterwards(name):
    model = MODELS[name]()
    before = logprobs(model, WINDOW)
    weights = {path: p.clone() for path, p in model.named_parameters()}
    for suspect in tried(model):
        found = score(model, WINDOW, suspect)
        assert found.shape == before.shape, suspect.name
        known = found.isfinite()
        assert known.sum() >= len(before) - 1 and not torch.equal(found[known], before[known]), suspect.name
        assert torch.equal(logprobs(model, WINDOW), before), suspect.name
    assert all(torch.equal(p, weights[path]) for path, p in model.named_parameters())


def test_models_have_the_suspects_of_their_settings():
    names = {name: " ".join(suspect.name for suspect in tried(make())) for name, make in MODELS.items()}
    for part in ("RoPE base", "RoPE pairs", "epsilon", "scale of attention", "temperature", "BOS"):
        assert part in names["llama"]
    assert all("a window of 16 in place of full attention" in found for found in names.values())
    for name, found in names.items():  # gemma stores weights less 1
        stored = "their weight in place of 1 + weight" if "gemma" in name else "1 + weight in place of their weight"
        assert f"norms that multiply by {stored}" in found and found.count("norms that multiply by") == 2  # tried twice
    assert "RoPE base 10000 in all layers" in names["gemma3"]  # it has two
    assert "RoPE" not in names["gpt2"] and "softcap" not in names["llama"]
    assert "no softcap of attention" in names["gemma2"] and "no softcap of logits" in names["gemma2"]


@pytest.mark.parametrize("layers", [4, 40])
def test_layers_without_attention_move_no_window_to_another_layer(layers):
    """Every fourth block of Qwen3-Next attends to all tokens, the others are recurrent."""
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 16, "num_experts": 2}
    model = random_model(Qwen3NextConfig(**(SIZES | sizes | {"num_hidden_layers": layers})))
    found = fully_attending(model)
    assert [module.layer_idx for module in found] == [*range(3, layers, 4)]


def changed_model(**entries):
    config = LlamaConfig(**(LLAMA.to_dict() | entries))
    other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(random_model(LLAMA).state_dict())
    return other


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("RoPE base 10000 in place of 100000", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
        ("RoPE positions divided by 8", {"rope_parameters": {"rope_theta": 1e5, "rope_type": "linear", "factor": 8.0}}),
        ("epsilon 0.001 of norms in place of 1e-05", {"rms_norm_eps": 1e-3}),
    ],
)
def test_a_setting_is_changed_as_another_configuration_changes_it(name, entries):
    model = random_model(LLAMA)
    (suspect,) = (each for each in suspects(model, int(WINDOW[0])) if each.name == name)
    torch.testing.assert_close(
        score(model, WINDOW, suspect), logprobs(changed_model(**entries), WINDOW), rtol=1e-4, atol=1e-4
    )


YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("RoPE base 25000 in place of 50000", {"rope_theta": 2.5e4}),
        ("RoPE scaling yarn by 2 in place of 4", {"factor": 2.0}),
        ("RoPE scaling yarn as if trained up to position 64, not 16", {"original_max_position_embeddings": 64}),
        (
            "RoPE scaling by the base alone (NTK) in place of yarn",
            {"rope_type": "default", "rope_theta": 5e4 * 4 ** (8 / 7)},
        ),
    ],
)
def test_a_scaled_rope_is_changed_as_another_configuration_changes_it(name, entries):
    """Its frequencies do not show its base, which the configuration tells."""
    weights = random_model(LLAMA).state_dict()

    def made(parameters):
        config = LlamaConfig(**(LLAMA.to_dict() | {"rope_parameters": parameters}))
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        other.load_state_dict(weights)
        return other

    model = made(YARN)
    (suspect,) = (each for each in suspects(model, int(WINDOW[0])) if each.name == name)
    if "base" in name and "NTK" not in name:  # where yarn blends frequencies depends on the base, too: it stays here
        own = model.model.rotary_emb.inv_freq
        with suspect.change(model):
            expected = own * 0.5 ** -(torch.arange(8) / 8)
            torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
        return
    found = score(model, WINDOW, suspect)
    torch.testing.assert_close(found, logprobs(made(YARN | entries), WINDOW), rtol=1e-4, atol=1e-4)


def test_a_second_beginning_is_scored_as_a_longer_text():
    model = random_model(LLAMA)
    suspect = next(each for each in suspects(model, 0, 0) if each.name == "a second BOS token")
    window = torch.cat([torch.tensor([0]), WINDOW])
    longer = logprobs(model, torch.cat([torch.tensor([0]), window]))
    assert torch.equal(score(model, window, suspect), longer[1:])


def test_pairs_in_another_order_are_the_other_convention_of_rope():
    """Rotating interleaved pairs of reordered rows is rotating halves of the rows as they were."""
    model = random_model(LLAMA)
    suspect = next(each for each in suspects(model, 5) if "pairs" in each.name)
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    with suspect.change(model):
        after = model.model.layers[0].self_attn.q_proj.weight.clone()
    half = model.model.layers[0].self_attn.head_dim // 2
    first = before[: 2 * half]
    assert torch.equal(after[0 : 2 * half : 2], first[:half]) and torch.equal(after[1 : 2 * half : 2], first[half:])


def test_an_error_inside_of_a_change_leaves_the_model_as_it_was():
    model = random_model(LLAMA)
    before = logprobs(model, WINDOW)
    for suspect in tried(model):
        with pytest.raises(RuntimeError, match="stopped"), suspect.change(model):
            raise RuntimeError("stopped")
    assert torch.equal(logprobs(model, WINDOW), before)


def test_what_goes_beyond_the_context_or_leaves_nothing_is_not_scored():
    """Learned positions end with the context; a cut window may lie inside of what its sequences share."""
    model = random_gpt2(TINY)
    whole = random_tokens(model.config.n_positions, seed=1, smallest=3)
    for suspect in suspects(model, 5, 0):
        assert len(score(model, whole, suspect)) == len(whole) - 1, suspect.name
    shared = next(each for each in suspects(model, 5, shared=(*WINDOW[:20].tolist(),)) if each.skip == 20)
    assert score(model, WINDOW[:20], shared).isnan().all() and score(model, WINDOW[:21], shared).isnan().all()
    assert score(model, WINDOW, shared).isfinite().any()


def test_pairs_that_the_engine_turns_side_by_side_are_the_inverse_order(monkeypatch):
    """Of families that turn a part of each head as well."""
    for config in (LLAMA, PhiConfig(**SIZES | {"num_key_value_heads": 2}, partial_rotary_factor=0.5)):
        model = random_model(config)
        suspect = next(each for each in suspects(model, 5) if each.name.endswith("side by side in the engine"))
        found = score(model, WINDOW, suspect)
        module = __import__(type(model).__module__, fromlist=["rotate_half"])

        def neighbours(x):
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

        def turned(q, k, cos, sin, *others, **named):
            cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1)[:, None] for x in (cos, sin))
            return tuple(x * cos + neighbours(x) * sin for x in (q, k))

        with monkeypatch.context() as patch:
            patch.setattr(module, "apply_rotary_pos_emb", turned)
            torch.testing.assert_close(found, logprobs(model, WINDOW), rtol=0, atol=1e-5)


def test_norms_of_heads_move_with_their_heads_and_come_back():
    """Cohere has a norm with a row for each head."""
    model = random_model(CohereConfig(**SIZES, use_qk_norm=True))
    before = {path: x.clone() for path, x in model.named_parameters()}
    exact = logprobs(model, WINDOW)
    for suspect in (each for each in suspects(model, 5) if "pairs" in each.name):
        assert not torch.equal(score(model, WINDOW, suspect), exact)
    assert all(torch.equal(x, before[path]) for path, x in model.named_parameters())


def test_scalings_of_a_model_whose_configuration_gives_no_width_of_heads():
    config = MixtralConfig(**SIZES, num_local_experts=2)
    assert config.head_dim is None
    assert any("RoPE scaling yarn" in each.name for each in suspects(random_model(config), 5))


def test_tokens_are_not_cut_where_frequencies_follow_the_length():
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling |= {"original_max_position_embeddings": 16, "factor": 4.0}
    assert len(cut(random_model(LLAMA), WINDOW, 8)) == 8
    assert len(cut(random_model(Phi3Config(**SIZES, rope_parameters=scaling)), WINDOW, 8)) == len(WINDOW)
