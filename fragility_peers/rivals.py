"""X2's rivals: plans of other libraries beside ours, under their own quantizers and at exactly their budgets.

Each library runs in a process of its own (``fragility_peers``). All methods see the same calibration windows, and
all plans are measured on other windows. Beside them are the oracle, which knows the measured KL of every layer alone
on the calibration windows, and plans drawn at random.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fragility_adjoint.mixed_precision.bits import fused_layers
from fragility_lab.inputs.loading import Inputs, require_at_least
from fragility_lab.paths import PROJECT
from fragility_lab.running.environment import progress
from fragility_peers.ladders import Ladder, get_ladder
from fragility_peers.own import best_plans
from fragility_peers.tasks import NO_RUNG, ORACLE, OURS, by_layer, carry_out, layer_paths, linear_model

PEERS = PROJECT / ".peers" / "bin" / "python"
RANDOM = "random"  # the method that draws plans


def split_windows(inputs: Inputs, length: int, calibration: int, held: int, seed: int) -> tuple[Tensor, Tensor]:
    """Windows for methods to learn from, and others to measure on, each (B, T), drawn from one text."""
    require_at_least(1, calibration=calibration)
    require_at_least(2, held=held)
    _, windows = inputs.windows(length, calibration + held, seed)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[:calibration]], windows[order[calibration:]]


@dataclass(frozen=True)
class Benchmark:
    """A checkpoint by name, its ``calibration`` and ``held`` windows (B, T), and the ``folder`` of finished answers.

    The answer to a finished task is read from the folder, even if the code has changed: empty it to run all again.
    """

    model: str
    calibration: Tensor
    held: Tensor
    folder: Path
    probes: int = 2
    seed: int = 0

    def __post_init__(self):
        require_at_least(0, seed=self.seed)

    @cached_property
    def loaded(self):
        """The model with all linear layers as ``nn.Linear``."""
        return linear_model(self.model)

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the model's linear layers, in order."""
        return layer_paths(self.loaded)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Weights of each layer."""
        return {path: self.loaded.get_submodule(path).weight.numel() for path in self.paths}

    def ask(self, ladder: Ladder, kind: str, **more: Any) -> dict[str, Any]:
        """The answer to a task. Tasks that need a library run in a process of their own.

        Raises OSError without the libraries' environment, and RuntimeError with the last words of a process that fails.
        """
        task = {"kind": kind, "model": self.model, "ladder": ladder.title, "calibration": self.calibration.tolist()}
        task |= more
        if ladder.library == "own":
            return carry_out(task)
        text = json.dumps(task)
        answer = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not answer.is_file():
            self._run(text, answer, sys.executable if more.get("method") == OURS else PEERS)
        return json.loads(answer.read_text())

    def _run(self, text: str, answer: Path, python: str | Path) -> None:
        if not Path(python).exists():
            raise OSError(
                f"libraries of rivals need an environment of their own, but there is no {python}: make rivals"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        task, made = answer.with_suffix(".task"), answer.with_suffix(".part")
        task.write_text(text)
        given = {"PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, "-m", "fragility_peers", task, made], env=os.environ | given, cwd=PROJECT, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the driver failed: {' '.join(done.stderr.splitlines()[-3:])}")
        made.rename(answer)
        task.unlink()


@dataclass(frozen=True)
class Comparison:
    """All methods on one ladder: their choices and scores beside the measured KL."""

    benchmark: Benchmark
    ladder: Ladder
    budgets: Sequence[float]
    draws: int = 3

    @cached_property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The answers of the library's methods, by name."""
        more = {"budgets": list(self.budgets)}
        return {name: self.benchmark.ask(self.ladder, "choose", method=name, **more) for name in self.ladder.methods}

    @cached_property
    def units(self) -> list[list[str]]:
        """Layers that get one scheme together: the library's units, or the layers that read the same input."""
        found = [answer["units"] for answer in self.methods.values()]
        if any(units != found[0] for units in found):
            raise RuntimeError(f"methods of {self.ladder.library} must have the same units")
        if found:
            return found[0]
        return [list(group) for group in fused_layers(self.benchmark.loaded, self.benchmark.calibration[:1])]

    @cached_property
    def ours(self) -> dict[str, Any]:
        """Our answer, over the same units."""
        more = {"units": self.units, "budgets": list(self.budgets)}
        more |= {"probes": self.benchmark.probes, "seed": self.benchmark.seed}
        return self.benchmark.ask(self.ladder, "choose", method=OURS, **more)

    @cached_property
    def unit_sizes(self) -> list[int]:
        """Weights of each unit."""
        return [sum(self.benchmark.sizes[path] for path in unit) for unit in self.units]

    def bits(self, plan: Sequence[int]) -> float:
        """Bits a weight of a plan."""
        total = sum(size * self.ladder.bits[rung] for size, rung in zip(self.unit_sizes, plan, strict=True))
        return total / sum(self.unit_sizes)

    @cached_property
    def singles(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Measured KL (units, rungs) of each unit alone, over calibration and held-out windows, and its seconds.

        The dearest rung counts as exact: its error is small beside the others, and measuring it would take as long.
        """
        places = [(u, r) for u in range(len(self.units)) for r in self.ladder.cheaper]
        plans = [[r if i == u else NO_RUNG for i in range(len(self.units))] for u, r in places]
        windows = torch.cat([self.benchmark.calibration, self.benchmark.held])
        kl, seconds = self._measure(plans, windows)
        count, shape = len(self.benchmark.calibration), (len(self.units), len(self.ladder.names))
        known, held = np.zeros(shape), np.zeros(shape)
        for (u, r), row in zip(places, kl):
            known[u, r], held[u, r] = row[:count].mean(), row[count:].mean()
        return known, held, float(np.sum(seconds)) * count / len(windows)

    def _measure(self, plans: Sequence[Sequence[int]], windows: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """KL (plans, windows), and seconds for each plan."""
        choices = [by_layer(self.benchmark.paths, self.units, plan) for plan in plans]
        answer = self.benchmark.ask(self.ladder, "measure", choices=choices, held=windows.tolist())
        return np.array(answer["kl"]), np.array(answer["seconds"])

    def best(self, errors: np.ndarray | list, bits: float) -> list[int]:
        """The plan with the least sum of ``errors`` (units, rungs) within ``bits`` a weight."""
        return best_plans(np.asarray(errors), self.unit_sizes, self.ladder, [bits])[0]

    def at_random(self, bits: float, seed: int) -> list[int]:
        """A random plan: the cheapest rung for all units, then drawn ones, unit by unit, as long as ``bits`` allow."""
        generator, plan = np.random.default_rng(seed), [int(np.argmin(self.ladder.bits))] * len(self.units)
        others = [rung for rung in range(len(self.ladder.bits)) if rung != plan[0]]
        for unit in generator.permutation(len(plan)):
            trial = [int(generator.choice(others)) if i == unit else rung for i, rung in enumerate(plan)]
            plan = trial if self.bits(trial) <= bits * (1 + 1e-9) else plan
        return plan

    def plans(self) -> pd.DataFrame:
        """One row per plan: KL with its interval, and its difference from the rival's plan at the same budget.

        ``rival`` is the method whose budget the plan has, ``chosen_by`` its maker, ``choice`` the rungs of all layers,
        a letter each. ``predicted`` is our prediction for the plan, ``additive`` the sum of its units' KL alone.
        """
        asked = []
        for rival in self.methods or [""]:
            for number, budget in enumerate(self.budgets):
                theirs: Any = self.methods[rival]["plans"][number] if rival else None
                bits = self.bits(theirs) if rival else budget
                made = [(rival, theirs)] if rival else []
                made += [(OURS, self.best(self.ours["scores"], bits)), (ORACLE, self.best(self.singles[0], bits))]
                made += [(RANDOM, self.at_random(bits, seed)) for seed in range(self.draws)]
                asked += [(rival, budget, bits, chosen_by, plan) for chosen_by, plan in made]
        distinct = {tuple(plan): None for *_, plan in asked}
        kl = dict(zip(distinct, self._measure(list(distinct), self.benchmark.held)[0]))
        first = {(rival, budget): kl[tuple(plan)] for rival, budget, _, by, plan in asked if by == rival}
        rows = [
            {"ladder": self.ladder.title, "rival": rival, "budget": budget}
            | {"budget_bits": bits, "bits": self.bits(plan), "chosen_by": by} | interval("kl", kl[tuple(plan)])
            | interval("difference", kl[tuple(plan)] - first.get((rival, budget), np.nan))
            | {"predicted": total(self.ours["scores"], plan), "additive": total(self.singles[1], plan)}
            | {"choice": letters(by_layer(self.benchmark.paths, self.units, plan))}
            for rival, budget, bits, by, plan in asked
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def layers(self) -> pd.DataFrame:
        """One row per unit and rung: its measured KL alone, on held-out windows, and every method's score for it."""
        scores = {OURS: self.ours["scores"], ORACLE: self.singles[0].tolist()}
        scores |= {name: answer["scores"] for name, answer in self.methods.items()}
        return pd.DataFrame(
            {"ladder": self.ladder.title, "unit": unit[0], "layers": len(unit), "rung": self.ladder.names[r]}
            | {"measured": self.singles[1][u, r]} | {method: found[u][r] for method, found in scores.items()}
            for u, unit in enumerate(self.units) for r in self.ladder.cheaper
        )  # fmt: skip

    def costs(self) -> pd.DataFrame:
        """Seconds and MiB of memory that each method took for the plans of all budgets, on one thread."""
        rows = [{"method": name} | answer for name, answer in (self.methods | {OURS: self.ours}).items()]
        rows.append({"method": ORACLE, "seconds": self.singles[2]})
        table = pd.DataFrame(rows, columns=["method", "seconds", "memory"])
        return table.assign(ladder=self.ladder.title)


def letters(choice: Sequence[int]) -> str:
    """The rungs of layers as text, "a" for the first."""
    return "".join(chr(ord("a") + rung) for rung in choice)


def interval(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean of ``values`` over windows and its 95 % interval, Student's."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5 if np.ndim(values) else np.nan
    return {name: np.mean(values), f"{name}_low": np.mean(values) - half, f"{name}_high": np.mean(values) + half}


def total(errors: np.ndarray | list, plan: Sequence[int]) -> float:
    """The sum of ``errors`` (units, rungs) over the rungs of ``plan``."""
    return float(np.asarray(errors)[range(len(plan)), list(plan)].sum())


def compare_all(
    benchmark: Benchmark, ladders: Sequence[str], shares: Sequence[float], draws: int
) -> dict[str, pd.DataFrame]:
    """Tables by name: ``plans``, ``layers``, ``costs``, and ``refused``, the answers of libraries to other schemes.

    Budgets lie at ``shares`` of the way from the cheapest rung to the dearest.
    """
    found: dict[str, list[pd.DataFrame]] = {"plans": [], "layers": [], "costs": []}
    said: dict[str, dict[str, str]] = {}
    for name in progress(ladders, desc="ladders"):
        ladder = get_ladder(name)
        least, most = min(ladder.bits), max(ladder.bits)
        comparison = Comparison(benchmark, ladder, [least + share * (most - least) for share in shares], draws)
        for kind, rows in found.items():
            rows.append(getattr(comparison, kind)())
        if ladder.library not in said:
            said[ladder.library] = benchmark.ask(ladder, "refuse")
    refused = [(library, scheme, text) for library, texts in said.items() for scheme, text in texts.items()]
    tables = {kind: pd.concat(each, ignore_index=True) for kind, each in found.items()}
    return tables | {"refused": pd.DataFrame(refused, columns=["library", "scheme", "said"])}


def summary(plans: pd.DataFrame) -> pd.DataFrame:
    """One row per rival's plan: its KL, ours, the oracle's and the mean of random ones at the same budget.

    ``difference`` is ours minus the rival's, with its interval over windows. ``better`` is "same" if both are one plan,
    "open" if the interval holds 0, else the method with the smaller KL.
    """
    rows = []
    for (ladder, rival, budget), group in plans.groupby(["ladder", "rival", "budget"], sort=False, dropna=False):
        by = dict(iter(group.groupby("chosen_by", sort=False)))
        ours = by[OURS].iloc[0]
        theirs = by[rival].iloc[0] if rival in by else None
        row = {"ladder": ladder, "rival": rival, "budget": budget, "bits": ours.budget_bits}
        row |= {"rival_kl": theirs.kl if theirs is not None else np.nan, "ours": ours.kl}
        row |= {name: by[name].kl.mean() for name in (ORACLE, RANDOM)}
        row |= {name: ours[name] for name in ("difference", "difference_low", "difference_high", "predicted")}
        rows.append(row | {"better": better(ours, theirs)})
    return pd.DataFrame(rows)


def better(ours: pd.Series, theirs: pd.Series | None) -> str:
    """The method whose plan has the smaller KL: "ours", "rival", "same" or "open"; empty without a rival."""
    if theirs is None:
        return ""
    if ours.choice == theirs.choice:
        return "same"
    return OURS if ours.difference_high < 0 else "rival" if ours.difference_low > 0 else "open"


def ranking(layers: pd.DataFrame) -> pd.DataFrame:
    """Spearman's correlation of every method's scores with the measured KL of single units, by ladder and rung.

    The oracle's correlation is the ceiling: the same measurement on other windows. ``tenth``, ``median`` and
    ``ninetieth`` are quantiles of our prediction over what was measured.
    """
    rows = []
    for (ladder, rung), group in layers.groupby(["ladder", "rung"], sort=False):
        ratio = (group[OURS] / group.measured).quantile([0.1, 0.5, 0.9]).to_numpy()
        for method in group.columns[group.columns.get_loc("measured") + 1 :]:
            if group[method].notna().all():
                row = {"ladder": ladder, "rung": rung, "method": method}
                row["spearman"] = group[method].corr(group.measured, method="spearman")
                known = ratio if method == OURS else [np.nan] * 3
                rows.append(row | dict(zip(("tenth", "median", "ninetieth"), known)))
    return pd.DataFrame(rows)
