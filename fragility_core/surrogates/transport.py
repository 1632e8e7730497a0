"""Three estimators of residual transport rho = ||J_f||_2 of a block x -> x + f(x) (Appendix A.7 (`app:estimation`)).

``release`` and ``operator_norm`` follow from statistics and weights alone; ``power_iteration`` needs
products with the block's Jacobian. Only ``operator_norm`` bounds ||J_f||_2 from above.
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.utils._pytree import tree_map_only

TRANSPORTS = ("release", "operator_norm", "power_iteration")


def in_sequence(alpha, beta):
    """Gain of f for x -> r = x + a(x) -> r + b(r) with gains alpha of a and beta of b."""
    return alpha + beta * (1 + alpha)


def in_block(layers: pd.DataFrame, alpha, beta):
    """Gain of f for blocks in sequence, or alpha + beta for those of ``layers`` marked as parallel.

    f(x) = a(x) + b(x) for x -> x + a(x) + b(x): the MLP does not see the attention's error.
    """
    if "parallel" not in layers:
        return in_sequence(alpha, beta)
    return in_sequence(alpha, beta).where(~layers.parallel, alpha + beta)


def release_transport(layers: pd.DataFrame) -> pd.Series:
    """Norm ratios, rho = alpha + beta (1 + alpha), alpha + beta in parallel (protocol section 3).

    alpha = (||Z_1|| / ||h||)(||a|| / ||Z_1||) and beta likewise for the MLP; the norms of the
    LayerNorm outputs cancel.
    """
    return in_block(layers, layers.attention_norm / layers.input_1_norm, layers.mlp_norm / layers.input_2_norm)


def operator_norm_transport(layers: pd.DataFrame) -> pd.Series:
    """Upper bound of ||J_f||_2 from the constituent maps (Appendix A.7 (`app:estimation`), option ii).

    LayerNorm: max|gamma| / sqrt(min sigma^2 + epsilon). Attention: the differentials of P and V,
    with ||J(p)|| <= 1/2 and Frobenius norms over all heads above each head's spectral norm; rotations
    of queries and keys change no norm, norms of them multiply by their gain. A gated MLP's product
    act(gate) up changes by at most sqrt(L^2 max|up|^2 + max|act(gate)|^2) times the change of (gate, up).
    """
    norm_1 = layers.gamma_1_max / (layers.variance_1_min + layers.epsilon_1) ** 0.5
    norm_2 = layers.gamma_2_max / (layers.variance_2_min + layers.epsilon_2) ** 0.5
    query_weight_norm, key_weight_norm = (
        layers[f"{heads}_weight_norm"] * layers.get(f"{heads}_gain", 1.0) for heads in ("query", "key")
    )
    through_scores = (
        0.5
        * layers.score_scaling
        * layers.value_spectral_norm
        * (layers.key_norm * query_weight_norm + layers.query_norm * key_weight_norm)
    )
    through_values = layers.probability_norm * layers.value_weight_norm
    attention = layers.attention_out_weight_norm * (through_scores + through_values)
    slope = layers.activation_lipschitz
    if "up_max" in layers:
        slope = np.hypot(slope * layers.up_max, layers.activated_max)
    mlp = layers.mlp_out_weight_norm * slope * layers.mlp_in_weight_norm
    return in_block(layers, norm_1 * attention, norm_2 * mlp)


def residual_transport(layers: pd.DataFrame, estimator: str) -> pd.Series:
    """rho of every row of ``layers`` by the named estimator.

    Raises ValueError for an unknown estimator, and where power iterations were not measured.
    """
    if estimator == "release":
        return release_transport(layers)
    if estimator == "operator_norm":
        return operator_norm_transport(layers)
    if estimator == "power_iteration":
        if "branch_jacobian_norm" not in layers:
            raise ValueError(
                'transport "power_iteration" needs the column branch_jacobian_norm, which was not measured: '
                "monitor with power_iteration=True"
            )
        return layers.branch_jacobian_norm
    raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {estimator!r}")


@torch.no_grad()
@torch.inference_mode(False)  # torch 2.6 takes derivatives in it for 0
def branch_jacobian_norm(block: nn.Module, args: tuple, kwargs: dict, steps: int = 2) -> Tensor:
    """||J_f||_2 of each window by power iteration with JVPs and VJPs, (B,) (Appendix A.7 (`app:estimation`), option i).

    ``args`` and ``kwargs`` are those of the observed call, the block input (B, T, d_model) first. The
    low-precision weights compute in fp32 here: the Jacobian is the model's, not its rounding's. Beyond
    fp32 rounding, never above the exact norm.
    """
    args, kwargs = tree_map_only(Tensor, lambda x: x.clone() if x.is_inference() else x, (args, kwargs))
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
        _, image = jvp(branch, (x,), (direction,))
        norm = torch.linalg.vector_norm(image.flatten(1), dim=-1)
        _, pull_back = vjp(branch, x)
        (direction,) = pull_back(image)
    return norm
