"""E5: does the mismatch fall if LayerNorm's epsilon is raised in the blocks that the score names? (protocol section 6)

A run trains one model under one policy. Its result has one row per step and block: the observed quantities, the epsilon
in force, and the action that was decided. The tables of ``outcomes`` are views of these rows.
"""

import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from io import BytesIO
from itertools import product
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_core.bgss import Policy, State, advance, get_policy, policy_class, replay
from fragility_core.bgss.released import Released
from fragility_core.bgss.state import Action, Limits
from fragility_core.models.blocks import blocks
from fragility_core.surrogates import Estimator
from fragility_lab.experiments.realisations import moved
from fragility_lab.experiments.shadow import ShadowTraining, warmed_up
from fragility_lab.inputs.loading import Inputs, load, require_at_least, require_values
from fragility_lab.running.environment import keeps_stale
from fragility_lab.running.files import read_sealed, write_sealed
from fragility_lab.running.runs import RunStore, Specification
from fragility_lab.running.task import Advance, Worker
from fragility_numerics.lowering import as_format


@dataclass(frozen=True)
class TrainingSetting:
    """The settings of training that all runs of one E5 experiment share."""

    model: str
    data: str
    precision: str = "fp16"
    length: int = 256
    windows: int = 512
    steps: int = 256
    learning_rate: float = 6e-4
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    layernorm: str = "release"
    transport: str = "release"
    initial: str = "trained"  # the checkpoint's weights, or "random": drawn anew with the seed of each run
    realisation: int = 0  # of rounding: above 0, the initial weights are moved by half a unit roundoff of the shadow

    def __post_init__(self):
        require_at_least(1, length=self.length, windows=self.windows, steps=self.steps)
        require_at_least(0, realisation=self.realisation)
        if self.initial not in ("trained", "random"):
            raise ValueError(f"initial must be trained or random, got {self.initial!r}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")


@dataclass(frozen=True)
class TrainingSpec(Specification):
    """One run of E5: the setting, the policy with its parameters, and the seed."""

    experiment, unit, paired = "E5", "step", True

    setting: TrainingSetting
    policy: str
    parameters: tuple[tuple[str, float], ...]
    seed: int
    device: str
    execution: str  # of the shadow: "native" or "emulated"
    inputs: str = ""  # digest of the weights, the token stream and what begins a window

    def __post_init__(self):
        require_at_least(0, seed=self.seed)

    @property
    def label(self) -> str:
        return f"{self.policy}-seed{self.seed}"

    @property
    def size(self) -> int:
        return self.setting.steps

    def build_policy(self) -> Policy:
        """The policy that the run is under."""
        return get_policy(self.policy, **dict(self.parameters))


def load_inputs(setting: TrainingSetting, device: str | None = None) -> Inputs:
    """Load and check the language model and text of ``setting``, before any work (see ``inputs.loading.load``).

    Raises TypeError for a model whose blocks are not known.
    """
    as_format(setting.precision)
    inputs = load(setting.model, setting.data, (setting.length,), setting.windows, device, AutoModelForCausalLM)
    blocks(inputs.model)
    return inputs


def specifications(
    setting: TrainingSetting, policies: Sequence[Policy], seeds: Sequence[int], inputs: Inputs
) -> list[TrainingSpec]:
    """One specification per policy and seed; raises ValueError if there are none."""
    require_values(policies=policies, seeds=seeds)
    there = inputs.device.type, inputs.execution(setting.precision), inputs.digest
    return [
        TrainingSpec(setting, policy.name, tuple(asdict(policy).items()), seed, *there)
        for policy, seed in product(policies, seeds)
    ]


def policies(names: Sequence[str], setting: TrainingSetting, inputs: Inputs, **parameters) -> list[Policy]:
    """The policies ``names``, with the epsilon of the model's own norms and the unit roundoff of the shadow.

    Each policy gets those of ``parameters`` that it has. Raises ValueError for unknown names, for a parameter that no
    policy has, and for a missing parameter that a policy needs, TypeError for a model without norms before sublayers.
    """
    known = [fields(policy_class(name)) for name in names]
    taken = {f.name for its in known for f in its}
    if unknown := sorted(parameters.keys() - taken):
        raise ValueError(
            f"policy parameters must be among those of the chosen policies, {', '.join(sorted(taken))}, "
            f"got {', '.join(unknown)}"
        )
    unit_roundoff = as_format(setting.precision).unit_roundoff
    block = blocks(inputs.model)[0]
    if block.norm_1 is None or block.norm_2 is None:
        raise TypeError(
            "E5 raises the epsilon of the norms before attention and MLP, got a model with norms behind them alone: "
            "take one with norms before them"
        )
    given = {"base_epsilon": block.norm_1.eps, "unit_roundoff": unit_roundoff} | parameters
    chosen = []
    for name, its in zip(names, known):
        if missing := [f.name for f in its if f.default is MISSING and f.name not in given]:
            raise ValueError(
                f"policy {name!r} needs {', '.join(missing)}, for which the paper gives no value: "
                f"pass them as policy parameters, e.g. {{{missing[0]!r}: 0.5}}"
            )
        chosen.append(get_policy(name, **{f.name: given[f.name] for f in its if f.name in given}))
    return chosen


def training_windows(inputs: Inputs, setting: TrainingSetting, seed: int) -> Tensor:
    """The windows (N, T) that a run trains on, in its order."""
    _, windows = inputs.windows(setting.length, setting.windows, seed)
    order = list(range(len(windows)))
    random.Random(seed).shuffle(order)
    return windows[order]


def initial_model(model: PreTrainedModel, setting: TrainingSetting, seed: int) -> PreTrainedModel:
    """The model that a run starts from: ``model``, or its architecture with random weights drawn by ``seed``."""
    if setting.initial == "random":
        torch.manual_seed(seed)
        there = next(model.parameters())
        model = AutoModelForCausalLM.from_config(model.config, dtype=there.dtype).to(there.device)
    if setting.realisation:
        model = moved(model, as_format(setting.precision).unit_roundoff / 2, setting.realisation)
    return model


class Mitigation(Worker[TrainingSpec]):
    """Computes the runs of E5, each from its last checkpoint if there is one.

    Runs of one seed are the same until the first action. The first of them saves its state at step ``shared_steps``.
    Runs whose policies may not act earlier go on from that state.
    """

    shared_files = "*.start"

    def __init__(
        self, inputs: Inputs, store: RunStore, checkpoint_interval: int = 64, shared_steps: int = Released.warmup_steps
    ):
        """Raises ValueError for an interval below 1 step, or for less than 0 shared steps."""
        super().__init__(inputs, store)
        require_at_least(1, checkpoint_interval=checkpoint_interval)
        require_at_least(0, shared_steps=shared_steps)
        self.interval, self.shared_steps = checkpoint_interval, shared_steps

    def run(self, spec: TrainingSpec, advance_by: Advance) -> pd.DataFrame:
        """Rows per step and block. A nonfinite loss, gradient or mismatch is named in ``event`` and ends the run."""
        rows = self._without_actions(spec)
        if rows is None:
            devices = [self.inputs.device] if self.inputs.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                rows = self._train(spec, advance_by)
        return rows.assign(policy=spec.policy, seed=spec.seed)

    def _without_actions(self, spec: TrainingSpec) -> pd.DataFrame | None:
        """The rows of policy ``none``, if they are finished and the policy of ``spec`` would not act on them.

        Until its first action a policy trains as ``none`` does, so a policy that never acts has the run of ``none``.
        """
        policy = spec.build_policy()
        rows = self.store.load(uncontrolled(spec))
        if rows is None or rows.event.any():
            return None
        layers = rows.assign(window=rows.step)
        return rows if replay(policy, layers, layers[layers.layer == 0], spec.seed).empty else None

    def _train(self, spec: TrainingSpec, advance_by: Advance) -> pd.DataFrame:
        setting = spec.setting
        windows = training_windows(self.inputs, setting, spec.seed)
        policy = spec.build_policy()
        estimator = Estimator(setting.layernorm, setting.transport)
        shadow = initial_model(self.inputs.model, setting, spec.seed), setting.precision, spec.execution, estimator
        training = ShadowTraining(*shadow, setting.weight_decay, setting.clip)
        torch.manual_seed(spec.seed)
        path = self.store.path(spec).with_suffix(".checkpoint")
        start = self.store.path(uncontrolled(spec)).with_suffix(f".{self.shared_steps}.start")
        shares = 0 < self.shared_steps <= policy.first_step
        state = policy.start(len(training.shadow.monitor.blocks), spec.seed)
        rows: list[pd.DataFrame] = []
        if taken_up := restore(path, spec, training):
            state, rows = taken_up
        elif shares and (shared := restore(start, spec, training)):
            state, rows = replace(state, step=shared[0].step, signals=shared[0].signals), shared[1]
        advance_by(state.step)
        for step in range(begin := state.step, setting.steps):
            if shares and begin < step == self.shared_steps:
                save(start, spec, training, state, rows)
            tokens = windows[step % len(windows)][None].to(self.inputs.device)
            frame, state = one_step(training, policy, state, tokens, setting)
            rows.append(frame)
            advance_by(1)
            if frame.event.iloc[0]:
                break
            if (step + 1) % self.interval == 0 and step + 1 < setting.steps:
                save(path, spec, training, state, rows)
        path.unlink(missing_ok=True)
        return pd.concat(rows, ignore_index=True)


def uncontrolled(spec: TrainingSpec) -> TrainingSpec:
    """The run of policy ``none`` that equals that of ``spec`` until the first action."""
    none = get_policy("none", base_epsilon=spec.build_policy().base_epsilon)
    return replace(spec, policy="none", parameters=tuple(asdict(none).items()))


def one_step(
    training: ShadowTraining, policy: Policy, state: State, tokens: Tensor, setting: TrainingSetting
) -> tuple[pd.DataFrame, State]:
    """Train, observe and decide; returns the rows of the step, one per block, and the controller's next state."""
    training.shadow.set_epsilons(state.epsilon)
    rate = warmed_up(setting.learning_rate, state.step, setting.warmup_steps)
    loss, gradient_norm = training.train_step(tokens, rate)
    seen = {"step": state.step, "learning_rate": rate, "loss": loss, "gradient_norm": gradient_norm}
    actions: tuple[Action, ...] = ()
    signal = np.nan
    rows = pd.DataFrame({"layer": range(state.layers)})
    if np.isfinite([loss, gradient_norm]).all():
        rows, windows = training.shadow.observe(tokens)
        window = windows.iloc[0].rename({"loss": "shadow_loss"}).drop("window")
        signal = float(window.combined)
        actions = policy.decide(state, rows, signal)
        rows, seen = rows.drop(columns="window"), seen | window.to_dict()
    rows = rows.assign(
        epsilon=state.epsilon,
        new_epsilon=rows.layer.map({action.layer: action.new_epsilon for action in actions}),
        priority=rows.layer.map({action.layer: action.priority for action in actions}),
        **seen,
        event=nonfinite(seen),
    )
    return rows, advance(state, signal, actions)


def nonfinite(seen: dict[str, float]) -> str:
    """The name of the first quantity of the step that is not finite, or nothing."""
    watched = ("loss", "gradient_norm", "mismatch", "shadow_loss")
    return next((f"nonfinite {name}" for name in watched if not np.isfinite(seen.get(name, 0.0))), "")


# --- Checkpoints inside a run -----------------------------------------------------------------


def save(path: Path, spec: TrainingSpec, training: ShadowTraining, state: State, rows: list[pd.DataFrame]) -> None:
    """Write everything that the rest of the run depends on."""
    plain = [(frame.dtypes.astype(str).to_dict(), frame.to_dict("list")) for frame in rows]
    record = {
        "provenance": json.loads(json.dumps(spec.provenance())), "training": training.state(), "controller": state,
        "rows": plain,
        "random": torch.get_rng_state(), "random_on_gpus": torch.cuda.get_rng_state_all(),  # none without a GPU
    }  # fmt: skip
    content = BytesIO()
    torch.save(record, content)
    write_sealed(path, content.getvalue())


def restore(path: Path, spec: TrainingSpec, training: ShadowTraining) -> tuple[State, list[pd.DataFrame]] | None:
    """Take up the run at ``path``. Returns None, for a new start, if the checkpoint is absent, unreadable or stale."""
    if not path.exists():
        return None
    try:
        with torch.serialization.safe_globals([State, Limits, Action]):  # a planted file runs no code
            record = torch.load(BytesIO(read_sealed(path)), weights_only=True)
        valid = spec.is_current(record.get("provenance", {})) or keeps_stale()
        problem = "" if valid else "was left by other code or other versions of packages"
    except UnpicklingError:  # torch's message proposes to run the file's code
        problem = "cannot be read (it holds what no checkpoint does)"
    except (OSError, RuntimeError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError) as cause:
        problem = f"cannot be read ({cause})"
    if problem:
        warnings.warn(f"{path.name} {problem}, its run starts again", stacklevel=2)
        return None
    training.load_state(record["training"])
    torch.set_rng_state(record["random"])
    torch.cuda.set_rng_state_all(record["random_on_gpus"])
    return record["controller"], [pd.DataFrame(columns).astype(dtypes) for dtypes, columns in record["rows"]]
