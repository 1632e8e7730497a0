"""Quantize and run GGUF files by llama.cpp. This file runs by itself, in an environment that has llama-cpp-python.

Elsewhere it can be imported, though not run. The task is JSON on standard input: the fp32 file ``source``; ``files`` to
make of it, each with its ``path``, the mix ``ftype`` as llama-quantize calls it, and ``rules`` (pairs of a regular
expression and a type); ``windows`` of tokens. The last line of the answer is JSON, too: for each file its ``bytes``,
and the ``kl`` of every window against the source in nats a token, mean over its positions.
"""

import ctypes
import json
import sys
from collections.abc import Callable

import numpy as np

THREADS = 1


def quantize(source: str, path: str, ftype: str, rules: list[list[str]]) -> None:
    """Write ``source`` quantized to ``path``, as llama-quantize does with ``--tensor-type``; raises RuntimeError."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype.upper()}")
    params.nthread = THREADS
    kinds = {name.lower(): getattr(llama_cpp, name) for name in dir(llama_cpp) if name.startswith("GGML_TYPE_")}
    overrides = [(pattern.encode(), kinds[f"ggml_type_{kind}"]) for pattern, kind in rules]
    kept = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))(*overrides, (None, 0))
    if rules:
        params.tt_overrides = kept
    if llama_cpp.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp must quantize {source} to {ftype}, but failed: its messages are above")


def opened(path: str, length: int, cache: str = "f16") -> Callable[[list[int]], np.ndarray]:
    """A function from ``length`` tokens to logits (T, vocabulary) by llama.cpp, with keys and values in ``cache``.

    A cache in another type than fp16 needs fused attention.
    """
    import llama_cpp

    kind = getattr(llama_cpp, f"GGML_TYPE_{cache.upper()}")
    engine = llama_cpp.Llama(
        path, n_ctx=length, n_batch=length, n_ubatch=length, n_threads=THREADS, n_threads_batch=THREADS,
        logits_all=True, verbose=False, type_k=kind, type_v=kind, flash_attn=cache != "f16",
    )  # fmt: skip

    def run(tokens: list[int]) -> np.ndarray:
        engine.reset()
        engine.eval(tokens)
        return np.array(engine.scores[: len(tokens)], dtype=np.float32)

    return run


def logprobs(path: str, windows: list[list[int]]) -> np.ndarray:
    """Log-probabilities (B, T, vocabulary) in fp32 by llama.cpp, with its default cache in fp16."""
    run, found = opened(path, len(windows[0])), []
    for window in windows:
        logits = run(window)
        logits -= logits.max(-1, keepdims=True)
        found.append(logits - np.log(np.exp(logits, dtype=np.float32).sum(-1, keepdims=True, dtype=np.float64)))
    return np.stack(found).astype(np.float32)


def divergences(exact: np.ndarray, other: np.ndarray) -> list[float]:
    """KL of each window, mean over positions, in nats."""
    found = []
    for p, q in zip(exact, other, strict=True):
        log_p, log_q = p.astype(np.float64), q.astype(np.float64)
        found.append(float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))
    return found


def main() -> None:
    import llama_cpp

    task = json.load(sys.stdin)
    exact = logprobs(task["source"], task["windows"])
    answer = []
    for file in task["files"]:
        quantize(task["source"], file["path"], file["ftype"], file["rules"])
        with open(file["path"], "rb") as made:
            size = made.seek(0, 2)
        answer.append({"bytes": size, "kl": divergences(exact, logprobs(file["path"], task["windows"]))})
    print("\n" + json.dumps({"version": llama_cpp.__version__, "files": answer}))


if __name__ == "__main__":
    main()
