"""The catalogue of suspects that a model can have, given what a log and a tokenizer tell."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.norms import epsilon_name, known_norm
from fragility_core.models.paths import branch_paths
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.numbers import multipliers_of
from fragility_engines.suspects.outputs import multiplied
from fragility_engines.suspects.rotary import rotary
from fragility_engines.suspects.sampling import heated
from fragility_engines.suspects.suspect import Suspect, assigning, change, having, new
from fragility_engines.suspects.windows import CUTS, windows

TEMPERED = "another temperature"
PLACE = "something in "
NO_CAP = 1e6  # as a softcap does nothing, and some configurations take no None


@dataclass(frozen=True)
class Facts:
    """Facts about texts, from a log and a tokenizer.

    ``first`` is the first token of the first sequence, and ``shared`` are the tokens with which all begin, if there are
    several. ``longest`` is the length of the longest sequence. ``before`` is the largest number of tokens before the
    first scored one. ``bos`` and ``preambles`` are the tokenizer's: tokens that may stand before a text, by name.
    ``head`` is a matrix of logits that lies in the model's file without being used.
    """

    first: int
    bos: int | None = None
    shared: tuple[int, ...] = ()
    longest: int = 0
    before: int = 1
    preambles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    head: Tensor | None = None

    @classmethod
    def of(cls, sequences: Sequence[Scored], bos: int | None = None, **others: Any) -> "Facts":
        """The facts of the ``sequences`` of a log."""
        texts = [tuple(each.tokens.tolist()) for each in sequences]
        columns = zip(*texts) if len(texts) > 1 else ()
        shared = takewhile(lambda column: len({*column}) == 1, columns)
        begins = tuple(column[0] for column in shared)[: min(map(len, texts)) - 2]
        before = max(int(np.flatnonzero(np.isfinite(each.logprobs[1:]))[0]) + 1 for each in sequences)
        return cls(texts[0][0], bos, begins, max(map(len, texts)), before, **others)


def beginnings(facts: Facts) -> Iterator[Suspect]:
    """Suspects of how a window begins."""
    look = "what template and tokenizer put in front of a text"
    if facts.bos is not None and facts.first == facts.bos:
        yield Suspect("a second BOS token", look, prefix=(facts.bos,))
        yield Suspect("no BOS token", look, skip=1)
    elif facts.bos is not None:
        yield Suspect("a BOS token that the tokens do not show", look, prefix=(facts.bos,))
    for name, tokens in facts.preambles.items():
        if tokens and tokens != (facts.bos,):
            yield Suspect(f"{name} that the tokens do not show", look, prefix=tokens)
    if len(facts.shared) > 1:
        count = len(facts.shared)
        yield Suspect(f"the first {count} tokens, which all sequences share, not seen", look, skip=count)
        yield Suspect(f"the first {count} tokens, which all sequences share, seen twice", look, prefix=facts.shared)


def truncations(facts: Facts) -> Iterator[Suspect]:
    """Suspects of a prompt whose left part was cut off, which shows where the engine scored what follows it."""
    look = "the longest prompt that the engine takes (num_ctx, truncate_prompt_tokens, max_model_len)"
    for kept in sorted({1, facts.before // 2, *CUTS}, reverse=True):
        if not 0 < kept < facts.before:
            continue
        yield Suspect(f"a prompt cut to its last {kept} tokens", look, kept=kept)
        if facts.first == facts.bos:
            yield Suspect(f"a prompt cut to BOS and its last {kept} tokens", look, kept=kept, prefix=(facts.bos,))


def alignments() -> Iterator[Suspect]:
    """Suspects of log-probabilities that are those of another place."""
    look = "which logits, and which entry of the log, belong to a token"
    yield Suspect("log-probabilities taken one position too late", look, ahead=1)
    yield Suspect("log-probabilities taken one position too early", look, ahead=-1)
    yield Suspect("log-probabilities written one token too late", look, late=1)
    yield Suspect("log-probabilities written one token too early", look, late=-1)
    yield Suspect("log-probabilities of the most probable tokens, not of the text's", look, top=True)
    for base in (2, 10):
        yield Suspect(f"a log in base {base}", "the unit of the log, which must be nats", unit=math.log(base))


def heads(model: Any, own: Tensor | None = None) -> Iterator[Suspect]:
    """Suspects of a head that is tied to the embedding although the model's is not, or the reverse.

    ``own`` is a head in the file of a model that ties it.
    """
    head, embedding, look = model.get_output_embeddings(), model.get_input_embeddings(), "tie_word_embeddings"
    if head is None or getattr(head, "weight", None) is None or head.weight.shape != embedding.weight.shape:
        return
    if head.weight is embedding.weight:
        if own is not None and own.shape == head.weight.shape:
            loaded = new(own.to(head.weight))
            yield Suspect("the file's own head in place of the embedding", look, assigning([(head, "weight", loaded)]))
        return
    for name, one, other in (
        ("the embedding in place of the head (tied)", head, embedding),
        ("the head in place of the embedding (tied)", embedding, head),
    ):
        yield Suspect(name, look, assigning([(one, "weight", other.weight)]))


def replaced(value: float, before: float) -> float:
    """``value``, whatever was there."""
    return value


def settings(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of single numbers: epsilon of norms, the scale of attention, softcaps, the temperature."""
    norms = [(module, str(epsilon_name(module))) for module in model.modules() if epsilon_name(module)]
    known = sorted({getattr(*each) for each in norms})
    for epsilon in (1e-2, 1e-3, 1e-5, 1e-6, 1e-12):
        if known and not any(math.isclose(epsilon, own, rel_tol=1e-3) for own in known):  # some are stored in fp32
            yield Suspect(
                f"epsilon {epsilon:g} of norms in place of {known[0]:g}", "rms_norm_eps or layer_norm_eps",
                change(norms, partial(replaced, epsilon)),
            )  # fmt: skip
    if scales := having(model, "scaling", float):
        yield Suspect(
            "another scale of attention", "1 / sqrt(head_dim), and what multiplies it",
            change(scales, lambda scale: 1.01 * scale), slope=True,
        )  # fmt: skip
    for name, multipliers in multipliers_of(model).items():
        if any(getattr(*each) != 1.0 for each in multipliers):
            yield Suspect(
                f"no {name.replace('_', ' ')}", f"{name} of the engine's configuration",
                change(multipliers, partial(replaced, 1.0)),
            )  # fmt: skip
    if caps := having(model, "attn_logit_softcapping", float):
        yield Suspect("no softcap of attention", "kernels of attention without softcap", change(caps, lambda _: NO_CAP))
    config = model.config.get_text_config()
    if isinstance(getattr(config, "final_logit_softcapping", None), float):
        cap = [(config, "final_logit_softcapping")]
        yield Suspect("no softcap of logits", "final_logit_softcapping", change(cap, lambda _: NO_CAP))
    look = "temperature, or what multiplies the logits (logits_scaling, logit_scale)"
    yield Suspect(TEMPERED, look, processed=partial(heated, 1.01), slope=True)


def scales_of_norms(model: PreTrainedModel) -> Iterator[Suspect]:
    """Suspects of norms that multiply by their weight in place of 1 + weight, or the other way round."""
    own = [module for module, _ in having(model, "weight", nn.Parameter)]
    found = [norm for module in own if (norm := known_norm(module)) is not None]
    for offset, name in ((0.0, "1 + weight in place of their weight"), (1.0, "their weight in place of 1 + weight")):
        if settings := [(norm.module, "weight") for norm in found if norm.offset == offset]:
            yield Suspect(
                f"norms that multiply by {name}", "the class of the norms, and what a converter adds to their weights",
                change(settings, partial(moved, 1 - 2 * offset)),
            )  # fmt: skip


def moved(by: float, weight: Tensor) -> nn.Parameter:
    """``weight`` plus ``by``."""
    return new(weight.detach() + by)


def places(model: PreTrainedModel) -> list[Suspect]:
    """Suspects of one place: each branch of each block, left out for whatever is wrong in it."""
    look = "the weights of this branch, the order of its heads, and the kernel that the engine runs for it"
    paths = {path: [model.get_submodule(path)] for path in branch_paths(model)}
    return [Suspect(f"{PLACE}{path}", look, partial(multiplied, found, 0), place=True) for path, found in paths.items()]


def suspects(model: PreTrainedModel, facts: Facts) -> list[Suspect]:
    """All suspects that ``model`` can have, for a log of which ``facts`` are known."""
    return [
        *beginnings(facts), *truncations(facts), *alignments(), *rotary(model), *windows(model, facts.longest),
        *heads(model, facts.head), *settings(model), *scales_of_norms(model),
    ]  # fmt: skip
