"""The monitored pass: parity with the release, and every statistic against a slow fp64 oracle."""

import copy
import itertools

import pandas as pd
import pytest
import torch
from drawn import two_power_steps
from tiny import TINY, low_hidden, random_gpt2, random_tokens
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fragility_core import theory
from fragility_core.models.blocks import blocks
from fragility_core.surrogates import LAYERNORM_TERMS, SIGNALS, Estimator, score
from fragility_core.surrogates.monitor import NEUTRAL, Monitor, Observation
from fragility_core.surrogates.patching import Patching
from fragility_core.surrogates.reductions import sampled_rows
from fragility_core.surrogates.transport import TRANSPORTS, residual_transport
from fragility_numerics.attention import FP32_SCORES, OBSERVED_EAGER, observers, set_attention
from fragility_numerics.formats import FORMATS
from fragility_quantization.quantized import lower

# Where each of the release's fields is found in ours, per block and per window.
LAYER_FIELDS = {
    "attn_magnitude": "attention_term",
    "ln_magnitude": "layernorm_term",
    "ln1_magnitude": "layernorm_1_term",
    "ln2_magnitude": "layernorm_2_term",
    "remainder_magnitude": "remainder_term",
    "local_magnitude": "magnitude",
    "residual_transport_surrogate": "transport",
    "rho_ln": "layernorm_ratio",
    "kappa_softmax": "kappa_softmax",
    "chi_score": "chi_score",
    "kappa_val": "kappa_value",
    "softmax_jac_norm": "softmax_sensitivity",
    "score_norm": "score_norm",
    "prob_norm": "probability_norm",
    "v_norm": "value_norm",
    "v_operator_norm": "value_spectral_norm",
    "core_attn_norm": "context_norm",
    "projected_attn_norm": "attention_norm",
    "risk_score": "risk",
    "ln_dominance": "dominance",
    "downstream_transport": "downstream_transport",
}
WINDOW_FIELDS = {
    "loss": "loss",
    "predicted_risk_sum": "raw",
    "scaled_predicted_risk_sum": "combined",
    "attention_only_sum": "attention_only",
    "layernorm_only_sum": "layernorm_only",
    "remainder_only_sum": "remainder_only",
    "no_transport_sum": "no_transport",
    "target_final_norm": "final_norm",
}
# The release's gains are ratios of two of our norms; its LayerNorm outputs leave out the bias.
GAINS = {
    "ln1_gain": ("path_1_norm", "input_1_norm"),
    "attn_kernel_gain": ("attention_norm", "path_1_norm"),
    "attn_branch_gain": ("attention_norm", "input_1_norm"),
    "ln2_gain": ("path_2_norm", "input_2_norm"),
    "mlp_kernel_gain": ("mlp_norm", "path_2_norm"),
    "mlp_branch_gain": ("mlp_norm", "input_2_norm"),
}
# The release's remainder terms: the norm of a weight and of what it multiplies.
REMAINDERS = {
    "attn_proj_magnitude": ("attention_out_weight_norm", "context_norm"),
    "mlp_fc_magnitude": ("mlp_in_weight_norm", "norm_2_norm"),
    "mlp_proj_magnitude": ("mlp_out_weight_norm", "activation_norm"),
}
LENGTHS = [64, 128]
RUNS = [("fp32", "native"), ("bf16", "native"), ("bf16", "emulated"), ("fp16", "native"), ("fp16", "emulated")]
TIGHT, LOOSE = 1e-3, 2e-2  # protocol section 9


def close(tolerance: float, value: float):
    return pytest.approx(value, rel=tolerance)


# --- Parity with the release ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def monitored(reference_model, reference_windows):
    """The observation of the reference windows of a length in a format, as (format, execution, length)."""
    kept: dict[tuple, Observation] = {}

    def observe(format: str, execution: str, length: int) -> Observation:
        if (format, execution, length) not in kept:
            tokens = reference_windows[length]
            with torch.no_grad():
                reference = reference_model.base_model(tokens).last_hidden_state
            monitor = Monitor(lower(reference_model, format, execution))
            kept[format, execution, length] = monitor(tokens, reference=reference, loss=True)
        return kept[format, execution, length]

    return observe


@pytest.fixture(scope="module")
def recorded(reference_e2):
    """The release's records of a format and length, by window."""

    def select(format: str, length: int) -> list[dict]:
        rows = [row for row in reference_e2 if (row["precision"], row["sequence_length"]) == (format, length)]
        return sorted(rows, key=lambda row: row["window"])

    return select


@pytest.fixture(scope="module")
def implied_weight_norms(recorded, monitored):
    """The weight norms that the release's power iteration found, by format, from its first window."""

    def norms(format: str) -> pd.DataFrame:
        layers = monitored(format, "native", 64).layers.query("window == 0")
        rows = pd.DataFrame(recorded(format, 64)[0]["layer_rows"])
        return pd.DataFrame({weight: rows[field] / layers[norm] for field, (weight, norm) in REMAINDERS.items()})

    return norms


def unit_roundoff(format: str) -> float:
    """The release's unit roundoff. It scales its fp32 records by that of fp16 (protocol section 9)."""
    return 2.0**-11 if format == "fp32" else FORMATS[format].unit_roundoff


def tolerance(format: str, execution: str, length: int, reference_model_path, recorded, reference_windows) -> float:
    """1e-3 if this machine's kernels give the recorded hidden states, else 2 %.

    In fp32 they do. In 16 bits another CPU or number of threads sums in another order and may round to another value.
    The statistics then differ by up to 1 %. The library's own forward pass tells which case this machine is.
    """
    if format == "fp32":
        return TIGHT
    if execution == "emulated":
        return LOOSE
    low, reference = (
        AutoModelForCausalLM.from_pretrained(reference_model_path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (FORMATS[format].storage, torch.float32)
    )
    tokens = reference_windows[length]
    with torch.no_grad():
        hidden, exact = (model.base_model(tokens, use_cache=False).last_hidden_state for model in (low, reference))
    measured = theory.mismatch(hidden, exact).tolist()
    same = measured == [close(1e-4, row["final_mismatch"]) for row in recorded(format, length)]
    return TIGHT if same else LOOSE


@pytest.fixture(scope="module")
def tolerances(reference_model_path, recorded, reference_windows):
    kept: dict[tuple, float] = {}

    def find(*run) -> float:
        if run not in kept:
            kept[run] = tolerance(*run, reference_model_path, recorded, reference_windows)
        return kept[run]

    return find


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("format", "execution"), RUNS)
def test_parity_with_the_release(format, execution, length, monitored, recorded, implied_weight_norms, tolerances):
    """Every statistic, term, risk, signal and loss, with the release's weight norms in place of ours."""
    observation, allowed = monitored(format, execution, length), tolerances(format, execution, length)
    rows = recorded(format, length)
    norms = pd.concat([implied_weight_norms(format)] * len(rows), ignore_index=True)
    layers, windows = score(
        observation.layers.assign(**norms), observation.windows, unit_roundoff(format), Estimator("release", "release")
    )
    assert len(rows) == len(windows) == {64: 6, 128: 4}[length]
    for row, (_, window), (_, block_rows) in zip(rows, windows.iterrows(), layers.groupby("window")):
        for theirs, ours in WINDOW_FIELDS.items():
            assert window[ours] == close(allowed, row[theirs]), theirs
        for block_row, (_, block) in zip(row["layer_rows"], block_rows.iterrows(), strict=True):
            assert block.layer == block_row["layer"]
            for theirs, ours in LAYER_FIELDS.items():
                assert block[ours] == close(allowed, block_row[theirs]), theirs
            for theirs, (numerator, denominator) in GAINS.items():
                assert block[numerator] / block[denominator] == close(allowed, block_row[theirs]), theirs
            for theirs, (weight, norm) in REMAINDERS.items():
                assert block[weight] * block[norm] == close(allowed, block_row[theirs]), theirs
            u, final = unit_roundoff(format), window.final_norm
            assert u * block.risk == close(allowed, block_row["scaled_risk_score"])
            assert block.magnitude / final == close(allowed, block_row["no_transport_score"])
            for part in ("attention", "layernorm", "remainder"):
                alone = block[f"{part}_term"] / final * block.downstream_transport
                assert alone == close(allowed, block_row[f"{part}_only_score"])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("format", "execution"), RUNS)
def test_mismatch_is_the_releases(format, execution, length, monitored, recorded, tolerances):
    measured = monitored(format, execution, length).windows.mismatch
    known = pd.Series([row["final_mismatch"] for row in recorded(format, length)])
    if tolerances(format, execution, length) == TIGHT:
        # The fp32 mismatch is the distance between two orders of summation, so it is rounding noise itself.
        assert measured.tolist() == [close(0.5 if format == "fp32" else TIGHT, value) for value in known]
    else:
        # Between equally good roundings one window's mismatch scatters by 2 to 3 % (measured), the mean of four or
        # six windows by half of that. The tolerance is about three times the latter.
        assert measured.mean() == close(0.05, known.mean())


@pytest.mark.parametrize("field", ["attention_term", "score_norm", "input_1_norm"])
def test_parity_would_notice(field, monitored, recorded):
    """The values of another window differ by more than the tolerance, so the comparison can fail."""
    layers, _ = score(*[getattr(monitored("fp32", "native", 64), part) for part in ("layers", "windows")], 2.0**-11)
    one, other = (layers[layers.window == window][field].to_numpy() for window in (0, 1))
    assert (abs(one / other - 1) > TIGHT).all()


@pytest.mark.parametrize("length", LENGTHS)
def test_weight_norms_are_exact_and_the_releases_are_below(
    length, reference_model, monitored, recorded, implied_weight_norms
):
    """The release stops its power iterations early. Its norms are up to 2.7 % below the exact ones here."""
    layers, theirs = monitored("fp32", "native", length).layers, implied_weight_norms("fp32")
    for index, block in enumerate(blocks(reference_model)):
        weights = {
            "attention_out_weight_norm": block.attention_out.weight,
            "mlp_in_weight_norm": block.mlp_in.weight,
            "mlp_out_weight_norm": block.mlp_out.weight,
        }
        for name, weight in weights.items():
            exact = torch.linalg.matrix_norm(weight.double(), 2).item()
            assert layers[layers.layer == index][name].unique() == [close(1e-6, exact)]
            assert exact * (1 - 0.03) <= theirs[name][index] <= exact * (1 + 1e-6)
    for row, (_, window) in zip(recorded("fp32", length), layers.groupby("window")):
        for block_row, (_, block) in zip(row["layer_rows"], window.iterrows()):
            for field, (weight, norm) in REMAINDERS.items():  # the same in every window
                assert block_row[field] / block[norm] == close(1e-6, theirs[weight][block_row["layer"]])


# --- Every statistic against its definition ------------------------------------------------------


def oracle(model: nn.Module, tokens: torch.Tensor) -> list[dict[str, float]]:
    """The statistics of protocol section 3 for one window (T,), from the library's eager attention in fp64."""
    base = model.base_model.double()
    base.set_attn_implementation("eager")
    seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda module, args, output: seen.update({module: (args[0][0], output[0])}))
        for module in base.modules()
        if len(list(module.children())) == 0
    ]
    result = base(tokens[None], output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    rows = []
    for h, p, block in zip(result.hidden_states, result.attentions, base.h):
        h, p = h[0], p[0]  # (T, d_model), (H, T, T)
        heads, width, length = block.attn.num_heads, block.attn.head_dim, len(h)
        split = [x.view(length, heads, width).unbind(1) for x in seen[block.attn.c_attn][1].chunk(3, -1)]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores, values, sensitivities = [], [], []
        for head, (q, k, v) in enumerate(zip(*split)):
            scores.append((q @ k.T / width**0.5).masked_fill(~causal, 0))
            values.append(torch.linalg.matrix_norm(v, 2))
            sensitivities += [two_power_steps(p[head, row]) for row in sampled_rows(length)]
        a, m = seen[block.attn.c_proj][1], seen[block.mlp.c_proj][1]
        r = h + a
        row = {
            "score_norm": torch.stack(scores).norm(),
            "probability_norm": p.norm(),
            "softmax_sensitivity": max(sensitivities),
            "value_spectral_norm": max(values),
            "context_norm": seen[block.attn.c_proj][0].norm(),
            "attention_norm": a.norm(),
            "activation_norm": seen[block.mlp.c_proj][0].norm(),
            "mlp_norm": m.norm(),
            "norm_2_norm": seen[block.ln_2][1].norm(),
        }
        row |= {f"{name}_norm": torch.stack(x).norm() for name, x in zip(("query", "key", "value"), split)}
        for site, x, norm in (("1", h, block.ln_1), ("2", r, block.ln_2)):
            variance = x.var(-1, correction=0)
            path = norm.weight * (x - x.mean(-1, keepdim=True)) / (variance[:, None] + norm.eps).sqrt()
            row |= {
                f"input_{site}_norm": x.norm(),
                f"path_{site}_norm": path.norm(),
                f"variance_{site}": variance.mean(),
                f"variance_{site}_min": variance.min(),
                f"gamma_{site}_max": norm.weight.abs().max(),
                f"epsilon_{site}": norm.eps,
            }
        rows.append({name: float(value) for name, value in row.items()})
    return rows


@pytest.mark.parametrize("length", [1, 9, 40, 64])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_statistics_agree_with_their_definitions(length, epsilon, tiny_gpt2):
    tokens = random_tokens(3, length, seed=2)
    for module in tiny_gpt2.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = epsilon
    layers = Monitor(lower(tiny_gpt2, "fp32"))(tokens).layers
    assert layers[["window", "layer"]].values.tolist() == [[w, b] for w in range(3) for b in range(3)]
    want = [row for window in tokens for row in oracle(tiny_gpt2, window)]
    for (_, row), definition in zip(layers.iterrows(), want, strict=True):
        for name, value in definition.items():
            # ||V||_2 is an estimate from below, by up to 0.4 % (test_reductions.py).
            allowed = 4e-3 if name == "value_spectral_norm" else 2e-5
            assert row[name] == pytest.approx(value, rel=allowed, abs=1e-6), name


def test_statistics_cover_every_column(tiny_gpt2, tiny_tokens):
    """Every measured column is one of the oracle's or one of the constants below."""
    constants = {"window", "layer", "head_width", "d_model", "score_scaling", "activation_lipschitz"}
    weights = {name + "_weight_norm" for name in ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")}
    layers = Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens).layers
    assert set(layers) == constants | weights | set(oracle(tiny_gpt2, tiny_tokens[0])[0])
    assert layers[["d_model", "head_width", "score_scaling"]].drop_duplicates().values.tolist() == [[32, 16, 0.25]]


@pytest.mark.parametrize("reading", ["release", "paper"])
def test_score_by_definition(reading, tiny_gpt2, tiny_tokens):
    """The signals computed from the raw statistics with the formulas of protocol section 3, window by window."""
    observation, u = Monitor(lower(tiny_gpt2, "bf16"))(tiny_tokens), 2.0**-8
    layers, windows = score(observation.layers, observation.windows, u, Estimator(reading))
    for (_, window), (_, rows) in zip(windows.iterrows(), layers.groupby("window")):
        signals, downstream = dict.fromkeys(SIGNALS, 0.0), 1.0
        for _, s in rows[::-1].iterrows():  # from the last block to the first
            chi = s.query_norm * s.key_norm * s.softmax_sensitivity / (s.probability_norm * 4)  # sqrt(16)
            kappa = s.score_norm / s.probability_norm * s.softmax_sensitivity
            attention = (kappa + chi) * s.probability_norm * s.value_spectral_norm
            layernorm, ratios = 0.0, []
            for site in (1, 2):
                variance, epsilon = s[f"variance_{site}"], s[f"epsilon_{site}"]
                factor = (epsilon + 2 * variance) / (variance + epsilon) ** 1.5
                size = {"release": s[f"gamma_{site}_max"] * s[f"input_{site}_norm"], "paper": s[f"path_{site}_norm"]}
                layernorm += size[reading] * factor
                ratios.append(variance / epsilon * 32 * u)
            remainder = (
                s.attention_out_weight_norm * s.context_norm
                + s.mlp_in_weight_norm * s.norm_2_norm
                + s.mlp_out_weight_norm * s.activation_norm
            )
            magnitude = attention + layernorm + remainder
            assert s.layernorm_ratio == close(1e-12, max(ratios))
            assert s.dominance == close(1e-12, layernorm / magnitude)
            assert s.risk == close(1e-12, magnitude / window.final_norm * downstream)
            parts = {"combined": magnitude, "attention_only": attention, "layernorm_only": layernorm}
            for name, part in (parts | {"remainder_only": remainder, "transport_only": 1.0}).items():
                signals[name] += u * part / window.final_norm * downstream
            signals["no_transport"] += u * magnitude / window.final_norm
            signals["norm_only"] += u / window.final_norm
            alpha, beta = s.attention_norm / s.input_1_norm, s.mlp_norm / s.input_2_norm
            downstream *= 1 + alpha + beta * (1 + alpha)
        for name, value in signals.items():
            assert window[name] == close(1e-12, value), name
        assert window.raw == close(1e-12, signals["combined"] / u)


def test_unknown_layernorm_reading(tiny_gpt2, tiny_tokens):
    observation = Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens)
    with pytest.raises(ValueError, match="LayerNorm term must be one of release, paper, got 'printed'"):
        score(observation.layers, observation.windows, 2.0**-8, Estimator("printed"))


def test_window_rows(tiny_gpt2, tiny_tokens):
    """Loss and mismatch from the library's own loss and two plain passes."""
    monitor = Monitor(lower(tiny_gpt2, "bf16", "emulated"))
    reference = tiny_gpt2.base_model(tiny_tokens).last_hidden_state
    seen = monitor(tiny_tokens, reference=reference, loss=True)
    low = lower(tiny_gpt2, "bf16", "emulated")
    low.model.set_attn_implementation("eager")
    with low.running():
        hidden = low.model.base_model(tiny_tokens).last_hidden_state.float()
    for row, window, want, got in zip(seen.windows.itertuples(), tiny_tokens, reference, hidden):
        # Attention in blocks sums in another order than the library's, so some roundings differ.
        assert row.mismatch == close(0.05, ((got - want).norm() / want.norm()).item())
        assert row.final_norm == close(1e-2, got.norm().item())
        assert row.loss == close(1e-2, tiny_gpt2(window[None], labels=window[None]).loss.item())
    assert seen.hidden.dtype == torch.bfloat16 and seen.hidden.shape == (3, 40, 32)
    assert list(monitor(tiny_tokens).windows) == ["window", "final_norm"]


def test_loss_is_the_librarys(tiny_gpt2, tiny_tokens):
    losses = Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens, loss=True).windows.loss
    want = [tiny_gpt2(window[None], labels=window[None]).loss.item() for window in tiny_tokens]
    assert losses.tolist() == [close(1e-5, loss) for loss in want]
    assert Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens.int(), loss=True).windows.loss.tolist() == losses.tolist()


# --- How it is computed --------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "allowed"), [("fp32", 2e-5), ("fp16", LOOSE)])
def test_a_batch_gives_what_single_windows_give(format, allowed, tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, format, "native" if format == "fp32" else "emulated"), power_iteration=True)
    batch = monitor(tiny_tokens, loss=True)
    single = [monitor(window[None], loss=True) for window in tiny_tokens]
    for part in ("layers", "windows"):
        want = pd.concat([getattr(observation, part) for observation in single], ignore_index=True)
        got = getattr(batch, part)
        pd.testing.assert_frame_equal(got.drop(columns="window"), want.drop(columns="window"), rtol=allowed)


@pytest.mark.parametrize(("format", "execution"), RUNS)
def test_two_runs_are_identical(format, execution, reference_model, reference_windows, monitored):
    again = Monitor(lower(reference_model, format, execution))(reference_windows[64], loss=True)
    first = monitored(format, execution, 64)
    pd.testing.assert_frame_equal(again.layers, first.layers, check_exact=True)
    pd.testing.assert_frame_equal(again.windows, first.windows.drop(columns="mismatch"), check_exact=True)
    assert torch.equal(again.hidden, first.hidden)


@pytest.mark.parametrize("execution", ["native", "emulated"])
def test_observing_changes_nothing(execution, tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "bf16", execution)
    monitor = Monitor(low, power_iteration=True)
    monitored = monitor(tiny_tokens).hidden
    with torch.no_grad(), monitor.running():
        assert torch.equal(low.model.base_model(tiny_tokens).last_hidden_state, monitored)


def interrupt(monitor: Monitor, tokens: torch.Tensor) -> None:
    """A monitored pass that fails inside of the last block."""
    hook = monitor.blocks[-1].mlp_out.register_forward_hook(lambda *call: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        monitor(tokens)
    hook.remove()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_keeps_its_attention(implementation, tiny_gpt2, tiny_tokens):
    """After construction, passes and a pass that fails. A plain pass is the library's own before and after."""
    low = lower(tiny_gpt2, "bf16")
    low.model.set_attn_implementation(implementation)
    plain = low_hidden(low, tiny_tokens)
    monitor = Monitor(low, power_iteration=True)
    configs = [low.model.config, low.model.base_model.config]
    assert [config._attn_implementation for config in configs] == [implementation] * 2
    with monitor.running():
        assert low.model.config._attn_implementation == OBSERVED_EAGER
    monitored = monitor(tiny_tokens).hidden
    assert implementation == "eager" or not torch.equal(monitored, plain)
    interrupt(monitor, tiny_tokens)
    assert [config._attn_implementation for config in configs] == [implementation] * 2
    assert torch.equal(low_hidden(low, tiny_tokens), plain)


def test_monitors_on_one_model_do_not_disturb_each_other(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "fp16", "emulated")
    want = Monitor(low)(tiny_tokens).layers
    one, other = Monitor(low), Monitor(low, power_iteration=True)
    seen = other(tiny_tokens).layers
    pd.testing.assert_frame_equal(seen.drop(columns="branch_jacobian_norm"), want, check_exact=True)
    with other.running():  # even within the other's context
        pd.testing.assert_frame_equal(one(tiny_tokens).layers, want, check_exact=True)
        assert low.model.config._attn_implementation == OBSERVED_EAGER
    pd.testing.assert_frame_equal(other(tiny_tokens).layers, seen, check_exact=True)


def test_nothing_is_left_on_the_model(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "bf16")
    hooks = [(*module._forward_hooks, *module._forward_pre_hooks) for module in low.model.modules()]
    monitor = Monitor(low, power_iteration=True)
    before = len(observers)
    monitor(tiny_tokens)
    interrupt(monitor, tiny_tokens)
    assert len(observers) == before
    assert hooks == [(*module._forward_hooks, *module._forward_pre_hooks) for module in low.model.modules()]


class NoSynchronisation(TorchDispatchMode):
    """Once armed, fails on kernels that make the host wait for their result. Counts the other kernels."""

    FORBIDDEN = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}

    def __init__(self):
        super().__init__()
        self.armed, self.kernels = False, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.armed:
            name = func.overloadpacket.__name__
            assert name not in self.FORBIDDEN, name
            self.kernels += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("format", "execution"), RUNS)
def test_the_pass_does_not_wait_for_the_device(format, execution, tiny_gpt2, tiny_tokens, monkeypatch):
    """Between the first block and the last statistic nothing waits. The one transfer follows in ``_collect``.

    Before the first block the library itself asks about packed sequences.
    """
    monitor = Monitor(lower(tiny_gpt2, format, execution))
    reference = tiny_gpt2.base_model(tiny_tokens).last_hidden_state
    watch, collect, collected = NoSynchronisation(), monitor._collect, []
    monitor.blocks[0].module.register_forward_pre_hook(lambda module, args: setattr(watch, "armed", True))
    monkeypatch.setattr(monitor, "_collect", lambda *statistics: collected.append(statistics) or (None, None))
    with watch:
        monitor(tiny_tokens, reference=reference, loss=True)
    assert watch.kernels > 100 and len(collected) == 1
    transfers, plain_cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(x) or plain_cpu(x))
    layers, windows = collect(*collected[0])
    assert len(transfers) == 1 and len(layers) == 9 and len(windows) == 3


class ListIndices(TorchFunctionMode):
    """Counts indexing by Python lists. Each list is copied to the device, and the host waits for the copy."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.count += sum(isinstance(part, list) for part in index)
        return func(*args, **(kwargs or {}))


def test_the_pass_makes_no_index_on_the_host(tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "fp32"))
    with ListIndices() as lists:
        monitor(tiny_tokens)
    assert lists.count == 0


def test_scores_kept_in_fp32_stay_so(tiny_gpt2, tiny_tokens):
    low = lower(tiny_gpt2, "bf16")
    set_attention(low.model, FP32_SCORES)
    with low.running():
        expected = low.model.base_model(tiny_tokens).last_hidden_state
    assert Monitor(low)(tiny_tokens).hidden.equal(expected)
    Patching(tiny_gpt2, low)(tiny_tokens)
    assert low.model.config._attn_implementation == FP32_SCORES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "tf32", "fp8_e4m3"])
def test_the_pass_does_not_wait_for_a_gpu(format, tiny_gpt2, tiny_tokens, monkeypatch):
    # The library asks before the first block, in plain passes too, whether a window holds several texts.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    monitor = Monitor(lower(tiny_gpt2.cuda(), format))
    tokens = tiny_tokens.cuda()
    monitor(tokens)  # libraries synchronise when they start
    monitor._collect = lambda *statistics: (None, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        monitor(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_gives_what_a_cpu_gives(format, tiny_gpt2, tiny_tokens):
    cpu = Monitor(lower(tiny_gpt2, format, "auto"))(tiny_tokens)
    gpu = Monitor(lower(tiny_gpt2.cuda(), format, "auto"))(tiny_tokens.cuda())
    allowed = 0.2 if format.startswith("fp8") else LOOSE
    pd.testing.assert_frame_equal(gpu.layers, cpu.layers, rtol=allowed)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("power_iteration", [False, True])
def test_grad_mode_changes_nothing(context, power_iteration, tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "bf16", "emulated"), power_iteration)
    want = monitor(tiny_tokens, loss=True)
    with context():
        got = monitor(tiny_tokens, loss=True)
    pd.testing.assert_frame_equal(got.layers, want.layers, rtol=1e-5)
    pd.testing.assert_frame_equal(got.windows, want.windows, rtol=1e-5)
    assert not got.hidden.requires_grad


def test_a_pass_in_inference_mode_does_not_spoil_later_ones(tiny_gpt2):
    """Masks are kept from pass to pass. They must not be inference tensors, which autograd refuses."""
    model = copy.deepcopy(tiny_gpt2).requires_grad_(True)
    set_attention(model, OBSERVED_EAGER)
    tokens = torch.randint(101, (1, 37))  # a length that no other test uses
    with torch.inference_mode():
        model.base_model(tokens)
    model.base_model(tokens).last_hidden_state.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.base_model.parameters())


# --- Blocks that differ -------------------------------------------------------------------------


@pytest.fixture
def mixed_qwen3() -> Qwen3ForCausalLM:
    """Block 0 has neither norms of queries and keys nor a gate. Block 1 has the norms only. Block 2 has both."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.model.layers.parameters():
        parameter.normal_(0.2, 0.2)
    for layer in (0, 1):
        model.model.layers[layer].mlp = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
    model.model.layers[0].self_attn.q_norm = model.model.layers[0].self_attn.k_norm = nn.Identity()
    return model.eval()


MIXED = {"query_gain": [0], "key_gain": [0], "up_max": [0, 1], "activated_max": [0, 1]}  # the blocks that have none


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_blocks_without_gates_or_head_norms(format, mixed_qwen3, tiny_tokens):
    """Their columns are neutral: without these columns each block's transport is the same."""
    seen = Monitor(lower(mixed_qwen3, format, "emulated"), power_iteration=True)(tiny_tokens)
    bound = residual_transport(seen.layers, "operator_norm")
    assert (seen.layers.branch_jacobian_norm < bound).all()
    for column, without in MIXED.items():
        lacks = seen.layers.layer.isin(without)
        assert (seen.layers[column][lacks] == NEUTRAL[column]).all()
        assert (seen.layers[column][~lacks] != NEUTRAL[column]).all()
    for layer, rows in seen.layers.groupby("layer"):
        rows = rows.drop(columns=[column for column, without in MIXED.items() if layer in without])
        assert residual_transport(rows, "operator_norm").tolist() == bound[rows.index].tolist()
    for estimator in TRANSPORTS:
        layers, windows = score(seen.layers, seen.windows, 2.0**-8, Estimator("release", estimator))
        assert (layers.risk > 0).all() and (windows.combined < torch.inf).all()


# --- Settings, refusals and overflow -------------------------------------------------------------


def test_a_model_that_looks_up_more_than_embeddings_is_refused_by_name():
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
        "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    }  # fmt: skip
    model = Gemma4ForCausalLM(Gemma4TextConfig(layer_types=["sliding_attention", "full_attention"], **sizes)).eval()
    with pytest.raises(TypeError, match="a pass over embeddings, which Gemma4TextModel lacks"):
        Monitor(lower(model, "bf16"))


def test_statistics_do_not_depend_on_the_blocks_of_rows(tiny_gpt2, tiny_tokens, monkeypatch):
    """Here each block is one row, so that every sampled row of probabilities begins a block."""
    monitor = Monitor(lower(tiny_gpt2, "fp32"))
    whole = monitor(tiny_tokens).layers
    monkeypatch.setattr("fragility_numerics.attention.BLOCK_ELEMENTS", 1)
    pd.testing.assert_frame_equal(monitor(tiny_tokens).layers, whole, rtol=1e-4)


def test_epsilon_may_change_between_passes(tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "fp32"))
    before = monitor(tiny_tokens)
    monitor.blocks[1].norm_2.eps = 1e-2
    after = monitor(tiny_tokens)
    assert after.layers.query("layer == 1").epsilon_2.unique() == [1e-2]
    assert after.layers.query("layer != 1").epsilon_2.unique() == [1e-5]
    assert after.layers.epsilon_1.unique() == [1e-5]
    assert not torch.equal(after.hidden, before.hidden)
    pd.testing.assert_frame_equal(after.layers.query("layer == 0"), before.layers.query("layer == 0"), check_exact=True)
    later = [frame.query("layer == 1") for frame in (before.layers, after.layers)]
    assert (later[1].path_2_norm < later[0].path_2_norm).all()


def test_weights_may_change_after_refresh(tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "fp32"))
    before = monitor(tiny_tokens).layers.mlp_out_weight_norm
    for block in monitor.blocks:
        block.mlp_out.weight.mul_(2)
    monitor.refresh()
    assert monitor(tiny_tokens).layers.mlp_out_weight_norm.tolist() == [close(1e-5, 2 * norm) for norm in before]


def test_models_without_a_head(tiny_gpt2, tiny_tokens):
    with_head = Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens)
    without = Monitor(lower(tiny_gpt2.base_model, "fp32"))(tiny_tokens)
    pd.testing.assert_frame_equal(without.layers, with_head.layers)


@pytest.mark.parametrize("shape", [(40,), (0, 40), (2, 0)])
def test_windows_of_another_shape_are_refused(tiny_gpt2, shape):
    with pytest.raises(ValueError, match=r"windows must be \(B, T\) and not empty, got shape"):
        Monitor(lower(tiny_gpt2, "bf16"))(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("path", ["", "transformer.h.1.mlp.dropout"])
def test_training_mode_is_refused(tiny_gpt2, tiny_tokens, path):
    """Also that of a module inside, such as one that was added after ``eval``."""
    tiny_gpt2.get_submodule(path).train()
    monitor = Monitor(lower(tiny_gpt2, "bf16"))
    with pytest.raises(ValueError, match=r"needs the model in eval mode, got training mode: call model.eval\(\)"):
        monitor(tiny_tokens)


def test_other_architectures_are_refused():
    config = BertConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(TypeError, match="the score does not cover BertLayer: it needs"):
        Monitor(lower(BertModel(config), "fp32"))


@pytest.mark.parametrize("execution", ["native", "emulated"])
@pytest.mark.parametrize("site", ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"])
def test_an_overflow_is_flagged_never_zeroed(execution, site, tiny_gpt2, tiny_tokens):
    """A weight of block 1 is scaled until |W x| is above 65504, the largest fp16 number."""
    reference = tiny_gpt2.base_model(tiny_tokens).last_hidden_state
    weight = tiny_gpt2.get_submodule(f"transformer.h.1.{site}").weight
    while weight.abs().max() < 30000:
        weight.mul_(2)
    observation = Monitor(lower(tiny_gpt2, "fp16", execution))(tiny_tokens, reference=reference, loss=True)
    layers, windows = score(observation.layers, observation.windows, 2.0**-11)
    for signal in (*SIGNALS, "raw", "mismatch", "loss", "final_norm"):
        assert not torch.tensor(windows[signal].to_numpy()).isfinite().any(), signal
    assert not torch.tensor(layers.risk.to_numpy()).isfinite().any()


def test_an_overflow_of_the_final_state_alone_is_no_safe_window(tiny_gpt2, tiny_tokens):
    """An infinite norm of the final state would make every risk 0."""
    observation = Monitor(lower(tiny_gpt2, "fp16", "emulated"))(tiny_tokens)
    windows = observation.windows.assign(final_norm=[torch.inf, *observation.windows.final_norm[1:]])
    layers, scored = score(observation.layers, windows, 2.0**-11)
    assert scored[list(SIGNALS)].isna().all(axis=1).tolist() == [True] + [False] * (len(scored) - 1)
    assert layers.risk.isna().equals(layers.window == 0)


@pytest.mark.parametrize(
    "estimator", list(itertools.starmap(Estimator, itertools.product(LAYERNORM_TERMS, TRANSPORTS)))
)
def test_no_nonfinite_statistic_makes_a_finite_score(estimator, tiny_gpt2, tiny_tokens):
    seen = Monitor(lower(tiny_gpt2, "bf16", "emulated"), power_iteration=True)(tiny_tokens[:1])
    for name in seen.layers.select_dtypes("float"):
        for value in (torch.inf, torch.nan):
            layers = seen.layers.assign(**{name: [value, *seen.layers[name][1:]]})
            assert not torch.tensor(score(layers, seen.windows, 2.0**-8, estimator)[1].combined.item()).isfinite(), name


def test_an_overflow_in_one_window_leaves_the_others_alone(tiny_gpt2, tiny_tokens):
    rare = 100  # a token with an enormous embedding, in the first window only
    tokens = torch.where(tiny_tokens == rare, 0, tiny_tokens)
    want = Monitor(lower(tiny_gpt2, "fp16", "emulated"))(tokens, loss=True)
    tiny_gpt2.lm_head.weight = nn.Parameter(tiny_gpt2.lm_head.weight.clone())  # untied: the logits stay
    tiny_gpt2.transformer.wte.weight[rare] = 1e6  # beyond 65504
    tokens[0, 5] = rare
    observation = Monitor(lower(tiny_gpt2, "fp16", "emulated"))(tokens, loss=True)
    layers, windows = score(observation.layers, observation.windows, 2.0**-11)
    finite = torch.tensor(windows[list(SIGNALS)].to_numpy()).isfinite()
    assert not finite[0].any() and finite[1:].all()
    assert not torch.tensor(layers.query("window == 0").risk.to_numpy()).isfinite().any()
    pd.testing.assert_frame_equal(observation.layers.query("window > 0"), want.layers.query("window > 0"), rtol=LOOSE)


def test_score_refuses_rows_that_do_not_belong_together(tiny_gpt2, tiny_tokens):
    seen = Monitor(lower(tiny_gpt2, "fp32"))(tiny_tokens)
    others = [
        (seen.layers, seen.windows[:1]), (seen.layers[::-1], seen.windows), (seen.layers, seen.windows[::-1]),
        (seen.layers[1:], seen.windows), (seen.layers[:0], seen.windows),
    ]  # fmt: skip
    for layers, windows in others:
        with pytest.raises(ValueError, match="layers must hold all blocks, from 0 on, of each row of windows"):
            score(layers, windows, 2.0**-8)


def test_score_of_several_observations(tiny_gpt2, tiny_tokens):
    """Observations joined by pandas.concat, which repeats the index, get the scores that each has alone."""
    monitor = Monitor(lower(tiny_gpt2, "fp32"))
    parts = [monitor(tiny_tokens[:2]), monitor(tiny_tokens[2:])]
    each = [score(part.layers, part.windows, 2.0**-8) for part in parts]
    layers, windows = score(
        pd.concat([part.layers for part in parts]), pd.concat([part.windows for part in parts]), 2.0**-8
    )
    assert layers.risk.tolist() == pytest.approx(pd.concat([frame for frame, _ in each]).risk.tolist())
    assert windows.combined.tolist() == pytest.approx(pd.concat([frame for _, frame in each]).combined.tolist())


def test_a_monitor_needs_a_lowered_model(tiny_gpt2):
    with pytest.raises(TypeError, match=r'such as lower\(model, "bf16"\), got a GPT2LMHeadModel'):
        Monitor(tiny_gpt2)


def test_inference_mode_changes_nothing(tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "fp16"))
    expected = monitor(tiny_tokens)
    with torch.inference_mode():
        found = monitor(tiny_tokens)
        anew = Monitor(monitor.low)(tiny_tokens)
    pd.testing.assert_frame_equal(found.layers, expected.layers)
    pd.testing.assert_frame_equal(anew.layers, expected.layers)


@pytest.mark.parametrize(
    ("rows", "unit_roundoff", "estimator", "error", "message"),
    [
        (0, 2**-11, Estimator(), ValueError, "a score needs at least one window, got none"),
        (None, -1.0, Estimator(), ValueError, "must lie strictly between 0 and 1, got -1.0"),
        (None, 2**-11, "paper", TypeError, "an estimator is given as Estimator"),
    ],
)
def test_a_score_refuses_what_it_cannot_use(tiny_gpt2, tiny_tokens, rows, unit_roundoff, estimator, error, message):
    observed = Monitor(lower(tiny_gpt2, "fp16"))(tiny_tokens)
    with pytest.raises(error, match=message):
        score(observed.layers[:rows], observed.windows[:rows], unit_roundoff, estimator)


def test_a_block_that_runs_twice_in_a_pass_is_refused():
    model = random_gpt2(TINY)
    model.transformer.h[2] = model.transformer.h[1]
    with pytest.raises(ValueError, match="runs each block once a pass, got a block that runs again"):
        Monitor(lower(model, "bf16"))(random_tokens(2, 8))
