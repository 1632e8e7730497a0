"""The costs of observation, emulation and estimates: ``make bench``.

The monitored pass (bf16) and the emulation (fp16) are timed on a model of GPT-2's real size with random weights. Times
are medians of interleaved repetitions, so that a drift of the machine's speed affects both sides alike. Memory is the
peak of a fresh process during the pass alone. In that process every tensor has a mapping of its own. The peak then
counts the memory in use, as on a GPU, without the holes of a heap. The estimator is timed on the embedded checkpoint in
processor time of one thread, which other work on the machine disturbs least.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import TypeVar

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2Model

from fragility_adjoint.predictor import Adjoint
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.patching import Patching
from fragility_lab.experiments.shadow import ShadowTraining
from fragility_lab.inputs.checkpoints import default_device, load_model
from fragility_lab.running.environment import device_name
from fragility_lab.running.memory import forget_peak, peak
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower

ALONE = ("plain", "monitored", "training forward", "estimate")  # what is measured in a process of its own


def random_gpt2() -> GPT2Model:
    """GPT-2's architecture (124 M parameters) with random weights."""
    torch.manual_seed(0)
    return GPT2Model(GPT2Config()).eval().requires_grad_(False).to(default_device())


def random_tokens(length: int) -> Tensor:
    """One window (1, length) of random tokens, which the embedded checkpoint has too."""
    return torch.randint(4096, (1, length), device=default_device())


Key = TypeVar("Key", str, int)


def medians(
    calls: Mapping[Key, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Key, float]:
    """Median seconds of each call by ``clock``, the calls taking turns after one warm-up each."""
    seconds: dict[Key, list[float]] = {name: [] for name in calls}
    for turn in range(repetitions + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compared(name: str, length: int, value: float, base: float, limit: float, unit: str = "seconds") -> dict:
    """A row of the table: ``value`` and ``base`` in ``unit``, their ratio, and the largest ratio that is aimed at."""
    return {"pass": name, "T": length, unit: value, f"base {unit}": base, "ratio": value / base, "limit": limit}


@torch.no_grad()
def plain_pass(low: LowPrecision, tokens: Tensor) -> None:
    """One low-precision pass that nobody observes."""
    with low.running():
        low.model(tokens)


@torch.no_grad()
def time_passes(repetitions: int) -> pd.DataFrame:
    """Monitored over plain in bf16, and emulated fp16 over plain fp32, by window length.

    "plain" is the model as transformers ships it. "unobserved" is the low-precision pass that the monitor observes,
    which ``lower`` makes faster than the plain one.
    """
    model = random_gpt2()
    plain, unobserved = copy.deepcopy(model).bfloat16(), lower(model, "bf16")
    emulated, monitor = lower(model, "fp16", "emulated"), Monitor(lower(model, "bf16"))
    rows = []
    for length, limit in ((128, 1.2), (512, 1.2), (1024, 1.5)):
        tokens = random_tokens(length)
        calls = {
            "plain bf16": partial(plain, tokens),
            "unobserved bf16": partial(plain_pass, unobserved, tokens),
            "monitored bf16": partial(monitor, tokens),
            "plain fp32": partial(model, tokens),
            "emulated fp16": partial(plain_pass, emulated, tokens),
        }
        seconds = medians(calls, repetitions * 1024 // length)  # short passes scatter more
        for slow, fast, most in (
            ("monitored bf16", "plain bf16", limit),
            ("monitored bf16", "unobserved bf16", float("nan")),
            ("emulated fp16", "plain fp32", 1.6),
        ):
            rows.append(compared(f"{slow} / {fast}", length, seconds[slow], seconds[fast], most))
    return pd.DataFrame(rows)


def time_patching(repetitions: int) -> pd.DataFrame:
    """Base and all L patched passes of one window over L plain passes with the library's default attention."""
    model, tokens, rows = load_model("embedded"), random_tokens(512), []
    for format in ("bf16", "fp16"):
        plain, patching = lower(model, format), Patching(model, lower(model, format))
        seconds = medians({"E3": partial(patching, tokens), "plain": partial(plain_pass, plain, tokens)}, repetitions)
        name = f"E3: all patched forwards / (L x plain), {format} {plain.execution}"
        rows.append(compared(name, 512, seconds["E3"], len(patching.pairs) * seconds["plain"], 0.75))
    return pd.DataFrame(rows)


def time_training_step(repetitions: int) -> pd.DataFrame:
    """A step of E5 (training, shadow copy, monitored pass, reference) over a bare fp32 training step."""
    model, tokens = load_model("embedded", auto_class=AutoModelForCausalLM), random_tokens(256)
    shadowed, bare = ShadowTraining(model, "fp16"), ShadowTraining(model, "fp16")
    bare.master = copy.deepcopy(model).requires_grad_(True)  # as the library ships it
    bare.optimizer = torch.optim.AdamW(bare.master.parameters(), weight_decay=0.0, fused=True)

    def step() -> None:
        shadowed.train_step(tokens, 1e-5)
        shadowed.shadow.observe(tokens)

    seconds = medians({"E5": step, "bare": lambda: bare.train_step(tokens, 1e-5)}, 2 * repetitions)
    return pd.DataFrame([compared("E5 step / training step", 256, seconds["E5"], seconds["bare"], 2.5)])


# The target, the points of the gradients, and by window length how many plain passes an estimate may take.
ESTIMATES = (
    ("hidden", "low", {512: 3.5, 1024: 5.0}),
    ("kl", "low", {512: 3.5}),
    ("kl", "both", {512: 7.0}),
    ("kl", "secant", {512: 20.0}),
)


def time_estimate(repetitions: int) -> pd.DataFrame:
    """One estimate of one probe over one plain fp32 pass with the library's default attention, on one thread.

    The plain pass gives logits where the target needs them.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for target, gradients, limits in ESTIMATES:
        model = load_model("embedded", auto_class=AutoModelForCausalLM if target == "kl" else AutoModel)
        for length, limit in limits.items():
            tokens = random_tokens(length)
            calls = {"plain": torch.no_grad()(partial(model, tokens, use_cache=False))}
            for format, implementation in product(("bf16", "fp16"), ("sdpa", OBSERVED_EAGER)):
                low = attending(lower(model, format), implementation)
                adjoint = Adjoint(low, model, target=target, gradients=gradients)
                calls[f"{target} at {gradients}, {format}, {implementation}"] = partial(adjoint, tokens)
            seconds = medians(calls, repetitions, clock)
            base = seconds.pop("plain")
            for name, taken in seconds.items():
                rows.append(compared(f"estimate / plain fp32, {name}", length, taken, base, limit))
    torch.set_num_threads(threads)
    return pd.DataFrame(rows)


def attending(low: LowPrecision, implementation: str) -> LowPrecision:
    """``low`` itself, set to another attention implementation."""
    set_attention(low.model, implementation)
    return low


def memory_of(kind: str) -> float:
    """MiB of one pass of one window; ``kind`` is one of ALONE.

    A "plain" (eager) or "monitored" pass counts with the loaded model. An "estimate" or a "training forward" counts
    without the loaded models (fp32 and bf16).
    """
    low: LowPrecision
    call: Callable[[Tensor], object]
    if kind in ("plain", "monitored"):
        low = lower(random_gpt2(), "bf16")
        if kind == "plain":
            low.model.set_attn_implementation("eager")
        call = Monitor(low) if kind == "monitored" else partial(plain_pass, low)
    else:
        model = load_model("embedded")
        low = attending(lower(model, "bf16"), OBSERVED_EAGER)
        estimate = partial(Adjoint, low, model, gradients="low")
        call = model.requires_grad_(True) if kind == "training forward" else lambda given: estimate()(given)
    tokens = random_tokens(1024)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()  # memory that loading the model freed is not the pass's
    loaded = 0.0 if kind in ("plain", "monitored") else _peak()
    call(tokens)
    return _peak() - loaded


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else peak()


def memory_passes() -> pd.DataFrame:
    """Memory of the monitored pass over the plain eager pass, and of an estimate; each in a fresh process."""
    command = [sys.executable, __file__, "--peak"]
    given = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = {kind: float(subprocess.check_output([*command, kind], env=given, text=True)) for kind in ALONE}
    pairs = ("monitored", "plain", 1.3), ("estimate", "training forward", 1.5)
    return pd.DataFrame(
        [
            compared(f"{large} / {small}, peak", 1024, peaks[large], peaks[small], limit, "MiB")
            for large, small, limit in pairs
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--peak", choices=ALONE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(memory_of(arguments.peak))
        return
    print(f"GPT-2's size, random weights, {device_name(default_device())}, torch {torch.__version__}")
    print(time_passes(arguments.repetitions).round(3).to_string(index=False))
    print("\nthe embedded checkpoint")
    for measure in (time_training_step, time_patching, time_estimate):
        print(measure(arguments.repetitions).round(3).to_string(index=False))
    if torch.cuda.is_available() or sys.platform == "linux":
        print(memory_passes().round(2).to_string(index=False))


if __name__ == "__main__":
    main()
