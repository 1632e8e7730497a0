"""The signal by token: its definition, and the experiment that judges it."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fragility_adjoint.predictor import Adjoint
from fragility_core.models.paths import final_hidden
from fragility_lab.experiments import positions, sinks
from fragility_lab.inputs.loading import load
from fragility_lab.measurement.travel import StreamNorms, stream_norms
from fragility_lab.reporting import results_sinks as page
from fragility_numerics.attention import observing_attention
from fragility_quantization.quantized import lower

SHAPE = (3, 2, 5)  # blocks, windows, tokens


def drawn_norms(seed: int) -> StreamNorms:
    generator = torch.Generator().manual_seed(seed)
    size = [SHAPE, SHAPE, SHAPE, SHAPE[1:], SHAPE[1:]]
    return StreamNorms(*(torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in size))


def test_travel_by_definition():
    norms = drawn_norms(0)
    want = []
    for window in range(2):
        of_tokens = [
            sum(float(norms.attention[b, window, t] ** 2 + norms.mlp[b, window, t] ** 2) ** 0.5 for b in range(3))
            / float(norms.last[window, t])
            for t in range(5)
        ]
        final = norms.hidden[window].tolist()
        errors = sum((s * x) ** 2 for s, x in zip(of_tokens, final)) ** 0.5
        want.append(2.0**-8 * errors / sum(x**2 for x in final) ** 0.5)
    assert norms.travel(2.0**-8).tolist() == pytest.approx(want, rel=1e-12)


@given(st.integers(0, 99), st.floats(0.01, 100))
def test_travel_lies_between_those_of_its_tokens_and_has_no_scale(seed, scale):
    norms = drawn_norms(seed)
    tokens, windows = norms.relative_travel(), norms.travel(1.0)
    assert (tokens.amin(1) <= windows * (1 + 1e-12)).all() and (windows <= tokens.amax(1) * (1 + 1e-12)).all()
    scaled = StreamNorms(*(x * scale for x in norms))
    assert torch.allclose(scaled.travel(1.0), windows, rtol=1e-12)


def test_a_sink_leaves_the_signal_of_other_tokens_as_it_is():
    """A token whose stream and additions are 1000 times as large hides all others in a Frobenius norm, not here."""
    norms = drawn_norms(1)
    factor = torch.ones(5, dtype=torch.float64)
    factor[0] = 1e3
    sunk = norms._replace(**{name: getattr(norms, name) * factor for name in ("attention", "mlp", "entering", "last")})
    assert torch.allclose(sunk.travel(1.0), norms.travel(1.0), rtol=1e-12)
    found, plain = (sinks.variants(each, 1.0) for each in (sunk, norms))
    assert not torch.allclose(found["travel_frobenius"], plain["travel_frobenius"], rtol=1e-2)
    assert torch.allclose(found["travel_frobenius_rest"], plain["travel_frobenius_rest"], rtol=1e-12)


def test_travel_needs_a_lowered_model(tiny_gpt2, tiny_tokens):
    with pytest.raises(TypeError, match="lower"):
        stream_norms(tiny_gpt2, tiny_tokens)
    low = lower(tiny_gpt2, "bf16")
    together, *single = (stream_norms(low, x).travel(1.0) for x in (tiny_tokens, *tiny_tokens.split(1)))
    one = torch.cat(single)
    assert together.shape == (len(tiny_tokens),) and torch.allclose(together, one, rtol=2e-2)


def test_halves_of_a_text_share_no_token():
    inputs = load("embedded", "embedded", [64], 3)
    first, second = (sinks.starts(inputs, 64, half, 10**6) for half in sinks.HALVES)
    assert max(first) + 64 <= min(second) and len(first) > 100 and len(second) > 100
    assert sinks.starts(inputs, 64, "first", 5) == sorted({*sinks.starts(inputs, 64, "first", 5)} & {*first})


def test_agreement_of_signals():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=60)
    columns = {name: generator.normal(size=60) for name in (*sinks.SIGNALS, *sinks.VARIANTS)}
    windows = pd.DataFrame(columns | {"travel": 2 * truth + 1, "combined": -truth, "mismatch_mean": truth}).assign(
        mismatch=truth + generator.normal(size=60), precision="bf16", length=128, half="second"
    )
    windows.loc[59, "mismatch"] = np.inf  # it overflowed
    found = sinks.agreement(windows).set_index("signal")
    assert (found.windows == 59).all()
    assert found.pearson[["travel", "combined"]].tolist() == pytest.approx([1, -1])
    assert (
        found.one_pass["travel"] == pytest.approx(found.passes_agree["travel"]) and 0.4 < found.one_pass["travel"] < 0.9
    )
    noise = found.loc["norm_only"]
    assert noise.low < noise.pearson < noise.high and 0.3 < noise.high - noise.low < 0.7


def test_the_experiment_from_the_command_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sinks, "output_folder", lambda *parts: tmp_path)
    monkeypatch.setattr(sinks, "RESAMPLES", 20)
    sinks.main(["--windows", "4", "--lengths", "16", "--passes", "1"])
    windows, signals, layers = (
        pd.read_csv(tmp_path / f"sinks_{name}.csv") for name in ("windows", "signals", "layers")
    )
    assert windows.groupby(["precision", "half"]).size().to_dict() == {
        ("bf16", "first"): 4, ("bf16", "second"): 4, ("fp16", "second"): 4,
    }  # fmt: skip
    assert (windows.mismatch == windows.mismatch_mean).all()  # one realisation
    assert len(signals) == 3 * (len(sinks.SIGNALS) + len(sinks.VARIANTS))
    assert len(layers) == 12 and layers[["stream", "attention"]].to_numpy().max() < 1
    inputs = load("embedded", "embedded", [16], 3)
    row = windows.query("precision == 'bf16'").iloc[0]
    tokens, low = inputs.window(row.start, 16)[None], lower(inputs.model, "bf16")
    assert stream_norms(low, tokens).travel(low.format.unit_roundoff).item() == pytest.approx(row.travel, rel=1e-4)
    assert row.mismatch < 0.1 and "travel" in capsys.readouterr().out


def test_too_short_windows_and_none_that_are_finite_are_refused():
    with pytest.raises(ValueError, match="length must be at least 17, got 16"):
        positions.main(["--length", "16"])
    lost = pd.DataFrame({"precision": "fp16", "length": 16, "half": "second", "mismatch": [np.nan] * 4})
    with pytest.raises(ValueError, match="three finite windows, got none"):
        sinks.agreement(lost.assign(mismatch_mean=np.nan))


def test_windows_that_overflow_leave_the_shares_of_others_as_they_are():
    rows = [
        {"first_share": np.array(share), "first_attention": np.array([0.1, 0.2])} for share in ([0.5, 0.7], [0.3, 0.5])
    ]
    found = sinks.layers_of([*rows, {"first_share": np.array([0.9, np.nan])}])
    assert found.stream.tolist() == pytest.approx([0.4, 0.6]) and found.attention.tolist() == pytest.approx([0.1, 0.2])


def test_the_page_is_made_of_the_committed_tables():
    models = page.present()
    assert {"GPT-2, 3 M", "Llama, 3 M"} < {*models}
    assert page.FIRST == sinks.FIRST and {*sinks.VARIANTS} < {*page.SIGNALS}
    assert page.PAGE.read_text(encoding="utf-8") == page.rendered(models), "run `make docs` and commit"
    one = next(iter(models.values()))
    moved = {**one, "sinks_signals": one["sinks_signals"].assign(pearson=0.123)}
    assert "0.12 (" in page.rendered({"another": moved}) and "another" in page.rendered({"another": moved})


def test_figures_of_the_page():
    models = page.present()
    layers, signals = page.layers_figure(models), page.signals_figure(models)
    assert (
        [line.get_label() for line in layers.lines]
        == [*models]
        == [text.get_text() for text in signals.get_legend().get_texts()]
    )
    assert all(np.nanmax(line.get_ydata()) <= 1 for line in layers.lines)


def test_squares_by_position_add_up_to_contributions():
    """Every kernel that has positions is seen, each window and probe once, and the first position is the first."""
    inputs = load("embedded", "embedded", [24], 3)
    windows = torch.stack([inputs.window(start, 24) for start in (0, 240)])
    estimate = Adjoint(lower(inputs.model, "bf16"), inputs.model, probes=2, gradients="low")
    squares = positions.PositionSquares(estimate, 24)
    rows = estimate(windows).contributions
    want = rows[rows.kind == "kernel"].groupby("place").c2.sum()
    assert {*squares.found} == {*want.index}
    for place, found in squares.found.items():
        assert found.shape == (24,) and float(found.sum()) == pytest.approx(want[place], rel=1e-4)
    last = rows[rows.kind == "kernel"].place.max()
    counted = torch.zeros(2, 24, dtype=torch.bool)
    counted[:, 0] = True
    estimate(windows, counted)  # an error of the last kernel at other positions reaches no first final state
    again = positions.PositionSquares(estimate, 24)
    estimate(windows, counted)
    assert float(again.found[last][1:].sum()) == 0 < float(again.found[last][0])


def test_shares_of_positions():
    found = positions.grouped(np.arange(1.0, 41.0))
    assert found == pytest.approx([1 / 820, 9 / 820, sum(range(5, 17)) / 820, sum(range(17, 41)) / 820])


def test_positions_and_middles_of_windows():
    """Shares of kernels add up to 1; a measured second half and its norm are those of the states by hand."""
    inputs = load("embedded", "embedded", [64], 3)
    low = lower(inputs.model, "bf16")
    windows = torch.stack([inputs.window(start, 64) for start in (0, 640, 1280)])
    rows = positions.position_rows(inputs, low, windows)
    assert list(rows.positions) == list(positions.GROUPS) and rows.tokens.sum() == pytest.approx(1)
    assert (rows.attention + rows.other).sum() == pytest.approx(1) and rows.measured.sum() == pytest.approx(1)
    middle = pd.DataFrame(positions.middle_rows(inputs, low, windows))
    with torch.no_grad():
        exact = final_hidden(inputs.model, windows)[:, 32:].double()
        with observing_attention(low.model), low.running():  # as a monitored pass
            rounded = final_hidden(low.model, windows)[:, 32:].double()
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(exact, rounded)]
    assert middle.mismatch.tolist() == pytest.approx(apart, rel=0.05)
    assert (1 / middle.norm_only_counted).tolist() == pytest.approx([float(x.norm()) for x in exact], rel=0.02)
    table = positions.correlations(middle.assign(travel=middle.mismatch, combined=-middle.mismatch)).set_index("signal")
    assert table.pearson.travel == pytest.approx(1) and table.pearson.combined == pytest.approx(-1)
    assert (table.low <= table.pearson + 1e-9).all() and (table.windows == 3).all()
