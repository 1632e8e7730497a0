"""What fp32 in one part would leave of the rounding: predicted as an emulated pass measures it."""

import numpy as np
import pytest
from test_suspects import LLAMA, SIZES
from tiny import random_model, random_tokens
from transformers import MixtralConfig

from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.remedies import PARTS, Remedy, remedies
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.suspect import logprobs

WINDOWS = random_tokens(4, 48, seed=7, smallest=3)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_every_part_that_the_model_has_is_predicted_and_emulated(config):
    model = random_model(config)
    low = random_model(config).bfloat16()
    log = [Scored(w.numpy(), np.concatenate([[np.nan], logprobs(low, w).numpy()])) for w in WINDOWS]
    gap = measure(model, log, "bf16", probes=8)
    found = {each.part: each for each in remedies(model, log, gap, True)}
    expected = {part for part in PARTS if part != "router" or config is MIXTRAL}
    assert found.keys() == {PARTS[part] for part in expected}
    for each in found.values():
        assert 0 < each.predicted <= 1 and each.words
        if config is LLAMA:  # a hundred tokens; where rounding changes the choice of experts, predictions do not hold
            assert each.emulated == pytest.approx(each.predicted, abs=0.2), each
    assert all(np.isnan(each.emulated) for each in remedies(model, log, gap, False))


def test_what_it_is_worth_is_said_in_words():
    assert [Remedy("the head", left).words for left in (0.5, 0.9, 0.99)] == [
        "worth it", "helps a little", "not worth it",
    ]  # fmt: skip


def test_two_engines_and_rounded_weights_have_no_remedies():
    model = random_model(LLAMA)
    log = [Scored(w.numpy(), np.concatenate([[np.nan], logprobs(model, w).numpy()])) for w in WINDOWS[:1]]
    assert remedies(model, log, measure(model, log, "bf16", probes=1, reference=log), False) == []
