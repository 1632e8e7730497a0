"""Settings in which a model and its original differ. Their effect is not rounding."""

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fragility_lab.inputs.checkpoints import load_config
from fragility_lab.inputs.offloaded import load_beside
from fragility_lab.measurement.comparison import compare, observe_each

# Entries of a configuration that no pass in evaluation mode reads. All others count, those of the future as well.
ASIDE = re.compile(
    r"_*(model_)?name_or_path|_commit_hash|architectures|auto_map|(torch_)?dtype|transformers_version|use_cache"
    r"|\w*token_ids?|\w*drop(out)?\w*|initializer_\w+|output_\w+|return_dict|pretraining_tp|\w*aux_loss_coef|id2label"
    r"|label2id|num_labels|problem_type|task_specific_params|summary_\w+|tokenizer_class|\w*attn_implementation\w*"
)
NOTHING: tuple[Any, ...] = (None, False, 0, "none", [], ())  # values that mean the same as no entry
NOISE = 1e-6  # the relative error that the order of sums makes in fp32; the KL divergence that it makes is smaller


def differing(model: PreTrainedConfig, reference: PreTrainedConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ between two configurations, by name: the value of ``model`` and that of ``reference``.

    Numbers that fp32 cannot tell apart are the same, since GGUF files store settings in fp32.
    """
    a, b = (dict(flat(config.get_text_config().to_dict())) for config in (model, reference))
    pairs = {name: (a.get(name), b.get(name)) for name in sorted({*a, *b})}
    return {name: pair for name, pair in pairs.items() if not same(*pair)}


def flat(settings: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of ``settings`` that count; one inside a dictionary is named "rope_parameters.rope_theta"."""
    for name, value in settings.items():
        if isinstance(value, dict) and not ASIDE.fullmatch(name):
            yield from flat(value, f"{before}{name}.")
        elif not ASIDE.fullmatch(name):
            yield before + name, list(value) if isinstance(value, tuple) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b or (a in NOTHING and b in NOTHING)


def in_words(found: dict[str, tuple[Any, Any]]) -> str:
    """The settings ``found`` by ``differing``, with both values."""
    return ", ".join(f"{name} ({a} and {b})" for name, (a, b) in found.items())


def require_same_settings(name: str, reference: str, original: PreTrainedModel, windows: Tensor) -> None:
    """Raises ValueError if the settings of the model ``name`` make another function than those of ``reference``.

    ``original``, the model of ``reference``, runs over ``windows`` (B, T) in fp32 with both. The error says what the
    settings change. If they change nothing, they are named on stderr.
    """
    if not (found := differing(load_config(name), load_config(reference))):
        return
    alone = effect(name, reference, original, windows)
    if max(alone.mismatch.max(), alone.kl.max()) <= NOISE:  # a scale of logits leaves the hidden state alone
        print(f"these settings differ and change nothing over the windows: {in_words(found)}", file=sys.stderr)
        return
    raise ValueError(
        "not rounding: these settings differ between MODEL= and REFERENCE_MODEL=, "
        f"{in_words(found)}. With the same weights in fp32 they alone change the final hidden state by a mismatch of "
        f"{alone.mismatch.mean():.3g} and the next token by a KL divergence of {alone.kl.mean():.3g} nats, means over "
        f"{len(alone)} windows: give both one configuration, then ask what rounding does"
    )


def effect(name: str, reference: str, original: PreTrainedModel, windows: Tensor) -> pd.DataFrame:
    """The table of ``comparison.compare`` for the weights of ``reference`` with the configuration of ``name``."""
    other = load_beside(original, reference, load_config(name))
    other.set_attn_implementation(original.config._attn_implementation)
    passes = zip(observe_each(other, windows), observe_each(original, windows), windows.split(1))
    return pd.concat([compare(*one)[0] for one in passes], ignore_index=True)
