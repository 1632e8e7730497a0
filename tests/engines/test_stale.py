"""An engine that has the weights of another checkpoint, all or some of them, at 2 and 40 blocks."""

import copy

import numpy as np
import pytest
import torch
from test_catalogue import DEPTHS, WINDOWS
from test_main import log
from test_structure_suspects import SIZES, model_of
from tiny import random_model
from torch import nn
from transformers import DynamicCache, LlamaConfig

from fragility_engines.__main__ import main
from fragility_engines.comparison import compare
from fragility_engines.comparison.measuring import measure
from fragility_engines.comparison.slopes import Directions
from fragility_engines.comparison.verdict import judge, search
from fragility_engines.logs.sequences import Scored
from fragility_engines.proving.ground import Ground
from fragility_engines.proving.variations import Variation, native
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.stale import Checkpoint
from fragility_engines.suspects.suspect import logprobs, score
from fragility_lab.inputs import checkpoints
from fragility_offload import memory
from fragility_quantization.recipes import get_recipe

NAME = "step-7"


def trained(model, size):
    """A copy of ``model`` whose parameters are otherwise by about ``size`` of their own, as by a training."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    for parameter in other.parameters():
        scale = size * parameter.square().mean().sqrt()
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return other


def ground_of(model, size):
    """A ground on which engines may have the weights of a checkpoint, and the model of that checkpoint."""
    other = trained(model, size)
    return Ground(model, WINDOWS, 0, Checkpoint.of(NAME, model, other, get_recipe("bf16"))), other


@pytest.fixture(scope="module", params=DEPTHS)
def grounds(request):
    return ground_of(model_of("qwen2", request.param), 0.05)


def having(other, chosen):
    """The engine of bf16 with the parameters of ``other`` where ``chosen`` says so of their path."""

    def change(low):
        theirs = dict(other.named_parameters())
        for path, parameter in low.named_parameters():
            if chosen(path):
                parameter.data = theirs[path].to(parameter.dtype)

    return Variation(NAME, native(change))


PARTS = {
    "the checkpoint {name}": lambda path: True,
    "model.layers.1 from the checkpoint {name}": lambda path: "layers.1." in path,
    "self_attn.q_proj of all blocks from the checkpoint {name}": lambda path: "q_proj" in path,
    "self_attn of all blocks from the checkpoint {name}": lambda path: "self_attn" in path,
    "lm_head from the checkpoint {name}": lambda path: "lm_head" in path,
    "model.embed_tokens from the checkpoint {name}": lambda path: "embed_tokens" in path,
}


@pytest.mark.parametrize("cause", PARTS)
def test_weights_of_another_checkpoint_are_named(grounds, cause):
    ground, other = grounds
    _, verdict = ground.judged(having(other, PARTS[cause]))
    assert verdict.cause is not None and verdict.cause.suspect.name == cause.format(name=NAME), verdict.line
    assert not verdict.partial, verdict.line


def test_a_stage_of_a_pipeline_is_named():
    """Half of the blocks, or a quarter, has kept its weights."""
    ground, other = ground_of(model_of("qwen2", 40), 0.05)
    for first, last in ((20, 39), (10, 19)):
        blocks = {f"model.layers.{block}." for block in range(first, last + 1)}
        engine = having(other, lambda path, blocks=blocks: any(path.startswith(block) for block in blocks))
        _, verdict = ground.judged(engine)
        name = f"model.layers.{first} to model.layers.{last} from the checkpoint {NAME}"
        assert verdict.cause is not None and verdict.cause.suspect.name == name, verdict.line


@pytest.mark.parametrize(("new_first", "where"), [(False, "before position 25"), (True, "from position 25 on")])
def test_weights_that_came_while_the_engine_ran_are_named_with_the_position(new_first, where):
    """As of a policy that is updated, or set back, in flight: the first keys and values are those of other weights."""
    model = model_of("qwen2", 2)
    ground, other = ground_of(model, 0.05)

    def run(model, windows):
        new, old, found = copy.deepcopy(model).bfloat16(), copy.deepcopy(other).bfloat16(), []
        first, second = (new, old) if new_first else (old, new)
        for window in windows:
            cache = DynamicCache(config=model.config)
            parts = [
                low(part[None], past_key_values=cache).logits[0]
                for low, part in ((first, window[:24]), (second, window[24:]))
            ]
            z = torch.cat(parts).float().log_softmax(-1)[:-1]
            found.append(z.gather(-1, window[1:, None])[:, 0])
        return torch.stack(found)

    with torch.no_grad():
        _, verdict = ground.judged(Variation(NAME, run))
    assert f"The checkpoint {NAME} explains" in verdict.line and f"of it {where}:" in verdict.line, verdict.line


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prefix_cache_of_old_weights_is_named(depth):
    """Answers are scored, of which the prompts were read by the weights before."""
    model, prompt = model_of("qwen2", depth), 20
    other = trained(model, 0.1)
    new, old, log = copy.deepcopy(model).bfloat16(), copy.deepcopy(other).bfloat16(), []
    for window in WINDOWS:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            old(window[None, :prompt], past_key_values=cache)
            cache.crop(-1)
            z = new(window[None, prompt - 1 :], past_key_values=cache).logits[0, :-1].float().log_softmax(-1)
        found = z.gather(-1, window[prompt:, None])[:, 0]
        log.append(Scored(window.numpy(), np.concatenate([np.full(prompt, np.nan), found])))
    known = Checkpoint.of(NAME, model, other, get_recipe("bf16"))
    directed = Directions(model, log, suspects(model, Facts.of(log, 0)), known)
    found, further = search(measure(model, log, "bf16", seen=directed.see), directed)
    verdict = judge(measure(model, log, "bf16"), [*found, *further])
    assert f"Keys and values of the prompt from the checkpoint {NAME} explains" in verdict.line, verdict.line


def test_without_a_prompt_there_is_no_prefix_cache():
    model = model_of("qwen2", 2)
    known = Checkpoint.of(NAME, model, trained(model, 0.1), get_recipe("bf16"))
    suspect = next(each for each in known.suspects() if each.run is not None)
    assert score(model, WINDOWS[0], suspect).isnan().all() and score(model, WINDOWS[0], suspect, 9).isfinite().all()


def test_weights_of_the_same_places_are_one_suspect():
    """As of an adapter of queries alone."""
    model = model_of("qwen2", 2)
    other = copy.deepcopy(model)
    for block in other.model.layers:
        block.self_attn.q_proj.weight.data *= 1.1
    known = Checkpoint.of(NAME, model, other, get_recipe("bf16"))
    names = [suspect.name for suspect in known.suspects()]
    blocks = [f"model.layers.{block} from the checkpoint {NAME}" for block in (0, 1)]
    prompt = f"keys and values of the prompt from the checkpoint {NAME}"
    assert names == [f"the checkpoint {NAME}", prompt, *blocks]


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_a_multiple_of_the_difference_is_named(grounds, factor):
    """An adapter that has half of its scale, that is merged twice, or three times."""
    ground, other = grounds
    engine = copy.deepcopy(ground.model)
    for mine, own, theirs in zip(engine.parameters(), ground.model.parameters(), other.parameters(), strict=True):
        mine.data = theirs + factor * (own - theirs)
    _, verdict = ground.judged(having(engine, lambda path: True))
    assert verdict.cause is not None, verdict.line
    times, _, rest = verdict.cause.suspect.name.partition(" ")
    assert rest == f"times the model's difference from the checkpoint {NAME}", verdict.line
    assert float(times) == pytest.approx(factor, rel=0.05), verdict.line


def test_an_engine_with_the_right_weights_is_rounding(grounds):
    _, verdict = grounds[0].judged(Variation("bf16", native(lambda low: None)))
    assert verdict.kind == "rounding" and verdict.cause is None, verdict.line


@pytest.mark.parametrize(("depth", "size"), [(2, 0.002), (40, 0.006)])
def test_weights_are_seen_whose_change_is_about_that_of_rounding(depth, size):
    """As after a few steps: a gap of 1.6 times the predicted one is a change of 1.25 times rounding."""
    ground, other = ground_of(model_of("qwen2", depth), size)
    gap, verdict = ground.judged(having(other, lambda path: True))
    assert gap.ratio[0] < 1.6 and verdict.cause.suspect.name == f"the checkpoint {NAME}", verdict.line
    assert not verdict.alike and not verdict.partial


def test_a_step_below_the_rounding_of_weights_is_seen_by_what_it_rounds_to():
    """Each weight lies in the middle of two numbers of bf16, and the step decides which of them it becomes."""
    model = model_of("qwen2", 2)
    for parameter in model.parameters():
        grid = parameter.bfloat16().float()
        parameter.data = grid + 2.0**-8 * torch.ldexp(torch.ones_like(grid), torch.frexp(grid).exponent - 1)
    ground, other = ground_of(model, 1e-5)
    _, verdict = ground.judged(having(other, lambda path: True))
    assert verdict.cause is not None and verdict.cause.suspect.name == f"the checkpoint {NAME}", verdict.line
    assert not verdict.partial, verdict.line


@pytest.mark.parametrize("both", [True, False])
def test_a_tied_head_may_be_new_where_the_embedding_is_not(both):
    model = random_model(LlamaConfig(**SIZES | {"tie_word_embeddings": True}, num_hidden_layers=2))
    ground, other = ground_of(model, 0.1)
    names = {suspect.name for suspect in ground.other.suspects()}
    assert {f"{place} from the checkpoint {NAME}" for place in ("lm_head", "model.embed_tokens")} < names

    def change(low):
        theirs = nn.Parameter(other.lm_head.weight.to(low.lm_head.weight.dtype))
        low.lm_head.weight = theirs
        if both:
            low.model.embed_tokens.weight = theirs

    _, verdict = ground.judged(Variation(NAME, native(change)))
    place = "model.embed_tokens and lm_head" if both else "lm_head"
    assert verdict.cause.suspect.name == f"{place} from the checkpoint {NAME}", verdict.line


def saved(folder, model):
    model.save_pretrained(folder)
    return str(folder)


def test_a_command_names_the_checkpoint(tmp_path, outputs, capsys):
    model = random_model(LlamaConfig(**SIZES, num_hidden_layers=2))
    other = trained(model, 0.1)
    path = log(tmp_path / "log.jsonl", WINDOWS, lambda w: logprobs(copy.deepcopy(other).bfloat16(), w))
    place, earlier = saved(tmp_path / "now", model), saved(tmp_path / NAME, other)
    main(["--log", path, "--model", place])
    assert "give them as CHECKPOINT= and compare again" in capsys.readouterr().out
    main(["--log", path, "--model", place, "--checkpoint", earlier])
    printed = capsys.readouterr().out
    assert f"The checkpoint {NAME} explains" in printed and "CHECKPOINT=" not in printed


def test_of_two_engines_that_one_is_named_which_has_the_checkpoint(tmp_path, outputs, capsys):
    """A trainer, and an engine that still has its first weights."""
    model = random_model(LlamaConfig(**SIZES, num_hidden_layers=2))
    other = trained(model, 0.1)
    runs = {name: copy.deepcopy(run).bfloat16() for name, run in (("engine", other), ("trainer", model))}
    engine = log(tmp_path / "engine.jsonl", WINDOWS, lambda w: logprobs(runs["engine"], w))
    trainer = log(tmp_path / "trainer.jsonl", WINDOWS, lambda w: logprobs(runs["trainer"], w))
    place, earlier = saved(tmp_path / "now", model), saved(tmp_path / NAME, other)
    for logs, owner in (((engine, trainer), "LOG (engine.jsonl)"), ((trainer, engine), "AGAINST (engine.jsonl)")):
        main(["--log", logs[0], "--against", logs[1], "--model", place, "--checkpoint", earlier])
        first = capsys.readouterr().out.splitlines()[0]
        assert f"The checkpoint {NAME}" in first and owner in first, first


def test_an_adapter_merged_twice_has_its_owner_and_no_older_checkpoint():
    """The engine has twice the difference: it goes away from the checkpoint, not to it. Its name may have braces."""
    model = model_of("qwen2", 2)
    other = trained(model, 0.02)
    engine = copy.deepcopy(model)
    for mine, theirs in zip(engine.parameters(), other.parameters(), strict=True):
        mine.data = theirs + 2.0 * (mine - theirs)
    own, right = (
        [Scored(w.numpy(), np.concatenate([[np.nan], logprobs(low, w).numpy()])) for w in WINDOWS]
        for low in (engine.bfloat16(), copy.deepcopy(model).bfloat16())
    )
    checkpoint = Checkpoint.of("step-{7}", model, other, get_recipe("bf16"))
    for logs, owner in (((own, right), "LOG"), ((right, own), "AGAINST")):
        directed = Directions(model, logs[0], (), checkpoint)
        found, further = compare.explained(measure(model, logs[0], "bf16", reference=logs[1]), directed)
        cause = judge(measure(model, logs[0], "bf16", reference=logs[1]), [*found, *further]).cause
        times, _, rest = cause.suspect.name.partition(" ")
        assert rest == "times the model's difference from the checkpoint step-{7}" and cause.owner == owner
        assert float(times) == pytest.approx(2.0, rel=0.05)


def test_a_comparison_that_memory_cannot_hold_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    """Another checkpoint is held beside the model, in fp32."""
    model = random_model(LlamaConfig(**SIZES, num_hidden_layers=2))
    now, earlier = saved(tmp_path / "now", model), saved(tmp_path / NAME, trained(model, 0.1))
    path = log(tmp_path / "log.jsonl", WINDOWS, lambda w: logprobs(model, w))
    monkeypatch.setattr(checkpoints, "load_model", None)
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    taken = []
    for given in ([], ["--checkpoint", earlier]):
        with pytest.raises(SystemExit, match=r"take a smaller model, shorter sequences or a larger machine$"):
            main(["--log", path, "--model", now, *given])
        monkeypatch.setattr(compare, "require_room", lambda what, takes, *given: taken.append(takes))
        with pytest.raises(TypeError):  # the weights would be read now
            main(["--log", path, "--model", now, *given])
        monkeypatch.setattr(compare, "require_room", memory.require_room)
    assert taken[1] - taken[0] == 4 * model.num_parameters() < taken[0]


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    model = random_model(LlamaConfig(**SIZES, num_hidden_layers=2))
    now = saved(tmp_path / "now", model)
    path = log(tmp_path / "log.jsonl", WINDOWS, lambda w: logprobs(model, w))
    wider = random_model(LlamaConfig(**(SIZES | {"intermediate_size": 96}), num_hidden_layers=2))
    scaled = random_model(LlamaConfig(**SIZES, num_hidden_layers=2, rms_norm_eps=1e-3))
    for other, said in (
        (now, "must have other weights than MODEL once bf16 has rounded both, got the same in now"),
        (saved(tmp_path / "wider", wider), "got other settings, intermediate_size (96 and 48)"),
        (saved(tmp_path / "scaled", scaled), "got other settings, rms_norm_eps"),
        (str(tmp_path / "absent"), "absent"),
        ("embedded", "got other settings, model_type (gpt2 and llama): give"),
    ):
        with pytest.raises(SystemExit, match="make compare: ") as ended:
            main(["--log", path, "--model", now, "--checkpoint", other])
        assert said in str(ended.value)


def test_other_parameters_are_refused():
    model = random_model(LlamaConfig(**SIZES, num_hidden_layers=2))
    deeper = random_model(LlamaConfig(**SIZES, num_hidden_layers=3))
    with pytest.raises(ValueError, match="got step-7 with another model.layers.2.input_layernorm.weight"):
        Checkpoint.of(NAME, model, deeper, get_recipe("bf16"))
