"""Notebook 6: one window of text through the embedded checkpoint, block by block, in bf16, fp16 and fp32.

transformers, whose import takes seconds, is loaded by the first function that needs it, and not by the first cell.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_core.surrogates import score
from fragility_lab.paths import ASSETS
from fragility_lab.reporting.figures import figure_of
from fragility_lessons.coding import coding
from fragility_lessons.controller import raised
from fragility_lessons.exercises import exercises
from fragility_lessons.pictures import TWO_COLUMNS, Picture, finish, panels
from fragility_numerics.formats import get_format

if TYPE_CHECKING:
    from fragility_core.models.blocks import Block
    from fragility_core.surrogates.monitor import Monitor

EXERCISES = exercises("window")
FORMATS = ("bf16", "fp16")
EPSILONS = tuple(10.0 ** (quarter / 4) for quarter in range(-20, 5))  # the first is the checkpoint's own


@cache
def words() -> list[str]:
    """The text of each token of the window."""
    from fragility_lessons import embedded

    return embedded.load_tokenizer(embedded.EMBEDDED).batch_decode(embedded.window_tokens()[0][:, None])


def readable(word: str) -> str:
    """The text of a token as a label: a line break and a blank have a sign."""
    return word.strip(" ").replace("\n", "⏎") or "␣"


# --- The passes -----------------------------------------------------------------------------------


@cache
def monitor(format: str) -> "Monitor":
    """The monitored model in ``format``, emulated."""
    from fragility_core.surrogates.monitor import Monitor
    from fragility_lessons import embedded
    from fragility_numerics.lowering import lower

    exact, _ = embedded.prepared()
    return Monitor(lower(exact.model, format, "emulated"))


class WindowPass(NamedTuple):
    """A monitored pass: the scores of blocks and window, and the relative errors against fp32 after every block."""

    layers: pd.DataFrame
    window: pd.Series
    drift: np.ndarray  # (L,), of the hidden state
    token_drift: np.ndarray  # (L, T), of each token's hidden state
    predicted_drift: np.ndarray  # (L,), by Theorem 3 (`thm:unified`) for the blocks up to this one


@cache
@torch.no_grad()
def passed(format: str) -> WindowPass:
    """The window in ``format``, compared with fp32."""
    from fragility_core.models.paths import final_hidden
    from fragility_lab.measurement.comparison import block_outputs
    from fragility_lessons import embedded

    (exact, window), low = embedded.prepared(), monitor(format)
    with block_outputs(exact.model) as exact_states, exact.running():
        final = final_hidden(exact.model, window)
    with block_outputs(low.model) as low_states:
        seen = low(window, final)
    u = low.low.format.unit_roundoff
    layers, windows = score(seen.layers, seen.windows, u)
    reference, states = torch.stack(exact_states)[:, 0], torch.stack(low_states)[:, 0].float()  # (L, T, d_model)
    norms = torch.linalg.vector_norm
    magnitude, rho = torch.tensor(layers[["magnitude", "transport"]].to_numpy().T)
    predicted = [
        theory.mismatch_bound(magnitude[:depth], rho[:depth], norms(states[depth - 1]), u)
        for depth in range(1, len(layers) + 1)
    ]
    return WindowPass(
        layers,
        windows.iloc[0],
        theory.mismatch(states, reference).numpy(),
        (norms(states - reference, dim=-1) / norms(reference, dim=-1)).numpy(),
        torch.stack(predicted).numpy(),
    )


def predicted_error(magnitudes: list[float], gains: list[float], u: float) -> Tensor:
    """The sum u sum_k M_k prod_{j > k} (1 + rho_j): Theorem 3 (`thm:unified`) times the norm of the hidden state."""
    return theory.mismatch_bound(torch.tensor(magnitudes), torch.tensor(gains), torch.tensor(1.0), u)


CODING = coding("window", predicted_error, [([10.0, 4.0, 7.0], [0.5, 0.2, 1.0], 2**-8)])


# --- The window and its drift -----------------------------------------------------------------------


def text(block: int, format: str) -> Picture:
    """The tokens of the window, shaded by the relative error of their hidden states after ``block``."""
    drift, columns = passed(format).token_drift, 8
    shades = np.log10(drift)  # one scale for all blocks, without its dark end, so that letters stay legible
    (axes,) = panels(9.6, height=3.8)
    figure_of(axes).subplots_adjust(left=0.02, right=0.97, bottom=0.05)
    scale = {"cmap": "YlOrBr", "vmin": shades.min(), "vmax": shades.max() + 0.4}
    cells = axes.pcolormesh(shades[block].reshape(-1, columns), edgecolors="white", linewidth=1, **scale)
    bar = figure_of(axes).colorbar(cells, fraction=0.04, pad=0.02)
    unit, powers = get_format(format).unit_roundoff, 2.0 ** np.arange(-2, 8)
    inside = powers[np.abs(np.log10(powers * unit) - shades.mean()) < np.ptp(shades) / 1.5]
    bar.set_ticks(np.log10(inside * unit), labels=[f"{power:g}" for power in inside])
    axes.invert_yaxis()
    shown = [readable(word) for word in words()]
    for place, word in enumerate(shown):
        row, column = divmod(place, columns)
        axes.text(column + 0.5, row + 0.5, word, ha="center", va="center", fontsize="small")
    axes.set(xticks=[], yticks=[], title=f"relative error of every token after block {block}, in units of u")
    worst = int(drift[block].argmax())
    return [axes], (
        f"{format}, after block {block}: relative error of the whole hidden state {passed(format).drift[block]:.2g}, "
        f"of single tokens {drift[block].min():.2g} to {drift[block].max():.2g}, largest at token {worst} "
        f"({shown[worst]})"
    )


def profile(block: int, format: str) -> Picture:
    """First panel: the terms of M over the blocks. Second: the error of the hidden state, measured and predicted."""
    here = passed(format)
    row = here.layers.iloc[block]
    terms, drift = panels(height=3.8, here=block)
    names = {"attention": "attention A", "remainder": "remainder", "layernorm": "LayerNorm"}
    for marker, (name, label) in zip("oDs", names.items()):
        terms.plot(here.layers.layer, here.layers[f"{name}_term"], f"{marker}-", markersize=5, label=label)
    drift.plot(here.predicted_drift, "^-", color="C3", markersize=5, label="predicted")
    drift.plot(here.drift, "o-", color="C0", markersize=5, label="measured")
    drift.axhline(get_format(format).unit_roundoff, color="0.2", linestyle="--", linewidth=1, label="u")
    right = ("relative error", "error of the hidden state after the block", (1e-4, 1e3))
    for axes, (y, title, limits) in ((terms, ("magnitude", "terms of M", (50, 2e6))), (drift, right)):
        legend, ticks = TWO_COLUMNS | {"loc": "upper left"}, range(0, len(here.drift), 2)
        finish(axes, "block", y, title, "y", legend, ylim=limits, xticks=ticks)
    return [terms, drift], (
        f"{format}, block {block}: attention {row.attention_term:.2g}, remainder {row.remainder_term:.2g}, LayerNorm "
        f"{row.layernorm_term:.2g}; after it the hidden state is off by {here.drift[block]:.2g}, "
        f"predicted {here.predicted_drift[block]:.2g}"
    )


# --- One block ----------------------------------------------------------------------------------------


def formulas(row: pd.Series, final_norm: float, unit_roundoff: float) -> list[str]:
    """The formulas of the score of one block, ``fragility_lab/assets/block_score.txt``, with numbers filled in."""
    numbers = row.to_dict() | {
        "final_norm": final_norm,
        "unit_roundoff": unit_roundoff,
        "scaled_risk": unit_roundoff * row.risk,
        "root_head_width": row.head_width**0.5,
        "attention_out": row.attention_out_weight_norm * row.context_norm,
        "mlp_in": row.mlp_in_weight_norm * row.norm_2_norm,
        "mlp_out": row.mlp_out_weight_norm * row.activation_norm,
        "factor_1": theory.layernorm_factor(row.variance_1, row.epsilon_1),
        "factor_2": theory.layernorm_factor(row.variance_2, row.epsilon_2),
    }
    return (ASSETS / "block_score.txt").read_text(encoding="utf-8").format_map(numbers).splitlines()


def block_score(block: int, format: str) -> Picture:
    """First panel: G of every block. Second: the formulas of ``block`` with their numbers."""
    here = passed(format)
    row, risk = here.layers.iloc[block], here.layers.risk
    bars, page = panels(3.2, 6.8, height=3.8)
    bars.bar(here.layers.layer, risk, color=["C3" if layer == block else "C0" for layer in here.layers.layer])
    finish(bars, "block", "G", "G of every block", xticks=range(0, len(risk), 2))
    page.set_position((0.02, 0.0, 0.98, 0.95))
    page.axis("off")
    lines = formulas(row, here.window.final_norm, get_format(format).unit_roundoff)
    for place, line in enumerate(lines):
        page.text(0, 0.95 - place / len(lines), line, fontsize="small", transform=page.transAxes)
    return [bars, page], (
        f"{format}, block {block}: G = {row.risk:.3g}, {row.risk / risk.sum():.0%} of the sum; attention is "
        f"{row.attention_term / row.magnitude:.1%} of M, LayerNorm {row.dominance:.1%}"
    )


# --- A larger epsilon in one block ------------------------------------------------------------------


def _entry(block: "Block") -> Callable:
    """A hook that appends to the batch the block's outputs for the first window's input under each of EPSILONS."""
    from fragility_core.surrogates.shadow import set_epsilons

    def hook(module, args, kwargs, output):
        joined = [output]
        for epsilon in EPSILONS:
            set_epsilons([block], (epsilon,))
            joined.append(module.forward(args[0][:1], *args[1:], **kwargs))
        set_epsilons([block], (EPSILONS[0],))
        return torch.cat(joined)

    return hook


@torch.no_grad()
def final_states(monitor: "Monitor", window: Tensor) -> Tensor:
    """Final hidden states (L, E, T, d_model) with each of EPSILONS in each block alone, in one pass.

    A variant equals the plain pass up to its block. So each variant enters the batch at its block.
    """
    from fragility_core.models.paths import final_hidden

    with ExitStack() as stack:
        for block in monitor.blocks:
            stack.callback(block.module.register_forward_hook(_entry(block), with_kwargs=True).remove)
        with monitor.running():
            hidden = final_hidden(monitor.model, window)
    return hidden[1:].float().unflatten(0, (len(monitor.blocks), len(EPSILONS)))


@cache
def raised_epsilons() -> pd.DataFrame:
    """The measured effect of a larger epsilon in one block, one row for each block and epsilon.

    Columns: the mismatch in each of FORMATS, both passes under the same epsilon as in E5, and ``change``, the
    change ||X(epsilon) - X|| / ||X|| of the fp32 output.
    """
    from fragility_lessons import embedded

    exact, window = embedded.prepared()
    reference = final_states(exact, window)
    columns = {format: theory.mismatch(final_states(monitor(format), window), reference) for format in FORMATS}
    columns["change"] = theory.mismatch(reference, reference[0, 0])
    index = pd.MultiIndex.from_product([range(len(reference)), EPSILONS], names=["layer", "epsilon"])
    return pd.DataFrame({name: column.flatten().numpy() for name, column in columns.items()}, index=index)


def epsilon(block: int, exponent: float, format: str) -> Picture:
    """First panel: frozen G and measured mismatch over epsilon in ``block``. Second: the change of the output."""
    layers, real = passed(format).layers, raised_epsilons().loc[block]
    row, chosen = layers.loc[[block] * len(EPSILONS)].reset_index(drop=True), 10.0**exponent
    frozen = 1 - raised(row, np.array(EPSILONS)).reduction / row.risk
    measured = real[format] / real[format].iloc[0]
    left, right = panels(height=3.8, here=chosen)
    left.plot(EPSILONS, frozen, "^-", color="C3", markersize=5, label="G of the block, frozen")
    left.plot(EPSILONS, measured, "o-", color="C0", markersize=5, label="mismatch, measured")
    right.plot(real.index[1:], real.change[1:], "s-", color="C1", markersize=5, label="change of the output (fp32)")
    right.plot(real.index, real[format], "o-", color="C0", markersize=5, label=f"mismatch in {format}")
    place = EPSILONS.index(chosen)
    x, top = "ε of the block", max(1.6, 1.3 * measured.max())
    finish(left, x, "relative to ε = 10⁻⁵", f"raising ε in block {block}", "x", "upper left", ylim=(0, top))
    finish(right, x, "relative change", "what raising ε costs", "xy", "upper left", ylim=(1e-6, 100))
    return [left, right], (
        f"{format}, ε = {chosen:g} in block {block}: G frozen × {frozen[place]:.2g}, mismatch measured × "
        f"{measured.iloc[place]:.2g}; the output itself changes by {real.change.iloc[place]:.2g}, rounding's share is "
        f"{real[format].iloc[place]:.2g}"
    )
