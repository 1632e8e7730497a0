"""Olive's selective mixed precision by ``kld_gradient``, as of 0.13 (https://github.com/microsoft/Olive).

Its score is ⟨gradient of the KL at the low point, low weight - high weight⟩ a million weights. In the order of their
scores, layers are moved to the higher rung until the share of low weights is at most the one that was asked for.
"""

import copy
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_peers.ladders import get_ladder
from fragility_peers.tasks import Chosen, layer_paths, without_head

GROUP = 32  # 128 does not divide the 352 inputs of the second embedded checkpoint's projections


def quantizer(bits: int, group: int = GROUP) -> Any:
    """Olive's quantizer of weights, asymmetric by default."""
    from olive.common.quant.utils import WeightQuantizer

    return WeightQuantizer(bits=bits, group_size=group, symmetric=False)


def choose(model: PreTrainedModel, calibration: Tensor, task: dict[str, Any]) -> Chosen:
    """Scores, and the plans of all budgets from them. Given windows replace Olive's own text, which is on a hub."""
    import olive.passes.pytorch.selective_mixed_precision as smp
    from olive.common.hf.wrapper import ModelWrapper
    from olive.passes.pytorch.quant_utils import get_qkv_quantization_groups

    low, high = get_ladder(task["ladder"]).bits
    wrapper = ModelWrapper.from_model(without_head(model))
    strategy = smp._make_scoring_strategy(task["method"], quantizer(low), quantizer(high))
    batches = [{"input_ids": window} for window in calibration.split(1)]
    with patch.object(smp, "get_calibration_dataset", lambda handler, **named: batches), torch.enable_grad():
        sizes, found = strategy.compute_unit_scores(None, wrapper, "cpu", get_qkv_quantization_groups(wrapper))
    plans = []
    for budget in task["budgets"]:
        share = (high - budget) / (high - low)  # of weights on the low rung
        moved, _ = smp.SelectiveMixedPrecision.get_overrides_from_scores(sizes, found, {"bits": high}, share)
        plans.append([int(unit[0] in moved) for unit in found])
    scores = [[-found[unit] * sizes[unit] / 1e6, 0.0] for unit in found]
    return Chosen([list(unit) for unit in found], scores, plans)


def quantized(model: nn.Module, calibration: Tensor, rung: str) -> nn.Module:
    """The model with the weights of all layers under Olive's quantizer."""
    model, rounding = copy.deepcopy(model), quantizer(int(rung.split()[0]))
    for path in layer_paths(model):
        weight = model.get_submodule(path).weight
        weight.data = rounding.fake_quantize(weight.data)
    return model


def refused(model: nn.Module, calibration: Tensor) -> dict[str, str]:
    """The errors of Olive for other schemes: it has only integers, and groups that divide the inputs of a layer."""
    found = {}
    widths = sorted({model.get_parameter(f"{path}.weight").shape[1] for path in layer_paths(model)})
    trials = {"3 bits": (3, GROUP, widths[0])} | {
        f"groups of 128 over {n} inputs": (4, 128, n) for n in widths if n % 128
    }
    for name, (bits, group, inputs) in trials.items():
        try:
            quantizer(bits, group).fake_quantize(torch.ones(1, inputs))
        except AssertionError as cause:
            found[name] = f"AssertionError: {cause}"
    return found
