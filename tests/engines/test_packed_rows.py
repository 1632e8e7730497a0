"""Engines whose sequences see those before them in a packed row."""

import numpy as np
import pytest
import torch
from families import OLDER
from test_gap import WINDOWS, engine
from test_suspects import LLAMA
from tiny import random_model
from transformers import GPT2Config, GPTJConfig, LlamaConfig, OPTConfig

from fragility_engines.comparison.compare import explained
from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.signs import begin_rows
from fragility_engines.comparison.slopes import Directions
from fragility_engines.comparison.verdict import judge
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.suspect import Window, logprobs, scores
from fragility_engines.suspects.windows import PACKED, packed

NAME = "sequences that see those before them in a packed row, positions "
COUNTED, RESTARTED = NAME + "counted on", NAME + "from 0"


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


def row(low, windows, restart):
    """Log-probabilities (n, T) of ``windows`` (n, T) by ``low``, in one row with a causal mask over all of it."""
    count, length = windows.shape
    positions = torch.arange(length).repeat(count) if restart else torch.arange(count * length)
    hidden = torch.ones(len(positions), len(positions), dtype=torch.bool).triu(1)
    mask = torch.zeros(hidden.shape, dtype=low.dtype).masked_fill(hidden, torch.finfo(low.dtype).min)
    with torch.no_grad():
        z = low(windows.reshape(1, -1), position_ids=positions[None], attention_mask=mask[None, None]).logits
    found = z[0].float().log_softmax(-1).view(count, length, -1)
    return found[:, :-1].gather(-1, windows[:, 1:, None])[..., 0]


def packs(size, restart, config=LLAMA):
    """The log of native bf16 with ``size`` windows in a row."""
    low = random_model(config).bfloat16()
    found = torch.cat([row(low, part, restart) for part in WINDOWS.split(size)])
    return [Scored(w.numpy(), np.concatenate([[np.nan], x.numpy()])) for w, x in zip(WINDOWS, found)]


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize(("name", "restart"), [(COUNTED, False), (RESTARTED, True)])
def test_rows_that_are_not_told_apart_are_named(model, size, name, restart):
    log = packs(size, restart)
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)))
    gap = measure(model, log, "bf16", seen=directed.see)
    assert begin_rows(gap) == [*range(0, 6, size)]
    found, further = explained(gap, directed)
    verdict = judge(gap, [*found, *further])
    assert verdict.cause.suspect.name == name and not verdict.partial, verdict.line


def test_rows_are_named_at_40_blocks():
    config = LlamaConfig(**(LLAMA.to_dict() | {"num_hidden_layers": 40}))
    model, log = random_model(config), packs(3, False, config)
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)))
    found, further = explained(gap := measure(model, log, "bf16", seen=directed.see), directed)
    assert judge(gap, [*found, *further]).cause.suspect.name == COUNTED


def test_the_trainer_that_packs_its_rows_is_named(model):
    native = engine(lambda window: logprobs(random_model(LLAMA).bfloat16(), window))
    log = packs(3, restart=True)
    directed = Directions(model, native, suspects(model, Facts.of(native, 0)))
    gap = measure(model, native, "bf16", reference=log, seen=directed.see)
    found, further = explained(gap, directed)
    cause = judge(gap, [*found, *further]).cause
    assert cause.suspect.name == RESTARTED and cause.owner == "AGAINST"


TABLES = {  # positions are read from a table, or masks made for the context
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=100, vocab_size=101),
    "gptj": GPTJConfig(n_embd=32, n_layer=2, n_head=2, n_positions=100, rotary_dim=8, vocab_size=101),
    "opt": OPTConfig(
        hidden_size=32, ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=100, vocab_size=101,
    ),
    **{family: OLDER[family] for family in ("codegen", "mpt", "gpt_neo")},
}  # fmt: skip


@pytest.mark.parametrize("family", TABLES)
def test_rows_do_not_go_on_behind_a_context_that_has_an_end(family):
    model = random_model(TABLES[family])
    assert packed(model, [48] * 3, [0]) == [] and packed(model, [51, 50], [0]) == []
    found = packed(model, [48] * 4, [0, 2])
    assert found[0].name == COUNTED
    for suspect in found:
        values = scores(model, [Window(WINDOWS[1], before=WINDOWS[:1])], suspect)[0]
        assert values.isfinite().all(), suspect.name
    if family == "gpt2":
        for suspect, restart in zip(found, (False, True), strict=True):
            values = scores(model, [Window(WINDOWS[1], before=WINDOWS[:1])], suspect)[0].float()
            assert torch.allclose(values, row(model, WINDOWS[:2], restart)[1], atol=1e-4)


def test_a_log_of_single_sequences_has_no_such_suspect(model):
    low = random_model(LLAMA).bfloat16()
    gap = measure(model, engine(lambda window: logprobs(low, window)), "bf16")
    assert begin_rows(gap) == [*range(6)] and packed(model, [48] * 6, begin_rows(gap)) == []


def test_rows_of_many_tokens_are_not_tried(model):
    lengths = [1024] * 4
    assert sum(lengths) == PACKED and packed(model, lengths, [0])
    assert not packed(model, [*lengths, 1], [0])
