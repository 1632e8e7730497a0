"""GGUF's types and mixes against llama.cpp itself, by llama-cpp-python in an environment of its own.

ENGINES_PYTHON names a Python that has it. Without one these tests are skipped.
"""

import ctypes
import json
import os
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from packed import packed
from tiny import random_model
from transformers import LlamaConfig

from fragility_adjoint.mixed_precision import Plan
from fragility_core.models.paths import embedding_paths, head_paths
from fragility_engines.environment import ENVIRONMENT
from fragility_engines.llama_cpp import plans as gguf_plans
from fragility_engines.llama_cpp.files import write_gguf
from fragility_exports.llama_cpp import llama_quantize
from fragility_quantization.ggml import MIXES, TYPES, WEIGHTS
from fragility_quantization.gguf_mixes import tensor_names
from fragility_quantization.operands import linear_weights, owner, row_width, with_known_layers
from fragility_quantization.recipes import get_recipe

PYTHON = os.environ.get("ENGINES_PYTHON", str(ENVIRONMENT) if ENVIRONMENT.exists() else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="llama.cpp is not installed: run make referees")
LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def library():
    say = "import llama_cpp, os; print(os.path.dirname(llama_cpp.__file__))"
    folder = subprocess.run([PYTHON, "-I", "-c", say], capture_output=True, text=True, check=True).stdout.strip()
    found = ctypes.CDLL(str(Path(folder) / "lib" / "libggml-base.so"))
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
    found.ggml_quantize_chunk.argtypes += [ctypes.c_void_p]
    return found


def by_ggml(library, kind: str, x: torch.Tensor) -> np.ndarray:
    """The bytes (rows, m) of ``x`` as ggml quantizes it without an importance matrix."""
    made, x = np.zeros(2 * x.numel(), np.uint8), x.contiguous()
    size = library.ggml_quantize_chunk(Type[kind.upper()], x.data_ptr(), made.ctypes.data, 0, *x.shape, None)
    return made[:size].reshape(len(x), -1)


def drawn(name: str) -> torch.Tensor:
    x = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    kinds = {"normal": x, "tails": x**3, "positive": x.abs() + 1, "negative": -x.abs() - 1, "integers": x.round()}
    kinds |= {"small": x * 1e-6, "outlier": torch.where(torch.arange(512) == 100, 50 * x, x), "zeros": 0 * x}
    kinds["on a grid"] = TYPES["q4_1"].round(x)
    return kinds[name]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(
    "kind", ["normal", "tails", "positive", "negative", "integers", "small", "outlier", "zeros", "on a grid"]
)
def test_numbers_and_bytes_are_those_of_ggml(name, kind, library):
    x = drawn(kind)
    theirs, stored = by_ggml(library, name, x), TYPES[name]
    np.testing.assert_array_equal(stored.round(x).numpy(), gguf.quants.dequantize(theirs, Type[name.upper()]))
    grid = stored.grid(stored.in_blocks(x))
    certain = (grid.step != 0).all(0).numpy()  # other groups read as one number, whatever their integers are
    assert np.array_equal(packed(stored, x)[certain], theirs.reshape(len(certain), -1)[certain])


def made_by_llama_cpp(model, files, folder, windows):
    write_gguf(model, folder / "source.gguf")
    task = {"source": str(folder / "source.gguf"), "files": files, "windows": windows}
    ran = subprocess.run(
        [PYTHON, "-I", str(gguf_plans.WORKER)], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("changed", [{}, {"tie_word_embeddings": True, "hidden_size": 192}, {"num_key_value_heads": 4}])
def test_every_mix_gives_each_tensor_what_llama_quantize_does(changed, tmp_path):
    model = random_model(LlamaConfig(**LLAMA | HEADS | changed))
    files = [{"path": str(tmp_path / f"{mix}.gguf"), "ftype": mix, "rules": []} for mix in MIXES]
    made_by_llama_cpp(model, files, tmp_path, [[1, 2, 3, 4]])
    paths = dict.fromkeys([*map(owner, linear_weights(model)), *embedding_paths(model), *head_paths(model)])
    for mix in MIXES:
        written = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(tmp_path / f"{mix}.gguf").tensors}
        layers = with_known_layers(model, get_recipe(f"gguf-{mix}")).layers
        for path, name in tensor_names(model, paths).items():
            ours = layers[path].weights.of_width(row_width(model, f"{path}.weight")).name
            assert ours == written[name], (mix, name)


def test_a_plan_is_made_and_measures_as_it_is_emulated(tmp_path):
    model = random_model(LlamaConfig(**LLAMA | HEADS))
    layers = {path: ("ggml-q3_k", "ggml-q6_k")[i % 2] for i, path in enumerate(map(owner, linear_weights(model)))}
    plan = Plan("fp32", layers=(*layers.items(), ("lm_head", "ggml-q5_0"), ("model.embed_tokens", "ggml-q4_0")))
    windows = torch.randint(64, (3, 32), generator=torch.Generator().manual_seed(0))
    rules = [line.split("=") for line in llama_quantize(plan, model).text().split()]
    files = [{"path": str(tmp_path / "plan.gguf"), "ftype": "q8_0", "rules": rules}]
    answer = made_by_llama_cpp(model, files, tmp_path, windows.tolist())
    written = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(tmp_path / "plan.gguf").tensors}
    assert written["blk.0.attn_q.weight"] == "q3_k" and written["blk.0.attn_k.weight"] == "q6_k"
    assert written["output.weight"] == "q5_0" and written["token_embd.weight"] == "q4_0"
    assert 0 < answer["files"][0]["bytes"] - gguf_plans.stored_bytes(model, plan) < 20_000  # the header
    np.testing.assert_allclose(answer["files"][0]["kl"], gguf_plans.emulated(model, plan, windows), rtol=0.05)
