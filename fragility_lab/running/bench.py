"""What observation and emulation cost: ``make bench``.

GPT-2's real size with random weights, in bf16 (monitored pass) and fp16 (emulation). Times are
medians of interleaved repetitions, so that a drift of the machine's speed hits both sides. Memory is
the peak of a fresh process during the pass alone, every tensor mapped by itself: what is in use, as on
a GPU, without the holes of a heap, which differ from run to run. The estimator is timed on the embedded
checkpoint, in processor time of one thread, which other work on the machine disturbs least.
"""

import argparse
import copy
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model

from fragility_core.adjoint import Adjoint
from fragility_core.arithmetic.attention import OBSERVED_EAGER, set_attention
from fragility_core.arithmetic.lowering import lower
from fragility_core.surrogates.monitor import Monitor
from fragility_lab.experiments.patching import Patching
from fragility_lab.experiments.shadow import ShadowTraining
from fragility_lab.inputs.checkpoints import default_device, load_model
from fragility_lab.running.environment import device_name

LENGTHS = (128, 512, 1024)
TIME_LIMITS = {128: 1.2, 512: 1.2, 1024: 1.5}
EMULATION_LIMIT = 1.6
MEMORY_LIMIT = 1.3
TRAINING_LENGTH, TRAINING_LIMIT = 256, 2.5
PATCHING_LENGTH, PATCHING_LIMIT = 512, 0.75
ESTIMATE_LIMITS = {512: 3.5, 1024: 5.0}
ESTIMATE_MEMORY_LIMIT = 1.5


def random_gpt2() -> GPT2Model:
    """GPT-2's architecture (124 M parameters) with random weights."""
    torch.manual_seed(0)
    return GPT2Model(GPT2Config()).eval().requires_grad_(False).to(default_device())


def medians(
    calls: dict[str, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each call by ``clock``, the calls taking turns after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repetitions + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


@torch.no_grad()
def time_passes(repetitions: int) -> pd.DataFrame:
    """Monitored over plain in bf16, and emulated fp16 over plain fp32, by window length.

    Plain is the model as transformers ships it; unobserved the same low-precision pass as monitored, which
    ``lower`` makes faster (``lookup.LookUp``).
    """
    model = random_gpt2()
    plain, unobserved = copy.deepcopy(model).bfloat16(), lower(model, "bf16")
    emulated, monitor = lower(model, "fp16", "emulated"), Monitor(lower(model, "bf16"))
    rows = []
    for length in LENGTHS:
        tokens = torch.randint(50000, (1, length), device=default_device())

        def lowered_pass(low, tokens=tokens):
            with low.running():
                low.model(tokens)

        calls = {
            "plain bf16": lambda tokens=tokens: plain(tokens),
            "unobserved bf16": partial(lowered_pass, unobserved),
            "monitored bf16": lambda tokens=tokens: monitor(tokens),
            "plain fp32": lambda tokens=tokens: model(tokens),
            "emulated fp16": partial(lowered_pass, emulated),
        }
        seconds = medians(calls, repetitions * max(LENGTHS) // length)  # short passes scatter more
        for slow, fast, limit in (
            ("monitored bf16", "plain bf16", TIME_LIMITS[length]),
            ("monitored bf16", "unobserved bf16", float("nan")),
            ("emulated fp16", "plain fp32", EMULATION_LIMIT),
        ):
            rows.append(
                {"pass": f"{slow} / {fast}", "T": length, "seconds": seconds[slow], "base_seconds": seconds[fast],
                 "ratio": seconds[slow] / seconds[fast], "limit": limit}
            )  # fmt: skip
    return pd.DataFrame(rows)


def time_patching(repetitions: int) -> pd.DataFrame:
    """Base and all L patched passes of one window over L plain passes with the library's default attention."""
    model = load_model("embedded")
    tokens = torch.randint(model.config.vocab_size, (1, PATCHING_LENGTH), device=default_device())
    rows = []
    for format in ("bf16", "fp16"):
        plain, patching = lower(model, format), Patching(model, lower(model, format))
        layers = len(patching.pairs)

        @torch.no_grad()
        def plain_pass(plain=plain):
            with plain.running():
                plain.model(tokens)

        seconds = medians({"patched": lambda p=patching: p(tokens), "plain": plain_pass}, repetitions)
        base = layers * seconds["plain"]
        rows.append(
            {"pass": f"E3: all patched forwards / (L x plain), {format} {plain.execution}", "T": PATCHING_LENGTH,
             "seconds": seconds["patched"], "base_seconds": base, "ratio": seconds["patched"] / base,
             "limit": PATCHING_LIMIT}
        )  # fmt: skip
    return pd.DataFrame(rows)


def time_training_step(repetitions: int) -> pd.DataFrame:
    """A step of E5 (training, shadow copy, monitored pass, reference) over a bare fp32 training step."""
    model = load_model("embedded", auto_class=AutoModelForCausalLM)
    shadowed, bare = ShadowTraining(model, "fp16"), ShadowTraining(model, "fp16")
    bare.master = copy.deepcopy(model).requires_grad_(True)  # as the library ships it
    bare.optimizer = torch.optim.AdamW(bare.master.parameters(), weight_decay=0.0, fused=True)
    tokens = torch.randint(model.config.vocab_size, (1, TRAINING_LENGTH), device=default_device())

    def step() -> None:
        shadowed.train_step(tokens, 1e-5)
        shadowed.observe(tokens)

    calls = {"E5 step": step, "training step": lambda: bare.train_step(tokens, 1e-5)}
    seconds = medians(calls, 2 * repetitions)
    row = {"pass": "E5 step / training step", "T": TRAINING_LENGTH, "seconds": seconds["E5 step"],
           "base_seconds": seconds["training step"], "ratio": seconds["E5 step"] / seconds["training step"],
           "limit": TRAINING_LIMIT}  # fmt: skip
    return pd.DataFrame([row])


def time_estimate(repetitions: int) -> pd.DataFrame:
    """One estimate of one probe over one plain fp32 pass with the library's default attention, on one thread."""
    model = load_model("embedded")
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for length, limit in ESTIMATE_LIMITS.items():
        tokens = torch.randint(model.config.vocab_size, (1, length), device=default_device())

        @torch.no_grad()
        def plain_pass(tokens=tokens):
            model(tokens, use_cache=False)

        calls = {"plain": plain_pass}
        for format in ("bf16", "fp16"):
            for implementation in ("sdpa", OBSERVED_EAGER):
                calls[f"{format}, {implementation}"] = partial(estimator(model, format, implementation), tokens)
        seconds = medians(calls, repetitions, clock)
        base = seconds.pop("plain")
        rows += [
            {"pass": f"estimate / plain fp32, {name}", "T": length, "seconds": taken, "base_seconds": base,
             "ratio": taken / base, "limit": limit}
            for name, taken in seconds.items()
        ]  # fmt: skip
    torch.set_num_threads(threads)
    return pd.DataFrame(rows)


def estimator(model: nn.Module, format: str, implementation: str) -> Adjoint:
    """The estimator for ``model`` in ``format`` with an attention implementation."""
    low = lower(model, format)
    set_attention(low.model, implementation)
    return Adjoint(low, model)


def growth_of_estimate(kind: str, length: int = 1024) -> float:
    """Memory that one "estimate" or "training forward" takes on top of the loaded models (fp32, and bf16)."""
    model = load_model("embedded")
    low = lower(model, "bf16")
    set_attention(low.model, OBSERVED_EAGER)
    tokens = torch.randint(model.config.vocab_size, (1, length), device=default_device())
    _reset_peak()
    before = _peak()
    if kind == "estimate":
        Adjoint(low, model)(tokens)
    else:
        model.requires_grad_(True)(tokens)
    return _peak() - before


def peak_megabytes(kind: str, length: int = 1024) -> float:
    """Peak memory during one bf16 pass ("plain" eager or "monitored"), the loaded model included."""
    low = lower(random_gpt2(), "bf16")
    if kind == "plain":
        low.model.set_attn_implementation("eager")
    monitor = Monitor(low) if kind == "monitored" else None
    tokens = torch.randint(50000, (1, length), device=default_device())
    _reset_peak()
    with torch.no_grad(), low.running():
        monitor(tokens) if monitor else low.model(tokens)
    return _peak()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what loading the model freed is not the pass's
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far


def _peak() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**10


MEASURED_ALONE = {kind: partial(peak_megabytes, kind) for kind in ("plain", "monitored")} | {
    kind: partial(growth_of_estimate, kind) for kind in ("training forward", "estimate")
}


def memory_passes() -> pd.DataFrame:
    """Memory of the monitored pass over the plain eager pass, and of an estimate; each in a fresh process."""
    command = [sys.executable, "-m", __spec__.name, "--peak"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = {
        kind: float(subprocess.check_output([*command, kind], env=environment, text=True)) for kind in MEASURED_ALONE
    }
    rows = [
        {"pass": f"{large} / {small}, peak MiB", "T": 1024, "MiB": peaks[large], "base MiB": peaks[small],
         "ratio": peaks[large] / peaks[small], "limit": limit}
        for large, small, limit in (
            ("monitored", "plain", MEMORY_LIMIT),
            ("estimate", "training forward", ESTIMATE_MEMORY_LIMIT),
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--peak", choices=MEASURED_ALONE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(MEASURED_ALONE[arguments.peak]())
        return
    print(f"GPT-2's size, random weights, {device_name(default_device())}, torch {torch.__version__}")
    print(time_passes(arguments.repetitions).round(3).to_string(index=False))
    print("\nthe embedded checkpoint")
    print(time_training_step(arguments.repetitions).round(3).to_string(index=False))
    print(time_patching(arguments.repetitions).round(3).to_string(index=False))
    print(time_estimate(arguments.repetitions).round(3).to_string(index=False))
    if torch.cuda.is_available() or sys.platform == "linux":
        print(memory_passes().round(2).to_string(index=False))


if __name__ == "__main__":
    main()
