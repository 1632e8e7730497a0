"""The score as a function of the statistics: rows drawn at random, no model. The passes are in test_monitor.py."""

import numpy as np
import pandas as pd
import pytest
from drawn import many, seeds
from hypothesis import given
from hypothesis import strategies as st

from fragility_core import theory
from fragility_core.surrogates.scoring import (
    LAYERNORM_TERMS,
    Estimator,
    layernorm_term,
    local_terms,
    remainder_term,
    score,
)

STATISTICS = (
    "query_norm", "key_norm", "score_norm", "probability_norm", "softmax_sensitivity", "value_spectral_norm",
    "context_norm", "attention_out_weight_norm", "mlp_in_weight_norm", "mlp_out_weight_norm", "norm_2_norm",
    "activation_norm", "attention_norm", "mlp_norm", "variance_1", "variance_2", "gamma_1_max", "gamma_2_max",
    "input_1_norm", "input_2_norm", "path_1_norm", "path_2_norm",
)  # fmt: skip
draws = {"seed": seeds, "windows": st.integers(1, 3), "depth": st.integers(1, 4)}


def statistics(seed: int, windows: int, depth: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Positive statistics of every block and window, over six orders of magnitude."""
    generator = np.random.default_rng(seed)
    rows = windows * depth
    drawn = pd.DataFrame({name: 10 ** generator.uniform(-3, 3, rows) for name in STATISTICS})
    layers = drawn.assign(
        window=np.repeat(np.arange(windows), depth), layer=np.tile(np.arange(depth), windows), epsilon_1=1e-5,
        epsilon_2=1e-5, head_width=16, d_model=64,
    )  # fmt: skip
    return layers, pd.DataFrame({"window": np.arange(windows), "final_norm": 10 ** generator.uniform(0, 3, windows)})


def test_remainder_term_by_hand():
    """||W_O|| ||P V|| + ||W_in|| ||LN|| + ||W_out|| ||activation|| (Appendix A.7 (`app:estimation`))."""
    row = pd.DataFrame(
        {
            "attention_out_weight_norm": [2.0], "context_norm": [3.0], "mlp_in_weight_norm": [5.0],
            "norm_2_norm": [7.0], "mlp_out_weight_norm": [11.0], "activation_norm": [13.0],
        }
    )  # fmt: skip
    assert remainder_term(row).tolist() == [6.0 + 35.0 + 143.0]


@given(**draws)
@many
def test_the_score_of_a_window_is_the_sum_over_its_blocks(seed, windows, depth):
    """``raw`` is R (Section 3 (`sec:problem_formulation`)), ``combined`` is u R (Eq. (14) (`eq:bgss-predictor`)).

    The three signals of one part each add up to ``combined``.
    """
    u = 2.0**-8
    layers, signals = score(*statistics(seed, windows, depth), u)
    total = layers.groupby("window").risk.sum()
    np.testing.assert_allclose(signals.raw, total, rtol=1e-12)
    np.testing.assert_allclose(signals.combined, u * total, rtol=1e-12)
    parts = signals.attention_only + signals.layernorm_only + signals.remainder_only
    np.testing.assert_allclose(parts, signals.combined, rtol=1e-12)


@pytest.mark.parametrize("reading", LAYERNORM_TERMS)
@given(**draws, site=st.sampled_from([1, 2]), factor=st.floats(1, 1e6))
@many
def test_a_larger_epsilon_alone_never_raises_the_score(reading, seed, windows, depth, site, factor):
    """Proposition 2 (`prop:bgss`) and its analogue for the surrogate, with every other statistic frozen."""
    layers, signals = statistics(seed, windows, depth)
    raised = layers.assign(**{f"epsilon_{site}": factor * layers[f"epsilon_{site}"]})
    assert (layernorm_term(raised, site, reading) <= layernorm_term(layers, site, reading) * (1 + 1e-14)).all()
    before, after = (score(rows, signals, 2.0**-8, Estimator(reading)) for rows in (layers, raised))
    assert (after[0].risk <= before[0].risk * (1 + 1e-14)).all()
    assert (after[1].combined <= before[1].combined * (1 + 1e-14)).all()
    assert (after[0].layernorm_ratio <= before[0].layernorm_ratio).all()


def test_local_terms_by_definition():
    """As Section 5.1 (`subsec:bgss_estimation`) prints them, for the reading ``paper``."""
    s, _ = statistics(1, 2, 3)
    terms = local_terms(s, 2.0**-8, Estimator("paper"))
    kappa = s.score_norm / s.probability_norm * s.softmax_sensitivity
    chi = s.query_norm * s.key_norm / (s.probability_norm * 16**0.5) * s.softmax_sensitivity
    factors = [(1e-5 + 2 * variance) / (variance + 1e-5) ** 1.5 for variance in (s.variance_1, s.variance_2)]
    want = {
        "kappa_softmax": kappa,
        "chi_score": chi,
        "attention_term": (kappa + chi) * s.probability_norm * s.value_spectral_norm,
        "layernorm_term": s.path_1_norm * factors[0] + s.path_2_norm * factors[1],
        "remainder_term": remainder_term(s),
        "layernorm_ratio": np.maximum(s.variance_1, s.variance_2) / 1e-5 * 64 / 256,
    }
    for name, values in want.items():
        np.testing.assert_allclose(terms[name], values, rtol=1e-13, err_msg=name)


@pytest.mark.parametrize("reading", LAYERNORM_TERMS)
def test_local_terms_with_norms_behind_the_branches(reading):
    """Everything before such a norm goes through it; the norm itself is one more kernel of the remainder."""
    plain, windows = statistics(1, 2, 3)
    kinds = ("variance", ""), ("gamma", "_max"), ("input", "_norm"), ("path", "_norm")
    renamed = {f"{name}_{n}{end}": f"{name}_{n}_out{end}" for n in (1, 2) for name, end in kinds}
    behind = statistics(2, 2, 3)[0][[*renamed]].rename(columns=renamed).assign(epsilon_1_out=1e-6, epsilon_2_out=1e-6)
    layers = plain.join(behind)
    before, after = (local_terms(rows, 2.0**-8, Estimator(reading)) for rows in (plain, layers))
    first, second = (
        layers[f"gamma_{n}_out_max"] * (1e-6 + 2 * layers[f"variance_{n}_out"])
        / (layers[f"variance_{n}_out"] + 1e-6) ** 1.5
        for n in (1, 2)
    )  # fmt: skip
    attention_out = plain.attention_out_weight_norm * plain.context_norm
    kernels = layernorm_term(layers, "1_out", reading) + layernorm_term(layers, "2_out", reading)
    want = {
        "attention_term": first * before.attention_term,
        "layernorm_term": first * before.layernorm_1_term + second * before.layernorm_2_term,
        "remainder_term": first * attention_out + second * (before.remainder_term - attention_out) + kernels,
        "transport": before.transport,  # of norms of what the branches add
    }
    for name, values in want.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-10, err_msg=name)
    without = layers.drop(columns=["variance_1", "variance_2"])
    assert (local_terms(without, 2.0**-8, Estimator(reading)).layernorm_term == 0).all()
    assert score(without, windows, 2.0**-8, Estimator(reading))[1].combined.notna().all()


def test_readings_of_the_layernorm_term():
    layers, _ = statistics(0, 1, 2)
    factor = theory.layernorm_factor(layers.variance_1, 1e-5)
    release = layers.gamma_1_max * factor * layers.input_1_norm
    np.testing.assert_allclose(layernorm_term(layers, 1, "release"), release, rtol=1e-14)
    np.testing.assert_allclose(layernorm_term(layers, 1, "paper"), layers.path_1_norm * factor, rtol=1e-14)
