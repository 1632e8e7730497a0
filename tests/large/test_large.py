"""A model larger than the memory that its diagnosis may take: ``make test-large``.

The limit is RLIMIT_DATA, which the kernel enforces. It counts what a process has written or may write to: the heap, its
threads, and the one file that is mapped. Pages of files that are only read do not count, as the kernel takes them back.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fragility_lab.diagnosis.needs import streamed_memory
from fragility_lab.diagnosis.request import Request
from fragility_lab.paths import CHECKPOINTS

LIMIT = 2_500_000_000
DEPTH = 17
SHARD = 200_000_000
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
REQUEST = {"data": "embedded", "format": "bf16", "budget": "2 blocks", "windows": 2, "length": 64}
DIAGNOSIS = f"""
    import json, sys, time
    from fragility_lab import diagnosis
    started = time.perf_counter()
    request = diagnosis.Request(sys.argv[1], **{REQUEST})
    loaded, tokens = diagnosis.load(request)
    expected = diagnosis.forecast(request, loaded, tokens)
    found = diagnosis.diagnose(request, loaded, tokens, expected)
    print(json.dumps({{
        "form": str(expected), "memory": expected.memory, "predicted": found.prediction.windows.predicted.tolist(),
        "measured": found.measured.mismatch.tolist(), "protected": found.protected.mismatch.tolist(),
        "seconds": sum(found.seconds.values()), "expected": expected.seconds, "all": time.perf_counter() - started,
    }}))
"""


def llama_config(depth: int) -> LlamaConfig:
    """A Llama of ``depth`` blocks; 17 have 1.0 B parameters, each of them 51 M."""
    return LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=depth, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=32000, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def write_model(folder: Path, depth: int) -> int:
    """A random model in shards, with the tokenizer of the embedded checkpoint; returns its number of parameters."""
    made = llama_config(depth)
    with torch.device("meta"):
        shapes = {path: p.shape for path, p in AutoModelForCausalLM.from_config(made).named_parameters()}
    generator, shards, shard = torch.Generator().manual_seed(0), {}, {}
    for number, (path, shape) in enumerate(shapes.items()):
        norm = len(shape) == 1
        shard[path] = torch.randn(shape, generator=generator).mul_(0.1 if norm else 0.02).add_(1.0 if norm else 0.0)
        if sum(x.nbytes for x in shard.values()) > SHARD or number == len(shapes) - 1:
            name = f"model-{len(set(shards.values())):05}.safetensors"
            save_file(shard, folder / name)
            shards |= dict.fromkeys(shard, name)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(CHECKPOINTS / "embedded" / name, folder)
    return sum(shape.numel() for shape in shapes.values())


def run_diagnosis(folder: Path, limit: int) -> tuple[dict, int]:
    """What a diagnosis under the ``limit`` finds, and its largest number of bytes in memory that no file backs."""
    command = [sys.executable, "-c", textwrap.dedent(DIAGNOSIS), str(folder)]
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # its own pool reserves a gigabyte
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip
    peak, status = 0, Path(f"/proc/{run.pid}/status")
    while run.poll() is None:
        held = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("RssAnon")]
        peak = max([peak, *(int(size) * 1024 for size in held)])
        time.sleep(0.02)
    printed, errors = run.communicate()
    assert run.returncode == 0, errors[-3000:]
    return json.loads(printed.splitlines()[-1]), peak


@pytest.mark.skipif(sys.platform != "linux", reason="the limit, and what it counts, are Linux's")
def test_a_model_of_1_b_parameters_within_the_limit_and_its_double_in_the_same_memory(tmp_path):
    peaks = {}
    for depth in (DEPTH, 2 * DEPTH):
        folder = tmp_path / str(depth)
        folder.mkdir()
        parameters = write_model(folder, depth)
        assert parameters > 5e7 * depth and 4 * parameters > 1.5 * LIMIT
        found, peaks[depth] = run_diagnosis(folder, LIMIT)
        print(f"\n{parameters / 1e9:.2f} B parameters: peak {peaks[depth] / 1e9:.3f} GB", json.dumps(found))
        shutil.rmtree(folder)
        assert "streamed, as the whole form takes" in found["form"]
        for predicted, measured, protected in zip(*(found[name] for name in ("predicted", "measured", "protected"))):
            assert abs(predicted / measured - 1) < 0.2 and protected < measured
        assert peaks[depth] < LIMIT and 0.5 < found["memory"] / peaks[depth] < 2
        assert 0.25 < found["seconds"] / found["expected"] < 4
    assert abs(peaks[2 * DEPTH] / peaks[DEPTH] - 1) < 0.05
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(llama_config(depth)) for depth in peaks]
    stated = [streamed_memory(Request("it", **REQUEST), model, 2) for model in models]
    assert stated[1] / stated[0] - 1 < 0.05
