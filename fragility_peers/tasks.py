"""Tasks of a process that drives a library, and its answers.

A task is a dictionary that JSON holds: ``kind``, ``model`` (a checkpoint), ``ladder``, and the windows ``calibration``
(B, T) as lists of tokens. Kinds:

- "choose", with ``method``, ``budgets`` (bits a weight) and, for OURS, ``units``, ``probes`` and ``seed``: the answer
  has ``units`` (lists of paths that get one scheme), ``scores`` (units, rungs), ``plans`` (budgets, units; numbers of
  rungs), ``seconds`` of a core for all of it, and ``memory``, MiB of its peak above the loaded model.
- "measure", with ``held`` windows and ``choices``, each of which gives every linear layer of blocks, in the model's
  order, the number of its rung (NO_RUNG for none): the answer has ``kl`` (choices, windows) in nats a token,
  ``seconds`` for each, and ``paths``.
- "refuse": the answer has the errors of the library for schemes that it cannot run here, by name.
"""

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fragility_lab.inputs.checkpoints import load_model
from fragility_lab.running.memory import forget_peak, peak
from fragility_peers.ladders import get_ladder
from fragility_quantization.operands import linear_weights, owner

OURS = "ours"  # the method of this project, on any ladder
ORACLE = "oracle"  # the method that knows the measured KL of every layer alone
NO_RUNG = -1
BATCH = 8  # windows a pass


@dataclass(frozen=True)
class Chosen:
    """A method's ``units``, its ``scores`` (units, rungs; smaller is better), and one plan for each budget."""

    units: list[list[str]]
    scores: list[list[float]]
    plans: list[list[int]]


class Driver(Protocol):
    """The functions that the module of a library offers.

    A library that refuses schemes has ``refused(model, calibration)``, too: its errors, by name.
    """

    def choose(self, model: nn.Module, calibration: Tensor, task: dict[str, Any]) -> Chosen:
        """The plans of ``task["method"]`` for ``task["budgets"]``."""

    def quantized(self, model: nn.Module, calibration: Tensor, rung: str) -> nn.Module:
        """A copy of ``model`` with all linear layers of blocks on one rung, under the library's own quantizers."""


def linear_model(name: str) -> PreTrainedModel:
    """The fp32 model ``name`` with GPT-2's ``Conv1D`` as ``nn.Linear``, since libraries look for linear layers."""
    model = load_model(name, "cpu", AutoModelForCausalLM)
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
            model.set_submodule(path, linear)
    return model.eval().requires_grad_(False)


class Head(nn.Module):
    """The head as a module that no library takes for a linear layer: it is outside of all plans."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def without_head(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` whose head is a ``Head``."""
    model = copy.deepcopy(model)
    model.set_output_embeddings(Head(model.get_output_embeddings()))
    return model


def layer_paths(model: nn.Module) -> list[str]:
    """Paths of the linear layers of blocks, in the model's order."""
    return list(dict.fromkeys(owner(path) for path in linear_weights(model)))


def carry_out(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to ``task``; raises ValueError for an unknown kind."""
    library = "own" if task.get("method") == OURS else get_ladder(task["ladder"]).library
    driver: Driver = importlib.import_module(f"fragility_peers.{library}")
    model, calibration = linear_model(task["model"]), torch.tensor(task["calibration"])
    match task["kind"]:
        case "choose":
            chosen, seconds, memory = weighed(lambda: driver.choose(model, calibration, task))
            return vars(chosen) | {"seconds": seconds, "memory": memory}
        case "measure":
            return measured(driver, model, calibration, task)
        case "refuse":
            return driver.refused(model, calibration) if hasattr(driver, "refused") else {}
    raise ValueError(f'a task must be to "choose", to "measure" or to "refuse", got {task["kind"]!r}')


@torch.no_grad()
def measured(driver: Driver, model: PreTrainedModel, calibration: Tensor, task: dict[str, Any]) -> dict[str, Any]:
    """KL of every choice over every window, and the seconds of a core that it took."""
    rungs, held = get_ladder(task["ladder"]).names, torch.tensor(task["held"]).split(BATCH)
    layers = [
        dict(driver.quantized(model, calibration, rung).named_modules()) if rung != "none" else {} for rung in rungs
    ]
    paths, own = layer_paths(model), dict(model.named_modules())
    exact = [log_probabilities(model, tokens) for tokens in held]
    found, seconds = [], []
    for choice in task["choices"]:
        began = time.process_time()
        for path, number in zip(paths, choice, strict=True):
            there: dict[str, nn.Module] = layers[number] if number != NO_RUNG else {}
            model.set_submodule(path, there[path] if path in there else own[path])
        found.append([kl for tokens, want in zip(held, exact) for kl in divergences(model, tokens, want)])
        seconds.append(time.process_time() - began)
    return {"kl": found, "seconds": seconds, "paths": paths}


def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The log probabilities of all next tokens, (B, T, vocabulary)."""
    return model(tokens, use_cache=False).logits.double().log_softmax(-1)


def divergences(model: PreTrainedModel, tokens: Tensor, exact: Tensor) -> list[float]:
    """KL in nats a token of each window of ``tokens`` from log probabilities ``exact``."""
    return (exact.exp() * (exact - log_probabilities(model, tokens))).sum(-1).mean(-1).tolist()


def weighed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of ``call``, its seconds of a core, and the MiB by which the peak of memory rose.

    The peak is that of this process, above its memory before the call. It is NaN on systems other than Linux.
    """
    forget_peak()
    before, began = peak(), time.process_time()
    result = call()
    return result, time.process_time() - began, peak() - before


def by_layer(paths: Sequence[str], units: Sequence[Sequence[str]], plan: Sequence[int]) -> list[int]:
    """The rung of every one of ``paths``, from a plan (one rung for each unit)."""
    rung = {path: number for unit, number in zip(units, plan, strict=True) for path in unit}
    return [rung.get(path, NO_RUNG) for path in paths]
