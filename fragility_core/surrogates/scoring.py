"""The risk score from the statistics of a monitored pass (Section 5.1 (`subsec:bgss_estimation`)).

Statistics are tidy tables, one row per window and block, in fp64; protocol section 3 defines their columns. The
LayerNorm term has two readings: ``release`` is M_LN of Proposition 1 (`prop:ln`) with a_ln = 1, and ``paper`` is
the printed surrogate ||Z|| C_LN.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from fragility_core import theory
from fragility_core.surrogates.transport import residual_transport

LAYERNORM_TERMS = ("release", "paper")
SIGNALS = (
    "combined", "no_transport", "attention_only", "layernorm_only", "remainder_only", "transport_only", "norm_only",
)  # fmt: skip

# Columns that ``score`` adds to the statistics of a block.
DERIVED = (
    "kappa_softmax", "chi_score", "kappa_value", "attention_term", "layernorm_1_term", "layernorm_2_term",
    "layernorm_term", "remainder_term", "layernorm_ratio", "transport",
    "magnitude", "downstream_transport", "risk", "dominance",
)  # fmt: skip


class Estimator(NamedTuple):
    """Choices of the score: the reading of its LayerNorm term, and the estimator of its transport."""

    layernorm: str = "release"
    transport: str = "release"


class Scores(NamedTuple):
    """``layers``, one row per window and block, with its terms and risk; ``windows``, with the signals (``score``)."""

    layers: pd.DataFrame
    windows: pd.DataFrame


def layernorm_term(layers: pd.DataFrame, site: int | str, reading: str) -> pd.Series:
    """M_LN of the norm at ``site`` (``Block.norms``) of every row (Section 5.1 (`subsec:bgss_estimation`)).

    Where the norm is an RMSNorm, the column of the variance holds the mean square (see ``theory.layernorm``).
    Raises ValueError for an unknown ``reading``.
    """
    variance, epsilon = layers[f"variance_{site}"], layers[f"epsilon_{site}"]
    if reading == "release":
        return theory.layernorm_magnitude(layers[f"gamma_{site}_max"], variance, epsilon, layers[f"input_{site}_norm"])
    if reading == "paper":
        return theory.layernorm_surrogate(layers[f"path_{site}_norm"], variance, epsilon)
    raise ValueError(f"the LayerNorm term must be one of {', '.join(LAYERNORM_TERMS)}, got {reading!r}")


def out_gain(layers: pd.DataFrame, branch: int) -> pd.Series | float:
    """Largest factor of errors through the norm behind sublayer ``branch`` (1 or 2); 1 without one.

    This is the bound max|gamma| f(epsilon) of its Jacobian from which M_LN is made (Appendix A.4 (`app:ln-proof`)).
    """
    if f"variance_{branch}_out" not in layers:
        return 1.0
    factor = theory.layernorm_factor(layers[f"variance_{branch}_out"], layers[f"epsilon_{branch}_out"])
    return layers[f"gamma_{branch}_out_max"] * factor


def remainder_term(layers: pd.DataFrame, reading: str = "release") -> pd.Series:
    """M_eff of every row: ||W|| ||input|| of W_O, W_in and W_out, summed (Appendix A.7 (`app:estimation`)).

    A norm behind a sublayer is one more kernel, with its M_LN in the given ``reading``, and multiplies the others of
    its branch by its gain. The paper also counts "the epsilon-independent LayerNorm tail" (the addition of beta). The
    release leaves the tail out, and so does this function.
    """
    return theory.remainder_magnitude(
        layers.attention_out_weight_norm * layers.context_norm * out_gain(layers, 1),
        layers.mlp_in_weight_norm * layers.norm_2_norm * out_gain(layers, 2),
        layers.mlp_out_weight_norm * layers.activation_norm * out_gain(layers, 2),
        *(layernorm_term(layers, f"{n}_out", reading) for n in (1, 2) if f"variance_{n}_out" in layers),
    )


def local_terms(layers: pd.DataFrame, unit_roundoff: float, estimator: Estimator) -> pd.DataFrame:
    """kappa_softmax, chi_score, A, M_LN, M_eff, rho_LN and rho of every row (Section 5.1 (`subsec:bgss_estimation`)).

    They depend on the block's own statistics alone. rho_LN is the largest one of the block's norms. Terms of a branch
    with a norm behind it are multiplied by that norm's gain (protocol section 3).
    """
    s = layers
    kappa = theory.kappa_softmax(s.score_norm, s.probability_norm, s.softmax_sensitivity)
    chi = theory.chi_score(s.query_norm, s.key_norm, s.probability_norm, s.head_width, s.softmax_sensitivity)
    layernorm = [
        layernorm_term(s, n, estimator.layernorm) * out_gain(s, n) if f"variance_{n}" in s else 0.0 * s.d_model
        for n in (1, 2)
    ]
    if "shared_norm" in s:  # one norm before both sublayers errs once
        layernorm[1] = layernorm[1].mask(s.shared_norm, 0.0)
    ratios = [
        theory.layernorm_ratio(s[f"variance_{site}"], s[f"epsilon_{site}"], s.d_model, unit_roundoff)
        for site in ("1", "2", "1_out", "2_out")
        if f"variance_{site}" in s
    ]
    return pd.DataFrame(
        {
            "kappa_softmax": kappa,
            "chi_score": chi,
            "kappa_value": theory.kappa_value(s.probability_norm, s.value_spectral_norm, s.context_norm),
            "attention_term": theory.attention_magnitude(kappa, chi, s.probability_norm, s.value_spectral_norm)
            * out_gain(s, 1),
            "layernorm_1_term": layernorm[0],
            "layernorm_2_term": layernorm[1],
            "layernorm_term": layernorm[0] + layernorm[1],
            "remainder_term": remainder_term(s, estimator.layernorm),
            # pandas' max would skip a NaN, and an overflow must stay visible.
            "layernorm_ratio": pd.concat(ratios, axis=1).max(axis=1, skipna=False),
            "transport": residual_transport(s, estimator.transport),
        }
    )


def require_order(layers: pd.DataFrame, windows: pd.DataFrame) -> None:
    """Raises ValueError unless ``layers`` holds all blocks, in order, of each of ``windows``, in their order."""
    count = len(windows)
    if not count:
        raise ValueError("a score needs at least one window, got none: take the tables of a Monitor's observation")
    depth = max(1, len(layers) // count)
    in_order = len(layers) == count * depth and np.array_equal(layers["layer"], np.tile(np.arange(depth), count))
    if not in_order or not np.array_equal(layers["window"], np.repeat(windows["window"], depth)):
        raise ValueError(
            "layers must hold all blocks, from 0 on, of each row of windows, in their order, got "
            f"{len(layers)} rows for {count} windows, or another order: take both from the same observation"
        )


def score(
    layers: pd.DataFrame, windows: pd.DataFrame, unit_roundoff: float, estimator: Estimator = Estimator()
) -> Scores:
    """Risk of every block and signals of every window (Section 5.1 (`subsec:bgss_estimation`)).

    ``layers`` and ``windows`` are those of ``monitor.Observation``: any number of windows, each with all its
    blocks in order. Returns both tables with columns added.

    Each block gets its terms, the risk G (Eq. (20) (`eq:alg-risk`)) and the dominance phi (Eq. (21) (`eq:alg-phi`)).
    Each window gets R = sum(G) as ``raw`` and the signals, which are u R (Eq. (14) (`eq:bgss-predictor`)) with
    parts of G left out: ``combined`` is u R itself; ``no_transport`` lacks the product over later blocks;
    ``attention_only``, ``layernorm_only`` and ``remainder_only`` keep one part of M; ``transport_only`` has M = 1;
    ``norm_only`` has M = 1 and lacks the product, which leaves the division by ||X_L||.

    A nonfinite statistic makes all risks and signals of its window nonfinite. Raises TypeError for
    an estimator that is no ``Estimator``. Raises ValueError for tables without rows, where the rows of ``layers`` are
    not those of ``windows``, for a unit roundoff that is not positive and for an unknown estimator.
    """
    if not isinstance(estimator, Estimator):
        raise TypeError(f'an estimator is given as Estimator(layernorm="paper"), got {estimator!r}')
    if not 0 < unit_roundoff < 1:
        raise ValueError(f"the unit roundoff must lie strictly between 0 and 1, got {unit_roundoff}: take the format's")
    require_order(layers, windows)
    layers, windows = layers.reset_index(drop=True), windows.reset_index(drop=True)
    terms = local_terms(layers, unit_roundoff, estimator)
    shape = (len(windows), len(layers) // len(windows))  # (windows, blocks)

    def grid(column: pd.Series) -> torch.Tensor:
        return torch.tensor(column.to_numpy(copy=True)).view(shape)

    # An infinite ||X_L|| would make every risk 0; other statistics enter some estimators as divisors.
    finite = grid(pd.Series(np.isfinite(layers.select_dtypes("number")).all(axis=1))).all(1)
    final_norm = torch.tensor(windows.final_norm.where(finite.numpy() & np.isfinite(windows.final_norm)).to_list())
    final_norm = final_norm[:, None]
    downstream = theory.downstream_transport(grid(terms.transport))
    parts = {name: grid(terms[f"{name}_term"]) for name in ("attention", "layernorm", "remainder")}
    magnitude = theory.local_magnitude(parts["remainder"], parts["attention"], parts["layernorm"])
    risk = theory.layer_risk(magnitude, downstream, final_norm)
    dominance = theory.layernorm_dominance(parts["layernorm"], magnitude)
    found = {"magnitude": magnitude, "downstream_transport": downstream, "risk": risk, "dominance": dominance}
    block = terms.assign(**{name: x.flatten().numpy() for name, x in found.items()})
    even = torch.ones_like(magnitude)
    signals = {
        "combined": risk,
        "no_transport": theory.layer_risk(magnitude, 1.0, final_norm),
        "transport_only": theory.layer_risk(even, downstream, final_norm),
        "norm_only": theory.layer_risk(even, 1.0, final_norm),
    } | {f"{name}_only": theory.layer_risk(part, downstream, final_norm) for name, part in parts.items()}
    predicted = {name: theory.predicted_mismatch(part, unit_roundoff).numpy() for name, part in signals.items()}
    return Scores(layers.join(block), windows.assign(**predicted, raw=theory.total_risk(risk).numpy()))
