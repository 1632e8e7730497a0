"""X4: what engines compute, beside our predictions and emulations of them."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fragility_adjoint.mixed_precision import Contributions, apply
from fragility_core.models.paths import head_paths
from fragility_engines.referees.known import Referee
from fragility_lab.experiments.x2 import Evaluator, row
from fragility_lab.measurement.comparison import ByToken, by_token
from fragility_lab.paths import PROJECT
from fragility_numerics.lowering import sharing_copy


@dataclass(frozen=True)
class Answer:
    """An engine's ``version``, its ``seconds`` over all windows, and the file of the logits of each."""

    version: str
    seconds: float
    logits: list[Path]


@dataclass(frozen=True)
class Court:
    """The fp32 ``model`` with its ``tokenizer``, and ``windows`` (B, T); ``probes`` of predictions.

    The engines run under ``python``. They find the model in a folder of ``work``, and leave there what they make of it.
    """

    model: PreTrainedModel
    tokenizer: Any
    windows: Tensor
    work: Path
    python: Path
    probes: int = 2

    @cached_property
    def folder(self) -> Path:
        """The folder of the model, which engines read."""
        made = self.work / "model"
        self.model.save_pretrained(made)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(made)
        return made

    @cached_property
    def exact(self) -> list[Tensor]:
        """The fp32 logits (1, T, vocabulary) of every window."""
        return list(self._passes(self.model))

    def _passes(self, model: PreTrainedModel) -> Iterator[Tensor]:
        for window in self.windows.split(1):
            with torch.no_grad():
                logits = model(window, use_cache=False).logits.float()
            yield logits

    def compared(self, logits: Iterable[Tensor]) -> list[ByToken]:
        """The comparison by token of each window's ``logits`` with the fp32 ones."""
        pairs = zip(logits, self.exact, self.windows.split(1), strict=True)
        return [by_token(low, exact, tokens) for low, exact, tokens in pairs]

    @contextmanager
    def ask(self, referee: Referee) -> Iterator[Answer]:
        """The answer of ``referee``; its logits are gone when the context ends.

        Raises RuntimeError with the last line that the engine wrote if it cannot compute, and for a model of which it
        quantizes less than its recipe says.
        """
        if referee.linear_alone and any(isinstance(module, Conv1D) for module in self.model.modules()):
            raise RuntimeError(f"{referee.name} quantizes nn.Linear alone, and this model has Conv1D in its blocks")
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            task = {
                "engine": referee.engine, "kind": referee.kind, "model": str(self.folder), "work": str(self.work),
                "answer": folder, "windows": self.windows.tolist(),
            }  # fmt: skip
            written = Path(folder) / "task.json"
            written.write_text(json.dumps(task))
            command = [str(self.python), "-m", "fragility_engines.referees.worker", str(written)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
            if ran.returncode:
                raise RuntimeError(last_error(ran.stderr) or f"it ended with {ran.returncode}")
            found = json.loads((Path(folder) / "answer.json").read_text())
            files = [Path(folder) / f"logits-{number}.npy" for number in range(len(self.windows))]
            yield Answer(found["version"], found["seconds"], files)

    def emulated(self, referee: Referee) -> list[ByToken]:
        """The comparison of our own passes, by the plan of ``referee``, with fp32."""
        low = apply(self._of(referee), referee.plan, "emulated")

        def passes() -> Iterator[Tensor]:
            with low.running():
                yield from self._passes(low.model)

        return self.compared(passes())

    def predicted(self, referee: Referee, target: str) -> np.ndarray:
        """The prediction (B,) in ``target`` for the plan of ``referee``."""
        model = self._of(referee)
        found = Evaluator(model, self.windows, self.probes).predict(referee.plan.recipe, target)
        if not referee.plan.residual:
            return found.windows.predicted.to_numpy()
        return Contributions(model, found).predict(referee.plan).predicted.to_numpy()

    def _of(self, referee: Referee) -> PreTrainedModel:
        return untied(self.model) if referee.untied else self.model

    def rows(self, referee: Referee, targets: Iterable[str] = ("kl", "logprob")) -> list[dict[str, object]]:
        """One row for each quantity of READ: predicted if it is among ``targets``, emulated, and by the engine.

        An engine that cannot compute has one row, with what it said.
        """
        named: dict[str, object] = {"engine": referee.name, "recipe": referee.plan.recipe.name}
        try:
            with self.ask(referee) as answer:
                logits = (torch.from_numpy(np.load(path))[None] for path in answer.logits)
                measured = self.compared(logits)
        except RuntimeError as refused:
            return [named | {"quantity": "kl", "refused": str(refused)}]
        ours, rows = self.emulated(referee), list[dict[str, object]]()
        for quantity, of in READ.items():
            found = np.array([of(each) for each in measured])
            expected = (
                self.predicted(referee, quantity) if quantity in targets and referee.plan.recipe.rounds
                else np.full(len(found), np.nan)
            )  # fmt: skip
            columns = row(referee.plan.recipe.name, quantity, expected, found) if np.isfinite(expected).any() else {}
            rows.append(
                named | {"quantity": quantity, "windows": len(found)} | columns
                | {"measured": found.mean(), "emulated": np.mean([of(each) for each in ours])}
                | {"seconds": answer.seconds, "version": answer.version}
            )  # fmt: skip
        return rows


READ: dict[str, Callable[[ByToken], float]] = {  # mean over the positions of a window
    "kl": lambda found: float(found.kl.mean()),
    "logprob": lambda found: float((found.logprob - found.exact_logprob).square().mean() ** 0.5),
    "changed": lambda found: float(found.changed.double().mean()),
}


def last_error(said: str) -> str:
    """The last line of what a process ``said`` that names an error, otherwise the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def untied(model: PreTrainedModel) -> Any:
    """A copy of ``model`` whose head has a matrix of its own; all other parameters are shared."""
    made: Any = sharing_copy(model)
    made.config.tie_word_embeddings = False
    for path in head_paths(made):
        head = made.get_submodule(path)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return made
