"""A model and its original in other settings, or with other tokens: found before anything is called rounding."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from tiny import fresh_model
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig

from fragility_core.models.paths import hidden_and_logits
from fragility_core.theory import mismatch
from fragility_lab import diagnosis
from fragility_lab.diagnosis import __main__ as make_diagnose
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.settings import differing
from fragility_lab.inputs.checkpoints import load_config, load_model, load_tokenizer

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": 4096}
THETA, LINEAR = {"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FAMILIES = {
    "gpt2": GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=4096),
    "llama": LlamaConfig(**WIDE),
    "gemma2": Gemma2Config(**WIDE, head_dim=16, sliding_window=64, query_pre_attn_scalar=16),
    "mixtral": MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
}
CHANGES = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx (True and False)"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights (False and True)"),
    ("gpt2", {"activation_function": "relu"}, "activation_function (relu and gelu_new)"),
    ("gpt2", {"layer_norm_epsilon": 1e-2}, "layer_norm_epsilon (0.01 and 1e-05)"),
    ("llama", {"rope_parameters": THETA}, "rope_parameters.rope_theta (500000.0 and 10000.0)"),
    (
        "llama",
        {"rope_parameters": LINEAR},
        "factor (4.0 and None), rope_parameters.rope_type (linear and def",
    ),
    ("llama", {"rms_norm_eps": 1e-2}, "rms_norm_eps (0.01 and 1e-06)"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act (gelu and silu)"),
    ("gemma2", {"attn_logit_softcapping": 0.1}, "attn_logit_softcapping (0.1 and 50.0)"),
    ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar (256 and 16)"),
    ("gemma2", {"sliding_window": 4}, "sliding_window (4 and 64)"),
    ("gemma2", {"final_logit_softcapping": 1.0}, "final_logit_softcapping (1.0 and 30.0)"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok (1 and 2)"),
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of a random model of a family."""
    made = {}

    def folder(family: str):
        if family not in made:
            model = fresh_model(FAMILIES[family])
            for x in model.parameters():
                x.add_(0.1 * torch.randn_like(x))
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
            load_tokenizer("embedded").save_pretrained(made[family])
        return made[family]

    return folder


def changed(folder, to, **entries):
    """A copy of ``folder`` with other ``entries`` of its configuration."""
    copy = shutil.copytree(folder, to / "changed")
    config = json.loads((copy / "config.json").read_text()) | entries
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def asked(model, reference, **more) -> Request:
    sizes = {"windows": 2, "length": 24} | more
    return Request(str(model), "embedded", "given", "1 site", reference_model=str(reference), **sizes)


@pytest.mark.parametrize(("family", "entries", "said"), CHANGES, ids=[f"{f}-{next(iter(e))}" for f, e, _ in CHANGES])
@pytest.mark.parametrize("form", ["whole", "streamed"])
def test_settings_that_differ_are_the_answer(family, entries, said, form, original, tmp_path):
    """The error that they make is measured with the weights of the original, so that no rounding is in it."""
    reference = original(family)
    model = changed(reference, tmp_path, **entries)
    request = asked(model, reference, form=form)
    with pytest.raises(ValueError, match="^not rounding: these settings differ") as answer:
        diagnosis.load(request)
    assert said in str(answer.value) and "over 2 windows: give both one configuration" in str(answer.value)
    same, tokens = diagnosis.load(Request(str(reference), "embedded", "bf16", "1 site", windows=2, length=24))
    one, other = same.model, load_model(str(model), "cpu", AutoModelForCausalLM)
    with torch.no_grad():
        (exact, p), (changes, q) = (hidden_and_logits(m, tokens) for m in (one, other))
        apart = mismatch(changes, exact).mean().item()
        kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean().item()
    assert max(apart, kl) > 1e-4
    found = re.search(r"a mismatch of (\S+) and .* a KL divergence of (\S+) nats", str(answer.value))
    assert [float(x) for x in found.groups()] == pytest.approx([apart, kl], rel=0.02, abs=1e-6)


def test_what_no_pass_reads_is_no_difference(original, tmp_path):
    """Dropout, names, token numbers, and epsilon as GGUF files store it, in fp32."""
    entries = {"use_cache": False, "attention_dropout": 0.1, "eos_token_id": 7, "rms_norm_eps": 9.999999974752427e-07}
    model = changed(original("llama"), tmp_path, **entries, torch_dtype="bfloat16", architectures=["Other"])
    assert differing(*(load_config(str(folder)) for folder in (model, original("llama")))) == {}


def test_an_unknown_setting_is_named_and_what_it_does_is_measured(original, tmp_path, capsys):
    """A setting of the future that this version does not read changes nothing, so that the diagnosis goes on."""
    model = changed(original("llama"), tmp_path, attention_sharpness=2.0)
    with pytest.raises(ValueError, match="must have other weights than REFERENCE_MODEL="):
        diagnosis.load(asked(model, original("llama")))
    assert capsys.readouterr().err.startswith(
        "these settings differ and change nothing over the windows: attention_sharpness (2.0 and None)"
    )


def test_tokens_of_another_meaning_are_refused(original, tmp_path):
    """Two tokens that change places: shapes, and most tokens, are the same."""
    model = shutil.copytree(original("llama"), tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    by_number = {number: token for token, number in vocabulary.items()}
    vocabulary[by_number[300]], vocabulary[by_number[400]] = 400, 300
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    request = asked(model, original("llama"))
    said = r"must have the tokenizer of MODEL=, but token 300 is .* and .*, and 2 of 4095 tokens differ: take the orig"
    with pytest.raises(ValueError, match=said):
        diagnosis.load(request)
    with pytest.raises(SystemExit, match=said):
        make_diagnose.main(["--check", f"MODEL={model}", f"REFERENCE_MODEL={request.reference_model}"])


def test_a_model_without_a_tokenizer_takes_that_of_its_original(original, tmp_path):
    model = shutil.copytree(original("llama"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.raises(ValueError, match="must have other weights than REFERENCE_MODEL="):
        diagnosis.load(replace(asked(model, original("llama")), seed=1))
