"""What the headers of files say: every way of loading refuses the same, and most of it before PyTorch is imported."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from bad_inputs import DAMAGES, _copied
from safetensors.torch import load_file, save_file
from test_further_families import small
from tiny import random_model
from transformers import AutoModelForCausalLM

from fragility_lab.diagnosis import __main__ as make_diagnose
from fragility_lab.inputs.checkpoints import load_model, stored_dtypes
from fragility_lab.inputs.offloaded import load_offloaded
from fragility_lab.paths import CHECKPOINTS, PROJECT

LATER = {"a weight that is not finite"}  # weights are read for that
TOKENIZER = {"no tokenizer", "a tokenizer that is no JSON"}
FITTING = {  # found with the model's parts, which PyTorch makes
    "a missing weight",
    "a weight of another shape",
    "a tensor of an unknown name beside a weight",
}


def diagnose_stored(name: str) -> None:
    make_diagnose.main(["--check", f"MODEL={name}"])


@pytest.mark.parametrize("how", sorted(DAMAGES.keys() - TOKENIZER))
def test_every_way_of_loading_refuses_the_same(how, tmp_path):
    copy = _copied(tmp_path)
    DAMAGES[how](copy)
    ways = [lambda name: load_model(name, "cpu", AutoModelForCausalLM)]
    ways += [] if how in LATER else [load_offloaded, diagnose_stored]
    said = []
    for way in ways:
        with pytest.raises((SystemExit, ValueError, OSError)) as refused:
            way(str(copy))
        said.append(str(refused.value).removeprefix("make diagnose: "))
        assert "\n" not in said[-1]
    assert {text.replace("transformer.", "") for text in said} == {said[0].replace("transformer.", "")}


@pytest.mark.parametrize("how", sorted(TOKENIZER))
def test_a_broken_tokenizer_is_refused_before_a_kernel_starts(how, tmp_path):
    copy = _copied(tmp_path)
    DAMAGES[how](copy)
    with pytest.raises(SystemExit, match="cannot load the tokenizer"):
        diagnose_stored(str(copy))


def test_most_refusals_need_neither_torch_nor_transformers(tmp_path):
    """One Python without the two, so that none of them waits for their import."""
    names = sorted(DAMAGES.keys() - TOKENIZER - FITTING - LATER)
    for how in names:
        (tmp_path / how).mkdir()
        DAMAGES[how](_copied(tmp_path / how))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\1" * 16)
    given = [*(str(tmp_path / how / "model") for how in names), str(tmp_path / "cut.gguf"), "./no/such/folder"]
    code = f"""
    import sys
    sys.modules |= {{"torch": None, "transformers": None, "pandas": None, "datasets": None}}
    from fragility_lab.diagnosis.__main__ import main
    for name in {given}:
        for variable in ("MODEL", "REFERENCE_MODEL"):
            try:
                main(["--check", f"{{variable}}={{name}}", "FORMAT=given"])
            except SystemExit as refused:
                print(str(refused)[:15])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout == "make diagnose: \n" * 2 * len(given), done.stderr


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_masks_of_older_versions_are_no_weights(dtype, tmp_path):
    """GPT-2's causal mask lies beside the weights in the checkpoints of its time."""
    copy = _copied(tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8, dtype=dtype) for i in range(12)}
    tensors |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(12)}
    (copy / "model.safetensors").unlink()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    tokens = torch.arange(8)[None]
    wanted = load_model("embedded", "cpu", AutoModelForCausalLM)(tokens).logits
    assert torch.equal(load_model(str(copy), "cpu", AutoModelForCausalLM)(tokens).logits, wanted)
    assert torch.equal(load_offloaded(str(copy), "cpu")(tokens).logits, wanted)
    assert stored_dtypes(str(copy)) == "F32"


def test_experts_by_token_are_no_packed_weights(tmp_path):
    """DeepSeek V4 has a table of integers that says which experts a token gets."""
    model = random_model(small("deepseek_v4"))
    model.save_pretrained(tmp_path)
    assert any(x.dtype == torch.int64 for x in load_file(tmp_path / "model.safetensors").values())
    tokens = torch.arange(1, 9)[None]
    logits = [load(str(tmp_path), "cpu", AutoModelForCausalLM)(tokens).logits for load in (load_model, load_offloaded)]
    assert torch.equal(*logits) and torch.allclose(logits[0], model(tokens).logits, atol=1e-3)


def test_both_forms_read_the_same_files(tmp_path):
    """Where one file and an index lie in a folder, transformers takes the one file."""
    copy = _copied(tmp_path)
    tensors = {name: x * 2 for name, x in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = torch.arange(8)[None]
    logits = [
        load_model(str(copy), "cpu", AutoModelForCausalLM)(tokens).logits,
        load_offloaded(str(copy))(tokens).logits,
    ]
    assert torch.equal(*logits)


def test_stored_dtypes_are_named_by_how_much_they_hold(tmp_path):
    tensors = load_file(CHECKPOINTS / "embedded" / "model.safetensors")
    copy = shutil.copytree(CHECKPOINTS / "embedded", tmp_path / "copy")
    save_file({k: x.bfloat16() if x.ndim > 1 else x for k, x in tensors.items()}, copy / "model.safetensors")
    assert stored_dtypes(str(copy)) == "BF16 and F32"


def test_a_bias_that_the_configuration_leaves_out_is_no_silence(tmp_path):
    """A flag such as attention_bias that does not fit the files changes the model's function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**wide, vocab_size=64, attention_bias=True)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"attention_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (lambda name: load_model(name, "cpu", AutoModelForCausalLM), load_offloaded, diagnose_stored):
        with pytest.raises((OSError, SystemExit), match="leaves out model.layers.0.self_attn.k_proj.bias, .* others"):
            load(str(tmp_path))
