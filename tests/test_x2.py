"""X2: ratios with intervals, changed tokens, single layers and plans against passes made by hand."""

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from tiny import TINY, random_gpt2

from fragility_core.adjoint.flips import changed_share
from fragility_core.arithmetic.operands import linear_weights, owner, rounded_weight
from fragility_core.arithmetic.recipes import LINEAR, get_recipe
from fragility_lab.experiments import x2
from fragility_lab.reporting import figures_x2


@pytest.fixture(scope="module")
def setting():
    tokens = torch.randint(TINY.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    return x2.Setting(random_gpt2(TINY), tokens, probes=4)


@pytest.mark.parametrize("deviation", [0.01, 0.3, 2.0])
def test_two_tokens_change_places_as_often_as_a_normal_difference_is_below_zero(deviation):
    margins = torch.linspace(0, 3, 2000)
    logits = torch.stack([margins, torch.zeros_like(margins)], -1)
    want = ndtr(-margins.double().numpy() / deviation).mean()
    assert changed_share(logits, deviation) == pytest.approx(want, abs=2e-3)
    assert changed_share(logits, deviation) == changed_share(logits, deviation)
    assert changed_share(torch.randn(50, 20).sort().values * 100, 0.0) == 0


def test_rounding_keeps_the_order_but_for_ties():
    """Of two logits that bf16 takes for one, the first counts."""
    tied = torch.tensor([[20.01, 20.0], [20.0, 20.01]])
    bf16 = get_recipe("bf16").kernels
    assert changed_share(tied[:1], 0.0, bf16) == 0 and changed_share(tied[1:], 0.0, bf16) == 1
    assert changed_share(torch.tensor([[20.2, 20.0]]), 0.0, bf16) == 0


def test_the_interval_of_a_ratio_covers_it():
    """Of pairs with a known ratio of means, 95 % of the intervals hold it."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        size = generator.uniform(1, 2, 12)
        found = x2.ratio(1.2 * size * generator.normal(1, 0.1, 12), size * generator.normal(1, 0.1, 12))
        held += found["low"] < 1.2 < found["high"]
    assert 0.91 < held / 400 < 0.98
    assert np.isnan(x2.ratio(np.ones(1), np.ones(1))["low"])


def test_one_layer_alone_is_quantized(setting):
    rows = x2.layer_table(setting, ["w4a16-g32"])
    by_hand = random_gpt2(TINY)
    path = "transformer.h.1.mlp.c_fc.weight"
    weight = linear_weights(by_hand)[path]
    weight.data = rounded_weight(by_hand, path, weight.data, LINEAR["w4a16-g32"].weights)
    row = rows[rows.layer == owner(path)].iloc[0]
    passes = (x2.Setting(model, setting.windows).exact for model in (setting.model, by_hand))
    exact, changed = ([seen.logits[0] for seen in found] for found in passes)
    want = np.mean([
        float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1).mean()) for a, b in zip(exact, changed)
    ])  # fmt: skip
    assert len(rows) == len(linear_weights(by_hand)) and row.measured == pytest.approx(want, rel=0.02)
    agreement = x2.layer_agreement(rows)
    assert agreement.spearman.item() > 0.5 and 0.3 < agreement["median"].item() < 1.5
    assert figures_x2.x2_layers(rows).get_xlabel() == "predicted KL (nats)"


def test_recipes_and_plans_have_the_error_that_was_predicted(setting):
    table = x2.recipe_table(setting, ["bf16", "w8a16-g32"])
    assert set(table.quantity) == set(x2.QUANTITIES) and len(table) == 6
    divergences = table[table.quantity == "kl"]
    assert divergences.ratio.between(0.6, 1.8).all()  # one draw of a small model
    assert len(figures_x2.x2_recipes(table).get_yticks()) == 2
    plans = x2.plan_table(setting, [["w4a16-g32", "w8a16-g32", "bf16"]], 3)
    best, chance = (plans[plans.chosen_by == name] for name in ("prediction", "chance"))
    assert (best.measured.to_numpy() <= 1.1 * chance.measured.to_numpy()).all() and best.ratio.between(0.5, 2).all()
    assert (chance.bits.to_numpy() <= best.bits.to_numpy() + 1).all()
    assert figures_x2.x2_plans(plans).get_xlabel() == "bits a weight"
