"""Measurements inside a few windows of E2 on the embedded checkpoints, which the committed tables do not have.

For each length and seed, the windows are those of the largest and the smallest mismatch of the GPT-2 in bf16. Every
checkpoint and format has the same windows. Each window has its text, the error of each token after each block, and for
each block its terms in the score (E2) and its share of the squared error by backward passes (X1). Each window of E3 has
the score of each block and the exact effect of patching it. ``make shipped`` computes all of this.
"""

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.patching import Patching, patch_effects
from fragility_explorer.tables import FOLDER, HIGHEST, LOWEST, rounded
from fragility_lab.experiments import e2, e3
from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.inputs.loading import Inputs
from fragility_lab.measurement.comparison import block_outputs
from fragility_lab.reporting.report import read_tables
from fragility_lab.running.execute import profile_values
from fragility_lab.running.files import write_whole
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.lowering import LowPrecision, as_format
from fragility_quantization.quantized import lower

CHECKPOINTS = ("embedded", "embedded-llama")
CHOSEN_BY = ("embedded", "bf16")
TOKENS = 64  # of a window, from its beginning
BEGINNING = 40  # characters of the text of any other window
STEPS = 36  # of a token's error on its scale: one digit of base 36
PRECISIONS = ("bf16", "fp16")
TERMS = ("attention_term", "layernorm_term", "remainder_term", "risk")
PROBES = 8


def digits(errors: np.ndarray) -> str:
    """``errors`` as one character each: the step of its logarithm between LOWEST and HIGHEST, in base 36."""
    place = np.log(np.clip(errors, LOWEST, HIGHEST) / LOWEST) / np.log(HIGHEST / LOWEST)
    return "".join(np.base_repr(step, STEPS).lower() for step in np.rint(place * (STEPS - 1)).astype(int))


@cache
def grid(model: str) -> tuple[e2.Grid, Inputs]:
    """The committed runs of E2 on the embedded checkpoint ``model``, and their model and text."""
    values = profile_values("embedded", "e2_predictor")
    sizes = tuple(values["lengths"]), tuple(values["seeds"]), values["windows"]
    asked = e2.Grid(model, "embedded", PRECISIONS, *sizes)
    return asked, e2.load_inputs(asked, "cpu")


def chosen() -> dict[tuple[int, int], list[int]]:
    """The chosen windows of each length and seed: those of the largest and the smallest mismatch."""
    profile, precision = CHOSEN_BY
    rows = read_tables(profile)["x1_windows"]
    rows = rows[(rows.precision == precision) & ~rows.overflow]
    groups = rows.set_index("window").groupby(["length", "seed"]).mismatch
    return {key: [int(group.idxmax()), int(group.idxmin())] for key, group in groups}


def token_errors(states: Tensor, exact: Tensor) -> np.ndarray:
    """Errors (T,) of the ``states`` of one window's tokens, each relative to its norm in fp32."""
    norms = torch.linalg.vector_norm(exact.float(), dim=-1)
    return (torch.linalg.vector_norm(states.float() - exact.float(), dim=-1) / norms).numpy()


class Inside:
    """Measurements inside windows of E2's runs of ``precision`` on the embedded checkpoint ``model``."""

    def __init__(self, model: str, precision: str):
        self.grid, self.inputs = grid(model)
        low = lower(self.inputs.model, precision, self.inputs.execution(precision))
        self.monitor, self.roundoff = Monitor(low), as_format(precision).unit_roundoff
        observed: LowPrecision = lower(self.inputs.model, precision, self.inputs.execution(precision))
        set_attention(observed.model, OBSERVED_EAGER)
        self.adjoint = Adjoint(observed, probes=PROBES)

    def of(self, length: int, seed: int, window: int) -> dict[str, Any]:
        """The window's errors by block and by token, the terms of its blocks, and their shares of the squared error."""
        tokens = self.inputs.windows(length, self.grid.windows, seed)[1]
        size = max(1, self.grid.batch_tokens // length)
        first, place = window // size * size, window % size
        batch = tokens[first : first + size]  # E2's own: other batches round otherwise
        with torch.no_grad(), block_outputs(self.inputs.model) as exact:
            final = final_hidden(self.inputs.model, batch)
        with block_outputs(self.monitor.model) as states:
            observed = self.monitor(batch, final)
        layers, windows = score(observed.layers, observed.windows, self.roundoff)
        terms = layers[layers.window == place]
        errors = [token_errors(a[place, :TOKENS], b[place, :TOKENS]) for a, b in zip(states, exact)]
        whole = [torch.linalg.matrix_norm(a[place].float() - b[place]) / torch.linalg.matrix_norm(b[place])
                 for a, b in zip(states, exact)]  # fmt: skip
        rows = self.adjoint(tokens[window : window + 1]).contributions
        c2 = rows.groupby("layer").c2.sum().reindex(range(len(terms)))
        return {
            "mismatch": float(f"{windows.mismatch[place]:.6g}"),
            "tokens": [digits(row) for row in errors],
            "error": rounded(float(value) for value in whole),
            **{name: rounded(terms[name]) for name in TERMS},
            "share": rounded(c2 / rows.c2.sum()),
        }


def patched(model: str) -> Iterator[dict[str, Any]]:
    """One row for each window of E3: the score and the exact effect of every block."""
    asked, inputs = grid(model)
    windows = read_tables(model)["e3_windows"][e3.WINDOW]
    for precision, runs in windows.groupby("precision", sort=False):
        low = lower(inputs.model, precision, inputs.execution(precision))
        monitor, patching = Monitor(low), Patching(inputs.model, low)
        for (length, seed), rows in runs.groupby(["length", "seed"], sort=False):
            tokens = inputs.windows(length, asked.windows, seed)[1]
            for window in rows.window:
                one = tokens[window : window + 1]
                with torch.no_grad():
                    exact = final_hidden(inputs.model, one)
                    effects = patch_effects(patching(one), exact)
                    observed = monitor(one, exact)
                blocks = score(observed.layers, observed.windows, as_format(precision).unit_roundoff)[0]
                found = {"risk": rounded(blocks.risk), "effect": rounded(effects.exact_reduction)}
                yield dict(zip(e3.WINDOW, (precision, length, seed, window))) | found


def texts() -> dict[str, Any]:
    """The starts of windows by length and seed, the text at each start, and the first tokens of chosen windows."""
    asked, inputs = grid(CHECKPOINTS[0])
    spell = load_tokenizer(CHECKPOINTS[0])
    starts, begins, spelled, looked = {}, {}, {}, chosen()
    for length, seed in product(asked.lengths, asked.seeds):
        found, tokens = inputs.windows(length, asked.windows, seed)
        starts[f"{length} {seed}"] = found
        for start, text in zip(found, tokens):
            begins[start] = spell.decode(text[:TOKENS])[:BEGINNING]
        for window in looked[length, seed]:
            words = [spell.decode([token]) for token in tokens[window, :TOKENS].tolist()]
            spelled[f"{length} {seed} {window}"] = words
    return {"starts": starts, "begins": begins, "texts": spelled}


def inside(model: str) -> Iterator[dict[str, Any]]:
    """One row for each chosen window, by format."""
    for precision in PRECISIONS:
        look = Inside(model, precision)
        for (length, seed), windows in chosen().items():
            for window in windows:
                identity = {"precision": precision, "length": length, "seed": seed, "window": window}
                yield identity | look.of(length, seed, window)


def write(folder: Path = FOLDER) -> None:
    """Compute everything and write it into ``folder``."""

    def save(name: str, data: Any) -> None:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        write_whole(folder / f"{name}.json", text + "\n")

    folder.mkdir(exist_ok=True)
    save("texts", texts())
    for model in CHECKPOINTS:
        save(model, {"inside": [*inside(model)], "patched": [*patched(model)]})


if __name__ == "__main__":
    write()
