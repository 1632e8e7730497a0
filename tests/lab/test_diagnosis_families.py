"""Diagnoses from the request to the page, of every family, shallow and deep: each table, figure and plan is there."""

import os
import re
from dataclasses import replace
from itertools import cycle

import pytest
from tiny import random_model, random_tokens
from transformers import (
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fragility_lab import diagnosis
from fragility_lab.diagnosis import page
from fragility_lab.diagnosis.needs import Forecast
from fragility_lab.diagnosis.request import Request
from fragility_lab.inputs.loading import Inputs

IDS = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPE = IDS | {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
GROUPED = SHAPE | {"intermediate_size": 32, "num_key_value_heads": 1}
HEADS = GROUPED | {"head_dim": 8}
ROUTED = HEADS | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def layers(config: type, options: dict, name: str = "num_hidden_layers"):
    """The family's configuration by its number of blocks."""
    return lambda depth: config(**options, **{name: depth})


FAMILIES = {
    "gpt2": layers(GPT2Config, IDS | {"n_embd": 16, "n_head": 2, "n_positions": 32}, "n_layer"),
    "opt": layers(OPTConfig, SHAPE | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "gpt_neox": layers(GPTNeoXConfig, SHAPE | {"intermediate_size": 32}),
    "phi": layers(PhiConfig, SHAPE | {"intermediate_size": 32}),
    "bloom": layers(BloomConfig, IDS | {"hidden_size": 16, "n_head": 2}, "n_layer"),
    "falcon": layers(FalconConfig, IDS | {"hidden_size": 16, "num_attention_heads": 2}),
    "llama": layers(LlamaConfig, GROUPED),
    "mistral": layers(MistralConfig, GROUPED | {"sliding_window": 4}),
    "qwen2": layers(Qwen2Config, GROUPED),
    "qwen3": layers(Qwen3Config, HEADS),
    "gemma": layers(GemmaConfig, HEADS),
    "gemma2": layers(Gemma2Config, HEADS | {"sliding_window": 4}),
    "gemma3": layers(Gemma3TextConfig, HEADS | {"sliding_window": 4}),
    "olmo2": layers(Olmo2Config, GROUPED),
    "cohere": layers(CohereConfig, GROUPED),
    "mamba": layers(MambaConfig, {"vocab_size": 101, "hidden_size": 16, "state_size": 4}),
    "mixtral": layers(MixtralConfig, GROUPED | {"num_local_experts": 4}),
    "qwen3_moe": layers(Qwen3MoeConfig, ROUTED),
    "gpt_oss": layers(GptOssConfig, HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
FORMATS = ("bf16", "fp16", "w4a16-g32")
BUDGETS = {"bf16": "1 block", "fp16": "2 modules", "w4a16-g32": "6 bits"}
EVERYTHING = bool(os.environ.get("EVERY"))
# Every family at both depths, the formats in turn; EVERY=yes (make test-families) runs the whole product.
EVERY = [(name, depth, format) for name in FAMILIES for depth in (2, 40) for format in FORMATS]
TURNS = [(name, depth, format) for (name, depth), format in zip(
    [(name, depth) for depth in (2, 40) for name in FAMILIES], cycle(FORMATS)
)]  # fmt: skip


def diagnosed(model, format: str, windows: int = 2, **changes) -> diagnosis.Diagnosis:
    """The diagnosis of ``model`` over a few random tokens, by a request like that of ``make diagnose``."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = random_tokens(windows, 8, seed=0, vocabulary=vocabulary, smallest=1)
    target = "kl" if format.startswith("w4") else "hidden"
    request = Request("tiny", "none", format, BUDGETS.get(format, "1 block"), windows, 8, probes=1, target=target)
    inputs = Inputs(model, tokens.flatten(), "")
    return diagnosis.diagnose(replace(request, **changes), inputs, tokens, Forecast(1.0, 1, None))


def read(found: diagnosis.Diagnosis) -> str:
    """The page without its scripts, after checks that all of it is there."""
    assert not {name: failure.trace for name, failure in found.failed.items()}
    html = page.page(found)
    assert not {name: failure.trace for name, failure in found.failed.items()}
    found.require_complete()
    parts = re.findall(r'<section aria-labelledby="(\w+)">', html)
    assert {
        "summary",
        "tokens",
        "by_token",
        "where",
        "coherence",
        "range",
        "plan",
        "explore",
        "words",
        "run",
        "sentence",
    } <= {*parts}
    figures = re.findall(r'<figure id="(\w+)">', html)
    assert {"sites", "blocks", "drift", "windows"} <= {*figures} and html.count("data:image/png;base64,") >= len(
        figures
    )
    text = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNaN\b|\binf\b|None</|Traceback", text)
    return text


@pytest.mark.parametrize(("name", "depth", "format"), EVERY if EVERYTHING else TURNS)
def test_every_family_has_its_page(name, depth, format):
    model = random_model(FAMILIES[name](depth))
    found = diagnosed(model, format, windows=2 if depth == 2 or EVERYTHING else 1)
    read(found)
    assert found.plan is not None and found.measured is not None and found.protected is not None
    without, with_plan = found.sentence["recipes"]
    assert len(without["words"]) == len(found.sentence["words"]) == 4 and with_plan["name"] == "the plan"


def test_a_model_of_80_blocks():
    text = read(diagnosed(random_model(FAMILIES["llama"](80)), "bf16"))
    assert re.search(r"blocks \d+ to \d+", text) or "No pair of sites matters" in text


def test_a_vocabulary_of_262_144_tokens():
    options = HEADS | {"vocab_size": 2**18, "sliding_window": 4, "num_hidden_layers": 2}
    read(diagnosed(random_model(Gemma3TextConfig(**options)), "bf16", target="kl"))
