"""The comparison of an engine's log with a model: load, predict, test suspects, judge."""

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from fragility_engines.comparison.eager import as_eager, eager
from fragility_engines.comparison.gap import Gap
from fragility_engines.comparison.measuring import measure, require_fitting
from fragility_engines.comparison.page import Compared
from fragility_engines.comparison.remedies import remedies
from fragility_engines.comparison.slopes import Directions, Slope, owned, screened
from fragility_engines.comparison.verdict import judge, search
from fragility_engines.logs.sequences import Scored, read
from fragility_engines.suspects.catalogue import Facts, suspects
from fragility_engines.suspects.stale import Checkpoint, require_other
from fragility_lab.diagnosis import needs
from fragility_lab.diagnosis.request import Request
from fragility_lab.inputs import checkpoints
from fragility_lab.inputs.offloaded import on_meta
from fragility_lab.inputs.offloaded import require_fitting as require_stored
from fragility_lab.inputs.stored import weight_files
from fragility_offload.memory import require_room
from fragility_quantization.recipes import Recipe, get_recipe

MARK = "fragility"  # stands for a text in a chat template
PADDING = 8  # tokens: other numbers do much the same
LONGEST_PREAMBLE = 256  # tokens of a chat template
HEAD = "lm_head.weight"


def compare(
    log: str, model: str, recipe: str = "bf16", against: str = "", seed: int = 0, checkpoint: str = ""
) -> Compared:
    """The comparison of the file ``log`` with ``model``, by name, and with what ``recipe`` must give.

    ``against`` is another engine's log of the same tokens, which stands in the place of the fp32 model. ``checkpoint``
    names other weights of the model, which an engine may have. Raises the errors of ``logs.read``,
    ``checkpoints.load_model``, ``gap.measure``, ``Checkpoint.read`` and ``require_memory``, most of them before the
    weights are read.
    """
    chosen = get_recipe(recipe)
    sequences, reference = read(log), read(against) if against else None
    require_fitting(checkpoints.load_config(model), sequences)
    require_stored(model)
    if checkpoint:
        require_other(checkpoint, model)
    require_memory(model, chosen, max(len(each.tokens) for each in sequences), beside=bool(checkpoint))
    loaded = checkpoints.load_model(model, auto_class=AutoModelForCausalLM)
    other = Checkpoint.read(checkpoint, loaded, chosen) if checkpoint else None
    directed = Directions(loaded, sequences, suspects(loaded, told(sequences, model)), other)
    measured = partial(measure, loaded, sequences, recipe, seed=seed, reference=reference)
    gap = measured(seen=directed.see)
    engines = (f"LOG ({shown(log)})", f"AGAINST ({shown(against)})")
    found, further = explained(gap, directed, engines)
    gap, verdict = as_eager(loaded, gap, judge(gap, [*found, *further]), measured)
    wider = []
    if verdict.kind in ("rounding", "few"):  # a fault comes first, and what is wider needs none
        with nullcontext() if verdict.fused is None else eager(loaded):
            wider = remedies(loaded, sequences, gap, verdict.kind == "rounding")
    names = (shown(log), shown(model), shown(against))
    return Compared(*names, gap, found, further, verdict, len(directed.tried), wider, shown(checkpoint))


def require_memory(model: str, recipe: Recipe, length: int, beside: bool) -> None:
    """Raises ValueError if a sequence of ``length`` tokens, and another checkpoint if ``beside``, exceed the memory.

    What a pass keeps is down to half of its estimate (``needs.kept_by_blocks``).
    """
    if not recipe.rounds:  # ``Adjoint`` refuses it
        return
    made, asked = on_meta(model), Request(model=model, format=recipe.name, length=max(2, length), target="logprob")
    takes = needs.whole(asked, made) - sum(needs.activations(asked, made)) // 2 + 4 * beside * made.num_parameters()
    what = f"a comparison of {length} tokens of {shown(model)}"
    require_room(what, takes, checkpoints.default_device(), "a smaller model, shorter sequences")


def explained(
    gap: Gap, directed: Directions, names: tuple[str, str] = ("LOG", "AGAINST")
) -> tuple[list[Slope], list[Slope]]:
    """The slopes of the suspects of ``directed``, and of further suspects if none explains a gap beyond rounding.

    Between two engines with these ``names``, each certain slope gets an owner.
    """
    found, further = search(gap, directed)
    if not gap.two:
        return found, further
    whole, some = (
        [owned(over, each, directed(over, each.suspect), names) if each.certain else each for each in slopes]
        for over, slopes in ((gap, found), (screened(gap), further))
    )
    return whole, some


def told(sequences: Sequence[Scored], model: str) -> Facts:
    """Facts about the texts and the head, from the log's ``sequences``, the tokenizer and the files of ``model``."""
    facts = replace(Facts.of(sequences), head=stored_head(model))
    try:
        tokenizer = checkpoints.load_tokenizer(model)
    except (OSError, ValueError):
        return replace(facts, bos=(ids := configured(model))[0], preambles=special(*ids))
    return replace(facts, bos=tokenizer.bos_token_id, preambles=preambles(tokenizer))


def configured(model: str) -> list[int | None]:
    """The ids of BOS, EOS and padding in the configuration of ``model``, the first of several; None without one."""
    config = checkpoints.load_config(model).get_text_config()
    ids = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    first = ([*each, None][0] if isinstance(each, list | tuple) else each for each in ids)
    return [each if each in range(config.vocab_size) else None for each in first]


def special(bos: int | None, eos: int | None, pad: int | None) -> dict[str, tuple[int, ...]]:
    """Tokens other than ``bos`` that may stand before a text, by name: EOS, or padding of PADDING tokens."""
    found: dict[str, tuple[int, ...]] = {} if eos is None or eos == bos else {"an EOS token": (eos,)}
    return found if pad is None else found | {"padding": (pad,) * PADDING}


def preambles(tokenizer: PreTrainedTokenizerBase) -> dict[str, tuple[int, ...]]:
    """Tokens that ``tokenizer`` may put before a text, by name: the beginning of its chat template, EOS, padding."""
    found = special(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    with suppress(Exception):  # a template is a program of somebody else, and fails in its own ways
        words = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        before = str(words).partition(MARK)[0]
        begins = tokenizer(before, add_special_tokens=False)["input_ids"]
        found["a chat template"] = tuple(begins)[:LONGEST_PREAMBLE]
    return {name: tokens for name, tokens in found.items() if tokens}


def stored_head(model: str) -> Tensor | None:
    """The matrix called lm_head in the files of ``model`` if its configuration ties the head; None if there is none."""
    config = checkpoints.load_config(model).get_text_config()
    if not getattr(config, "tie_word_embeddings", False):
        return None
    for path in weight_files(Path(checkpoints.located(model, weights=True)), model):
        with safe_open(path, "pt") as file:
            if HEAD in file.keys():  # noqa: SIM118
                return file.get_tensor(HEAD)
    return None


def shown(name: str) -> str:
    """``name`` as a page shows it: of a path on this machine the last part."""
    return Path(name).name if os.path.exists(name) else name
