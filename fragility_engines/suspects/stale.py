"""Suspects of weights from another checkpoint: an earlier step of a training, or a model before its adapter is merged.

An engine that is given new weights while it runs may keep old ones, all or some of them. An adapter may be left out,
merged twice or have another scale: the engine has then a multiple of the difference between the two checkpoints. A step
of a training may change a weight by less than its rounding, so that checkpoints differ as their rounded weights do.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.paths import block_of, is_norm
from fragility_engines.suspects.numbers import Number
from fragility_engines.suspects.structure import LOADED, Values, new
from fragility_engines.suspects.suspect import Change, Suspect, Window, assigned, assigning
from fragility_lab.diagnosis.settings import differing, in_words
from fragility_lab.inputs.checkpoints import load_config
from fragility_lab.inputs.offloaded import load_beside, require_fitting
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe

STAGES = (2, 3, 4)  # of a pipeline, one of which may have kept its weights
TIMES = (0.5, 2.0, 4.0, 16.0)  # the difference between the checkpoints: an adapter's scale, or one merged twice


@dataclass(frozen=True)
class Checkpoint:
    """Another checkpoint of a model, by ``name``: those ``weights`` that differ, by the path of their module.

    They are the model's own plus the difference between the rounded ones.
    """

    name: str
    weights: Mapping[str, Values]

    @classmethod
    def read(cls, place: str, model: PreTrainedModel, recipe: Recipe) -> "Checkpoint":
        """The checkpoint at ``place``, a folder or a hub's name, beside ``model``, both rounded by ``recipe``.

        Raises ValueError if it has other parameters than ``model``, or the same values, and the errors of
        ``load_beside``.
        """
        return cls.of(Path(place).name, model, load_beside(model, place), recipe)

    @classmethod
    def of(cls, name: str, model: PreTrainedModel, other: PreTrainedModel, recipe: Recipe) -> "Checkpoint":
        """The checkpoint ``name`` that ``other`` has, beside ``model``. Raises ValueError as ``read`` does."""
        own, theirs = parameters(model), parameters(other)
        unlike = sorted(path for path in {*own, *theirs} if shape_of(own, path) != shape_of(theirs, path))
        if unlike:
            raise ValueError(
                f"CHECKPOINT must have the parameters of MODEL with their shapes, got {name} with another "
                f"{unlike[0]}: give another step of one training, or the model before or after an adapter"
            )
        before, after = (parameters(lower(each, recipe).model) for each in (model, other))
        found: dict[str, Values] = {}
        for path, value in own.items():
            place, _, parameter = path.rpartition(".")
            if not torch.equal(before[path], after[path].to(before[path].device)):
                changed = value + (after[path].to(value) - before[path].to(value))
                found.setdefault(place, []).append((model.get_submodule(place), parameter, new(changed)))
        if not found:
            raise ValueError(
                f"CHECKPOINT must have other weights than MODEL once {recipe.name} has rounded both, got the same in "
                f"{name}: no log tells the two apart"
            )
        return cls(name, found)

    @property
    def values(self) -> Values:
        """All weights that differ."""
        return [value for some in self.weights.values() for value in some]

    def suspects(self) -> Iterator[Suspect]:
        """Suspects that the engine has this checkpoint, or some weights from it and all others from the model.

        Such weights are those of one block, one stage of a pipeline, one layer or branch in all blocks, all norms, one
        module outside of blocks, or a head together with the embedding that it is tied to.
        """
        look = "which weights the engine was given last, and whether it merged the adapter"
        yield Suspect(f"the checkpoint {self.name}", look, assigning(self.values))
        yield Suspect(
            f"keys and values of the prompt from the checkpoint {self.name}",
            "whether the prefix cache is emptied when the engine is given new weights",
            run=partial(after_prompt, assigning(self.values)),
        )
        groups, known = dict[str, Values](), {places_of(self.values)}
        outside = {path: values for path, values in self.weights.items() if block_of(path) is None}
        for (one, some), (other, more) in combinations(outside.items(), 2):
            if getattr(*some[0][:2]) is getattr(*more[0][:2]):
                groups[f"{one} and {other}"] = [*some, *more]
        for path, values in self.weights.items():
            found = block_of(path)
            inside = path.removeprefix(found[0])[1:] if found else ""
            names = [f"{inside or path} of all blocks", found[0], *self.stages(path)] if found else [path]
            branch = [f"{inside.partition('.')[0]} of all blocks"] if "." in inside else []
            for name in names + branch + ["all norms"] * is_norm(values[0][0]):
                groups.setdefault(name, []).extend(values)
        for name, some in groups.items():
            if (own := places_of(some)) not in known:
                yield Suspect(f"{name} from the checkpoint {self.name}", LOADED, assigning(some))
            known.add(own)

    def stages(self, path: str) -> list[str]:
        """The names of the stages that the block of ``path`` is in, if a pipeline has some of STAGES."""
        places = [found[0] for each in (path, *self.weights) if (found := block_of(each))]
        blocks, names = [*dict.fromkeys(places[1:])], []
        for stages in STAGES:
            stage = [place * stages // len(blocks) for place in range(len(blocks))]
            part = [block for block, own in zip(blocks, stage) if own == stage[blocks.index(places[0])]]
            if 1 < len(part) < len(blocks):
                names.append(f"{part[0]} to {part[-1]}")
        return names

    @property
    def difference(self) -> Number:
        """The multiple of the model's difference from this checkpoint that an engine has; 0 is the checkpoint."""
        name = self.name.replace("{", "{{").replace("}", "}}")
        return Number(
            f"{{}} times the model's difference from the checkpoint {name}",
            "the scale of the adapter (alpha / r), and whether it is merged twice",
            1.0, TIMES, lambda factor: partial(away, self.values, factor),
        )  # fmt: skip


def after_prompt(change: Change, model: PreTrainedModel, window: Window) -> Tensor | None:
    """The logits (T, V) of a ``window`` with the cache of its prompt from a model with ``change``; None without one.

    The last token of the prompt gives the first scored one its logits, and is run with the rest.
    """
    prompt, rest = window.tokens[None].split([window.first - 1, len(window.tokens) - window.first + 1], 1)
    if not prompt.numel():
        return None
    with change(model):
        before = model(prompt, use_cache=True)
    if getattr(before, "past_key_values", None) is None:
        return None
    after = model(rest, past_key_values=before.past_key_values, use_cache=True)
    return torch.cat([before.logits, after.logits], 1)[0].float()


def places_of(values: Values) -> frozenset[tuple[int, str]]:
    """The parameters that ``values`` are of."""
    return frozenset((id(module), name) for module, name, _ in values)


@contextmanager
def away(values: Values, factor: float, model: PreTrainedModel) -> Iterator[None]:
    """A context in which parameters differ from ``values`` by ``factor`` times their present difference."""
    made: list[tuple[Any, str, Any]] = [
        (module, name, new(torch.lerp(value, getattr(module, name), factor))) for module, name, value in values
    ]
    with assigned(made):
        yield


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` by path, a tied one at both."""
    return dict(model.named_parameters(remove_duplicate=False))


def shape_of(parameters: Mapping[str, Tensor], path: str) -> torch.Size | None:
    """The shape of the parameter at ``path``; None if there is none."""
    return parameters[path].shape if path in parameters else None


def require_other(place: str, model: str) -> None:
    """Raises ValueError if the checkpoint at ``place`` has other settings than ``model``, and OSError if it is none."""
    require_fitting(place)
    if found := differing(load_config(place), load_config(model)):
        found = {key: found[key] for key in found if key == "model_type" or "model_type" not in found}
        raise ValueError(
            f"CHECKPOINT must differ from MODEL in weights alone, got other settings, {in_words(found)}: give another "
            "step of one training"
        )
