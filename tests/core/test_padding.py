"""Padded batches: every window has the numbers that it has alone, whatever stands at the padding."""

import inspect
import math

import numpy as np
import pandas as pd
import pytest
import torch
from families import OLDER
from tiny import fresh_model, keep_norms, random_model, random_tokens
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    XLNetConfig,
)

from fragility_adjoint.mixed_precision.bits import predictions
from fragility_adjoint.predictor import Adjoint
from fragility_adjoint.predictor.targets import TARGETS, Target, logits
from fragility_core.models.padding import AFTER_PADDING, Group, context_length, require_tokens
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.observation import in_order
from fragility_core.theory import mismatch
from fragility_lab.inputs.offloaded import load_offloaded
from fragility_lab.measurement.comparison import compare, observe
from fragility_quantization.quantized import lower

IDS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE = IDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **IDS),
    "llama": LlamaConfig(**BASE),
    "gemma3": Gemma3TextConfig(head_dim=8, sliding_window=6, **BASE),
    "opt": OPTConfig(
        ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, **IDS
    ),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, **IDS),
}
FAMILIES = pytest.mark.parametrize("family", CONFIGS)
T = 18
TOKENS = random_tokens(4, T, smallest=1)
MASK = torch.ones(4, T, dtype=torch.long)  # windows of 18, 12, 12 and 15 tokens; padding left, right and on both sides
MASK[1, :6], MASK[2, 12:], MASK[3, :1], MASK[3, 16:] = 0, 0, 0, 0
ALONE = [tokens[mask.bool()][None] for tokens, mask in zip(TOKENS, MASK)]


def padding_model(family):
    """A model in which a padded position would change what follows it."""
    return fresh_model(CONFIGS[family], change=keep_norms)


@FAMILIES
@pytest.mark.parametrize("target", TARGETS)
def test_predictions(family, target):
    model = padding_model(family)
    gradients = {"hidden": "low", "kl": "secant"}.get(target, "both")
    adjoint = Adjoint(lower(model, "bf16"), model, 2, target=target, gradients=gradients)
    found = adjoint(TOKENS, attention_mask=MASK)
    alone = [adjoint(tokens) for tokens in ALONE]
    for name in {"predicted", "standard_error", "norm", "measured"} & {*found.windows}:
        want = [each.windows[name].item() for each in alone]
        np.testing.assert_allclose(found.windows[name], want, rtol=1e-5, err_msg=name)
    assert found.length == T and found.windows.predicted.gt(0).all()


def test_counted_positions_move_along_with_padding():
    model, mask = padding_model("llama"), MASK
    counted = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(2)) < 0.8
    adjoint = Adjoint(lower(model, "bf16"), model, 2, target="logprob", gradients="both")
    found = adjoint(TOKENS, counted, seeds=(4, 5, 6, 7), attention_mask=mask)
    for window, keep in enumerate(mask.bool()):
        alone = adjoint(TOKENS[window][keep][None], counted[window][keep][None], seeds=(4 + window,))
        assert found.windows.predicted[window] == pytest.approx(alone.windows.predicted.item(), rel=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_the_score(family):
    model = padding_model(family)
    monitor = Monitor(lower(model, "bf16"), power_iteration=family == "llama")
    exact = final_hidden(model, TOKENS, MASK)
    seen = monitor(TOKENS, exact, loss=True, attention_mask=MASK)
    layers, windows = score(seen.layers, seen.windows, 2.0**-8)
    for number, tokens in enumerate(ALONE):
        alone = monitor(tokens, final_hidden(model, tokens), loss=True)
        for table, want in zip((layers, windows), score(alone.layers, alone.windows, 2.0**-8)):
            own = table[table.window == number].reset_index(drop=True).drop(columns="window")
            # a window beside others is summed in another order, and some roundings differ
            pd.testing.assert_frame_equal(own, want.drop(columns="window"), rtol=0.03)
        assert torch.equal(
            seen.hidden[number][MASK[number] == 0], torch.zeros_like(seen.hidden[number, MASK[number] == 0])
        )


@FAMILIES
def test_what_is_measured(family):
    model, low = padding_model(family), lower(padding_model(family), "bf16")
    passes = observe(low.model, TOKENS, low, MASK), observe(model, TOKENS, None, MASK)
    windows, drift = compare(*passes, TOKENS, MASK)
    alone = [compare(observe(low.model, x, low), observe(model, x), x) for x in ALONE]
    for found, wanted in zip((windows, drift), zip(*alone)):
        want = pd.concat(wanted, ignore_index=True)
        # summed in another order, where windows of one length share a pass
        pd.testing.assert_frame_equal(found.drop(columns="window"), want.drop(columns="window"), rtol=0.02)
        assert found.window.is_monotonic_increasing and found.window.nunique() == len(TOKENS)
    assert windows.kl.gt(0).all()


@FAMILIES
def test_positions_are_those_of_generate(family):
    """The states are those of the library's own padded pass, with positions as ``generate`` counts them."""
    model = padding_model(family)
    positions = {"position_ids": (MASK.cumsum(-1) - 1).clamp_min(0)}
    takes = "position_ids" in inspect.signature(model.base_model.forward).parameters and family != "opt"
    with torch.no_grad():
        want = model(TOKENS, attention_mask=MASK, output_hidden_states=True, **(positions if takes else {}))
    keep = MASK.bool()
    found = final_hidden(model, TOKENS, MASK)
    torch.testing.assert_close(logits(model, TOKENS, MASK)[keep], want.logits[keep], rtol=1e-3, atol=1e-4)
    assert mismatch(found[keep], want.hidden_states[-1][keep]) < 1e-5
    assert not found[~keep].any()
    assert mismatch(final_hidden(model, TOKENS)[keep], found[keep]) > 0.01, "padding that counts would be seen"


def test_what_stands_at_the_padding_does_not_matter():
    model = padding_model("gpt2")
    low, other = lower(model, "bf16"), torch.where(MASK.bool(), TOKENS, 100 - TOKENS)
    adjoint, monitor = Adjoint(low, target="kl"), Monitor(low)
    found = [
        (
            adjoint(x, attention_mask=MASK).windows,
            monitor(x, attention_mask=MASK).layers,
            predictions(model, ["w4a16-g32"], x, attention_mask=MASK)["w4a16-g32"].windows,
            compare(observe(low.model, x, low), observe(model, x), x, MASK)[0][["loss", "kl"]].iloc[[0, 2]],
        )
        for x in (TOKENS, other)
    ]
    for a, b in zip(*found):
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_a_streamed_model(tmp_path):
    model = padding_model("llama")
    model.save_pretrained(tmp_path)
    offloaded = load_offloaded(str(tmp_path), "cpu", AutoModelForCausalLM)
    found = [
        Adjoint(lower(m, "bf16"), m, 2, gradients="low")(TOKENS, attention_mask=MASK).windows
        for m in (model, offloaded)
    ]
    pd.testing.assert_frame_equal(*found, check_exact=True)


# --- What is refused -----------------------------------------------------------------------------

HOLE, EMPTY, TWO = MASK.clone(), MASK.clone(), MASK.clone()
HOLE[0, 4:6], EMPTY[2], TWO[0, 0] = 0, 0, 2
WRONG = {
    "of one window": (MASK[0], r"must have the shape \(B, T\) of the tokens, \(4, 18\), got \(18,\)"),
    "of one window for all": (MASK[:1], r"\(4, 18\), got \(1, 18\)"),
    "shorter": (MASK[:, 1:], r"\(4, 18\), got \(4, 17\)"),
    "of scores": (MASK[:, None, None], r"\(4, 18\), got \(4, 1, 1, 18\)"),
    "with other values": (TWO, "must hold 0 and 1 alone, got 2"),
    "with a hole": (HOLE, "window 0 has 2 padded positions between them: close the gap"),
    "all padding": (EMPTY, "window 2 is all padding: leave it out"),
}
TAKING = {
    "prediction": lambda model, low, mask: Adjoint(low, model, gradients="low")(TOKENS, attention_mask=mask),
    "score": lambda model, low, mask: Monitor(low)(TOKENS, attention_mask=mask),
    "states": lambda model, low, mask: final_hidden(model, TOKENS, mask),
    "logits": lambda model, low, mask: logits(model, TOKENS, mask),
    "pass": lambda model, low, mask: observe(model, TOKENS, attention_mask=mask),
    "comparison": lambda model, low, mask: compare(observe(model, TOKENS), observe(model, TOKENS), TOKENS, mask),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("taker", TAKING)
def test_masks_that_do_not_fit(taker, kind):
    model, (mask, message) = padding_model("gpt2"), WRONG[kind]
    with pytest.raises(ValueError, match=message):
        TAKING[taker](model, lower(model, "bf16"), mask)


NEVER, LAST, ALL = torch.zeros_like(MASK, dtype=torch.bool), MASK.roll(1, 1) * 0, MASK.bool()
LAST[:, -1] = 1


@pytest.mark.parametrize(
    ("target", "counted", "message"),
    [
        ("hidden", MASK[0], r"counted must have the shape \(B, T\) of the tokens, \(4, 18\), got \(18,\)"),
        ("kl", MASK[..., None], r"\(4, 18\), got \(4, 18, 1\)"),
        ("hidden", NEVER, "counted must be True for a position of the target in every window, got none of 18"),
        ("logprob", LAST, "counted must be True for a position of the target in every window, got none of 17"),
        ("loss", ALL, "target that has one a token, 18 or 17, got 1: leave counted out"),
        (Target("two", lambda m, x: m(x).logits[:, :2], TARGETS["hidden"].norm), ALL, "18 or 17, got 2"),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor | Target) else value[:12],
)
def test_counted_positions_that_do_not_fit(target, counted, message):
    model = padding_model("gpt2")
    with pytest.raises(ValueError, match=message):
        Adjoint(lower(model, "bf16"), model, target=target, gradients="low")(TOKENS, counted)


def test_a_mask_of_ones_changes_nothing():
    monitor = Monitor(lower(padding_model("gpt2"), "bf16"))
    plain, masked = monitor(TOKENS), monitor(TOKENS, attention_mask=torch.ones_like(MASK))
    assert masked.layers.equals(plain.layers) and masked.scores().windows.equals(plain.scores().windows)


def test_rows_of_groups_are_in_the_order_of_windows_and_blocks():
    alike, depth = [Group([1], 0, 3), Group([0, 2], 1, 3)], 20
    numbers = [np.arange(len(group.windows)) for group in alike]
    tables = [pd.DataFrame({"window": n.repeat(depth), "layer": np.tile(range(depth), len(n))}) for n in numbers]
    found = in_order(alike, tables)
    assert found.window.tolist() == np.repeat(range(3), depth).tolist() and found.layer.tolist() == 3 * [*range(depth)]


def test_a_reference_of_other_windows():
    model = padding_model("gpt2")
    with pytest.raises(ValueError, match=r"a state for every token, \(4, 18, 'd_model'\), got shape \(1, 18, 32\)"):
        Monitor(lower(model, "bf16"))(TOKENS, final_hidden(model, TOKENS[:1]))
    with pytest.raises(ValueError, match=r"logits must be those of the tokens, \(4, 18, 'vocabulary'\)"):
        compare(observe(model, TOKENS), observe(model, TOKENS[:1]), TOKENS)


ABSOLUTE = [*sorted({*AFTER_PADDING} - {"xmod"}), "gpt2", "mpt", "opt"]  # xmod needs the name of a language


@pytest.mark.parametrize("name", ABSOLUTE)
@torch.no_grad()
def test_the_context_is_the_longest_window_that_a_model_takes(name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 101, "pad_token_id": 1}
    config = CONFIG_MAPPING[name](
        **sizes, is_decoder=True, bos_token_id=0, eos_token_id=0,
        **({"max_seq_len": 20} if name == "mpt" else {"max_position_embeddings": 20}),
    )  # fmt: skip
    model, longest = random_model(config), int(context_length(config))
    assert longest == (18 if name in AFTER_PADDING else 20)
    require_tokens(random_tokens(1, longest, smallest=2), model)
    assert model(random_tokens(1, longest, smallest=2)).logits.isfinite().all()
    too_long = random_tokens(1, longest + 1, smallest=2)
    with pytest.raises((IndexError, RuntimeError)):
        model(too_long)
    with pytest.raises(ValueError, match=f"must fit the model's context, {longest} tokens, got {longest + 1}"):
        require_tokens(too_long, model)


def test_relative_positions_have_no_longest_window():
    assert context_length(OLDER["bloom"]) == math.inf
    assert context_length(XLNetConfig()) == math.inf  # -1 stands for it there
    sizes = {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "factor": 4, "rope_theta": 1e4}}
    stretched = LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=101, **sizes)
    assert context_length(stretched) == math.inf
    require_tokens(random_tokens(1, 40), random_model(stretched))
