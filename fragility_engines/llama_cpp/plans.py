"""Plans of GGUF's types beside the mixes of llama-quantize at equal size, both made and measured by llama.cpp.

    make gguf MODEL=path DATA=text.txt

The plan is made from predictions over windows of the text that the
measurement does not see. The table is ``gguf_plans.csv`` of ``--results``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fragility_adjoint.mixed_precision.bits import Choices, chosen_groups, predictions
from fragility_adjoint.mixed_precision.structure import stored_parameters
from fragility_engines.environment import environment
from fragility_engines.llama_cpp.files import require_llama, shuffled, write_gguf
from fragility_exports.llama_cpp import llama_quantize
from fragility_exports.plan import Plan
from fragility_lab import paths
from fragility_lab.inputs.loading import load, require_at_least
from fragility_lab.measurement.comparison import by_token
from fragility_lab.reporting.tables import save_table
from fragility_quantization.ggml import MIXES, WEIGHTS
from fragility_quantization.operands import with_known_layers
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

WORKER = Path(__file__).with_name("worker.py")
TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "iq4_nl", "q4_1", "q5_0", "q5_1", "q8_0")


@dataclass(frozen=True)
class Made:
    """A file that llama.cpp makes: by a mix's name and ``plan``, or by the mix alone; ``rounded`` is its recipe."""

    name: str
    ftype: str
    plan: Plan
    by_rules: bool


def stored_bytes(model: Any, plan: Plan) -> int:
    """Bytes of all tensors of ``model`` by ``plan``."""
    return round(sum(p.entries * p.bits for p in stored_parameters(model, with_known_layers(model, plan.recipe))) / 8)


def plans_beside(
    model: Any, mixes: Sequence[str], tokens: Tensor, types: Sequence[str] = TYPES, probes: int = 1
) -> list[Made]:  # fmt: skip
    """Each of ``mixes``, followed by the plan over ``types`` of the same size or less with the least predicted KL."""
    names = [f"ggml-{name}" for name in types]
    found = predictions(model, names, tokens, "kl", probes=probes)
    choices = Choices(model, found, chosen_groups(model, tokens[:1], get_recipe(names[0])))
    made = []
    for mix in mixes:
        alone = Plan(f"gguf-{mix}")
        best = choices.plan(choices.within_bytes(stored_bytes(model, alone)))
        made += [Made(mix, mix, alone, False), Made(f"plan at {mix}", "q8_0", best, True)]
    return made


@torch.no_grad()
def emulated(model: Any, plan: Plan, windows: Tensor) -> list[float]:
    """KL of each of the ``windows`` (B, T) by our own pass, in nats a token."""
    low, found = lower(model, plan.recipe), []
    for window in windows.split(1):
        with low.running():
            rounded = low.model(window, use_cache=False).logits
        found.append(float(by_token(rounded, model(window, use_cache=False).logits, window).kl.mean()))
    return found


def measured(python: str, model: Any, made: Sequence[Made], windows: Tensor) -> dict[str, Any]:
    """The answer of ``worker`` for the files ``made``; raises RuntimeError with what it said if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/source.gguf"
        write_gguf(model, source)
        files = [
            {
                "path": f"{folder}/{number}.gguf", "ftype": each.ftype,
                "rules": [line.split("=") for line in llama_quantize(each.plan, model).text().split()] * each.by_rules,
            }
            for number, each in enumerate(made)
        ]  # fmt: skip
        task = json.dumps({"source": source, "files": files, "windows": windows.tolist()})
        ran = subprocess.run([python, "-I", str(WORKER)], input=task, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{python} must run {WORKER.name} with llama-cpp-python, got: {ran.stderr.strip()[-600:]}")
    return json.loads(ran.stdout.strip().splitlines()[-1])


def compared(
    model: Any, python: str, calibration: Tensor, windows: Tensor, mixes: Sequence[str],
    types: Sequence[str] = TYPES, probes: int = 1,
) -> pd.DataFrame:  # fmt: skip
    """One row a file: sizes, KL over ``windows`` predicted, emulated and by llama.cpp, and the ratio to the mix's."""
    made = plans_beside(model, mixes, calibration, types, probes)
    answer, rows = measured(python, model, made, windows), []
    for each, file in zip(made, answer["files"], strict=True):
        recipe = with_known_layers(model, each.plan.recipe)
        (known,) = predictions(model, [recipe], windows, "kl", probes=probes).values()
        kl, own = pd.Series(file["kl"]), pd.Series(emulated(model, each.plan, windows))
        rows.append({
            "file": each.name, "MB": file["bytes"] / 1e6, "MB_counted": stored_bytes(model, each.plan) / 1e6,
            "kl_predicted": known.windows.predicted.mean(), "kl_emulated": own.mean(),
            "kl_llama_cpp": kl.mean(), "kl_standard_error": kl.sem(), "windows": len(kl), "tokens": windows.shape[1],
        })  # fmt: skip
        rows[-1]["beside_mix"] = kl.mean() / rows[-1 - each.by_rules]["kl_llama_cpp"]
    return pd.DataFrame(rows)


def table_for(asked: argparse.Namespace) -> pd.DataFrame:
    """The table of ``compared`` for the options ``asked``. Raises ValueError also for unknown mixes or types."""
    mixes, types = asked.mixes.split(), asked.types.split()
    for kind, names, known in (("mix", mixes, MIXES), ("type", types, WEIGHTS)):
        if strange := [name for name in names if name not in known]:
            raise ValueError(f"a {kind} must be one of {', '.join(known)}, got {strange[0]!r}")
    require_at_least(1, windows=asked.windows, calibration=asked.calibration, probes=asked.probes)
    count = max(asked.calibration, asked.windows)
    inputs = load(asked.model, asked.data, [asked.length], count, auto_class=AutoModelForCausalLM)
    require_llama(inputs.model)
    model: Any = shuffled(inputs.model) if asked.shuffle else inputs.model
    (_, first), (_, second) = (inputs.windows(asked.length, count, seed, disjoint=True) for seed in (0, 1))
    calibration, windows = first[: asked.calibration], second[: asked.windows]
    return compared(model, asked.engines, calibration, windows, mixes, types, asked.probes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fragility_engines.llama_cpp.plans", description=__doc__)
    parser.add_argument("--model", default="embedded-llama", help="path of an fp32 model of Llama's family")
    parser.add_argument("--data", default="embedded", help="a text")
    parser.add_argument("--engines", default=str(environment()), help="a Python that has llama-cpp-python")
    parser.add_argument("--mixes", default="q4_k_m", help="mixes of llama-quantize, by their names")
    parser.add_argument("--types", default=" ".join(TYPES), help="types among which a plan chooses")
    parser.add_argument("--shuffle", action="store_true", help="channels in a random order (llama_cpp.files.shuffled)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--calibration", type=int, default=4, help="windows of the plan")
    parser.add_argument("--windows", type=int, default=8, help="windows of the measurement")
    parser.add_argument("--probes", type=int, default=1, help="sign vectors that a prediction averages over")
    parser.add_argument("--results", default="engines", help="folder in outputs for the table")
    parser.add_argument("--table", default="gguf_plans", help="name of the table")
    asked = parser.parse_args(arguments)
    try:
        table = table_for(asked)
    except (ValueError, OSError, RuntimeError) as refused:
        sys.exit(f"make gguf: {refused}")
    except KeyboardInterrupt:
        sys.exit("make gguf: interrupted, nothing is kept")
    print(table.to_string(index=False))
    (folder := paths.output_folder(asked.results) / "tables").mkdir(parents=True, exist_ok=True)
    save_table(table, folder, asked.table)


if __name__ == "__main__":
    main()
