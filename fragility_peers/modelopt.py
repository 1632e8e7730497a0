"""NVIDIA ModelOpt's AutoQuantize, as of 0.47 (https://github.com/NVIDIA/Model-Optimizer).

"gradient" takes squares of gradient times output error, with the loss of the text's own tokens, and an integer program.
"kl_div" measures the KL of each layer alone, and quantizes all layers below one threshold, small and large alike.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_peers.ladders import get_ladder
from fragility_peers.tasks import BATCH, Chosen, without_head

NEEDING_CUDA = ("MXFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG")


def choose(model: PreTrainedModel, calibration: Tensor, task: dict[str, Any]) -> Chosen:
    """Scores from one search, and the plans of all budgets from them, as ``get_auto_quantize_config`` finds these."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.algorithms import _resolve_best_recipe

    ladder = get_ladder(task["ladder"])
    formats = [getattr(mtq, name) for name in ladder.names if name != "none"]
    ways: dict[str, Any] = {"quantization_formats": formats}
    if "none" not in ladder.names:
        every = {"module_name_patterns": ["*"], "quantization_formats": formats, "allow_no_quant": False}
        ways["module_search_spaces"] = [every]
    if task["method"] == "gradient":
        ways["forward_step"] = lambda m, tokens: m(tokens, labels=tokens, use_cache=False)
        ways["loss_func"] = lambda output, tokens: output.loss
    else:
        ways["forward_step"] = lambda m, tokens: m(tokens, use_cache=False).logits
    batches = list(calibration.split(BATCH))
    _, state = mtq.auto_quantize(
        without_head(model), constraints={"effective_bits": float(task["budgets"][-1])}, data_loader=batches,
        num_calib_steps=len(batches), num_score_steps=len(batches), method=task["method"], **ways,
    )  # fmt: skip
    stats = state["candidate_stats"]
    scores, plans = [], []
    for row in stats.values():
        known = dict(zip(map(rung_name, row["formats"]), row["scores"]))
        scores.append([float(known[name]) for name in ladder.names])
    for budget in task["budgets"]:
        recipes = _resolve_best_recipe(state, {"effective_bits": budget})
        plans.append([ladder.names.index(rung_name(recipes[name])) for name in stats])
    return Chosen([list(row["module_names"]) for row in stats.values()], scores, plans)


def rung_name(recipe: Any) -> str:
    """The name of a rung of a ``QuantRecipe``, whose text is such as "FP8_DEFAULT_CFG(effective-bits: 8.0)"."""
    name = str(recipe).partition("(")[0]
    return "none" if name == "NONE" else name


def quantized(model: nn.Module, calibration: Tensor, rung: str) -> nn.Module:
    """The model with all layers under a configuration's quantizers. Static scales of inputs come from calibration."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, rung))
    return mtq.quantize(copy.deepcopy(model), config, lambda m: [m(w, use_cache=False) for w in calibration.split(1)])


def refused(model: nn.Module, calibration: Tensor) -> dict[str, str]:
    """The errors on a CPU of configurations that have kernels for GPUs alone, by name."""
    found = {}
    for name in NEEDING_CUDA:
        try:
            quantized(model, calibration[:1], name)(calibration[:1], use_cache=False)
        except Exception as cause:  # any failure of the library is meant, whatever its type: its text is the answer
            found[name] = f"{type(cause).__name__}: {cause}"
    return found
