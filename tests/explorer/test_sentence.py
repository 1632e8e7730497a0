"""The broken sentence: its words, causes and remedies, against passes; the shipped data, against themselves."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fragility_adjoint.mixed_precision import Plan, apply
from fragility_core.models.paths import block_paths
from fragility_explorer.continued import PROMPTS, versions
from fragility_explorer.continued import RECIPES as SHIPPED
from fragility_lab.explorer.continued import OVERFLOW, Version, continued, next_tokens, written
from fragility_lab.explorer.sentence import DATA, Sentence
from fragility_lab.inputs.checkpoints import load_model, load_tokenizer
from fragility_quantization.quantized import lower

RECIPES = ("bf16", "w3a16-g128")
COUNT = 10


@pytest.fixture(scope="module")
def told():
    """The embedded checkpoint, its tokenizer, a prompt, and what follows it."""
    model, spell = load_model("embedded", "cpu", AutoModelForCausalLM), load_tokenizer("embedded")
    prompt = spell("The function returns", return_tensors="pt").input_ids
    return model, spell, prompt, continued(model, spell.decode, prompt, COUNT, versions(model, RECIPES, most=2))


def test_words_are_those_of_greedy_passes(told):
    model, spell, prompt, found = told
    for name, words in [(None, found["words"]), *((each["name"], each["words"]) for each in found["recipes"])]:
        low, text = name and lower(model, name, "emulated"), prompt
        for word in words:
            (token,) = next_tokens(model, text, text.shape[1], low or None)
            assert spell.decode([token]) == word
            text = torch.cat([text, torch.tensor([[token]])], 1)


def test_changed_words_begin_where_the_texts_part(told):
    found = told[-1]
    assert any(each["changed"] for each in found["recipes"])
    for each in found["recipes"]:
        parts = [place for place, pair in enumerate(zip(found["words"], each["words"])) if len({*pair}) > 1]
        assert [row["word"] for row in each["changed"]][:1] == parts[:1]


def whole(model, prompt):
    """The prompt and what fp32 writes after it."""
    return torch.cat([prompt, torch.tensor([written(model, prompt, COUNT)])], 1)


def causes(texts):
    """Recipe and changed word of all that are explained."""
    return [
        (each["name"], row) for text in texts for each in text["recipes"] for row in each["changed"] if "fp32" in row
    ]


def test_causes_add_up_to_the_change_of_the_lead(told):
    rows = causes([told[-1]])
    assert rows
    for _, row in rows:
        assert row["fp32"] >= 0 >= row["low"]
        for parts in (row["blocks"], row["kinds"]):
            assert sum(part["adds"] for part in parts) == pytest.approx(row["fp32"] - row["low"], rel=0.01, abs=1e-3)


def test_what_saves_a_word_saves_it(told):
    model, _, prompt, found = told
    exact = whole(model, prompt)
    tried = 0
    for name, row in causes([found]):
        end = prompt.shape[1] + row["word"]
        for saver in row["saved"]:
            if saver.startswith("block"):
                plan = Plan(name, (block_paths(model)[int(saver.split()[1])],))
                low = apply(model, plan, "emulated")
                assert next_tokens(low.model, exact[:, :end], end, low) == [exact[0, end]]
                tried += 1
    assert tried or not any(row["saved"] for _, row in causes([found]))


def test_a_word_of_the_fp32_text_is_not_saved_by_nothing(told):
    """The test of a saver can fail: without a part in fp32 the word changes."""
    model, _, prompt, found = told
    name, row = causes([found])[0]
    exact = whole(model, prompt)
    end = prompt.shape[1] + row["word"]
    low = apply(model, Plan(name), "emulated")
    assert next_tokens(low.model, exact[:, :end], end, low) != [exact[0, end]]


def test_places_that_share_a_pass_say_what_they_say_apart(told):
    model, _, prompt, _ = told
    low = lower(model, "w3a16-g128", "emulated")
    text = whole(model, prompt)
    together, apart = (Version("", low, lambda plan: low, 0, 0, each).said(text, prompt.shape[1]) for each in (0, 1))
    assert len(together) == len(apart) == COUNT
    assert sum(a != b for a, b in zip(together, apart)) <= 1  # sums in another order may turn two level words


def test_a_text_ends_in_words_where_numbers_overflow(told):
    model, spell, prompt, _ = told
    low = lower(model, "fp16", "emulated")
    with torch.no_grad():
        low.model.get_output_embeddings().weight.fill_(torch.inf)
    found = continued(model, spell.decode, prompt, 3, [Version("fp16", low, lambda plan: low, 2, 2)])
    (only,) = found["recipes"]
    assert only["words"] == [OVERFLOW] and [row["said"] for row in only["changed"]] == [OVERFLOW] * 3
    assert len(found["words"]) == 3 and not any("fp32" in row for row in only["changed"])


def test_shipped_data_are_small_and_agree_with_themselves():
    assert DATA.stat().st_size < 1e6
    texts = json.loads(DATA.read_text("utf-8"))["texts"]
    assert [text["prompt"].strip() for text in texts] == [*PROMPTS]
    for text in texts:
        assert [each["name"] for each in text["recipes"]] == [*SHIPPED]
        for each in text["recipes"]:
            parts = [place for place, pair in enumerate(zip(text["words"], each["words"])) if len({*pair}) > 1]
            assert [row["word"] for row in each["changed"]][:1] == parts[:1]
    for _, row in causes(texts):
        assert sum(part["adds"] for part in row["blocks"]) == pytest.approx(
            row["fp32"] - row["low"], rel=0.01, abs=1e-3
        )


def test_a_page_holds_the_words_without_a_script_and_no_end_of_it():
    broken = {
        "prompt": "</script><b>",
        "words": ["a", " b"],
        "recipes": [{"name": "bf16", "words": ["a", " c"], "changed": []}],
    }
    html = Sentence([broken], "a model").html
    assert html.count("</script>") == 2
    assert "<td>a b</td>" in html and "<td>a c</td>" in html
