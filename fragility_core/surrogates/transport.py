"""Three estimators of residual transport rho = ||J_f||_2 of a block x -> x + f(x) (Appendix A.7 (`app:estimation`)).

``release`` and ``operator_norm`` follow from statistics and weights. ``power_iteration`` multiplies by the block's
Jacobian. Only ``operator_norm`` is an upper bound, and only with exact weight norms (``Monitor.refresh``).
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from fragility_numerics.nested import map_tensors

TRANSPORTS = ("release", "operator_norm", "power_iteration")


def block_gain(layers: pd.DataFrame, alpha: pd.Series, beta: pd.Series) -> pd.Series:
    """Gain of f for each row of ``layers``, whose attention a has gain alpha and whose MLP m has gain beta.

    In sequence x -> r = x + a(x) -> r + m(r), and the gain is alpha + beta (1 + alpha). In parallel f(x) = a(x) + m(x):
    the MLP does not read what the attention adds, and the gain is alpha + beta.
    """
    in_sequence = alpha + beta * (1 + alpha)
    return in_sequence.where(~layers.parallel, alpha + beta) if "parallel" in layers else in_sequence


def release_transport(layers: pd.DataFrame) -> pd.Series:
    """Ratios of norms, rho = alpha + beta (1 + alpha), or alpha + beta in parallel (protocol section 3).

    alpha = (||Z_1|| / ||h||)(||a|| / ||Z_1||) = ||a|| / ||h||, and beta = ||m|| / ||r|| for the MLP. These ratios
    compare sizes and see no direction of the Jacobians, not even that of the sublayer's input: a LayerNorm ignores the
    scale of its input, so J_a h and J_m r are about 0.
    """
    return block_gain(layers, layers.attention_norm / layers.input_1_norm, layers.mlp_norm / layers.input_2_norm)


def operator_norm_transport(layers: pd.DataFrame) -> pd.Series:
    """Upper bound of ||J_f||_2 from the norms of a block's parts (Appendix A.7 (`app:estimation`), option ii).

    Norms before and behind a sublayer: max|gamma| / sqrt(min sigma^2 + epsilon). Attention: the sum of the bounds for
    the differentials of P and of V. It uses ||J(p)|| <= 1/2, and the Frobenius norm over all heads in place of each
    head's spectral norm. Rotations of queries and keys change no norm; norms of queries and keys multiply by their
    gain. Gated MLP: the product act(gate) up changes by at most sqrt(L^2 max|up|^2 + max|act(gate)|^2) times the change
    of (gate, up).

    Two inputs may lie below the exact norms: ||V||_2, an estimate (by at most 0.4 %), and the weight norms after
    ``Monitor.follow``, which are Ritz values. With Ritz values this is an estimate and no upper bound.
    """
    query, key = (layers[f"{heads}_weight_norm"] * layers.get(f"{heads}_gain", 1.0) for heads in ("query", "key"))
    change_of_scores = layers.key_norm * query + layers.query_norm * key
    through_scores = 0.5 * layers.score_scaling * layers.value_spectral_norm * change_of_scores
    through_values = layers.probability_norm * layers.value_weight_norm
    attention = layers.attention_out_weight_norm * (through_scores + through_values)
    slope = layers.activation_lipschitz
    if "up_max" in layers:
        slope = np.hypot(slope * layers.up_max, layers.activated_max)
    mlp = layers.mlp_out_weight_norm * slope * layers.mlp_in_weight_norm
    norms = {site: norm_gain(layers, site) for site in ("1", "2", "1_out", "2_out")}
    return block_gain(layers, norms["1"] * attention * norms["1_out"], norms["2"] * mlp * norms["2_out"])


def norm_gain(layers: pd.DataFrame, site: str) -> pd.Series | float:
    """Bound max|gamma| / sqrt(min sigma^2 + epsilon) of the norm at ``site`` (``Block.norms``); 1 for none."""
    if f"variance_{site}" not in layers:
        return 1.0
    return layers[f"gamma_{site}_max"] / (layers[f"variance_{site}_min"] + layers[f"epsilon_{site}"]) ** 0.5


def residual_transport(layers: pd.DataFrame, estimator: str) -> pd.Series:
    """rho of every row of ``layers`` by the named estimator, one of TRANSPORTS.

    Raises ValueError for an unknown estimator, and for "power_iteration" if the monitor did not measure it.
    """
    if estimator not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {estimator!r}")
    if estimator != "power_iteration":
        return (release_transport if estimator == "release" else operator_norm_transport)(layers)
    if "branch_jacobian_norm" not in layers:
        raise ValueError(
            'transport "power_iteration" needs the column branch_jacobian_norm, which was not measured: '
            "monitor with power_iteration=True"
        )
    return layers.branch_jacobian_norm


@torch.no_grad()
@torch.inference_mode(False)  # torch 2.6 takes derivatives in it for 0
def branch_jacobian_norm(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int = 2) -> Tensor:
    """||J_f||_2 of each window by power iteration with JVPs and VJPs, (B,) (Appendix A.7 (`app:estimation`), option i).

    ``args`` and ``kwargs`` are those of the observed call; the block input (B, T, d_model) comes first. The rounded
    weights compute in fp32 here: the Jacobian is that of the model, not of its rounding. But for fp32 rounding, the
    estimate is never above the exact norm. The block's attention needs forward derivatives. The observed one has them,
    torch's fused CPU kernel has not.
    """
    args, kwargs = map_tensors((args, kwargs), lambda x: x.clone() if x.is_inference() else x)
    x = args[0].float()
    parameters = {name: parameter.float() for name, parameter in block.named_parameters()}

    def branch(x: Tensor) -> Tensor:
        return functional_call(block, parameters, (x, *args[1:]), kwargs) - x

    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(x.shape[1:], generator=generator).to(x.device).expand_as(x)
    norm = torch.ones(x.shape[0], device=x.device)
    for _ in range(steps):
        length = torch.linalg.vector_norm(direction.flatten(1), dim=-1).clamp_min(torch.finfo(x.dtype).tiny)
        direction = direction / length[:, None, None]
        image: Tensor = jvp(branch, (x,), (direction,))[1]
        norm = torch.linalg.vector_norm(image.flatten(1), dim=-1)
        (direction,) = vjp(branch, x)[1](image)
    return norm
