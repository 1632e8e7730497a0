"""Engines with known truth: a model run in bf16 in harmless ways, and with faults of kinds that people reported.

Each is a function of the fp32 model and its windows (B, T), and gives log-probabilities (B, T - 1) as an engine would.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.models import paths
from fragility_engines.proving.changes import (
    Change,
    attention_scale,
    base,
    epsilon,
    flipped,
    frequencies,
    next_matrix,
    other_norms,
    scaled_matrix,
    scaled_norms,
    split_products,
    wide,
    without_branch,
)
from fragility_engines.suspects.rotary import interleave
from fragility_engines.suspects.suspect import logprobs
from fragility_quantization.quantized import lower

Engine = Callable[[PreTrainedModel, Tensor], Tensor]


@dataclass(frozen=True)
class Variation:
    """An engine by ``name``; ``cause`` is a part of the name of the suspect that should be named, "" where none is.

    "4:1" is the second branch (MLP) of the block at four tenths of the depth. ``verdicts`` are those that are right.
    ``seen`` ones were used to design the tests; the others were added afterwards, and judge the design.
    """

    name: str
    run: Engine
    cause: str = ""
    seen: bool = True
    verdicts: tuple[str, ...] = ("more",)


def by_window(run: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """The results of ``run`` for each window by itself."""
    return torch.stack([run(window) for window in windows])


def narrow(model: PreTrainedModel, change: Change = lambda model: None) -> PreTrainedModel:
    """A copy of ``model`` in bf16, to which ``change`` was done in fp32."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return other.bfloat16()


def native(change: Change = lambda model: None, attention: str = "", **how) -> Engine:
    """An engine in native bf16 with a ``change`` of the model, other ``attention``, and options of ``gathered``."""

    def run(model: PreTrainedModel, windows: Tensor) -> Tensor:
        low = narrow(model, change)
        if attention:
            low.set_attn_implementation(attention)
        return by_window(partial(gathered, low, **how), windows)

    return run


@torch.no_grad()
def gathered(
    model: PreTrainedModel, window: Tensor, temperature: float = 1.0, before: int = 0, shift: int = 0, chunk: int = 0,
    drop: int = 0, dtype: torch.dtype = torch.float64, window_size: int = 0,
) -> Tensor:  # fmt: skip
    """Log-probabilities (T - 1,) of one window (T,), computed in another way.

    ``before`` BOS tokens are put in front of it; positions are moved by ``shift``; ``chunk`` tokens go through a cache
    at a time; the first ``drop`` tokens are seen by none of the later ones; ``dtype`` is that of the log-softmax; and
    each token sees ``window_size`` tokens.
    """
    options: dict[str, Any] = {}
    seen = torch.cat([window.new_full((before,), model.config.bos_token_id or 0), window])
    places = torch.arange(len(seen))
    if shift:
        options["position_ids"] = (places + shift)[None]
    if drop or window_size:
        mask = places[:, None] >= places
        mask &= (places >= drop) | (places[:, None] < drop)
        mask &= places[:, None] - places < (window_size or len(seen))
        low = torch.finfo(model.dtype).min
        options["attention_mask"] = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, low)[None, None]
    if chunk:
        cache, found = None, []
        for part in seen.split(chunk):
            output = model(part[None], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0])
        z = torch.cat(found)
    else:
        z = model(seen[None], use_cache=False, **options).logits[0]
    z = (z.to(dtype) / temperature)[before:-1]
    return (z.gather(-1, window[1:, None])[:, 0] - z.logsumexp(-1)).double()


def in_rows(size: int) -> Engine:
    """An engine in native bf16 that reads ``size`` windows in a row, each of which sees the windows before it."""

    def run(model: PreTrainedModel, windows: Tensor) -> Tensor:
        low, last = narrow(model), windows.shape[1] - 1
        rows = [windows[n - n % size : n + 1].flatten() for n in range(len(windows))]
        return torch.stack([gathered(low, row)[-last:] for row in rows])

    return run


def batched(model: PreTrainedModel, windows: Tensor, padding: str = "") -> Tensor:
    """All windows in one batch, each with eight tokens of ``padding`` before it ("left") or after it ("right")."""
    low = narrow(model)
    pad = windows.new_zeros(len(windows), 8)
    mask = torch.ones_like(windows)
    parts, masks = [windows], [mask]
    if padding:
        place = 0 if padding == "left" else 1
        parts.insert(place, pad)
        masks.insert(place, torch.zeros_like(pad))
    seen, mask = torch.cat(parts, 1), torch.cat(masks, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        z = low(seen, attention_mask=mask, position_ids=positions, use_cache=False).logits.double()
    z = z[:, 8:] if padding == "left" else z[:, : windows.shape[1]]
    z = z[:, :-1]
    return z.gather(-1, windows[:, 1:, None])[..., 0] - z.logsumexp(-1)


def autocast(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The fp32 model under autocast: its residual stream is in fp32."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        return by_window(partial(logprobs, model), windows)


def autocast_batch(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The result of ``autocast`` with all windows in one batch."""
    with torch.autocast(windows.device.type, torch.bfloat16), torch.no_grad():
        z = model(windows, use_cache=False).logits.double()[:, :-1]
    return z.gather(-1, windows[:, 1:, None])[..., 0] - z.logsumexp(-1)


def emulated(recipe: str, attention: str = "") -> Engine:
    """An emulated pass by ``recipe``, with other ``attention``."""

    def run(model: PreTrainedModel, windows: Tensor) -> Tensor:
        other = copy.deepcopy(model)
        if attention:
            other.set_attn_implementation(attention)
        low = lower(other, recipe)
        with low.running():
            return by_window(partial(logprobs, low.model), windows)

    return run


def exact(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The fp32 model itself."""
    return by_window(partial(logprobs, model), windows)


OK, NARROWER = ("rounding",), ("rounding", "less")  # the latter where some kernels run wider than the recipe says
HARMLESS = [
    Variation("sdpa", native(), verdicts=OK),
    Variation("eager", native(attention="eager"), verdicts=OK),
    Variation("one batch", batched, verdicts=OK),
    Variation("padding at the left", partial(batched, padding="left"), verdicts=OK),
    Variation("padding at the right", partial(batched, padding="right"), verdicts=OK),
    Variation("a cache, 16 tokens at a time", native(chunk=16), verdicts=OK),
    Variation("a cache, 7 tokens at a time", native(chunk=7), verdicts=OK),
    Variation("products in two halves", native(split_products), verdicts=OK),
    Variation("norms in fp32", native(wide(paths.norm_paths)), verdicts=NARROWER),
    Variation("autocast", autocast, verdicts=NARROWER),
    Variation("emulated", emulated("bf16"), verdicts=OK),
    Variation("emulated, eager", emulated("bf16", "eager"), verdicts=OK),
    Variation("a cache, one token at a time", native(chunk=1), verdicts=OK, seen=False),
    Variation("eager, a cache of 5 tokens", native(attention="eager", chunk=5), verdicts=OK, seen=False),
    Variation("eager, products in two halves", native(split_products, "eager"), verdicts=OK, seen=False),
    Variation("RoPE positions moved by 100", native(shift=100), verdicts=OK, seen=False),
    Variation("head in fp32", native(wide(paths.head_paths)), verdicts=NARROWER, seen=False),
    Variation("autocast, a batch", autocast_batch, verdicts=NARROWER, seen=False),
    Variation("fp16 where bf16 is said", emulated("fp16"), verdicts=("less",)),
    Variation("fp32 where bf16 is said", exact, verdicts=("less",)),
]
BOS, BASE, SCALE, HEAT, WINDOW = "BOS", "RoPE base", "scale of attention", "temperature", "a window of"
FAULTS = [
    Variation("a second BOS", native(before=1), BOS),
    Variation("RoPE base a tenth", native(base(0.1)), BASE),
    Variation("RoPE base a half", native(base(0.5)), BASE),
    Variation("RoPE base five times", native(base(5.0)), BASE),
    Variation("RoPE positions by two", native(frequencies(lambda x: x / 2)), "positions divided"),
    Variation("RoPE pairs in another order", native(interleave), "pairs"),
    Variation("attention scale +1 %", native(attention_scale(1.01)), SCALE),
    Variation("attention scale +10 %", native(attention_scale(1.1)), SCALE),
    Variation("attention scale halved", native(attention_scale(0.5)), SCALE),
    Variation("temperature 1.02", native(temperature=1.02), HEAT),
    Variation("temperature 0.9", native(temperature=0.9), HEAT),
    Variation("temperature 1.3", native(temperature=1.3), HEAT),
    Variation("epsilon 1e-3", native(epsilon(1e-3)), "epsilon"),
    Variation("epsilon 1e-1", native(epsilon(1e-1)), "epsilon"),
    Variation("a matrix of another block", native(next_matrix(4, 1)), "4:1"),
    Variation("an attention matrix of another block", native(next_matrix(7, 0)), "7:0"),
    Variation("rows of a query matrix turned around", native(flipped(2)), "2:0"),
    Variation("an MLP left out", native(without_branch(8, 1)), "8:1"),
    Variation("an attention left out", native(without_branch(3, 0)), "3:0"),
    Variation("norms of a block +2 %", native(scaled_norms(2, 1.02)), "2:"),
    Variation("norms of a block +30 %", native(scaled_norms(5, 1.3)), "5:"),
    Variation("a window of 16 tokens", native(window_size=16), WINDOW),
    Variation("the first 8 tokens are not seen", native(drop=8), "the first"),
    Variation("log-softmax in bf16", native(dtype=torch.bfloat16), "rounding of the log"),
    Variation("weights of 8 bits", emulated("w8a8-int8"), "the recipe w8a8-int8"),
    Variation("a cache of 8 bits", emulated("kv-fp8"), "the recipe kv-fp8"),
    Variation("RoPE base a third", native(base(1 / 3)), BASE, seen=False),
    Variation("RoPE positions by four", native(frequencies(lambda x: x / 4)), "positions divided", seen=False),
    Variation("attention scale -20 %", native(attention_scale(0.8)), SCALE, seen=False),
    Variation("temperature 1.1", native(temperature=1.1), HEAT, seen=False),
    Variation("epsilon 1e-4", native(epsilon(1e-4)), "epsilon", seen=False),
    Variation("an MLP matrix of another block", native(next_matrix(9, 1)), "9:1", seen=False),
    Variation("rows of a late query matrix turned around", native(flipped(6)), "6:0", seen=False),
    Variation("another MLP left out", native(without_branch(2, 1)), "2:1", seen=False),
    Variation("norms of a late block -10 %", native(scaled_norms(7, 0.9)), "7:"),
    Variation("a window of 48 tokens", native(window_size=48), WINDOW),
    Variation("norms of an early block +20 %", native(scaled_norms(1, 1.2)), "1:"),
    Variation("norms with 1 + weight", native(other_norms), "norms that multiply", seen=False),
    Variation("a window of 40 tokens", native(window_size=40), WINDOW, seen=False),
    Variation("attention scale +40 %", native(attention_scale(1.4)), SCALE, seen=False),
    Variation("RoPE base a quarter more", native(base(1.25)), BASE),
    Variation("RoPE base a fifth less", native(base(0.8)), BASE),
    Variation("epsilon 3e-3", native(epsilon(3e-3)), "epsilon", seen=False),
    Variation("an MLP matrix +4 %", native(scaled_matrix(5, 1, 1.04)), "5:1", seen=False),
    Variation("an attention matrix -20 %", native(scaled_matrix(8, 0, 0.8)), "8:0", seen=False),
    Variation("norms of a middle block -3 %", native(scaled_norms(6, 0.97)), "6:", seen=False),
    Variation("weights of 4 bits", emulated("w4a16-g128"), "the recipe w4a16-g128", seen=False),
    Variation("linear layers in fp8", emulated("fp8-dynamic"), "the recipe fp8-dynamic"),
    Variation("a cache in int8", emulated("kv-int8"), "the recipe kv-int8"),
    Variation("linear layers in blocks of fp8", emulated("fp8-block"), "the recipe fp8-block", seen=False),
    Variation("weights in mxfp4", emulated("mxfp4-w"), "the recipe mxfp4-w", seen=False),
    Variation("three sequences in a row", in_rows(3), "sequences that see those before them"),
]
