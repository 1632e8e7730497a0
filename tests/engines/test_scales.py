"""Layers whose scale is off are named with the factor, far below the size of rounding; and recipes that nobody said."""

import re
from functools import cache

import numpy as np
import pytest
import torch
from test_catalogue import WINDOWS, config_of, ground_of, quieted
from tiny import TINY, random_gpt2, random_model, random_tokens
from transformers import Gemma3TextConfig, MixtralConfig

from fragility_core.models.paths import is_norm
from fragility_engines.comparison.compare import explained
from fragility_engines.comparison.fitting import fitted
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.scoring import STANDS_OUT, outstanding, scored, scores
from fragility_engines.comparison.slopes import Directions, screened
from fragility_engines.comparison.verdict import judge
from fragility_engines.logs.sequences import Scored
from fragility_engines.proving.ground import Ground, given
from fragility_engines.proving.variations import Variation, emulated, native
from fragility_engines.suspects.recipes import COPY, RUN, recipes
from fragility_engines.suspects.scales import Scale, scaled, scales
from fragility_engines.suspects.suspect import Suspect, logprobs
from fragility_quantization.recipes import get_recipe

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 64, "num_hidden_layers": 3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "gpt2": lambda: random_gpt2(TINY),  # biases, Conv1D, a tied head
    "llama": lambda: random_model(config_of("plain", 40)),
    "gemma3": lambda: random_model(Gemma3TextConfig(head_dim=8, **SMALL)),  # 1 + weight, norms after branches
    "mixtral": lambda: random_model(MixtralConfig(num_local_experts=4, experts_implementation="eager", **SMALL)),
}


@cache
def gemma_of(depth):
    model = quieted(random_model(Gemma3TextConfig(head_dim=8, **SMALL | {"num_hidden_layers": depth})), depth)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.mul_(4.0)  # as large as in trained models
    return Ground(model, random_tokens(12, 48, seed=5, smallest=3), 0)


def times(factor, *paths):
    """An engine in bf16 whose weights at ``paths`` are ``factor`` times the model's."""

    def change(model):
        for path in paths:
            model.get_parameter(f"{path}.weight").mul_(factor)

    return native(change)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_derivatives_by_the_scales(family):
    """As differences of passes have them, for layers of all parts of the model, and for groups by sums."""
    model = FAMILIES[family]().double()
    sequences = [Scored(window.numpy(), np.full(16, -1.0)) for window in WINDOWS[:2, :16]]
    gap = measure(FAMILIES[family](), sequences, "bf16", probes=1)
    weights = np.random.default_rng(0).normal(size=(len(gap.tokens), 2))
    known = scales(model)
    paths = [scale.layers[0] for scale in known if len(scale.layers) == 1]
    found = scores(model, gap, sequences, paths, weights)

    def total(layers, by):
        with scaled(layers, by, model):
            return weights.T @ torch.cat([logprobs(model, window) for window in WINDOWS[:2, :16]]).numpy()

    size = np.abs(found).max()
    for scale in known[:: max(1, len(known) // 10)] + known[-4:]:
        slope = (total(scale.layers, 1e-4) - total(scale.layers, -1e-4)) / 2e-4
        # suspects read logits in fp32
        own = found[:, [paths.index(path) for path in scale.layers]].sum((0, 1))
        np.testing.assert_allclose(own, slope, rtol=1e-2, atol=5e-3 * size)
    assert size > 0.1 and not any(p.grad is not None for p in model.parameters())


def test_a_scale_is_that_of_the_weights():
    """The bias of a layer stays as it is, and so does the model after the context."""
    model, window = random_gpt2(TINY), WINDOWS[0]
    before = logprobs(model, window)
    for path in ("transformer.h.1.mlp.c_fc", "transformer.h.0.ln_1"):
        with scaled((path,), 0.25, model):
            found = logprobs(model, window)
        weight = model.get_parameter(f"{path}.weight")
        with torch.no_grad():
            kept = weight.clone()
            weight.mul_(1.25)
            torch.testing.assert_close(found, logprobs(model, window), rtol=0, atol=2e-6)
            assert (found - before).abs().max() > 1e-4
            weight.copy_(kept)
    assert torch.equal(logprobs(model, window), before)


NUMBER = r"[\d.]+"
POST, OUT, DOWN = "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"
FAULTS = {
    POST: (1.15, [POST]),
    f"{OUT} or self_attn.v_proj": (0.8, [OUT]),
    f"{DOWN} or mlp.up_proj": (1.4, [DOWN]),
    "the norms": (0.9, ["input_layernorm", POST]),
}


@pytest.mark.parametrize(("fault", "depth"), [*((fault, 2) for fault in FAULTS), ("the norms", 40)])
def test_a_layer_with_another_scale_is_named_with_the_factor(fault, depth):
    factor, paths = FAULTS[fault]
    ground, block = ground_of("plain", depth), f"model.layers.{depth // 2}"
    _, verdict = ground.judged(Variation(fault, times(factor, *(f"{block}.{path}" for path in paths))))
    assert verdict.kind == "more" and verdict.cause is not None and not verdict.partial, verdict.line
    name = f"{fault} of {block}" if fault == "the norms" else " or ".join(f"{block}.{x}" for x in fault.split(" or "))
    found = re.fullmatch(rf"the scale of {name}, ([\d.]+) times its own", verdict.cause.suspect.name)
    assert found and float(found[1]) == pytest.approx(factor, rel=0.05), verdict.line


@pytest.mark.parametrize(("depth", "factor"), [(2, 1.06), (40, 1.25)])
@pytest.mark.parametrize("stored", [False, True], ids=["1 + weight", "the stored weight"])
def test_norms_that_multiply_by_one_more_than_their_weight_have_two_scales(depth, factor, stored):
    """A factor of 1 + weight is another fault than one of the weights in the file."""
    block = f"model.layers.{depth // 2}"

    def change(low):
        for module in low.get_submodule(block).modules():
            if is_norm(module):
                module.weight.copy_(module.weight * factor + (0.0 if stored else factor - 1))

    _, verdict = gemma_of(depth).judged(Variation("norms", native(change)))
    found = re.fullmatch(rf"the scale of (.*), ({NUMBER}) times its own", verdict.cause.suspect.name)
    assert found and float(found[2]) == pytest.approx(factor, rel=0.05), verdict.line
    assert found[1] == f"the {'stored weights of the ' if stored else ''}norms of {block}", verdict.line
    assert f", {found[2]} times its own, explains" in verdict.line


def test_a_layer_of_all_blocks_is_named():
    ground = ground_of("plain", 2)
    paths = [f"model.layers.{block}.self_attn.q_proj" for block in range(2)]
    _, verdict = ground.judged(Variation("all", times(1.6, *paths)))
    # a scale of all queries is one of attention, which is a number of the model
    assert verdict.cause.suspect.name.startswith("another scale of attention, 1.6")
    paths = [f"model.layers.{block}.mlp.down_proj" for block in range(2)]
    _, verdict = ground.judged(Variation("all", times(1.2, *paths)))
    before, after = "the scale of mlp.down_proj of all blocks or mlp.up_proj of all blocks, ", " times its own"
    name = verdict.cause.suspect.name
    assert name.startswith(before) and float(name[len(before) : -len(after)]) == pytest.approx(1.2, rel=0.02)


def test_a_scale_below_the_size_of_rounding_is_named():
    """The gap is within what rounding alone gives, and twenty windows tell it apart all the same."""
    model = quieted(random_model(config_of("plain", 2)), 2)
    ground = Ground(model, random_tokens(20, 48, seed=5, smallest=3), 0)
    path = "model.layers.1.post_attention_layernorm"
    gap, verdict = ground.judged(Variation("small", times(1.007, path)))
    assert gap.ratio[0] < 1.25, "a test of what is hidden in rounding needs a gap of its size"
    assert verdict.kind == "more" and re.search(r"scale of model\.layers\.1\.\S*(norm|mlp)", verdict.line)


@pytest.mark.parametrize(("depth", "engines"), [(2, 12), (40, 3)])
def test_rounding_makes_no_scale_stand_out(depth, engines):
    """Over all scales of the model, for engines that round otherwise."""
    ground, found = ground_of("plain", depth), []
    for seed in range(engines):
        rows = ground.gap.tokens
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], len(rows))
        change = rows.emulated + signs * np.random.default_rng(seed + 99).permutation(rows.rounding)
        gap = given(ground.gap, (change + rows.exact).to_numpy())
        found += outstanding(ground.model, gap, ground.sequences)
        assert not scored(gap, ground.directed)
    assert len(found) <= 1, f"{STANDS_OUT} standard deviations are rare"


def test_of_two_engines_the_one_with_the_scale_is_named():
    ground = ground_of("plain", 2)
    path = "model.layers.1.mlp.down_proj"
    right, wrong = (run(ground.model, WINDOWS).numpy() for run in (native(), times(1.3, path)))
    logs = [
        [Scored(w.numpy(), np.concatenate([[np.nan], row])) for w, row in zip(WINDOWS, each)] for each in (right, wrong)
    ]
    for first, second, owner in ((*logs, "AGAINST"), (*logs[::-1], "LOG")):
        gap = measure(ground.model, first, "bf16", reference=second)
        found, further = explained(gap, Directions(ground.model, first, ground.directed.tried))
        line = judge(gap, [*found, *further]).line
        assert re.search(rf"{path} or .*, 1\.(29|3\d?) times its own, in {owner} explains (9|100)", line), line


@cache
def long_texts(width):
    model = quieted(random_model(config_of("plain", 2, max_position_embeddings=256, head_dim=width)), 2)
    return Ground(model, random_tokens(6, 160, seed=11, smallest=3), 0)


@pytest.mark.parametrize(
    ("recipe", "depth"),
    [("kv-fp8", 2), ("kv-q4_0", 2), ("w8a8-int8", 2), ("fp8-dynamic", 2), ("w4a16-g128", 2), ("w4a16-g128", 40)],
)
def test_a_recipe_that_the_engine_does_not_say_is_named(recipe, depth):
    ground = long_texts(32 if recipe == "kv-q4_0" else 8) if depth == 2 else ground_of("plain", depth)
    _, verdict = ground.judged(Variation(recipe, emulated(recipe)))
    assert verdict.kind == "more" and verdict.cause is not None, verdict.line
    name, whole = verdict.cause.suspect.name, verdict.cause.whole
    same = "w8a" if recipe == "w8a8-int8" else recipe  # beside rounded weights those of inputs may not be seen
    assert name.startswith(f"the recipe {same}") and name.endswith("in place of bf16"), verdict.line
    assert 0.8 < whole < 1.25 or not verdict.cause.suspect.rounds
    assert not verdict.cause.suspect.rounds or f"must give {1 / whole:.2f} times this gap" in verdict.line


def test_the_recipe_that_the_engine_says_is_no_suspect():
    model = random_gpt2(TINY)
    every = [each.name for each in recipes(model, get_recipe("bf16"))]
    own = [each.name for each in recipes(model, get_recipe("kv-fp8"))]
    assert len(every) == len(RUN) - 1 == len(own) + 1 and not any("kv-fp8 in place" in name for name in own)
    assert not any("kv-q4_0" in name for name in every)  # its heads are no whole blocks


def test_recipes_are_not_tried_without_memory_for_a_copy(monkeypatch):
    model = random_gpt2(TINY)
    takes = COPY * sum(p.numel() for p in model.parameters())
    for free, count in ((takes - 1, 0), (takes + 1, len(RUN) - 1), (None, len(RUN) - 1)):  # its heads take no kv-q4_0
        monkeypatch.setattr("fragility_engines.suspects.recipes.free_memory", lambda device, free=free: free)
        assert len(recipes(model, get_recipe("bf16"))) == count


def test_a_number_beside_values_that_do_the_same_is_fitted():
    """The best two values leave a gap alike, with worse ones at both sides: they bracket nothing."""
    ground = ground_of("plain", 2)
    gap = given(ground.gap, native(lambda model: None, "eager")(ground.model, WINDOWS).numpy().ravel())
    plateau = Plateau(next(each for each in ground.directed.numbers if each.name.startswith("epsilon")))
    (found,) = fitted(gap, screened(gap), plateau)
    assert found.suspect.name.startswith("epsilon")


class Plateau:
    """Directions in which the values of a ``number`` explain a part of the gap, and two in the middle the same."""

    def __init__(self, number):
        self.numbers = [number]
        middle = len(number.usual) // 2
        self.parts = {each.name: 0.2 for each in number.usual} | {
            each.name: 0.5 for each in number.usual[middle : middle + 2]
        }

    def __call__(self, gap: Gap, suspect: Suspect) -> np.ndarray:
        return gap.tokens.change.to_numpy() * self.parts.get(suspect.name, 0.5)


def test_names_of_scales():
    model = random_model(config_of("plain", 2))
    names = [scale.name for scale in scales(model)]
    assert len(set(names)) == len(names)
    assert {
        "model.embed_tokens",
        "lm_head",
        "model.norm",
        "the norms of model.layers.1",
        "mlp.up_proj of all blocks",
    } < {*names}
    assert Scale("x", ("y",)).at(0.875).name == "the scale of x, 0.875 times its own"
