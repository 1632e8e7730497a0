"""The diagnosis: requests that are taken or refused, measurements, and the page with everything that can be on it."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, random_model, random_tokens
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from fragility_adjoint.mixed_precision import Plan
from fragility_adjoint.mixed_precision.bits import choices_beside, predictions
from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.theory import mismatch
from fragility_exports.libraries import EXPORTS
from fragility_lab import diagnosis
from fragility_lab.diagnosis import __main__ as make_diagnose
from fragility_lab.diagnosis import causes, explore, means, needs, page, plans, sections, timing
from fragility_lab.diagnosis.needs import Forecast, kept_by_blocks
from fragility_lab.diagnosis.request import Request
from fragility_lab.explorer.continued import Lead, next_tokens, written
from fragility_lab.inputs.checkpoints import EMBEDDED, load_model, load_tokenizer
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.comparison import ObservedPass, Ranges, by_token, compare, observe
from fragility_lab.measurement.growth import Growth
from fragility_lab.paths import OUTPUTS
from fragility_lab.reporting.tables import percent, quantity
from fragility_numerics.internals import attention_of
from fragility_quantization.ggml import GgmlType
from fragility_quantization.operands import linear_weights
from fragility_quantization.quantized import lower

ASKED = Request("embedded", "embedded", "bf16", "1 site", windows=3, length=40)
ENOUGH = Forecast(1.0, 1, None)
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}


def diagnose(model, tokens, **changes) -> diagnosis.Diagnosis:
    """The diagnosis of a model that was made here."""
    return diagnosis.diagnose(replace(ASKED, **changes), Inputs(model, tokens.flatten(), ""), tokens, ENOUGH)


@pytest.fixture(scope="module")
def found():
    """A diagnosis of a small GPT-2 under a plan of two blocks; nothing changes it."""
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    return diagnose(random_gpt2(TINY), tokens, budget="2 blocks")


@pytest.fixture(scope="module")
def found_page(found):
    """The page of ``found``."""
    return page.page(found)


def part(found, name: str) -> str:
    """One section of the page of ``found``, as the page has it, in one line."""
    (section,) = (each for each in page.SECTIONS if each.name == name)
    shown = page.rendered(section, found, sections.common(found, EMBEDDED))
    assert not shown["failures"]
    return " ".join(shown["html"].split())


# --- What is asked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("2", (2, "blocks")), ("1 block", (1, "blocks")), (" 3 Blocks ", (3, "blocks")), ("1 site", (1, "sites")),
        ("6modules", (6, "modules")), ("100 bytes", (100, "bytes")), ("1.5 MB", (1_500_000, "bytes")),
    ],
)  # fmt: skip
def test_budgets_as_people_write_them(text, parsed):
    assert replace(ASKED, budget=text).parsed_budget == parsed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "some blocks"}, r"a budget is a number of blocks, .* got 'some blocks'"),
        ({"budget": "1.5 blocks"}, "got '1.5 blocks'"),
        ({"budget": "2 heads"}, "got '2 heads'"),
        ({"budget": ""}, "got ''"),
        ({"format": "fp32"}, "needs a format that rounds results, bf16, .*, kv-q4_0, got 'fp32'"),
        ({"attention": "flash"}, "attention must be one of auto, sdpa, eager, got 'flash'"),
        ({"reference": "maybe"}, "reference must be one of auto, yes, no, got 'maybe'"),
        ({"windows": 0}, "windows must be at least 1, got 0"),
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"probes": 0}, "probes must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        (
            {"format": "w4a16-g128", "budget": "KL 0.1", "target": "logprob"},
            "got TARGET=logprob beside BUDGET='KL 0.1'",
        ),
    ],
)
def test_wrong_requests_are_refused_before_anything_is_loaded(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ASKED, **change)


@pytest.mark.parametrize(
    ("budget", "most"), [("13", "12 blocks"), ("8 sites", "7 sites"), ("77 modules", "76 modules")]
)  # 76: 12 blocks of two norms and four products, two embeddings, the final norm, the head
def test_a_budget_of_more_than_there_is_is_refused_before_work(budget, most):
    message = f"the budget must be between 0 and the {most} of the model, got {budget.split()[0]}"
    with pytest.raises(ValueError, match=message):
        diagnosis.load(replace(ASKED, budget=budget))


@pytest.mark.parametrize(
    ("recipe", "budget", "least"),
    [("w4a16-g128", "{:.4f} bits", r"4.125 bits"), ("w4a16-g128", "{:.6f} MB", r"[\d.]+ MB, which"),
     ("ggml-q4_k", "{:.4f} bits", "[45].* bits"), ("gguf-q4_k_m", "{:.4f} bits", "[23].* bits")],
)  # fmt: skip
def test_a_budget_below_the_smallest_is_refused_before_weights_are_read(recipe, budget, least):
    """The bound is that of the plan itself, or below it where a mix has types of its own."""
    request = replace(ASKED, format=recipe, target="kl", windows=1, length=32)
    with pytest.raises(ValueError, match=rf"the budget must be at least {least}") as caught:
        diagnosis.load(replace(request, budget=budget.format(0.01)))
    loaded, tokens = diagnosis.load(replace(request, budget=budget.format(100)))
    found = predictions(loaded.model, request.schemes, tokens)
    choices = choices_beside(request.schemes[0], loaded.model, found, tokens)
    size = choices.least_bits
    if "MB" in budget:
        size = (size * choices.weights + choices.fixed_bits) / 8e6
    bound = float(re.search(r"at least ([\d.]+)", str(caught.value))[1])
    assert 0.95 * size < bound < size if recipe == "gguf-q4_k_m" else size <= bound < size + 1e-3  # it is accepted


def test_forecast_of_the_embedded_checkpoint():
    request = replace(ASKED, windows=2, attention="eager")
    loaded, tokens = diagnosis.load(request)
    assert loaded.model.config._attn_implementation == "eager"
    expected = diagnosis.forecast(request, loaded, tokens)
    assert 0 < expected.seconds < 600 and expected.memory > 8 * sum(p.numel() for p in loaded.model.parameters())
    assert re.fullmatch(r"about .* and [\d.]+\s[MG]B of additional memory( \([\d.]+\s[GM]B free\))?", str(expected))


def test_a_forecast_is_made_of_trials(monkeypatch):
    """Of an estimate and a measurement of one window; of fp32 passes where that does not fit or is refused."""
    loaded, tokens = diagnosis.load(replace(ASKED, windows=2))
    made = needs.Timing(making=1.0, estimate=2.0, measurement=3.0)
    steps = made.by_step(ASKED, count=4)
    assert (steps["prediction"], steps["measurement"], steps["plan"]) == (9.0, 18.0, 0.0)
    assert made.by_step(replace(ASKED, probes=4), 4)["tokens"] > steps["tokens"]
    monkeypatch.setattr(needs.Timing, "run", lambda *asked: made)
    known = diagnosis.forecast(ASKED, loaded, tokens)
    assert known.steps["prediction"] == 5.0 and "experts" not in known.steps
    assert known.seconds == sum(known.steps.values())
    for module, *change in ((needs, "free_memory", lambda device: 1), (timing, "estimator", None)):
        monkeypatch.undo()
        monkeypatch.setattr(module, *change)
        guess = diagnosis.forecast(ASKED, loaded, tokens).steps
        assert guess["measurement"] == pytest.approx(guess["prediction"] * 1.5 * 2 / (1 + 4 * ASKED.probes))


def test_a_forecast_knows_which_types_take_long_to_round(monkeypatch):
    """By a clock that runs while weights are rounded alone: q6_k takes 3 microseconds an entry, all others 1."""
    loaded, _ = diagnosis.load(replace(ASKED, windows=2))
    request, clock = replace(ASKED, windows=2, format="gguf-q4_k_m", budget="5 bits"), [0.0]

    def round(self, x, *drawn):
        clock[0] += 1e-6 * x.numel() * (3 if self.name == "q6_k" else 1)
        return x

    monkeypatch.setattr(timing, "seconds", lambda device: clock[0])
    monkeypatch.setattr(GgmlType, "round", round)
    weights = sum(p.numel() for p in linear_weights(loaded.model).values())
    assert timing.slower(request, loaded.model) == pytest.approx(2e-6 * weights)
    found = needs.Timing(making=1.0, estimate=2.0, measurement=3.0, rounding=7.0).by_step(request, 2)
    assert found["plan"] == (len(request.schemes) - 1) * found["prediction"] + 7.0


def live_peak(work):
    """The largest number of bytes in use at once during ``work``, beyond those in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    steps = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(steps, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(
    "config",
    [
        lambda depth: GPT2Config(n_layer=depth, n_embd=128, n_head=4, vocab_size=64),
        lambda depth: LlamaConfig(num_hidden_layers=depth, intermediate_size=768, **WIDE),
        lambda depth: MixtralConfig(num_hidden_layers=depth, intermediate_size=256, num_local_experts=4, **WIDE),
    ],
    ids=["gpt2", "llama", "mixtral"],
)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3_linear"])
def test_what_the_blocks_keep_is_not_more_than_stated(config, format):
    tokens, kept, stated = torch.arange(256)[None] % 64, {}, {}
    for depth in (1, 3):
        model = AutoModelForCausalLM.from_config(config(depth)).eval().requires_grad_(False)
        low = lower(model, format)
        adjoint = Adjoint(low, model, gradients="low")
        adjoint(tokens)  # makes what is made once
        kept[depth], stated[depth] = (
            live_peak(partial(adjoint, tokens)),
            256 * kept_by_blocks(model, bool(low.recipe.linear)),
        )
    least = 1 if low.execution == "native" else 0.95  # an emulated kernel keeps its last result in fp32 for a moment
    assert least <= (stated[3] - stated[1]) / (kept[3] - kept[1]) < 2.2


def test_memory_decides_on_the_reference(tiny_gpt2, tiny_tokens):
    inputs = Inputs(tiny_gpt2, tiny_tokens.flatten(), "")
    short = Forecast(1.0, memory=2, free=1)
    assert not short.fits and Forecast(1.0, 1, 2).fits and ENOUGH.fits
    assert diagnosis.diagnose(ASKED, inputs, tiny_tokens[:1], short).measured is None
    insisting = replace(ASKED, reference="yes")
    assert diagnosis.diagnose(insisting, inputs, tiny_tokens[:1], short).measured is not None


# --- What is measured ---------------------------------------------------------------------------


def test_a_pass_compared_with_itself_and_by_hand():
    """Two tokens, three words: KL, changed words and losses computed by hand."""
    tokens = torch.tensor([[0, 2]])
    p, q = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]]), torch.tensor([[[0.4, 0.4, 0.2], [0.5, 0.2, 0.3]]])
    state = torch.ones(1, 2, 4)
    exact, low = ObservedPass(p.log(), state, [state]), ObservedPass(q.log(), 1.1 * state, [1.2 * state])
    windows, drift = compare(low, exact, tokens)
    kl = (p * (p / q).log()).sum(-1)[0]
    row = windows.loc[0]
    assert row.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert row.largest_kl == pytest.approx(kl.max().item(), rel=1e-5)
    assert row.median_kl == pytest.approx(kl.mean().item(), rel=1e-5)  # of two tokens
    assert row.ninetieth_kl == pytest.approx((0.1 * kl.min() + 0.9 * kl.max()).item(), rel=1e-5)
    assert row.changed == 0.5  # the first token's tie goes to the first word on both sides
    assert row.loss == pytest.approx(row.reference_loss) == pytest.approx(-torch.tensor(0.2).log().item())
    assert row.mismatch == pytest.approx(0.1, rel=1e-5)
    assert drift.to_dict("records") == [{"window": 0, "block": 0, "error": pytest.approx(0.2, rel=1e-5)}]
    same, still = compare(exact, exact, tokens)
    assert (same[["mismatch", "kl", "changed"]] == 0).all(axis=None) and (still.error == 0).all()


def test_observed_passes_are_the_models(tiny_tokens):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=101, **sizes)).eval().requires_grad_(False)
    seen = observe(model, tiny_tokens)
    hidden = model.model(tiny_tokens, output_hidden_states=True).hidden_states
    assert torch.equal(seen.logits, model(tiny_tokens).logits)
    assert torch.equal(seen.final, hidden[-1]) and torch.equal(seen.blocks[0], hidden[1]) and len(seen.blocks) == 2
    low = lower(model, "fp16")
    assert observe(low.model, tiny_tokens, low).final.dtype == torch.float16
    assert not low.model.model._forward_hooks


def test_overflow_and_saturation_are_named(tiny_gpt2, tiny_tokens):
    block = tiny_gpt2.transformer.h[1]
    block.mlp.c_fc.weight[0, 0] = 1e5
    low = lower(tiny_gpt2, "fp16")
    ranges = Ranges(low)
    with ranges.counting():
        observe(low.model, tiny_tokens, low)
    table = ranges.table(tiny_gpt2)
    assert table.loc[0].to_dict() == {
        "kind": "parameter", "module": "transformer.h.1.mlp.c_fc.weight", "nonfinite": 0, "saturated": 1,
    }  # fmt: skip
    assert table.loc[1, "module"] == "transformer.h.1.mlp.c_fc" and table.loc[1, "nonfinite"] > 0
    low = lower(random_gpt2(TINY), "fp8_e4m3")
    low.model.transformer.ln_f.weight.fill_(448.0)
    ranges = Ranges(low)
    with ranges.counting():
        observe(low.model, tiny_tokens, low)
    table = ranges.table(tiny_gpt2).set_index("module")
    assert table.loc["transformer.ln_f", "saturated"] > 0 and (table.loc["transformer.ln_f", "nonfinite"] == 0).all()


def test_nothing_saturates_in_a_format_that_fits_itself_to_each_tensor(tiny_gpt2, tiny_tokens):
    tiny_gpt2.transformer.ln_f.weight.fill_(1e4)
    low = lower(tiny_gpt2, "fp8_e4m3_scaled")
    ranges = Ranges(low)
    with ranges.counting():
        final = observe(low.model, tiny_tokens, low).final
    assert final.abs().max() > low.format.format.largest
    assert ranges.table(tiny_gpt2).empty


def test_diagnosis_measures_what_it_predicts(found, tiny_tokens):
    assert found.plan.label.startswith("blocks ") and len(found.plan.modules) == 2
    assert found.prediction.windows.window.tolist() == [0, 1, 2] == found.measured.window.tolist()
    assert found.measured.mismatch.mean() == pytest.approx(found.prediction.windows.predicted.mean(), rel=0.15)
    assert found.protected.mismatch.mean() == pytest.approx(found.plan.predicted, rel=0.15)
    assert (found.protected.mismatch < found.measured.mismatch).all()
    model, low = random_gpt2(TINY), lower(random_gpt2(TINY), "bf16")
    with torch.no_grad(), low.running():
        final = final_hidden(low.model, tiny_tokens[1:2])
    exact = final_hidden(model, tiny_tokens[1:2])
    assert found.measured.mismatch[1] == pytest.approx(mismatch(final, exact).item(), rel=1e-3)
    assert len(found.drift) == 3 * 3
    assert causes.block_shares(found.contributions).index.tolist() == ["embedding", "0", "1", "2", "after"]


def test_a_diagnosis_of_weights_only(tiny_tokens):
    model = random_gpt2(TINY)
    model.transformer.ln_f.weight.fill_(5e4)  # results beyond fp16, in which only weights have to fit
    found = diagnose(model, tiny_tokens, format="fp16", budget="1 block", weights_only=True)
    assert found.execution == "weights" and set(found.prediction.contributions.kind) == {"weight"}
    assert found.measured.mismatch.mean() == pytest.approx(found.prediction.windows.predicted.mean(), rel=0.3)
    assert (found.protected.mismatch < found.measured.mismatch).all()
    assert found.ranges.empty and not diagnose(model, tiny_tokens, format="fp16").ranges.empty
    html = re.sub(r"<script.*?</script>", "", page.page(found), flags=re.S)
    assert "weights in fp16" in html and "computing in fp32" in html and "scores" not in html
    assert "WEIGHTS_ONLY=yes" in html and "apply(model, plan, &#34;weights&#34;)" in html


def test_experts_that_change_are_counted_and_said(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    load_tokenizer("embedded").save_pretrained(tmp_path)
    request = replace(ASKED, model=str(tmp_path), windows=1)
    found = diagnosis.diagnose(request, *diagnosis.load(request), ENOUGH)
    assert 0 <= found.changed_experts < 1
    assert "This model chooses experts, and rounding changes" in part(found, "summary") and 0 <= found.flips.experts < 1
    blind = diagnosis.diagnose(replace(request, reference="no"), *diagnosis.load(request), ENOUGH)
    assert "This model chooses experts, and nothing was measured" in part(blind, "summary")
    assert "No fp32 pass was run" in part(blind, "sentence")


def test_changed_tokens_are_not_predicted_for_streamed_models():
    with pytest.raises(ValueError, match="the model is streamed, got TARGET=flips: use TARGET=kl, or FORM=whole"):
        diagnosis.load(replace(ASKED, target="flips", form="streamed"))


def test_a_text_begins_where_rounding_changes_the_next_token(tiny_tokens):
    """The text is that of the window, its continuation what greedy passes of both models write."""
    model = random_gpt2(TINY)
    found = diagnose(model, tiny_tokens, format="w3a16-g32", target="kl", budget="6 bits")
    told, begun = found.sentence, found.sentence["begun"]
    low = lower(model, "w3a16-g32", "emulated")
    assert begun.margin > 0
    prompt = tiny_tokens[begun.window : begun.window + 1, : begun.length]
    assert told["prompt"] == "".join(f" {token}" for token in prompt[0].tolist())
    for of, words in ((None, told["words"]), (low, told["recipes"][0]["words"])):
        assert words == [f" {token}" for token in written(model if of is None else low.model, prompt, len(words), of)]
    first = told["recipes"][0]["changed"][0]
    assert first["word"] == 0 and -first["low"] == pytest.approx(begun.margin, abs=1e-4)
    for number, window in enumerate(tiny_tokens.split(1)):
        for length in range(8, window.shape[1] // 2 + 1):
            (wanted,), (said,) = (
                next_tokens(m, window[:, :length], length, of) for m, of in ((model, None), (low.model, low))
            )
            with torch.no_grad(), low.running():
                assert -float(Lead(wanted, said, length)(low.model, window)) <= begun.margin + 1e-4, (number, length)
    causes = [row for row in told["recipes"][0]["changed"] if "fp32" in row]
    assert causes and all(row["fp32"] >= 0 >= row["low"] for row in causes)
    for parts in (part for row in causes for part in (row["blocks"], row["kinds"])):
        moved = causes[0]["fp32"] - causes[0]["low"]
        assert sum(each["adds"] for each in parts) == pytest.approx(moved, rel=0.01, abs=1e-3)
    html = part(found, "sentence")
    assert "broken-sentence" in html and f"the first {begun.length} of window {begun.window}," in html


def test_a_streamed_model_writes_no_text():
    request = replace(ASKED, windows=1, length=8, form="streamed")
    found = diagnosis.diagnose(request, *diagnosis.load(request), ENOUGH)
    assert not found.failed and "read from the disk for every pass" in part(found, "sentence")


def test_changed_tokens_are_a_target(tiny_tokens):
    """The page says what share of the tokens changes, for plans too, and how long greedy decoding agrees."""
    model = random_gpt2(TINY)
    found = diagnose(model, tiny_tokens, format="fp8_e4m3", target="flips", budget="2 blocks", probes=8)
    known = means.by_window(found)
    assert known.predicted.mean() == pytest.approx(known.measured.mean(), rel=0.6)  # 120 tokens
    assert known["predicted with plan"].mean() < known.predicted.mean() < 1
    assert means.in_unit(found, found.prediction.windows.predicted.mean()) == pytest.approx(known.predicted.mean())
    flips = found.flips
    assert flips.horizon == tiny_tokens.shape[1] // 2 and 0 <= flips.length <= flips.horizon >= flips.measured_length
    html = page.page(found)
    assert f"{flips.length:.1f} of {flips.horizon} tokens</b>, and did so for {flips.measured_length:.1f}" in html
    assert f"for <b>{percent(known.predicted.mean())}</b> of the tokens" in html
    mixed = diagnose(model, tiny_tokens, format="w4a16-g32", target="flips", budget="7 bits", reference="no")
    assert mixed.flips.measured_length is None and mixed.plan.predicted < mixed.prediction.windows.predicted.mean()
    assert means.means(mixed)[1]["predicted with plan"]["mean"] < means.means(mixed)[1]["predicted"]["mean"]


@pytest.mark.parametrize(
    ("format", "weights_only"), [("gguf-q4_k_m", False), ("ggml-q4_0", False), ("w4a16-g32", True)]
)
def test_what_a_budget_is_compared_with_is_the_format(format, weights_only, monkeypatch):
    """The page of a mix of GGUF's types is about the mix, not about the smallest type that a plan may choose."""
    model = random_model(
        LlamaConfig(**WIDE, intermediate_size=256, num_hidden_layers=2, bos_token_id=0, eos_token_id=0)
    )
    tokens = random_tokens(2, 24, vocabulary=WIDE["vocab_size"])
    found = diagnose(model, tokens, format=format, target="kl", budget="9 bits", weights_only=weights_only)
    low = lower(model, f"{format}@fp32" if weights_only else format)
    wanted = [by_token(low(window).logits, model(window).logits, window).kl.mean().item() for window in tokens.split(1)]
    np.testing.assert_allclose(found.measured.kl, wanted, rtol=1e-5)
    assert found.prediction.windows.predicted.mean() == pytest.approx(np.mean(wanted), rel=0.5)
    assert found.plan.predicted < found.prediction.windows.predicted.mean()
    shown = []
    monkeypatch.setattr(explore.terms, "choosing", lambda choices, measured: shown.extend(measured))
    monkeypatch.setattr(explore, "Component", lambda *terms: SimpleNamespace(html=""))
    explore.explorer(found)
    own = [] if format.startswith("gguf") else [(0,) * len(found.choices.groups)]  # in all layers; a mix is no choice
    assert [choice.schemes for choice, _ in shown] == [*own, found.choice.schemes]


@pytest.mark.parametrize(
    "model",
    [
        OPTForCausalLM(
            OPTConfig(
                vocab_size=101, hidden_size=32, ffn_dim=64, word_embed_proj_dim=32, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64,
            )
        ),
        MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=4)),
    ],
    ids=["opt", "mamba"],
)  # fmt: skip
def test_models_whose_head_or_configuration_differs(model, tiny_tokens):
    """OPT's head asks the decoder inside of its base model, Mamba has no attention heads."""
    model = model.eval().requires_grad_(False)
    found = diagnose(model, tiny_tokens[:1], attention="eager")
    assert diagnosis.forecast(found.request, Inputs(model, tiny_tokens, ""), tiny_tokens).memory > 0
    assert found.measured.mismatch.item() > 0 and len(found.drift) == 2
    assert torch.equal(observe(model, tiny_tokens).final, final_hidden(model, tiny_tokens))


def test_attention_that_a_model_does_not_have_is_named_with_the_other(tmp_path):
    config = Gemma2Config(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    Gemma2ForCausalLM._from_config(config).save_pretrained(tmp_path)
    load_tokenizer("embedded").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no sdpa attention: use ATTENTION=auto"):
        diagnosis.load(replace(ASKED, model=str(tmp_path), attention="sdpa"))
    loaded, _ = diagnosis.load(replace(ASKED, model=str(tmp_path)))
    assert attention_of(loaded.model) == "eager"


def test_attention_that_a_model_does_not_take_over_is_refused(tmp_path):
    """Transformers only logs that BLOOM's sdpa is eager attention."""
    BloomForCausalLM._from_config(BloomConfig(vocab_size=4096, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    load_tokenizer("embedded").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no sdpa attention: use ATTENTION=auto"):
        diagnosis.load(replace(ASKED, model=str(tmp_path), attention="sdpa"))
    for attention in ("auto", "eager"):
        diagnosis.load(replace(ASKED, model=str(tmp_path), attention=attention))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("FORMAT=fp9", "make diagnose: a recipe must be known"),
        ("BUDGET=5 bits", "make diagnose: a budget of bits, KL or MB divides"),
        ("WINDOWS=many", "make diagnose: windows must be a whole number, got 'many'"),
        ("LENGTH=1", "make diagnose: length must be at least 2, got 1"),
    ],
)
def test_a_wrong_request_is_answered_before_the_notebook_starts(asked, message):
    with pytest.raises(SystemExit, match=message):
        make_diagnose.main(["--check", asked])
    make_diagnose.main(["--check", "FORMAT=w4a16-g128", "BUDGET=5 bits", "WEIGHTS_ONLY=yes"])


def test_a_mixture_that_takes_all_its_experts_makes_no_choice(tiny_tokens):
    config = MixtralConfig(
        **WIDE, intermediate_size=64, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=2
    )
    model = MixtralForCausalLM._from_config(config).eval().requires_grad_(False)
    found = diagnose(model, tiny_tokens[:1] % 64, format="w8a8-int8", target="kl", budget="2 modules")
    assert found.changed_experts is None and found.prediction.contributions.site.eq("router").any()
    assert "This model chooses experts, and nothing was measured" not in part(found, "summary")


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertLMHeadModel._from_config(config).save_pretrained(tmp_path)
    load_tokenizer("embedded").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="predicts each token from those before it, got .*, an encoder"):
        diagnosis.load(replace(ASKED, model=str(tmp_path)))


# --- Schemes under a budget ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    """A choice of schemes for a small GPT-2, with all weights in four bits without it."""
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    return diagnose(random_gpt2(TINY), tokens, format="w4a16-g32", budget="7 bits", target="kl", probes=16)


def test_a_budget_of_bits_is_kept_and_helps(mixed):
    weights = mixed.choices.weights
    assert mixed.request.schemes[1].name == "w8a16-g128" and mixed.attention == "sdpa"
    assert float(mixed.plan.label.split()[0]) <= 7 and {name for _, name in mixed.plan.layers} <= {*mixed.choices.names}
    assert weights == sum(p.numel() for p in linear_weights(random_gpt2(TINY)).values())
    assert mixed.protected.kl.mean() < mixed.measured.kl.mean() and means.helps(mixed)
    assert mixed.planned.mean() == pytest.approx(mixed.protected.kl.mean(), rel=0.3)
    html = page.page(mixed)
    assert "the best choice of schemes takes" in html and "Which scheme for which layer" in html and "<svg" not in html
    assert 'id="words"' in html and "nats, " in html and mixed.plan.layers[0][0] in html


def test_a_bound_on_the_divergence_is_kept_by_the_prediction(mixed):
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    bound = (mixed.planned.mean() + mixed.prediction.windows.predicted.mean()) / 2
    found = diagnose(random_gpt2(TINY), tokens, format="w4a16-g32", budget=f"KL {bound:.3e}", probes=4)
    assert found.request.measured_in == "kl" and found.plan.predicted <= bound
    assert float(found.plan.label.split()[0]) < float(mixed.plan.label.split()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "5 bits"}, "the recipe must name the smallest, such as w4a16-g128, .*, got 'bf16'"),
        ({"budget": "5 bits", "format": "ctranslate2-int8"}, "or schemes for embedding and head, got"),
        ({"budget": "KL 0.1", "format": "w4a16-g128+kv-fp8"}, "without a KV cache or .*, got"),
        ({"target": "margin"}, "target must be one of hidden, kl, logprob, flips, got 'margin'"),
        ({"format": "fp9"}, "a recipe must be known, got 'fp9': take one of fp32, "),
        ({"budget": "KL low"}, "got 'KL low'"),
        ({"budget": "5 bits", "format": "w4a16-g128", "keep": "residual, tail"}, "keep must name some of .*, got tail"),
        (
            {"budget": "2 blocks", "keep": "head"},
            "keep goes with a budget for schemes .* got KEEP='head' with '2 blocks'",
        ),
    ],
)
def test_budgets_of_bits_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ASKED, **change)


def test_a_budget_of_kl_is_a_limit_and_no_error_to_lower(mixed):
    """The fewest bits whose divergence is at most the limit: more than that of a recipe which keeps it by far."""
    measured, kept = mixed.measured.assign(kl=1e-3), mixed.protected.assign(kl=0.0099)
    limited = replace(mixed, request=replace(mixed.request, budget="KL 0.01"), measured=measured, protected=kept)
    assert means.helps(limited) and "did not help" not in part(limited, "summary")
    beyond = replace(limited, protected=kept.assign(kl=0.02))
    assert means.helps(beyond) is False and "It does not keep the budget:" in part(beyond, "summary")
    assert means.helps(replace(mixed, measured=measured, protected=kept)) is False


def test_pages_say_what_holds_for_their_target_and_numbers(mixed, found):
    assert "of the final hidden state is a sum" not in part(mixed, "where")
    assert "step is still to come" in part(replace(found, pending=["sentence"]), "summary")
    assert "2 steps are still to come" in part(replace(found, pending=["growth", "sentence"]), "summary")
    none = replace(found, measured=found.measured.assign(changed=0.0), protected=found.protected.assign(changed=0.01))
    assert "no fewer than without the plan" in part(none, "summary")
    same = replace(none, protected=found.protected.assign(changed=0.0))
    assert "no fewer than without the plan" not in part(same, "summary")


def test_parts_in_fp32_share_the_budget_with_schemes(mixed):
    """The same bytes as without them: what is stored in fp32 is paid by smaller schemes, what is not stored is free."""
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    size = mixed.choices.stored_bytes(mixed.choice)
    asked = {"format": "w4a16-g32", "budget": f"{size / 1e6:.6f} MB", "target": "kl", "probes": 16}
    found = diagnose(random_gpt2(TINY), tokens, **asked, keep="residual scores norms head")
    assert found.request.mixes and found.choices.stored_bytes(found.choice) <= size and found.plan.residual
    assert found.plan.predicted < mixed.plan.predicted and means.helps(found)
    html = " ".join(page.page(found).split())
    assert "Beside the schemes the plan keeps" in html and "the residual stream" in html
    assert "Stored, the whole model takes" in html and "KEEP=&#39;residual scores norms head&#39;" in html
    assert "left out <i>scores</i>: with sdpa attention" in html
    nothing = replace(found, plan=mixed.plan, choice=mixed.choice)
    assert "allows lowers the predicted error within the budget" in part(nothing, "plan")


def test_megabytes_mean_what_is_stored_only_where_weights_have_schemes():
    assert replace(ASKED, format="w4a16-g128", budget="12 MB").mixes and not replace(ASKED, budget="12 MB").mixes


# --- Weights that somebody else has rounded -----------------------------------------------------


@pytest.fixture(scope="module")
def rounded_elsewhere(tmp_path_factory):
    """A folder with the embedded checkpoint, its linear weights in int4 by the rule written out."""
    folder = tmp_path_factory.mktemp("int4")
    model = load_model("embedded", "cpu", AutoModelForCausalLM)
    for weight in linear_weights(model).values():
        groups = weight.T.reshape(weight.shape[1], -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        weight.copy_(((groups / scale).round() * scale).reshape(weight.T.shape).T)
    model.save_pretrained(folder)
    load_tokenizer("embedded").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("target", "column"), [("kl", "kl"), ("hidden", "mismatch")])
def test_weights_as_they_are_against_the_original(rounded_elsewhere, target, column):
    """All windows share the errors of weights, so that the mean with a plan is one realisation: its bound is wider."""
    asked = {"model": str(rounded_elsewhere), "reference_model": "embedded", "format": "given", "windows": 8}
    request = replace(ASKED, **asked, length=64, target=target, budget="2 blocks")
    found = diagnosis.diagnose(request, *diagnosis.load(request), ENOUGH)
    assert found.measured[column].mean() == pytest.approx(found.prediction.windows.predicted.mean(), rel=0.1)
    assert found.protected[column].mean() == pytest.approx(found.plan.predicted, rel=0.15)
    assert means.helps(found) and found.execution == "weights"
    named = found.prediction.contributions.query("c2 > 0").module.unique()
    assert {*named} == {
        p.rpartition(".")[0] for p in linear_weights(load_model("embedded", "cpu", AutoModelForCausalLM))
    }
    html = " ".join(page.page(found).split())
    assert "The weights of <code>embedded</code> are stored in F32. The reference of every error computes in" in html
    assert "as they are, with those of <code>embedded</code>" in html and "these modules take what they took" in html
    words = shlex.split(html.replace("&#39;", "'").partition("make diagnose ")[2].partition("<")[0])
    assert {"REFERENCE_MODEL=embedded", "BUDGET=2 blocks"} < {*words} and "FORMAT=given" not in words
    names = {}
    exec(plans.snippet(request, found.plan, found.attention), names)
    assert torch.equal(names["low"].model.lm_head.weight, names["original"].lm_head.weight)
    blocks = [f"{path}.attn.c_attn" for path in found.plan.modules]
    assert all(
        torch.equal(names["low"].model.get_submodule(p).weight, names["original"].get_submodule(p).weight)
        for p in blocks
    )


def test_models_that_cannot_be_compared_are_refused_before_the_notebook_starts(rounded_elsewhere, tmp_path):
    given = {"MODEL": str(rounded_elsewhere), "REFERENCE_MODEL": "embedded"}

    def asked(**changes):
        return ["--check", *("=".join(item) for item in (given | changes).items())]

    make_diagnose.main(asked())
    with pytest.raises(SystemExit, match="of the same shapes, but .* has no such parameter and .* in"):
        make_diagnose.main(asked(REFERENCE_MODEL="embedded-llama"))
    with pytest.raises(SystemExit, match="leave RECIPE= or REFERENCE_MODEL= away"):
        make_diagnose.main(asked(RECIPE="bf16"))
    with pytest.raises(SystemExit, match="a budget of bytes needs to know what weights take"):
        make_diagnose.main(asked(BUDGET="2 MB"))
    with pytest.raises(
        ValueError, match="must have other weights than REFERENCE_MODEL=, got the same ones in 'embedded'"
    ):
        diagnosis.load(replace(ASKED, reference_model="embedded", format="given"))
    configuration = json.loads((rounded_elsewhere / "config.json").read_text())
    for method, how in [("compressed-tensors", "CompressedTensorsConfig"), ("gptq", "the library that quantized")]:
        quantized = configuration | {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(quantized))
        with pytest.raises(
            SystemExit, match=f"quantized by {method}: give a folder with its dequantized weights .*{how}"
        ):
            make_diagnose.main(asked(MODEL=str(tmp_path)))
        with pytest.raises(ValueError, match=f"quantized by {method}"):
            diagnosis.load(replace(ASKED, model=str(tmp_path)))


def test_a_plan_that_did_not_help_is_not_recommended(found, found_page):
    worse = replace(found, protected=found.protected.assign(mismatch=2 * found.measured.mismatch))
    assert "This plan did not help" in part(worse, "summary")
    assert "It is shown, not recommended" in part(worse, "plan")
    assert means.helps(found) and "did not help" not in found_page


def first_line(found) -> tuple[str, str]:
    """The level and the words of the coloured verdict."""
    level, words = re.search(
        r'<div class="banner (\w+)"><strong>.*?</span>(.*?)</strong>', part(found, "summary")
    ).groups()
    return level, " ".join(words.replace("\xa0", " ").split())


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        (
            {"kl": 5e-4, "changed": 1 / 33, "loss": 4.002}, "safe",
            "bf16 is safe here: one next token in 33 changes, loss +0.05 %.",
        ),
        (
            {"kl": 5e-3, "changed": 0.0, "loss": 4.0}, "safe",
            "bf16 is safe here: no next token of 120 changes, loss unchanged.",
        ),
        (  # a text whose next tokens are nearly tied
            {"kl": 5e-3, "changed": 0.375, "loss": 4.0}, "noticeable",
            "bf16 makes a noticeable difference here: one next token in 3 changes, loss unchanged.",
        ),
        (
            {"kl": 0.05, "changed": 0.125, "loss": 3.9}, "noticeable",
            "bf16 makes a noticeable difference here: one next token in 8 changes, loss −2.50 %.",
        ),
        (
            {"kl": 0.5, "changed": 0.6, "loss": 5.0}, "large",
            "bf16 makes a large difference here: 60.0 % of the next tokens change, loss +25.00 %.",
        ),
        ({"kl": float("nan")}, "overflows", "bf16 gives no finite probabilities in 3 of 3 windows."),
    ],
)  # fmt: skip
def test_the_first_line_says_how_much_rounding_matters(found, change, level, words):
    assert first_line(replace(found, measured=found.measured.assign(reference_loss=4.0, **change))) == (level, words)


def test_the_first_line_of_other_requests(found):
    table = found.measured.assign(kl=5e-4, changed=0.25, loss=4.0, reference_loss=4.0)
    weights = replace(found, request=replace(found.request, weights_only=True), measured=table)
    assert first_line(weights)[1] == "Weights in bf16 are safe here: one next token in 4 changes, loss unchanged."
    given = replace(found.request, format="given", reference_model="its/original")
    assert first_line(replace(weights, request=given))[1].startswith("These rounded weights are safe here: ")
    blind = replace(found, measured=None, protected=None, flips=None)
    assert first_line(blind) == ("unmeasured", "bf16 is not measured against fp32 here.")
    assert first_line(replace(blind, pending=["measurement"]))[1] == "bf16 is not measured against fp32 yet."
    assert "safe" not in part(blind, "summary") and "A plan is not known." in part(replace(blind, plan=None), "summary")


def test_the_first_line_counts_windows_that_overflow(found):
    """Not those whose gradient alone is lost; what is measured is of the others."""
    table = found.measured.assign(kl=5e-4, changed=[0.3, 0.25, 0.25], loss=4.0, reference_loss=4.0)

    def first(overflow: str) -> tuple[str, str]:
        windows = found.prediction.windows.assign(overflow=[overflow, "", ""])
        return first_line(replace(found, measured=table, prediction=replace(found.prediction, windows=windows)))

    level, words = first("products in transformer.h.1")
    assert (level, words) == (
        "overflows", "bf16 overflows in 1 of 3 windows; in the others one next token in 4 changes, loss unchanged."
    )  # fmt: skip
    assert first("not a number (0/0) in x")[1].startswith("bf16 gives no finite numbers in 1 of 3 windows")
    assert first("the gradient")[0] == "safe"
    table.loc[1, "kl"] = float("inf")  # of probabilities alone
    said = "bf16 gives no finite probabilities in 2 of 3 windows; in the others"
    assert first("products in transformer.h.1")[1].startswith(said)


def test_the_verdict_comes_first_then_the_picture_then_what_to_do(found):
    html = part(found, "summary")
    marks = ('class="banner', '<figure id="blocks">', "What to do", "The numbers")
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places) and html.startswith('<div class="banner')


@pytest.mark.parametrize("model", ["embedded", "embedded-llama"])
def test_committed_pages_begin_with_a_verdict(model):
    html = (OUTPUTS / model / "diagnosis.html").read_text(encoding="utf-8").partition("<body>")[2]
    assert re.search(r"bf16 is safe here: one next token in \d+ changes, loss", html.partition("<img")[0])
    assert html.index('class="banner safe"') < html.index('<figure id="blocks">') < html.index("What to do")


def test_the_summary_says_what_its_numbers_mean(found):
    table = found.measured.assign(kl=0.05, loss=4.1, reference_loss=4.0)
    said = part(replace(found, measured=table), "summary").replace("\xa0", " ")
    assert (
        "Rounding raises the loss of 4.0000 nats a token by 0.1 (2.50 %), and moves the next-token distribution by a "
        "KL divergence of 0.05 nats, 1.25 % of the loss.</b> This page calls a divergence below 0.1 nats noticeable."
    ) in said
    large = part(replace(found, measured=table.assign(kl=0.5)), "summary")
    assert "This page calls a divergence above 0.1 nats large." in large


def test_a_mismatch_has_its_setting_beside_it(found):
    setting = (
        f"bf16, {'fused attention (sdpa)' if found.attention == 'sdpa' else 'eager attention'}, 3 windows of 40 tokens"
    )
    html = part(found, "summary")
    assert f"</b>, for {setting}." in html and "in the same setting" in html
    assert setting in part(found, "tokens") and setting in part(found, "explore")
    assert "eager attention" in part(replace(found, attention="eager"), "tokens")


@pytest.mark.parametrize(
    ("measured", "said"),
    [(11.0, "chance suffices"), (0.0, "do not act in proportion"), (19.9, "This page does not know why")],
)
def test_a_length_that_the_prediction_misses_is_explained(found, measured, said):
    flips = replace(found.flips, horizon=20, length=10.0 if measured < 19 else 1.0, measured_length=measured)
    exponents = Growth(2.0, 1.9, 2.1) if "proportion" in said else None
    html = part(replace(found, flips=flips, growth=exponents), "summary")
    assert said in html and f"and did so for {measured:.1f}" in html


def test_chance_moves_the_mean_of_many_texts_less(found):
    flips = replace(found.flips, horizon=64, length=30.0, measured_length=None)
    assert flips.chance(8) == pytest.approx(flips.chance(2) / 2)
    keeps = np.random.default_rng(0).random((20000, 64)) > 1 / 40
    lengths = np.cumprod(keeps, 1).sum(1)
    assert replace(flips, length=lengths.mean()).chance(1) == pytest.approx(lengths.std(), rel=0.05)
    assert replace(flips, length=64.0).chance(2) == pytest.approx(0, abs=1e-3)
    assert replace(flips, length=0.0).chance(2) == pytest.approx(0, abs=1e-3)


# --- The page -----------------------------------------------------------------------------------


def test_page_stands_alone(found, found_page):
    html = found_page
    assert not re.search(r"(src|href)=\"(?!data:|#|plan\.)", html)
    assert html.count('<img src="data:image/png;base64,') == 5
    assert html.count("alt=") == 5 and 'name="viewport"' in html
    assert f"keep <b>{found.plan.label}</b> in fp32" in html
    assert percent(found.measured.mismatch.mean()) in html
    assert "No output of any module and no parameter left the range of bf16" in html


@pytest.mark.parametrize(("format", "beyond"), [("bf16", False), ("fp8_e5m2", True)])
def test_a_mismatch_beyond_the_first_order_is_said(tiny_tokens, format, beyond):
    model = random_gpt2(TINY)
    for block in model.transformer.h:
        block.mlp.c_proj.weight.mul_(4)
    found = diagnose(model, tiny_tokens, format=format)
    assert (found.prediction.windows.predicted.mean() > 0.2) == beyond
    summary = part(found, "summary")
    assert ("An error as large as this one is beyond the first" in summary) is beyond
    grown = replace(found, growth=Growth(2.0, 1.9, 2.1))  # half of every error gives half of the squared error
    assert ("grows with exponent" in summary) is not found.growth.in_proportion
    for factor, warned in ((1.0, False), (0.5, True), (2.0, True)):
        windows = found.prediction.windows.assign(predicted=factor * found.measured.mismatch)
        off = part(replace(grown, prediction=replace(found.prediction, windows=windows)), "summary")
        assert "Here it grows with exponent 1.00, not 2:" in off
        assert f"The prediction is {factor:#.2g} times the measurement." in off
        assert ("Do not trust the predicted size here." in off) is warned
    assert "Half of every error is emulated." in part(replace(found, execution="native"), "summary")


@pytest.mark.parametrize("target", ["hidden", "kl"])
def test_a_prediction_that_misses_where_few_tokens_decide_says_so(tiny_tokens, target):
    """One token of the first window makes most of the measured error; all others are as predicted."""
    found = diagnose(random_gpt2(TINY), tiny_tokens, target=target)
    column, measured = {"hidden": ("error", "mismatch"), "kl": ("kl", "kl")}[target]
    windows = found.prediction.windows.assign(predicted=0.5 * found.measured[measured])
    found = replace(found, prediction=replace(found.prediction, windows=windows))
    known = found.by_token.predicted.copy()
    even = replace(found, by_token=replace(found.by_token, measured=known.copy()))
    assert "Do not trust the predicted size here." in part(even, "summary")
    known.loc[3, column] = 100 * known[column].sum()
    told = part(replace(found, by_token=replace(found.by_token, measured=known)), "summary")
    assert "Do not trust" not in told and "a few tokens decide 1 of 3 windows" in told
    assert "For the median token the prediction is 1.0 times the measurement." in told


def test_a_model_that_does_not_know_the_text_is_said(found, found_page):
    """Random weights predict no better than a guess, as do weights with another model's tokenizer."""
    assert found.vocabulary == TINY.vocab_size
    assert "This model does not know this text." in found_page
    assert f"it is {np.log(TINY.vocab_size):.2f}." in " ".join(found_page.split())
    knows = replace(found, measured=found.measured.assign(reference_loss=0.7 * np.log(TINY.vocab_size)))
    assert "does not know" not in part(knows, "summary")


def test_changed_tokens_that_a_plan_does_not_lower_are_said(found):
    untold, more = "draws of so few tokens do not tell the two apart", ", no fewer than without the plan"
    predicted, measured = found.prediction.windows.set_index("window").predicted, found.measured.assign(changed=0.1)
    for share in (0.0, 1.0):
        protected = found.protected.assign(changed=0.1 * share)
        summary = part(replace(found, planned=share * predicted, measured=measured, protected=protected), "summary")
        assert (untold in summary) is (more in summary) is (share == 1)


def test_intervals_of_squares_do_not_begin_below_zero(found):
    """As Student's of a few windows would."""
    assert means.mean_of(pd.Series([0.0, 0.0, 1.0]))["low"] == 0 and pd.isna(means.mean_of(pd.Series([1.0]))["low"])
    assert causes.interval((0.7, 0.5), 2).startswith("0.70 (0.00 to ")
    grown = part(replace(found, growth=Growth(1.7, -1.4, 4.8)), "summary")
    falls = f"falls to {percent(1.7 / 4)} of the whole ({percent(0)} to {percent(4.8 / 4)})"
    assert " ".join(falls.split()) in grown


@pytest.mark.parametrize(("offset", "alike"), [(0.0, False), (100.0, True)])
def test_a_prediction_that_misses_is_said(offset, alike):
    """A channel with nearly the same large value at every position makes nearly the same error at every position."""
    model = random_gpt2(TINY)
    model.transformer.wpe.weight[:, 5] += offset
    tokens = torch.randint(TINY.vocab_size, (8, 40), generator=torch.Generator().manual_seed(1))
    summary = part(diagnose(model, tokens), "summary")
    assert bool(re.search(r"The prediction is 1\.2\d times the measured error", summary)) is alike


@pytest.mark.parametrize(("offset", "alike"), [(0.0, False), (100.0, True)])
def test_errors_that_act_together_are_said(offset, alike):
    """The large channel is rounded alike in the residual stream of blocks that follow each other."""
    model = random_gpt2(TINY)
    model.transformer.wpe.weight[:, 5] += offset
    tokens = torch.randint(TINY.vocab_size, (8, 40), generator=torch.Generator().manual_seed(1))
    found = diagnose(model, tokens, probes=16)
    html = part(found, "coherence")
    ratio = re.search(r"these passes is <b>(\S+) \((\S+) to (\S+)\) times</b>", html)
    assert float(ratio[2]) < float(ratio[1]) < float(ratio[3])
    assert (float(ratio[3]) < 1) is alike  # fewer squares than independent ones: they cancel
    pairs = found.coherence.pairs().query("matters")
    assert len(pairs) > 0 if alike else pairs.empty
    row = "residual additions, kernels, block 1" in html and "cancel" in html
    assert (row, "No pair of sites matters" in html) == (alike, not alike)


def test_signed_contributions_are_said_to_add_up(found):
    html = part(found, "coherence")
    said = re.search(
        r"add up to the measured error of these passes; at most (\S+) % of it is left over in a window", html
    )
    assert float(said[1]) < 1 and "The squared error of these passes is <b>" in html


@pytest.mark.parametrize("remainder", [0.14, float("nan")])
def test_they_are_not_said_to_add_up_where_they_do_not(found, remainder):
    """The slopes of an autograd function of the model's own are none of ours."""
    html = part(replace(found, coherence=replace(found.coherence, remainder=remainder)), "coherence")
    assert "add up to the measured error" not in html


def test_without_memory_for_secants_the_page_takes_slopes_at_the_low_end(tiny_gpt2, tiny_tokens, monkeypatch):
    for free, fits in ((None, True), (10**12, True), (10**6, False)):
        monkeypatch.setattr(needs, "free_memory", lambda device, free=free: free)
        assert needs.secants_fit(replace(ASKED, length=40), tiny_gpt2) is fits
    found = diagnose(tiny_gpt2, tiny_tokens)
    assert pd.isna(found.coherence.remainder)
    assert "To first order the squared error of these passes is <b>" in part(found, "coherence")


def test_the_forecast_tells_what_secant_slopes_take_where_they_are_taken(tiny_gpt2, tiny_tokens, monkeypatch):
    """Their step held 3.4 GB of SmolLM2, where 1.6 GB were told without them."""
    told, enough = {}, needs.memory(replace(ASKED, length=40), tiny_gpt2) + 1
    for free, reference in ((10**12, "auto"), (10**12, "no"), (enough, "auto")):
        monkeypatch.setattr(needs, "free_memory", lambda device, free=free: free)
        request = replace(ASKED, length=40, reference=reference)
        expected = diagnosis.forecast(request, Inputs(tiny_gpt2, tiny_tokens, ""), tiny_tokens)
        assert expected.fits and f"and {quantity(expected.memory + expected.slopes)} of" in str(expected)
        told[free, reference] = expected.slopes
    assert told[10**12, "auto"] == needs.of_secants(request, tiny_gpt2) > enough
    assert told[10**12, "no"] == told[enough, "auto"] == 0


def test_one_window_says_nothing_about_pairs(tiny_gpt2, tiny_tokens):
    html = part(diagnose(tiny_gpt2, tiny_tokens[:1]), "coherence")
    assert "one window says nothing about pairs" in html and "No pair of sites matters" not in html
    html = part(diagnose(tiny_gpt2, tiny_tokens[:2]), "coherence")
    assert "So few windows tell no pair from chance." in html and "would have been named" not in html


def test_page_of_fp8_in_linear_layers(tiny_gpt2, tiny_tokens):
    """The page tells what is multiplied in fp8 from what stays in bf16."""
    found = diagnose(tiny_gpt2, tiny_tokens, format="fp8_e4m3_linear", budget="3 modules")
    html = page.page(found)
    assert f"{found.execution} bf16, inputs of linear layers in fp8_e4m3_scaled." in " ".join(html.split())
    assert "cast back to bf16." in html and "left the range of bf16." in html
    assert found.measured.mismatch.mean() == pytest.approx(found.prediction.windows.predicted.mean(), rel=0.15)
    assert found.protected.mismatch.mean() == pytest.approx(found.plan.predicted, rel=0.15)


def test_page_of_a_model_that_overflows(tiny_tokens):
    model = random_gpt2(TINY)
    model.transformer.h[1].mlp.c_proj.bias.fill_(1e5)
    found = diagnose(model, tiny_tokens, format="fp16")
    assert found.plan is None and found.contributions is None
    html = page.page(found)
    assert "3 of 3 windows overflow" in html and "transformer.h.1.mlp.c_proj" in html
    assert "Measured against fp32: no window gave finite values" in html and 'id="tokens"' not in html
    assert "the stored weights of transformer.h.1.mlp.c_proj" in html and 'id="plan"' not in html
    assert found.remedy.plan is not None and found.remedy.plan.label in html
    assert found.mended.window.tolist() == [0, 1, 2] and not found.failed
    assert "Every window overflows in fp16, which leaves no numbers to choose words." in part(found, "sentence")
    told = " ".join(html.split())
    for words, known in (("their mismatch is predicted", "predicted"), ("and measured", "mismatch")):
        assert f"{words} as <b>{' '.join(percent(found.mended[known].mean()).split())}" in told


@pytest.mark.parametrize("module", ["transformer.h.1.mlp.c_proj", "lm_head", "transformer.ln_f"])
def test_a_weight_beyond_the_format_is_mended_where_weights_alone_are_rounded(tiny_tokens, module):
    model = random_gpt2(TINY)
    model.get_submodule(module).weight[0] = 1e5  # beyond fp16, but no result of the fp32 kernels is
    target = "kl" if module == "lm_head" else "hidden"  # the final hidden state does not read the head
    found = diagnose(model, tiny_tokens, format="fp16", weights_only=True, target=target)
    assert found.prediction.windows.overflow.ne("").all() and not found.failed
    assert module in found.remedy.plan.modules or found.remedy.plan.format == "bf16"
    assert found.mended.mismatch.between(0, 0.05).all()
    assert found.mended.predicted.between(0, 1).all()
    assert found.remedy.plan.label in part(found, "range")


def test_page_of_a_plan_that_leaves_an_overflow(found):
    """All means are over the windows that are finite without and with the plan."""
    measured, protected = found.measured.copy(), found.protected.copy()
    measured.loc[0, ["mismatch", "changed"]] = [float("nan"), 0.77]
    protected.loc[[0, 1], "mismatch"] = float("inf")
    broken = replace(found, measured=measured, protected=protected)
    kept, known = means.means(broken)
    assert kept.tolist() == [False, False, True]
    assert {name: found["mean"] for name, found in known.items()} == means.by_window(broken).loc[2].to_dict()
    html = part(broken, "summary")
    assert (
        "With the plan, <b>2 of 3 windows still overflow, or their probabilities do</b>" in html
        and "over the 1 window in which" in html
    )
    assert " ".join(percent(found.prediction.windows.predicted[2]).split()) in html


@pytest.mark.parametrize(("of_finite", "of_overflowing", "warned"), [(0.01, 1.0, False), (0.02, 0.0, True)])
def test_windows_that_overflow_without_the_plan_do_not_decide_on_the_prediction(
    found, of_finite, of_overflowing, warned
):
    """Half of the windows are measured as infinite, and their predictions are left out as well."""
    numbers = pd.DataFrame({"window": range(8)})
    steps = 1 + 0.001 * numbers.window
    predicted = numbers.assign(predicted=(numbers.window < 4).map({True: of_finite, False: of_overflowing}) * steps)
    measured = numbers.assign(mismatch=(0.01 * steps).where(numbers.window < 4, float("inf")))
    eight = replace(
        found, prediction=replace(found.prediction, windows=predicted), measured=measured,
        protected=numbers.assign(mismatch=0.005), planned=predicted.predicted,
    )  # fmt: skip
    kept, known = means.means(eight)
    assert kept.tolist() == [True] * 4 + [False] * 4
    assert bool(means.disagreement(known["predicted"], known["measured"])) is warned


def test_a_window_that_overflows_without_the_plan_only(tiny_tokens):
    model = random_gpt2(TINY)
    model.transformer.wte.weight[3, 0] = model.transformer.wpe.weight[0, 0] = 4e4  # both fit fp16, the sum does not
    tokens = torch.cat([tiny_tokens, tiny_tokens])[:3].clone()
    tokens[:, 0] = torch.tensor([3, 4, 5])
    found = diagnose(model, tokens, format="fp16", budget="2 sites")
    # fp32 additions and an fp32 head, whose logits leave the range as well; not the whole model, where the sum is.
    assert found.plan.residual and found.plan.modules == ("lm_head",)
    assert found.prediction.windows.overflow.ne("").tolist() == [True, False, False]
    table = means.by_window(found)
    assert table.notna().all().to_dict() == {
        "predicted": False, "predicted with plan": False, "measured": False, "measured with plan": True,
    }  # fmt: skip
    html = page.page(found)
    assert "1 of 3 windows overflow" in html and "still overflow" not in html
    assert percent(table["measured with plan"][1:].mean()) in html
    assert found.mended.window.tolist() == [0, 1, 2]  # in the others logits alone leave the range
    assert found.mended.predicted[0] == pytest.approx(found.mended.mismatch[0], rel=0.3)


def test_page_without_a_reference(tiny_gpt2, tiny_tokens):
    html = page.page(diagnose(tiny_gpt2, tiny_tokens[:1], reference="no"))
    assert "Nothing was measured against fp32: the measurement was not asked for" in html
    assert 'id="sites"' in html and 'id="drift"' not in html and "What it does to the tokens" not in html


def test_snippet_runs(found):
    request = replace(ASKED, attention="eager")
    plan = Plan("bf16", ("transformer.h.3",), residual=True, scores=True)
    names = {}
    exec(plans.snippet(request, plan, "eager"), names)
    assert names["plan"] == plan
    assert names["low"].model.transformer.h[3].mlp.c_fc.weight.dtype == torch.float32
    assert names["logits"].shape == (*names["tokens"].shape, 4096)


def test_command_says_everything_that_was_asked():
    request = replace(ASKED, model="my model", data="a'b.txt", budget="2 blocks")
    words = dict(word.split("=", 1) for word in shlex.split(sections.command(request, "embedded-custom"))[2:])
    assert {name: str(getattr(request, name.lower())) for name in words} == words
    assert words.keys() == {*["MODEL", "DATA", "FORMAT", "BUDGET", "WINDOWS", "LENGTH", "ATTENTION", "PROBES", "SEED"]}
    assert sections.command(request, "mine").endswith(" RESULTS=mine")


def test_command_leaves_the_defaults_away_so_that_results_stay_in_one_place():
    """``make`` writes results of any option to another folder (outputs/PROFILE-custom)."""
    command = sections.command(replace(ASKED, model="embedded", data="embedded"), "embedded")
    assert not {"MODEL", "DATA"} & {word.partition("=")[0] for word in command.split()}
    assert command.endswith(" RESULTS=embedded")


def test_words_for_numbers():
    assert [percent(x).replace("\xa0", " ") for x in (0.0137, 1.0, 0.5, 2e-5)] == [
        "1.37 %",
        "100 %",
        "50.0 %",
        "0.00200 %",
    ]
    assert percent(float("nan")) == "–"
    assert [quantity(x).replace("\xa0", " ") for x in (0, 256, 1600, 1.5e6, 1.13e12)] == [
        "0",
        "256 B",
        "1.6 kB",
        "1.5 MB",
        "1.13 TB",
    ]
    assert plans.price(Plan("bf16")) == "no extra memory, and no matrix product in fp32"
    assert means.mean_of(pd.Series([1.0, float("inf"), 3.0, float("nan")]))["mean"] == 2.0


def test_write(found, tmp_path, monkeypatch):
    monkeypatch.setattr("fragility_lab.paths.OUTPUTS", tmp_path)
    assert diagnosis.write(found, "mine") == tmp_path / "mine" / "diagnosis.html"
    assert (tmp_path / "mine" / "diagnosis.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_exports_of_the_plan_lie_beside_the_page_and_are_linked(mixed, tmp_path, monkeypatch):
    monkeypatch.setattr("fragility_lab.paths.OUTPUTS", tmp_path)
    model, refusal = random_gpt2(TINY), "ModelOpt has no such scheme"
    written = replace(mixed, exports=mixed.exports | {"modelopt": refusal})
    assert mixed.exports == plans.exports(mixed.plan, model) and mixed.exports.keys() == EXPORTS.keys()
    diagnosis.write(mixed, "mine")
    assert (tmp_path / "mine" / "plan.modelopt.yaml").exists()
    html = diagnosis.write(written, "mine").read_text(encoding="utf-8")
    links = set(re.findall(r'href="(plan\.[^"]+)"', html))
    assert links == {path.name for path in (tmp_path / "mine").glob("plan.*")} and len(links) == len(EXPORTS) - 1
    for library in EXPORTS.keys() - {"modelopt"}:
        want = EXPORTS[library](mixed.plan, model)
        assert json.loads((tmp_path / "mine" / f"plan.{library}.json").read_text(encoding="utf-8")) == want.config
    assert f"<code>plan.modelopt.yaml</code> is not written: {refusal}." in html
    assert "cannot express a scheme for Conv1D" in html


def test_a_plan_that_a_library_lacks_says_why():
    found = plans.exports(Plan("fp8-e5m2"), random_gpt2(TINY))
    assert found["torchao"].startswith("torchao has no fp8_e5m2_tensor for the weights of transformer.h.0.attn.c_attn")
    assert found["transformers"].missing
