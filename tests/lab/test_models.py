"""Loading models: by path, offline, from safetensors only, with one clear message."""

import json
import shutil

import pytest
import torch
from tiny import TINY, random_gpt2
from transformers import AutoModel, AutoModelForCausalLM, GemmaConfig, GPTNeoXConfig, OPTConfig

from fragility_lab.inputs.checkpoints import default_device, load_config, load_model, load_tokenizer, located
from fragility_lab.inputs.loading import load
from fragility_lab.inputs.names import titled
from fragility_lab.paths import CHECKPOINTS


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_a_local_model_is_loaded_in_fp32_for_evaluation(auto_class, reference_model_path):
    model = load_model(str(reference_model_path), "cpu", auto_class)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert load_config(str(reference_model_path)).n_layer == len(model.base_model.h) == 4


@pytest.mark.parametrize(
    ("changed", "another"),
    [({"rms_norm_eps": 1e-2}, True), ({"hidden_act": "gelu"}, True), ({"attention_dropout": 0.1}, True),
     ({"transformers_version": "4.0.0"}, False), ({"architectures": ["LlamaModel"]}, False)],
)  # fmt: skip
def test_inputs_are_others_where_the_configuration_is_another(changed, another, tmp_path):
    """Runs are kept by the digest of their inputs."""
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "embedded-llama", folder)
    first = load(str(folder), "embedded", [64], 2, "cpu").digest
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert (load(str(folder), "embedded", [64], 2, "cpu").digest != first) == another
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert load(str(moved), "embedded", [64], 2, "cpu").digest == load(str(folder), "embedded", [64], 2, "cpu").digest


def test_the_embedded_default_has_a_name():
    assert located("embedded") == str(CHECKPOINTS / "embedded")
    assert located(str(CHECKPOINTS)) == str(CHECKPOINTS)


TITLES = {
    "embedded": "the embedded GPT-2",
    "embedded-llama": "the embedded Llama",
    "gpt2": "gpt2",
    "owner/model-1.5": "owner/model-1.5",
    "models/mine/": "mine",
    "./mine": "mine",
    "/data/owner/mine": "mine",
    "models/q4_k.gguf": "q4_k (GGUF file)",
    "Q8.GGUF": "Q8 (GGUF file)",
}


@pytest.mark.parametrize("name", TITLES)
def test_a_title_names_a_model_without_the_way_to_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert titled(name) == TITLES[name]


def test_a_title_names_the_folder_that_a_relative_path_stands_for(tmp_path, monkeypatch):
    (tmp_path / "mine" / "part").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert [titled(name) for name in (".", "part", "../mine/part/..")] == ["mine", "part", "mine"]


def test_fp32_products_must_be_fp32(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ValueError, match=r'set to "high" precision: call torch.set_float32_matmul_precision'):
        load_model("embedded")


def test_default_device():
    assert default_device() == ("cuda" if torch.cuda.is_available() else "cpu")


HUB = "the model hub and this machine's cache"


def assert_says_how_to_go_on(error: pytest.ExceptionInfo, kind: str, name: str, where: str):
    message = str(error.value)
    assert message.startswith(f"cannot load the {kind} {name!r} from {where} (")
    assert "(MODEL=path/to/copy after `make reproduce` or `make diagnose`), or leave MODEL unset: both" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "load"), [("model", load_model), ("model", load_config), ("tokenizer", load_tokenizer)]
)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("nobody/no-such-model", HUB),
        ("no-such-model", HUB),
        ("./no/such/folder", "the folder"),
        ("a/b/c", "the folder"),
    ],
)
def test_what_is_not_found_is_named_with_the_way_out(kind, load, name, where):
    """conftest.py sets HF_HUB_OFFLINE, as on a machine without a network."""
    with pytest.raises(OSError) as error:
        load(name)
    assert_says_how_to_go_on(error, kind, name, where)


@pytest.fixture
def folder(tmp_path, reference_model_path):
    """A copy of the reference checkpoint to spoil."""
    return shutil.copytree(reference_model_path, tmp_path / "model")


def test_pickled_weights_are_refused(folder, reference_model):
    (folder / "model.safetensors").unlink()
    torch.save(reference_model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors") as error:
        load_model(str(folder))
    assert_says_how_to_go_on(error, "model", str(folder), "the folder")


def test_remote_code_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(OSError) as error:
        load_model(str(folder))
    assert_says_how_to_go_on(error, "model", str(folder), "the folder")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_weights_are_named(content, folder):
    """An interrupted download or a Git LFS pointer in place of the file."""
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(OSError) as error:
        load_model(str(folder))
    assert_says_how_to_go_on(error, "model", str(folder), "the folder")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(OSError) as error:
        load_model(str(tmp_path))
    assert_says_how_to_go_on(error, "model", str(tmp_path), "the folder")


def test_a_checkpoint_without_some_weights_is_refused(tmp_path):
    """The library would draw them at random, every time anew."""
    model = random_gpt2(TINY)
    weights = {name: x for name, x in model.state_dict().items() if "h.1.mlp" not in name and name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(
        OSError, match="must hold all weights of its model, but .* lacks h.1.mlp.c_fc.bias, .* drawn at random"
    ):
        load_model(str(tmp_path))


def test_a_checkpoint_of_other_shapes_than_its_configuration_is_refused(tmp_path):
    random_gpt2(TINY).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_embd": 32', '"n_embd": 64'))
    with pytest.raises(
        OSError, match=r"has h\.0\.attn\.c_attn\.bias \(96,\) for \(192,\), .* and others: take the config"
    ):
        load_model(str(tmp_path))


def test_a_checkpoint_of_more_blocks_than_its_configuration_is_refused(tmp_path):
    random_gpt2(TINY).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 3', '"n_layer": 2'))
    with pytest.raises(OSError, match=r"must be read, .* leaves out .*h\.2\.attn\.c_attn\.weight.* and others"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("config", [TINY, OPTConfig(), GPTNeoXConfig(), GemmaConfig()], ids=lambda c: c.model_type)
def test_a_folder_without_a_tokenizer(config, tmp_path):
    """The library makes an empty one for some families."""
    config.save_pretrained(tmp_path)
    with pytest.raises(OSError) as error:
        load_tokenizer(str(tmp_path))
    assert_says_how_to_go_on(error, "tokenizer", str(tmp_path), "the folder")


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = random_gpt2(TINY)
    model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be finite in fp32, but those of .* are not in h.1.mlp.c_fc.weight"):
        load_model(str(tmp_path))


def test_a_model_that_memory_cannot_hold_is_refused_unless_it_is_spread_over_gpus(monkeypatch):
    monkeypatch.setattr("fragility_offload.memory.free_memory", lambda device: 10**6)
    with pytest.raises(ValueError, match="the model 'embedded' must fit into memory and takes .* close other programs"):
        load_model("embedded")
    load_model("embedded", {"": "cpu"})
