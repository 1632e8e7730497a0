"""Run an engine over windows of tokens: ``python -m fragility_engines.referees.worker task.json``.

This runs in the environment of the engines (``make referees``). The task is a dictionary that JSON holds: ``engine``,
one of RUNNERS; ``kind``, how it is to compute; ``model``, the folder of an fp32 model of transformers; ``windows`` of
tokens (B, T); ``work``, a folder for what the engine makes of the model, which others may find there. The logits of
window i are written as ``logits-i.npy`` (T, vocabulary) into the folder ``answer``, beside ``answer.json`` with the
``version`` of the engine and the ``seconds`` of all windows.
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[np.ndarray], np.ndarray]  # from tokens (T,) to logits (T, vocabulary)


def ctranslate2(model: Path, work: Path, kind: str) -> Run:
    """CTranslate2's generator, with ``kind`` as its ``compute_type``."""
    import ctranslate2 as engine

    made = work / "ctranslate2"
    if not made.exists():
        engine.converters.TransformersConverter(str(model)).convert(str(made))
    generator = engine.Generator(str(made), device="cpu", compute_type=kind, intra_threads=1)

    def run(tokens: np.ndarray) -> np.ndarray:
        view = engine.StorageView.from_array
        length = np.array([len(tokens)], dtype=np.int32)
        return np.array(generator.forward_batch(view(tokens[None].astype(np.int32)), view(length)))[0]

    return run


def exported(model: Path, work: Path) -> Path:
    """The ONNX file of ``model``, from tokens to logits, for windows as long as those of the task."""
    import torch

    made = work / "model.onnx"
    if not made.exists():
        loaded = loaded_by_torch(model, torch.float32)
        loaded.set_attn_implementation("eager")
        head: Any = loaded.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())  # tied, it would be a result in the graph, not a constant

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = loaded

            def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
                return self.model(input_ids=input_ids, use_cache=False).logits

        tokens = torch.tensor(np.load(work / "tokens.npy"))[None]
        torch.onnx.export(
            Logits().eval(), (tokens,), made, dynamo=True, external_data=True, input_names=["input_ids"],
            output_names=["logits"],
        )  # fmt: skip
    return made


def onnxruntime(model: Path, work: Path, kind: str) -> Run:
    """ONNX Runtime: "float32"; "int8", by ``quantize_dynamic``; "int4", by MatMulNBits in blocks of 32."""
    import onnx
    import onnxruntime as engine
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    source, made = exported(model, work), work / f"{kind}.onnx"
    if kind == "int8":
        how = {"weight_type": QuantType.QInt8, "op_types_to_quantize": ["MatMul"]}
        quantize_dynamic(source, made, use_external_data_format=True, **how)
    elif kind == "int4":
        quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=4, block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(made), use_external_data_format=True)
    options = engine.SessionOptions()
    options.intra_op_num_threads = 1
    session = engine.InferenceSession(made if made.exists() else source, options, providers=["CPUExecutionProvider"])
    return lambda tokens: session.run(None, {"input_ids": tokens[None].astype(np.int64)})[0][0]


def openvino(model: Path, work: Path, kind: str) -> Run:
    """OpenVINO: "float32" and "bf16"; "int8-w" and "int8", "int4-w" and "int4", as NNCF compresses weights.

    Kinds without "-w" also round the inputs of products, to int8 in groups of 32: OpenVINO's dynamic quantization.
    """
    import nncf
    import openvino as engine

    core = engine.Core()
    graph = core.read_model(exported(model, work))
    if kind.startswith("int8"):
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
    elif kind.startswith("int4"):
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=32)
    compiled = core.compile_model(graph, "CPU", {
        "INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "bf16" if kind == "bf16" else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32 if kind in ("int8", "int4") else 0,
    })  # fmt: skip
    return lambda tokens: compiled({"input_ids": tokens[None].astype(np.int64)})[0][0]


def torch(model: Path, work: Path, kind: str) -> Run:
    """torch's own kernels: "bf16"; "int8", by ``quantize_dynamic``."""
    import torch as engine

    if kind == "bf16":
        return of_torch(loaded_by_torch(model, engine.bfloat16))
    exact = loaded_by_torch(model, engine.float32)
    return of_torch(engine.ao.quantization.quantize_dynamic(exact, {engine.nn.Linear}, dtype=engine.qint8))


def torchao(model: Path, work: Path, kind: str) -> Run:
    """torchao: "int8", weights and inputs; "int8-w", weights alone."""
    import torch as engine
    from torchao import quantization

    configs = {"int8": "Int8DynamicActivationInt8WeightConfig", "int8-w": "Int8WeightOnlyConfig"}
    exact = loaded_by_torch(model, engine.float32)
    quantization.quantize_(exact, getattr(quantization, configs[kind])())
    return of_torch(exact)


def loaded_by_torch(model: Path, dtype: Any) -> Any:
    """The ``model`` of transformers in ``dtype``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def of_torch(loaded: Any) -> Run:
    """The logits of a ``loaded`` model of torch."""
    import torch as engine

    @engine.no_grad()
    def run(tokens: np.ndarray) -> np.ndarray:
        return loaded(engine.tensor(tokens)[None], use_cache=False).logits[0].float().numpy()

    return run


def llama_cpp(model: Path, work: Path, kind: str) -> Run:
    """llama.cpp with a file of ``kind``, "f32", "f16" or a mix; "q4_k_m cache-q8_0" has another cache than in fp16."""
    import torch

    from fragility_engines.llama_cpp.files import write_gguf
    from fragility_engines.llama_cpp.worker import opened, quantize

    source, (mix, _, cache) = work / "f32.gguf", kind.partition(" cache-")
    if not source.exists():
        write_gguf(loaded_by_torch(model, torch.float32), source)
    made = work / f"{mix}.gguf"
    if not made.exists():
        quantize(str(source), str(made), mix, [])
    run = opened(str(made), np.load(work / "tokens.npy").size, cache or "f16")
    return lambda tokens: run(tokens.tolist())


RUNNERS: dict[str, tuple[Callable[[Path, Path, str], Run], str]] = {  # with the package whose version counts
    "ctranslate2": (ctranslate2, "ctranslate2"),
    "onnxruntime": (onnxruntime, "onnxruntime"),
    "llama.cpp": (llama_cpp, "llama-cpp-python"),
    "openvino": (openvino, "openvino"),
    "torch": (torch, "torch"),
    "torchao": (torchao, "torchao"),
}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of ``packages`` that are installed here."""
    known = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {name: known[name] for name in packages if name in known}


def carry_out(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to ``task``; raises whatever the engine raises."""
    runner, package = RUNNERS[task["engine"]]
    work, answer = Path(task["work"]), Path(task["answer"])
    windows = np.array(task["windows"])
    np.save(work / "tokens.npy", windows[0])
    run = runner(Path(task["model"]), work, task["kind"])
    run(windows[0][:2] if task["engine"] == "ctranslate2" else windows[0])  # the first run allocates memory
    seconds = 0.0
    for number, tokens in enumerate(windows):
        began = time.perf_counter()
        logits = run(tokens)
        seconds += time.perf_counter() - began
        np.save(answer / f"logits-{number}.npy", np.asarray(logits, dtype=np.float32))
    return {"version": importlib.metadata.version(package), "seconds": seconds}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    (Path(given["answer"]) / "answer.json").write_text(json.dumps(carry_out(given)))
