"""Intel AutoRound's AutoScheme, as of 0.16 (https://github.com/intel/auto-round).

Its score sums |gradient x error| over the entries of weights and inputs, at the point where every layer is on the same
rung. Dynamic programming over these then finds the plan.
"""

import copy
import os
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_peers.ladders import MXFP4_WEIGHTS, get_ladder
from fragility_peers.tasks import BATCH, Chosen, layer_paths


def scheme(rung: str) -> Any:
    """AutoRound's scheme for a rung: a preset, except for MXFP4 weights beside inputs of 16 bits."""
    from auto_round.schemes import QuantizationScheme, preset_name_to_scheme

    if rung == MXFP4_WEIGHTS:
        return QuantizationScheme.from_dict({"bits": 4, "group_size": 32, "data_type": "mx_fp", "act_bits": 16})
    return preset_name_to_scheme("BF16" if rung == "none" else rung)


def choose(model: nn.Module, calibration: Tensor, task: dict[str, Any]) -> Chosen:
    """The plans of AutoScheme for a list of budgets. It would load a data set by name; here it is given the windows."""
    from auto_round.auto_scheme import delta_loss
    from auto_round.auto_scheme.gen_auto_scheme import AutoScheme, GenScheme

    ladder, paths, tables = get_ladder(task["ladder"]), layer_paths(model), []
    batches = [{"input_ids": w, "attention_mask": torch.ones_like(w)} for w in calibration.split(BATCH)]
    solve = delta_loss.choose_bits_per_layer_with_path

    def solving(layers: dict, *given: Any) -> Any:
        tables.append(layers)
        return solve(layers, *given)

    options = [scheme(name) for name in ladder.names]
    asked = AutoScheme(
        avg_bits=list(map(float, task["budgets"])), options=options, nsamples=len(calibration),
        seqlen=calibration.shape[1], batch_size=BATCH, ignore_scale_zp_bits=True, low_cpu_mem_usage=False,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as cache,  # of scores: those of an earlier run would take no time
        patch.dict(os.environ, {"AR_AUTO_SCHEME_CACHE": cache}),
        patch.object(delta_loss, "get_dataloader", lambda *given, **named: batches),
        patch.object(delta_loss, "choose_bits_per_layer_with_path", solving),
    ):
        tokenizer = load_tokenizer(task["model"])
        found = GenScheme(asked, copy.deepcopy(model), paths, {}, "given", "cpu", tokenizer).get_layer_config()
    units = [list(options[0][3]) for options in tables[0].values()]
    scores = [losses(rows, len(options)) for rows in tables[0].values()]
    plans = [[number(found[budget][unit[0]], options) for unit in units] for budget in asked.avg_bits]
    return Chosen(units, scores, plans)


def losses(rows: Sequence[tuple], rungs: int) -> list[float]:
    """The score on every rung, of AutoRound's rows of (number of the rung, bits, loss, paths)."""
    known = {row[0]: float(row[2]) for row in rows}
    return [known[rung] for rung in range(rungs)]


def number(config: dict[str, Any], options: Sequence[Any]) -> int:
    """The number, among the ``options``, of a layer's configuration."""
    return next(
        i for i, option in enumerate(options) if all(config.get(key) == value for key, value in vars(option).items())
    )


def quantized(model: nn.Module, calibration: Tensor, rung: str) -> nn.Module:
    """The model with all layers rounded to nearest, as AutoRound does without iterations of tuning."""
    from auto_round.auto_scheme.utils import apply_quant_scheme
    from auto_round.wrapper import WrapperLinear

    model, paths = copy.deepcopy(model), layer_paths(model)
    apply_quant_scheme(model, paths, {}, vars(scheme(rung)))
    for path in paths:
        layer: Any = model.get_submodule(path)
        layer.scale_dtype = torch.float16 if layer.act_bits > 8 else torch.bfloat16  # as AutoScheme sets it
        off = {"enable_minmax_tuning": False, "enable_norm_bias_tuning": False, "enable_round_tuning": False}
        wrapper = WrapperLinear(layer, device="cpu", enable_torch_compile=False, iters=0, **off)
        model.set_submodule(path, wrapper.unwrapper({}))
    return model
