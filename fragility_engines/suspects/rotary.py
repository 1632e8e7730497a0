"""Suspects of rotary positions (RoPE)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fragility_core.models.paths import attention_modules
from fragility_engines.suspects.suspect import Setting, Suspect, assigning, change, changed, having

LOOK = "rope_scaling of the engine's configuration"
CODE = "the layers to which the engine's code gives RoPE (no_rope_layers, layer_types)"
FACTORS = {"yarn": 4.0, "llama3": 8.0, "dynamic": 2.0}  # as published models have them, for a model without scaling
FOLLOWING = {"dynamic", "longrope"}  # types of scaling whose frequencies follow the length of a text
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of llama3
TURNS = {  # by the model's type, the attribute of attention that is true where a layer has RoPE
    "smollm3": "use_rope", "llama4_text": "use_rope", "exaone4": "is_sliding", "exaone_moe": "is_sliding",
    "cohere2": "sliding_window",
}  # fmt: skip


@dataclass(frozen=True)
class Rotary:
    """The rotary ``module`` for layers of the type ``kind``, "" where all are alike, with ``parameters`` of RoPE."""

    module: Any
    kind: str
    parameters: dict[str, Any]

    def values(self, rope_type: str, **others: Any) -> list[tuple[Any, str, Any]]:
        """The attributes of the module for other parameters."""
        config = copy.deepcopy(self.module.config)
        if getattr(config, "head_dim", 0) is None:  # as of Mixtral, where torch's own rule takes its place
            config.head_dim = config.hidden_size // config.num_attention_heads
        new = self.parameters | others | {"rope_type": rope_type}
        config.rope_parameters = {**config.rope_parameters, self.kind: new} if self.kind else new
        kind: dict[str, Any] = {"layer_type": self.kind} if self.kind else {}
        if rope_type == "default":
            frequencies, factor = self.module.compute_default_rope_parameters(config, **kind)
        else:  # "dynamic" as for the longest text that it is for
            longest = int(new["factor"] * config.max_position_embeddings)
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=longest, **kind)
        own, name = self.own, f"{self.kind}_" * bool(self.kind)
        steady = [] if self.kind else [(self.module, "rope_type", "default")]  # else "dynamic" computes its own again
        found = [
            (self.module, f"{name}inv_freq", frequencies.to(own)),
            (self.module, f"{name}attention_scaling", factor),
        ]
        return [*found, *steady]

    @property
    def own(self) -> Tensor:
        """The frequencies (d / 2,) that the module has."""
        return getattr(self.module, f"{self.kind}_inv_freq" if self.kind else "inv_freq")


def rotaries(model: PreTrainedModel) -> list[Rotary]:
    """The rotary modules of ``model`` whose parameters are known."""
    found = []
    for module in model.modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not (isinstance(parameters, dict) and hasattr(module, "compute_default_rope_parameters")):
            continue
        named = {"": parameters} if "rope_type" in parameters else parameters
        for kind, own in named.items():
            name = f"{kind}_" * bool(kind)
            if (
                isinstance(own, dict)
                and hasattr(module, f"{name}inv_freq")
                and hasattr(module, f"{name}attention_scaling")
            ):
                found.append(Rotary(module, kind, own))
    return found


def scalings(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of RoPE's scaling: none where the model has one, another type, or one where the model has none."""
    for each in rotaries(model):
        own = each.parameters
        where = f" of {each.kind.replace('_', ' ')}" if each.kind else ""
        scaled, factor = own["rope_type"], float(own.get("factor") or 1.0)
        whole = own.get("original_max_position_embeddings") or each.module.config.max_position_embeddings
        if scaled in ("default", "proportional"):
            if not each.kind:
                for other, usual in FACTORS.items():
                    yield suspect_of(
                        each, f"RoPE scaling {other}, factor {usual:g}, in place of none", other, usual, whole
                    )
            continue
        yield Suspect(f"RoPE{where} without its scaling ({scaled})", LOOK, assigning(each.values("default")))
        if own_factor(each) != 1.0:
            name = f"{each.kind}_" * bool(each.kind) + "attention_scaling"
            yield Suspect(
                f"RoPE scaling {scaled}{where} without its factor of attention", "attention_factor of rope_scaling",
                assigning([(each.module, name, 1.0)]),
            )  # fmt: skip
        if scaled in FACTORS:
            for by in (factor / 2, 2 * factor):
                name = f"RoPE scaling {scaled}{where} by {by:g} in place of {factor:g}"
                yield Suspect(name, LOOK, assigning(each.values(scaled, factor=by)))
        if factor > 1 and (base := own.get("rope_theta")):
            power = len(each.own) / (len(each.own) - 1)
            name = f"RoPE scaling by the base alone (NTK){where} in place of {scaled}"
            yield Suspect(name, LOOK, assigning(each.values("default", rope_theta=base * factor**power)))
        longest = each.module.config.max_position_embeddings
        if scaled in ("yarn", "llama3") and whole != longest:
            name = f"RoPE scaling {scaled}{where} as if trained up to position {longest}, not {whole}"
            look = "original_max_position_embeddings of rope_scaling, which max_position_embeddings does not replace"
            yield Suspect(name, look, assigning(each.values(scaled, original_max_position_embeddings=longest)))
        for other in ("linear", *FACTORS):
            if other != scaled and factor > 1:
                yield suspect_of(each, f"RoPE scaling {other}{where} in place of {scaled}", other, factor, whole)


def own_factor(each: Rotary) -> float:
    """The factor by which a rotary module scales cosines and sines."""
    return float(getattr(each.module, f"{each.kind}_" * bool(each.kind) + "attention_scaling"))


def suspect_of(each: Rotary, name: str, rope_type: str, factor: float, whole: int) -> Suspect:
    """The suspect of another scaling, by a ``factor``, of positions that were trained up to ``whole``."""
    values = each.values(rope_type, factor=factor, original_max_position_embeddings=whole, **BANDS)
    return Suspect(name, LOOK, assigning(values))


def rotary(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of rotary positions: another base, linear scaling, a narrow dtype, another order of the pairs."""
    found = frequencies(model)
    if not found:
        return
    own_bases = bases_of(model)
    bases = sorted({*own_bases})
    where = f"in place of {bases[0]:g}" if len(bases) == 1 else "in all layers"
    yield from scalings(model)
    others = {1e4, 1e5, 5e5, 1e6} | {bases[0] * factor for factor in (0.1, 0.2, 0.5, 2, 5, 10) if len(bases) == 1}
    for base in sorted(others - {*bases} if len(bases) == 1 else others):
        if base > 100:
            values = [(*each, rebased(base / before, getattr(*each))) for each, before in zip(found, own_bases)]
            name = f"RoPE base {base:g} {where}"
            yield Suspect(name, "rope_theta of the engine's configuration", assigning(values))
    for factor in (2.0, 8.0):
        yield Suspect(
            f"RoPE positions divided by {factor:g}", "rope_scaling of the engine's configuration",
            change(found, partial(divided, factor)),
        )  # fmt: skip
    yield Suspect(
        "RoPE frequencies in bf16", "the dtype in which the engine keeps RoPE",
        change(found, lambda x: x.bfloat16().float()),
    )  # fmt: skip
    yield from left_out(model, found)
    look = "partial_rotary_factor of the engine's configuration, and the pairs that it turns"
    yield Suspect("RoPE of the faster half of its frequencies alone", look, change(found, faster))
    for each in rotaries(model):
        if each.parameters.get("partial_rotary_factor", 1.0) < 1.0 and each.parameters["rope_type"] == "default":
            name = f"RoPE of whole heads, in place of {each.parameters['partial_rotary_factor']:g} of each"
            values = each.values("default", partial_rotary_factor=1.0)
            turned_by = [(*one, 2 * len(values[0][2])) for one in having(model, "rotary_ndims", int)]
            yield Suspect(name, look, assigning([*values, *turned_by]))
    if own := turned(model):
        order = "the permutation of query and key heads when converted, and the order in which the engine pairs them"
        rows, engine = (partial(of_turned, pairs, 2 * len(getattr(*found[0]))) for pairs in (interleaved, apart))
        yield Suspect("RoPE pairs in another order, side by side in the weights", order, partial(reordered, rows))
        yield Suspect("RoPE pairs in another order, side by side in the engine", order, partial(reordered, engine))
        whole = all(module.head_dim == 2 * len(getattr(*found[0])) for module in own)
        if whole and len(getattr(*found[0])) % 2 == 0:
            yield Suspect("RoPE of the first half of each head alone", look, partial(in_first_half, found))


def left_out(model: PreTrainedModel, found: list[Setting]) -> Iterator[Suspect]:
    """Suspects of layers without RoPE, by the frequencies ``found``, and of RoPE in layers that have none."""
    for setting in found:
        kind = setting[1].removesuffix("inv_freq").replace("_", " ")
        yield Suspect(f"no RoPE{' of ' * bool(kind)}{kind}".rstrip(), CODE, change([setting], torch.zeros_like))
    config = model.config.get_text_config()
    layers = [(module, TURNS.get(config.model_type, "")) for module in attention_modules(model)]
    values = [getattr(*layer, None) for layer in layers]
    if any(values) and not all(values):
        on, off = next(filter(None, values)), next(value for value in values if not value)
        yield Suspect("RoPE in layers that have none", CODE, change(layers, lambda own: own or on))
        yield Suspect("RoPE in the layers without it alone", CODE, change(layers, lambda own: off if own else on))


def turned(model: PreTrainedModel) -> list[Any]:
    """The modules of attention whose queries and keys come from a projection each, and have heads of one size."""
    layers = ("q_proj", "k_proj")
    known = [module for module, _ in having(model, "head_dim", int)]
    return [module for module in known if all(isinstance(getattr(module, name, None), nn.Module) for name in layers)]


def frequencies(model: PreTrainedModel) -> list[Setting]:
    """The frequencies of RoPE in the modules of ``model``; a single one has no base."""
    return [
        (module, name)
        for module in model.modules()
        for name, x in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name and len(x) > 1
    ]


def bases_of(model: PreTrainedModel) -> list[float]:
    """The base of each of the ``frequencies`` of ``model``; of scaled ones only the configuration tells it."""
    known = {
        (id(each.module), f"{each.kind}_" * bool(each.kind) + "inv_freq"): each.parameters.get("rope_theta")
        for each in rotaries(model)
    }
    return [float(known.get((id(one), name)) or base_of(getattr(one, name))) for one, name in frequencies(model)]


def base_of(x: Tensor) -> float:
    """The base of the frequencies ``x`` (d / 2,), each its power -2 i / d; three significant digits."""
    return float(f"{float(x[0] / x[1]) ** len(x):.3g}")


def divided(factor: float, x: Tensor) -> Tensor:
    """The frequencies ``x`` for positions divided by ``factor``."""
    return x / factor


def rebased(factor: float, x: Tensor) -> Tensor:
    """The frequencies ``x`` (d / 2,) with ``factor`` times their base, and the scaling that they have."""
    return x * factor ** -(torch.arange(len(x), device=x.device) / len(x))


def faster(x: Tensor) -> Tensor:
    """The frequencies ``x`` (d / 2,) with the slower half at 0."""
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


@contextmanager
def in_first_half(found: list[Setting], model: PreTrainedModel) -> Iterator[None]:
    """A context in which only the first half of each head is turned, by every second of the frequencies ``found``."""
    with (
        changed(found, lambda x: torch.cat([x[::2], torch.zeros_like(x[1::2])])),
        reordered(lambda size: torch.arange(size).unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(), model),
    ):
        yield


@contextmanager
def reordered(order: Callable[[int], Tensor], model: PreTrainedModel) -> Iterator[None]:
    """A context in which the entries of query and key heads stand in the ``order`` for heads of a size."""
    before = [(x, x.data) for x, *_ in in_heads(model)]
    try:
        reorder(order, model)
        yield
    finally:
        for x, data in before:
            x.data = data


def interleaved(size: int) -> Tensor:
    """The order in which RoPE's pairs stand side by side in a head of this ``size``, as in GGUF files."""
    return torch.arange(size).unflatten(0, (2, -1)).T.flatten()


def apart(size: int) -> Tensor:
    """Indices (``size``,) that move RoPE's pairs of a head from side by side into its two halves."""
    return torch.arange(size).unflatten(0, (-1, 2)).T.flatten()


def of_turned(order: Callable[[int], Tensor], width: int, size: int) -> Tensor:
    """The ``order`` of the first ``width`` entries of a head of this ``size``, all others in their places."""
    width = min(width, size)
    return torch.cat([order(width), torch.arange(width, size)])


def interleave(model: PreTrainedModel) -> None:
    """Interleave RoPE's pairs in the rows of query and key heads."""
    reorder(interleaved, model)


def reorder(order: Callable[[int], Tensor], model: PreTrainedModel) -> None:
    """Put the rows of query and key heads, and of their norms, in the ``order`` for a size."""
    for x, size, axis in in_heads(model):
        heads = x.data.unflatten(axis, (-1, size))
        x.data = heads.index_select(axis + 1, order(size).to(x.device)).reshape(x.shape)


def in_heads(model: PreTrainedModel) -> list[tuple[Tensor, int, int]]:
    """The parameters of queries, keys and their norms, the size of a head, and the axis along which heads lie."""
    found = []
    for module in turned(model):
        for name, axis in (("q_proj", 0), ("k_proj", 0), ("q_norm", -1), ("k_norm", -1)):
            if isinstance(inside := getattr(module, name, None), nn.Module):
                found += [(x, module.head_dim, axis % x.ndim) for x in inside.parameters()]
    return [each for each in found if each[0].shape[each[2]] % each[1] == 0]


def cut(model: nn.Module, tokens: Any, count: int) -> Any:
    """The first ``count`` of ``tokens`` (T,); all of them if RoPE's frequencies follow the length of a text."""
    for module in model.modules():
        own = getattr(module, "rope_type", "")
        if FOLLOWING & {*(own.values() if isinstance(own, dict) else [own])}:
            return tokens
    return tokens[:count]
