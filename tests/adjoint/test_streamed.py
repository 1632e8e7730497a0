"""Offloaded models give what whole models give, bit for bit, with one part in memory at a time."""

import json
import re
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY, random_gpt2
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    OpenAIGPTConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.predictor import Adjoint
from fragility_core.surrogates.monitor import Monitor
from fragility_lab import diagnosis
from fragility_lab.diagnosis import needs, streaming
from fragility_lab.diagnosis.given import load_rounded
from fragility_lab.diagnosis.sections import command
from fragility_lab.inputs.checkpoints import load_model
from fragility_lab.inputs.offloaded import load_offloaded, on_meta
from fragility_lab.measurement.comparison import observe_each
from fragility_lab.paths import CHECKPOINTS
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.presence import entries, loaded, source_of
from fragility_offload.files import Checkpoint, open_offloaded
from fragility_offload.lockstep import barrier, side_by_side
from fragility_offload.memory import within_limits
from fragility_offload.offloaded import (
    is_offloaded,
    load_when_running,
    offloaded_parameter,
    parts,
    return_freed_memory,
)
from fragility_quantization.quantized import lower

BASE = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "gpt2": TINY,  # its head is tied to its embedding
    "llama": LlamaConfig(**BASE),
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=16, **BASE),  # gated, grouped queries, norms of heads
}
PASSES = [
    ("bf16", "auto", "sdpa", {}),
    ("fp16", "auto", OBSERVED_EAGER, {"probes": 2}),
    ("fp8_e4m3", "auto", "eager", {"probes": 2, "target": "flips"}),
    ("w4a16-g32", "auto", "sdpa", {"probes": 2, "target": "kl", "gradients": "both"}),
    ("w4a16-g32", "weights", "sdpa", {"probes": 2}),
    ("w8a8-int8", "auto", OBSERVED_EAGER, {"probes": 2, "target": "logprob", "gradients": "fp32"}),
    ("kv-fp8", "auto", "sdpa", {"probes": 2}),
]


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """A whole model and an offloaded one, from the same shards."""
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param]
    if request.param == "gpt2":
        model = random_gpt2(config)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1 + 0.4 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 3
    whole = load_model(str(folder), "cpu", AutoModelForCausalLM)
    return whole, load_offloaded(str(folder), "cpu")


def assert_same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one, other, check_exact=True)


@pytest.mark.parametrize(("recipe", "execution", "attention", "options"), PASSES)
def test_an_estimate_is_that_of_the_whole_pass(recipe, execution, attention, options, both, tiny_tokens):
    found = []
    for model in both:
        low = lower(model, recipe, execution)
        set_attention(low.model, attention)
        found.append(Adjoint(low, model, **options)(tiny_tokens[:2]))
    whole, streamed = found
    assert_same(streamed.contributions, whole.contributions)
    assert_same(streamed.windows, whole.windows)
    assert streamed.ran == whole.ran and whole.windows.predicted.gt(0).all()


SIZES_OF_SHARING = {
    "vocab_size": 101, "vocab_size_per_layer_input": 101, "hidden_size": 32, "hidden_size_per_layer_input": 8,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
SHARING = Gemma3nTextConfig(
    layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16, bos_token_id=0, eos_token_id=0,
    pad_token_id=0, max_position_embeddings=64, **SIZES_OF_SHARING,
)  # fmt: skip
FALCON_H1 = FalconH1Config(
    num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8,
    ssm_multipliers=[1.0, 2.0, 0.5, 3.0, 0.7], **BASE,
)  # fmt: skip
OTHERS = [  # several kinds of experts, a state space
    BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=101),
    Gemma3TextConfig(num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, **BASE),
    MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=101),
    MixtralConfig(num_key_value_heads=2, num_local_experts=11, **BASE),
    Qwen2MoeConfig(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **BASE),
    GptOssConfig(num_key_value_heads=2, head_dim=16, num_local_experts=4, **BASE),
    SHARING,  # keys and values of earlier layers
    OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=101),  # an activation for all blocks
    FALCON_H1,  # a buffer of each block that the model fills
]


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_other_families_are_those_that_transformers_loads(config, tiny_tokens, tmp_path):
    """Experts are saved one by one; eleven of them, which are not in the order of their names."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = []
    for load in (load_model, load_offloaded):
        model = load(str(tmp_path), "cpu", AutoModelForCausalLM)
        low = lower(model, "bf16")
        estimate = Adjoint(low, model, probes=2, target="kl", gradients="low")(tiny_tokens[:2])
        found.append((estimate, observe_each(low.model, tiny_tokens[:2], low)))
    whole, streamed = found
    assert_same(streamed[0].contributions, whole[0].contributions)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(streamed[1], whole[1], strict=True))


class ShiftedLayers(nn.Module):
    """A model with a parameter beside its parts."""

    def __init__(self):
        super().__init__()
        self.shift, self.embedding = nn.Parameter(torch.randn(8)), nn.Embedding(101, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.shift
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_parameters_beside_the_parts_stay(tiny_tokens):
    torch.manual_seed(0)
    whole = ShiftedLayers().requires_grad_(False).eval()
    streamed = ShiftedLayers().eval()
    for path, x in whole.named_parameters():
        owner, _, name = path.rpartition(".")
        read = partial(torch.clone, x.data)
        setattr(streamed.get_submodule(owner), name, offloaded_parameter(x.shape, x.dtype, x.device, read))
    load_when_running(streamed)
    lows = [lower(model, "bf16") for model in (whole, streamed)]
    with torch.no_grad():
        assert torch.equal(*(low(tiny_tokens) for low in lows))
    estimates = [Adjoint(low, model, gradients="low")(tiny_tokens) for low, model in zip(lows, (whole, streamed))]
    assert_same(estimates[1].contributions, estimates[0].contributions)


def test_an_estimate_without_a_reference_and_one_probe_at_a_time(both, tiny_tokens):
    found = []
    for model in both:
        adjoint = Adjoint(lower(model, "bf16"), probes=2, target="kl")
        adjoint.at_once = False
        found.append(adjoint(tiny_tokens[:2]))
    assert_same(found[1].contributions, found[0].contributions)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_e4m3"])
def test_a_monitored_pass_is_that_of_the_whole_model(recipe, both, tiny_tokens):
    whole, streamed = (
        Monitor(lower(model, recipe), power_iteration=recipe == "bf16")(tiny_tokens, loss=True) for model in both
    )
    assert_same(streamed.layers, whole.layers)
    assert_same(streamed.windows, whole.windows)


@pytest.mark.parametrize("recipe", ["bf16", "w8a8-int8"])
def test_plans_keep_the_same_in_fp32(recipe, both, tiny_tokens):
    logits = []
    for model in both:
        known = Contributions(model, Adjoint(lower(model, recipe), model, gradients="low")(tiny_tokens[:1]))
        sites = known.structure.sites
        plans = [known.plan(1, "blocks"), Plan(recipe, (*sites["embedding"], *sites["norms"]), residual=True)]
        protected = [apply(model, plan) for plan in plans]
        with torch.no_grad():
            for low in protected:
                with low.running():
                    logits.append(low.model(tiny_tokens).logits)
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    assert not torch.equal(logits[0], logits[1])


def test_one_part_is_in_memory_at_a_time_and_none_afterwards(both, tiny_tokens, monkeypatch):
    model = both[1]
    owners = {id(p): path for path, module in parts(model).items() for p in module.parameters()}
    seen = set()

    def watched(read):
        seen.add(frozenset(owners[id(p)] for p in model.parameters() if source_of(p).asked))
        return read()

    for source in map(source_of, model.parameters()):
        monkeypatch.setattr(source, "read", partial(watched, source.read))
    low = lower(model, "bf16")
    Adjoint(low, model, probes=2, target="kl", gradients="low")(tiny_tokens[:2])
    Monitor(low)(tiny_tokens)
    observe_each(low.model, tiny_tokens[:2], low)
    assert max(map(len, seen)) == 1 and len(seen) == len(set(owners.values()))
    assert all(p.isnan().all() for m in (model, low.model) for p in m.parameters())


@pytest.mark.parametrize("other", [True, False], ids=["another", "the same"])
def test_a_tied_model_with_a_head_of_its_own_in_the_file(other, tmp_path, tiny_tokens):
    """As training of the head alone leaves it: transformers unties the two where their values differ."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **BASE)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = (
        weights["model.embed_tokens.weight"] * 1.5 if other else weights["model.embed_tokens.weight"].clone()
    )
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    whole, streamed = load_model(str(tmp_path), "cpu", AutoModelForCausalLM), load_offloaded(str(tmp_path), "cpu")
    for model in (whole, streamed):
        assert (model.lm_head.weight is not model.model.embed_tokens.weight) == other
    with loaded(streamed.lm_head):
        assert torch.equal(streamed.lm_head.weight, weights["lm_head.weight"])
    found = [Adjoint(lower(model, "bf16"), model, target="kl")(tiny_tokens[:2]) for model in (whole, streamed)]
    assert_same(found[1].windows, found[0].windows)
    if other:
        original = tmp_path / "original"
        LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **BASE)).save_pretrained(original)
        tied = load_model(str(original), "cpu", AutoModelForCausalLM)
        tied.load_state_dict({name: x for name, x in weights.items() if name != "lm_head.weight"}, strict=False)
        assert torch.equal(load_rounded(str(tmp_path), tied).lm_head.weight, weights["lm_head.weight"])


def test_windows_share_what_is_read(both, tiny_tokens, monkeypatch):
    """An estimate reads each part forward and backward, however many windows there are; a plain pass reads it once."""
    model, names = both[1], Counter()

    def counted(path, read):
        names[path] += 1
        return read()

    for path, parameter in model.named_parameters():
        source = source_of(parameter)
        monkeypatch.setattr(source, "read", partial(counted, path, source.read))
    low, tied = lower(model, "bf16"), model.config.tie_word_embeddings
    found = {}
    for count in (3, 1):
        estimate = Adjoint(low, model, gradients="low")
        names.clear()
        found[count] = estimate(tiny_tokens[:count])
        assert {*names.values()} == {1, 2}  # the last part is still there when the way back begins
        names.clear()
        assert len(observe_each(model, tiny_tokens[:count])) == count and names.total() == len(names) + tied
    assert_same(found[3].windows[:1], found[1].windows)


def test_windows_that_choose_other_experts_share_what_is_read(tiny_tokens, tmp_path, monkeypatch):
    """They run other numbers of kernels, and each probe of experts goes back by itself."""
    config = MixtralConfig(num_key_value_heads=2, num_local_experts=8, **BASE | {"num_hidden_layers": 6})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names, read = Counter(), Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *given: names.update([name]) or read(self, name, *given))
    for implementation in ("eager", "grouped_mm"):
        model = load_offloaded(str(tmp_path), "cpu", AutoModelForCausalLM)
        model.set_experts_implementation(implementation)
        estimate = Adjoint(lower(model, "bf16"), model, probes=3, target="kl", gradients="low")
        estimate(tiny_tokens[:1, :6])  # finds out what cannot go back at once
        names.clear()
        estimate(torch.stack([tiny_tokens[0, :6], tiny_tokens[1, :6], tiny_tokens[0, :1].expand(6)]))
        assert {*names.values()} == {1, 2}, implementation


@pytest.mark.parametrize("recipe", ["bf16", "fp8_e4m3", "w8a8-int8"])
def test_measured_passes_side_by_side_are_those_of_the_whole_model(recipe, both, tiny_tokens):
    for exact in (True, False):
        found = []
        for model in both:
            low = lower(model, recipe)
            given = (model,) if exact else (low.model,)
            found.append(observe_each(*given, tiny_tokens[:3], None if exact else low))
        for whole, streamed in zip(*found, strict=True):
            assert torch.equal(whole.logits, streamed.logits) and torch.equal(whole.final, streamed.final)
            assert all(map(torch.equal, whole.blocks, streamed.blocks)) and len(streamed.blocks) == len(whole.blocks)


def test_a_failure_in_one_pass_ends_those_beside_it(both, tiny_tokens):
    _, model = both
    path = next(reversed(parts(model)))
    calls = []

    def fail(module, args):
        calls.append(module)
        if len(calls) == 2:
            raise RuntimeError("the second one")

    hook = model.get_submodule(path).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the second one"):
        observe_each(model, tiny_tokens[:3])
    hook.remove()
    assert len(calls) == 2 and all(p.isnan().all() for p in model.parameters())
    assert len(observe_each(model, tiny_tokens[:3])) == 3


def test_an_interrupt_ends_all_passes():
    ended, before = [], threading.active_count()

    def one(number):
        while len(ended) < 1000:  # ten seconds, for a main thread that is long in coming to its turn
            ended.append(number)
            if len(ended) == 5:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.01)
            barrier()

    with pytest.raises(KeyboardInterrupt):
        side_by_side([partial(one, number) for number in range(3)])
    assert ended[:5] == [0, 1, 2, 0, 1] and len(ended) < 1000 and threading.active_count() == before


def test_a_system_that_gives_no_more_threads_ends_all_passes(monkeypatch):
    submit = ThreadPoolExecutor.submit

    def scarce(pool, run, number, one):
        if number == 2:
            raise RuntimeError("can't start new thread")
        return submit(pool, run, number, one)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", scarce)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        side_by_side([barrier] * 4)
    assert threading.active_count() == before


def test_entries_are_there_when_asked_for(both):
    whole, offloaded = both
    assert is_offloaded(offloaded) and not is_offloaded(whole)
    for (path, exact), parameter in zip(whole.named_parameters(), offloaded.parameters()):
        assert torch.equal(entries(parameter), exact) and parameter.isnan().all(), path
    with loaded(offloaded), loaded(offloaded):
        assert not any(p.isnan().any() for p in offloaded.parameters())


# --- Files ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded checkpoint."""
    return shutil.copytree(CHECKPOINTS / "embedded", tmp_path / "copy")


def change(folder, change):
    """Save what ``change`` makes of the weights in ``folder``."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def test_tensors_that_transformers_ignores_are_no_hindrance(tmp_path):
    """The layer of GLM-4.5 that predicts several tokens."""
    config = Glm4MoeConfig(
        num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        first_k_dense_replace=1, n_group=1, topk_group=1, **BASE,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.92.mlp.up_proj.weight": torch.ones(48, 32)}, file, {"format": "pt"})
    tokens = torch.arange(8)[None]
    found = [load(str(tmp_path), "cpu", AutoModelForCausalLM)(tokens).logits for load in (load_model, load_offloaded)]
    assert torch.equal(*found)


def test_files_that_lack_weights_are_refused_at_once(folder):
    change(folder, lambda weights: weights.pop(next(path for path in weights if "ln_f.weight" in path)))
    with pytest.raises(OSError, match=r"must hold all weights of its model, but .* lacks transformer.ln_f.weight"):
        load_offloaded(str(folder))
    with pytest.raises(OSError, match=r"the files lack transformer.ln_f.weight: load the whole model"):
        opened_offloaded(folder)


def opened_offloaded(folder):
    """The offloaded model in ``folder``, whose weights nobody compared with its configuration."""
    made = on_meta(str(folder))
    return open_offloaded(made, Checkpoint(folder.glob("*.safetensors"), made))


def spoil(folder, broken):
    """Change the last norm's weight in the ``folder``."""

    def change_norm(weights):
        path = next(path for path in weights if "ln_f.weight" in path)
        weights[path] = broken(weights[path]).contiguous()

    change(folder, change_norm)


def test_weights_of_another_shape_are_refused_at_once(folder):
    spoil(folder, lambda x: x[1:])
    with pytest.raises(OSError, match=r"must have the shapes .* has transformer.ln_f.weight \(\d+,\) for \(\d+,\)"):
        load_offloaded(str(folder), "cpu")
    model = opened_offloaded(folder)
    with pytest.raises(ValueError, match=r"must fit its model, got .*ln_f.weight of \(\d+,\) for \(\d+,\)"):
        model(torch.arange(8)[None])


def test_weights_that_are_not_finite_are_refused_when_they_are_read(folder):
    spoil(folder, lambda x: x / 0)
    model = load_offloaded(str(folder), "cpu")
    with pytest.raises(ValueError, match="finite"):
        model(torch.arange(8)[None])


def test_an_index_names_files_of_its_own_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match="model.safetensors.index.json must name files of the folder"):
        load_offloaded(str(folder))


# --- The diagnosis ----------------------------------------------------------------------------------


def test_a_streamed_diagnosis_says_the_same(monkeypatch):
    read, sizes = Checkpoint.read, []

    def counted(self, *given):
        sizes.append((found := read(self, *given)).nbytes)
        return found

    monkeypatch.setattr(Checkpoint, "read", counted)
    monkeypatch.setattr(needs, "LARGEST", 2)
    asked = {"model": "embedded", "data": "embedded", "format": "bf16", "budget": "1 block", "windows": 3, "length": 32}
    found = {}
    for form, free in (("whole", 10**12), ("streamed", 10**7)):
        monkeypatch.setattr(needs, "free_memory", lambda device, free=free: free)
        request = diagnosis.Request(**asked)
        inputs, tokens = diagnosis.load(request)
        assert is_offloaded(inputs.model) == (form == "streamed")
        monkeypatch.setattr(needs, "free_memory", lambda device: 10**12)
        expected = diagnosis.forecast(request, inputs, tokens)
        assert ("; streamed, as the whole form takes" in str(expected)) == (form == "streamed")
        found[form] = diagnosis.diagnose(request, inputs, tokens, expected), expected
    (whole, much), (streamed, little) = found["whole"], found["streamed"]
    reads = needs.ONCE + 2 * needs.reads_a_batch(request, inputs.model)
    assert little.memory < much.memory and (little.batch, much.batch) == (2, 1)
    assert sum(sizes) / inputs.files == pytest.approx(reads, rel=0.2)
    for name in ("measured", "drift", "protected", "protected_drift", "ranges"):
        assert_same(getattr(streamed, name), getattr(whole, name))
    assert streamed.plan == whole.plan and " FORM=" not in command(streamed.request, "embedded-custom")
    assert " FORM=streamed" in command(diagnosis.Request(**asked, form="streamed"), "embedded-custom")
    with pytest.raises(ValueError, match="form must be one of auto, whole, streamed, got 'half'"):
        diagnosis.Request(**asked, form="half")


def test_a_limit_of_the_process_is_less_memory():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (2**36, before[1]))
        (left, *_) = within_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert 2**35 < left < 2**36


def test_what_a_model_needs_is_known_from_its_configuration(tmp_path, capsys):
    """Llama 3's 70 B: 141 GB of bf16."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    streaming.main([str(tmp_path), "--disk", "3", "--bus", "25"])
    first, memory, estimate, *_ = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert first == "70.55 B parameters, 141 GB of files in bfloat16"
    assert re.fullmatch(r"memory: 3\d(\.\d)? GB streamed, \d{3} GB whole", memory)
    assert estimate == "an estimate of a window: 282 GB read, 1 min 34 s from the disk, 11.3 s over the bus"
    with pytest.raises(SystemExit, match="cannot load the model"):
        streaming.main([str(tmp_path / "nothing")])


def test_windows_has_no_settings_of_glibc(monkeypatch):
    """There ``ctypes.CDLL(None)`` ends in a TypeError."""
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("ctypes.CDLL", None)
    return_freed_memory()
