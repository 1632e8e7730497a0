"""The data of the explorer, evaluated by its rule written out here, beside ``Contributions`` and ``Choices``."""

import json
import random
import re

import numpy as np
import pytest
import torch
from explored import choices, contributions, views
from tiny import TINY, random_gpt2
from transformers import LlamaConfig, LlamaForCausalLM

from fragility_adjoint.mixed_precision import Contributions
from fragility_adjoint.predictor import Adjoint
from fragility_lab.explorer import terms
from fragility_lab.explorer.component import Component
from fragility_lab.paths import ASSETS, OUTPUTS
from fragility_quantization.quantized import lower


def gone(term: dict, kept: set[int], flags: dict[str, bool]) -> bool:
    """Whether a term vanishes: the outermost part that is kept decides, or the flags."""
    code = next((code for part, code in term["parts"] if part in kept), None)
    alone, beside = (False, term["stream"]) if code is None else (bool(code & 1), bool(code & 2))
    return (beside if flags["residual"] else alone) or (term["scores"] and flags["scores"])


def predicted(target: dict, kept: set[int], flags: dict[str, bool]) -> float:
    left = [i for i, term in enumerate(target["terms"]) if not gone(term, kept, flags)]
    squares = np.array(target["c2"])[:, left].sum(1)
    return float(np.mean(squares if target["squared"] else squares**0.5))


def added_bytes(view: dict, kept: set[int], flags: dict[str, bool]) -> int:
    total = 0.0
    for group in view["price"]:
        held = [bool(kept & set(o["parts"])) or (flags["residual"] and o["stream"]) for o in group["owners"]]
        total += group["all"] if all(held) else group["some"] if any(held) else 0
    return round(total)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def known_of(model, tokens, target, **how) -> Contributions:
    gradients = "low" if target == "hidden" else "both"
    return Contributions(model, Adjoint(lower(model, **how), model, 2, target=target, gradients=gradients)(tokens))


CASES = {
    "gpt2": (lambda: random_gpt2(TINY), {"recipe": "bf16"}),
    "llama": (llama, {"recipe": "bf16"}),
    "quantized": (llama, {"recipe": "w4a16-g32"}),
    "weights": (lambda: random_gpt2(TINY), {"recipe": "fp8_e4m3", "execution": "weights"}),
}


@pytest.mark.parametrize("target", ["hidden", "kl"])
@pytest.mark.parametrize("case", CASES)
def test_any_plan_has_the_same_prediction_and_price(case, target, tiny_tokens):
    make, how = CASES[case]
    model = make()
    known = known_of(model, tiny_tokens, target, **how)
    view = json.loads(json.dumps(terms.keeping([known])))
    (shown,) = view["targets"]
    possible = [name for name in ("residual", "scores") if name in known.structure.sites]
    draw = random.Random(0)
    for _ in range(40):
        kept = set(draw.sample(range(len(view["paths"])), draw.choice([0, 1, 3, 8])))
        flags = {name: name in possible and draw.random() < 0.5 for name in ("residual", "scores")}
        sites = [name for name, on in flags.items() if on]
        plan = known.keep([view["paths"][part] for part in kept], sites=sites)
        assert predicted(shown, kept, flags) == pytest.approx(plan.predicted, rel=1e-5)
        assert added_bytes(view, kept, flags) == plan.parameter_bytes
        assert view["stream_bytes"] * flags["residual"] == plan.activation_bytes


@pytest.mark.parametrize("target", [0, 1])
def test_best_plans_are_those_of_the_library(target):
    known, (view, _) = contributions()[target], views()
    best = view["targets"][target]["best"]
    for unit in ("blocks", "modules"):
        assert len(best[unit]) == len(getattr(known.structure, unit))
        for count in range(len(best[unit]) + 1):
            plan = known.plan(count, unit)
            assert {view["paths"][part] for part in best[unit][:count]} == set(plan.modules)
    for count, names in enumerate(best["sites"]):
        assert known.keep(sites=names).predicted == known.plan(count, "sites").predicted


def test_best_choices_are_those_within_budgets_of_bits_and_those_of_the_curve():
    known = choices()
    curve = known.curve(terms.BUDGETS)
    found = known.best(terms.BUDGETS)
    most = known.bits.max(1).sum() / known.weights
    within = [known.within_bits(bits * (1 + 1e-9)) for bits in np.linspace(known.least_bits, most, terms.BUDGETS)]
    assert found == list(dict.fromkeys(within)) and len(found) > 2
    assert views()[1]["best"] == [list(choice.schemes) for choice in found]
    assert [known.mean_bits(choice) for choice in found] == pytest.approx(curve.bits.tolist())
    assert [known.predict(choice).mean() for choice in found] == pytest.approx(curve.predicted.tolist())


def test_contributions_of_the_page_add_up_to_the_predicted_error():
    for known, target in zip(contributions(), views()[0]["targets"], strict=True):
        assert np.mean(target["c2"], 0).sum() == pytest.approx(known.relative.sum(), rel=1e-5)


def test_component_stands_alone_and_escapes_what_it_holds():
    html = Component(*views()).html
    assert not re.search(r"(src|href)=|@import|url\(|https?://(?!www\.w3\.org)", html)
    assert html.count("<script") == html.count("</script>") == 2
    evil = [view | {"recipe": "</script><script>alert(1)</script>"} for view in views()]
    assert "alert(1)</script>" not in Component(*evil).html
    assert "block 1" in html.partition("<script")[0]  # read where no script runs


def test_the_committed_page_is_made_by_the_committed_script_and_style():
    page = (OUTPUTS / "embedded" / "explorer.html").read_text(encoding="utf-8")
    for name in ("explorer.js", "explorer.css"):
        assert (ASSETS / "explorer" / name).read_text(encoding="utf-8").strip() in page, (
            "run `make explorer` and commit"
        )
