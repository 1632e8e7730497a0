"""The comparison of an engine's log with a model: load, predict, test suspects, judge."""

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_engines.gap import Gap, measure, require_fitting
from fragility_engines.logs import Scored, read
from fragility_engines.page import Compared
from fragility_engines.slopes import Directed, Slope, direction, screened
from fragility_engines.suspects import branches, suspects
from fragility_engines.verdict import judge, search
from fragility_lab.inputs import checkpoints
from fragility_lab.inputs.offloaded import require_fitting as require_memory
from fragility_quantization.recipes import get_recipe


def compare(log: str, model: str, recipe: str = "bf16", against: str = "", probes: int = 2, seed: int = 0) -> Compared:
    """The comparison of the file ``log`` with ``model``, by name, and with what ``recipe`` must give.

    ``against`` is another engine's log of the same tokens, which stands in the place of the fp32 model. Raises the
    errors of ``logs.read``, ``checkpoints.load_model`` and ``gap.measure``, most of them before the weights are read.
    """
    get_recipe(recipe)
    sequences, reference = read(log), read(against) if against else None
    require_fitting(checkpoints.load_config(model), sequences)
    require_memory(model)
    loaded = checkpoints.load_model(model, auto_class=AutoModelForCausalLM)
    gap = measure(loaded, sequences, recipe, probes, seed, reference)
    found, inside = explained(gap, loaded, sequences, beginning(model)) if not against else ([], [])
    return Compared(shown(log), shown(model), shown(against), gap, found, inside, judge(gap, [*found, *inside]))


def explained(
    gap: Gap, model: PreTrainedModel, sequences: Sequence[Scored], bos: int | None
) -> tuple[list[Slope], list[Slope]]:
    """The slopes of suspects; and if none explains a gap that is more than rounding, those of branches.

    A suspect that changes a number a little is tested over all tokens. Of the others, those that are most alike over
    few tokens are.
    """

    def directed(part: Gap) -> Directed:
        return lambda suspect: direction(part, model, sequences, suspect)

    part = screened(gap)
    tried = suspects(model, int(sequences[0].tokens[0]), bos)
    return search(gap, part, tried, branches(model), directed(gap), directed(part))


def beginning(model: str) -> int | None:
    """The token that the tokenizer of ``model`` calls BOS; None without a tokenizer."""
    try:
        return checkpoints.load_tokenizer(model).bos_token_id
    except (OSError, ValueError):
        return None


def shown(name: str) -> str:
    """``name`` as a page shows it: of a path on this machine the last part."""
    return Path(name).name if os.path.exists(name) else name
