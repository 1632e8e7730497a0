"""Agreement of signals with the mismatch in models with attention sinks, on windows that no signal was chosen by.

``python -m fragility_lab.experiments.sinks --model MODEL --data TEXT --results FOLDER`` leaves the tables
``sinks_windows``, ``sinks_signals`` and ``sinks_layers`` in ``outputs/FOLDER/tables``. The formula of ``travel`` was
decided on windows of the first half of each text, in bf16, of 128 tokens. It is judged on the second half, in fp16
and on longer windows.
"""

import argparse
import random
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fragility_adjoint.explain.error_samples import ErrorSamples, scales
from fragility_adjoint.predictor.estimator import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_core.surrogates import SIGNALS, score
from fragility_core.surrogates.monitor import Monitor
from fragility_core.theory import mismatch
from fragility_lab.inputs.loading import Inputs, load
from fragility_lab.measurement.travel import StreamNorms, stream_norms
from fragility_lab.paths import output_folder
from fragility_lab.reporting.tables import save_table
from fragility_lab.running.environment import progress
from fragility_quantization.quantized import lower

HALVES = ("first", "second")
FIRST = 4  # positions that are left out, where any are
RESAMPLES = 2000
VARIANTS = ("travel", "travel_rest", "travel_frobenius", "travel_frobenius_rest")


def starts(inputs: Inputs, length: int, half: str, count: int) -> list[int]:
    """First tokens of ``count`` windows drawn from one ``half`` of the text, or of all windows if there are fewer."""
    step = length - len(inputs.opening.ids)
    available = len(inputs.stream) // step
    pool = range(available // 2) if half == "first" else range(available // 2, available)
    return [number * step for number in sorted(random.Random(0).sample(pool, min(count, len(pool))))]


def variants(norms: StreamNorms, unit_roundoff: float) -> dict[str, Tensor]:
    """``travel`` of each window (B,), and its variants: with Frobenius norms, without the first positions, or both."""
    rest = StreamNorms(*(x[..., FIRST:] for x in norms))

    def frobenius(of: StreamNorms) -> Tensor:
        whole = StreamNorms(*(torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in of))
        return whole.relative_travel()[:, 0] * unit_roundoff

    return {
        "travel": norms.travel(unit_roundoff), "travel_rest": rest.travel(unit_roundoff),
        "travel_frobenius": frobenius(norms), "travel_frobenius_rest": frobenius(rest),
    }  # fmt: skip


def measured(low, model, monitor, realised, tokens: Tensor, passes: int) -> dict[str, float | np.ndarray]:
    """Signals and mismatch of one window ``tokens`` (1, T)."""
    exact = final_hidden(model, tokens)
    observed = monitor(tokens, exact)
    unit_roundoff = low.format.unit_roundoff
    row = score(observed.layers, observed.windows, unit_roundoff)[1].iloc[0][[*SIGNALS, "mismatch"]].to_dict()
    norms = stream_norms(low, tokens)
    row |= {name: value.item() for name, value in variants(norms, unit_roundoff).items()}
    others = [realised.again(lambda m: final_hidden(m, tokens), scale) for scale in scales(low.format, passes)[1:]]
    squares = [row["mismatch"] ** 2, *(mismatch(other, exact).item() ** 2 for other in others)]
    row["mismatch_mean"] = float(np.sqrt(np.mean(squares)))
    apart = (observed.hidden.float() - exact)[0].square().sum(-1)
    row["worst_token"] = (apart.max() / apart.sum()).item()
    shares = norms.entering[:, 0].square() / norms.entering[:, 0].square().sum(-1, keepdim=True)
    return row | {"first_share": shares[:, 0].cpu().numpy()}


def attention_to_first(model, tokens: Tensor) -> np.ndarray:
    """The mean share of attention that later tokens of ``tokens`` (1, T) give to the first token, by block."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        found = model(tokens, output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation(before)
    return np.array([p[0, :, 1:, 0].float().mean().item() for p in found])


@torch.no_grad()
def windows_of(inputs: Inputs, precision: str, length: int, half: str, count: int, passes: int) -> Iterator[dict]:
    """A row for each window; prints progress."""
    low = lower(inputs.model, precision, inputs.execution(precision))
    monitor, realised = Monitor(low), ErrorSamples(Adjoint(low, inputs.model, gradients="both"))
    for number, start in enumerate(progress(starts(inputs, length, half, count), desc=f"{precision} {length} {half}")):
        tokens = inputs.window(start, length)[None].to(inputs.device)
        row = measured(low, inputs.model, monitor, realised, tokens, passes)
        if number < 4:
            row["first_attention"] = attention_to_first(inputs.model, tokens)
        yield {"precision": precision, "length": length, "half": half, "start": start} | row


def correlation(x: np.ndarray, y: np.ndarray, draws: np.ndarray) -> dict[str, float]:
    """Pearson's correlation of ``x`` and ``y`` (N,), and its middle 95 % over ``draws`` (D, N): ``low``, ``high``."""
    drawn = [np.corrcoef(x[i], y[i])[0, 1] for i in draws if len({*i}) > 1]  # draws of one window alone have none
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return {"pearson": stats.pearsonr(x, y).statistic, "low": low, "high": high}


def agreement(windows: pd.DataFrame) -> pd.DataFrame:
    """Pearson's correlation with the mean mismatch over realisations and with that of one pass, by setting and signal.

    Intervals are the middle 95 % over RESAMPLES draws of windows with replacement. Raises ValueError if no setting has
    three windows that stay finite.
    """
    rows, generator = [], np.random.default_rng(0)
    for setting, own in windows.groupby(["precision", "length", "half"], sort=True):
        own = own[np.isfinite(own.mismatch) & np.isfinite(own.mismatch_mean)]
        if len(own) < 3:
            continue
        chosen = generator.integers(len(own), size=(RESAMPLES, len(own)))
        for signal in (*SIGNALS, *VARIANTS):
            x, y = own[signal].to_numpy(), own.mismatch_mean.to_numpy()
            rows.append(
                dict(zip(("precision", "length", "half"), setting)) | {
                    "signal": signal, "windows": len(own), **correlation(x, y, chosen),
                    "spearman": stats.spearmanr(x, y).statistic,
                    "one_pass": stats.pearsonr(x, own.mismatch).statistic,
                    "passes_agree": stats.pearsonr(own.mismatch, y).statistic,
                }
            )  # fmt: skip
    if not rows:
        raise ValueError("signals need a setting with three finite windows, got none: nearly all windows overflowed")
    return pd.DataFrame(rows)


def layers_of(rows: list[dict]) -> pd.DataFrame:
    """The first token's share in the squared norm of the stream, and in the attention of later tokens, by block.

    Windows that overflow do not count for the stream.
    """
    share = np.mean([row["first_share"] for row in rows if np.isfinite(row["first_share"]).all()], axis=0)
    drawn = np.mean([row["first_attention"] for row in rows if "first_attention" in row], axis=0)
    return pd.DataFrame({"layer": range(len(share)), "stream": share, "attention": drawn})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fragility_lab.experiments.sinks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--data", default="embedded")
    parser.add_argument("--results", default="embedded")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--windows", type=int, default=96, help="of each half, with 128 tokens; fewer of longer ones")
    parser.add_argument("--passes", type=int, default=2, help="realisations of rounding that are averaged")
    given = parser.parse_args(arguments)
    inputs = load(given.model, given.data, given.lengths, 3)
    rows: list[dict] = []
    for length in given.lengths:
        for precision in given.precisions:
            for half in HALVES:
                if half == "second" or (precision, length) == (given.precisions[0], given.lengths[0]):
                    count = max(3, given.windows * given.lengths[0] // length)
                    rows += windows_of(inputs, precision, length, half, count, given.passes)
    windows = pd.DataFrame([{k: v for k, v in row.items() if not isinstance(v, np.ndarray)} for row in rows])
    folder = output_folder(given.results, "tables")
    for name, table in (
        ("sinks_windows", windows), ("sinks_signals", agreement(windows)), ("sinks_layers", layers_of(rows)),
    ):  # fmt: skip
        save_table(table, folder, name)
    print(agreement(windows).query("signal in ('combined', 'norm_only', 'travel')").to_string(index=False))


if __name__ == "__main__":
    main()
