"""Token windows of a text (protocol section 2)."""

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import datasets
import torch
from datasets import DatasetDict, load_dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fragility_lab.inputs import hub
from fragility_lab.inputs.checkpoints import quiet_loading
from fragility_lab.inputs.local import EMBEDDED_TEXTS, READERS, local_rows, paragraphs, require_text
from fragility_lab.inputs.names import not_found


def load_rows(data: str) -> list[str]:
    """The text rows of ``data``: one of EMBEDDED_TEXTS, a local file, or a hub dataset name[:config[:split]].

    Local files are .txt (a row per line), or .jsonl, .json, .csv and .parquet with a column ``text``. Raises OSError if
    the data is not found, and ValueError for another kind of file or one without text.
    """
    require_text(data)
    if data in EMBEDDED_TEXTS:
        return [row for path in EMBEDDED_TEXTS[data] for row in paragraphs(path)]
    if Path(data).suffix in READERS:
        return local_rows(data)
    with quiet_loading():
        rows = _load_from_hub(*([data] if os.path.isdir(data) else data.split(":")))
    if "text" not in rows.column_names:
        raise ValueError(f'data must have a column "text", {data!r} has {", ".join(rows.column_names)}')
    kind = getattr(rows.features["text"], "dtype", "lists")
    if kind not in ("string", "large_string"):
        raise ValueError(f'the column "text" of {data!r} must hold strings, got {kind}')
    return [row for row in rows["text"] if row is not None]


def _load_from_hub(name: str, config: str | None = None, split: str = "validation"):
    error = None if os.path.isdir(name) else hub.trouble(name, "dataset")
    try:
        with patch.object(datasets.config, "HF_HUB_OFFLINE", datasets.config.HF_HUB_OFFLINE or bool(error)):
            found = hub.retried(lambda: load_dataset(name, config, split=split))
    except Exception as cause:  # the library raises a dozen unrelated types
        answered = hub.HubError(hub.reason(cause)) if hub.status(cause) else cause
        raise not_found("text", name, error or answered) from cause
    if error:
        print(f"{error}: taking {name} from this machine's cache", file=sys.stderr)
    return found[split] if isinstance(found, DatasetDict) else found


@dataclass(frozen=True)
class Opening:
    """The tokens that a tokenizer puts in front of every text, often none: their ids and their spelling."""

    ids: tuple[int, ...] = ()
    spelled: tuple[str, ...] = ()

    def window(self, stream: Tensor, start: int, length: int) -> Tensor:
        """The window (length,) whose text begins at token ``start`` of ``stream``: the opening, then the text."""
        text = stream[start : start + length - len(self.ids)]
        return torch.cat([text.new_tensor(self.ids), text]) if self.ids else text


PLAIN = Opening()


def opening(tokenizer: PreTrainedTokenizerBase) -> Opening:
    """The opening of ``tokenizer``, found by tokenizing a text. Tokens added at the end are no part of the opening.

    Raises ValueError if the text's own tokens are not among those of the text with special tokens.
    """
    given, bare = (tokenizer("text", add_special_tokens=special)["input_ids"] for special in (True, False))
    for first in range(len(given) - len(bare) + 1):
        if given[first : first + len(bare)] == bare:
            return Opening(tuple(given[:first]), tuple(tokenizer.convert_ids_to_tokens(given[:first])))
    raise ValueError(
        f"special tokens must stand around a text's own tokens, {bare}, but the tokenizer gives {given}: "
        "take one that adds its special tokens in front of a text or after it"
    )


def tokenize(rows: list[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """One stream of token ids: the rows that are not empty, joined by blank lines, without special tokens."""
    text = "\n\n".join(row for row in rows if row.strip())
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


def select_windows(
    stream: Tensor, length: int, count: int, seed: int, disjoint: bool = False, opening: Opening = PLAIN
) -> tuple[list[int], Tensor]:
    """Starts and tokens (count, length) of ``count`` windows whose texts do not overlap, in text order.

    The ``opening`` begins every window and counts in its length: the rest of a window is a slice of the stream.
    If the stream holds more windows, ``seed`` samples them, as the release does. Two seeds then share windows. With
    ``disjoint`` they share none: all windows are shuffled once, and seed s takes the s-th ``count`` of them. Raises
    ValueError if the stream holds fewer windows, and for a window that holds nothing but the opening.
    """
    step = length - len(opening.ids)
    if step < 1:
        raise ValueError(
            f"a window must hold a token of the text behind the {len(opening.ids)} with which the tokenizer begins it "
            f"({' '.join(opening.spelled)}), got windows of {length} tokens: ask for longer ones"
        )
    if seed < 0:  # Python's generator takes -1 as 1
        raise ValueError(f"seed must be at least 0, got {seed}")
    available, needed = len(stream) // step, count * (seed + 1 if disjoint else 1)
    if available < needed:
        all_seeds = f" for seeds 0 to {seed}, which share none" * disjoint
        raise ValueError(
            f"the text must hold {needed} windows of {length} tokens{all_seeds}, but its {len(stream)} tokens "
            f"make {available}: ask for fewer or shorter windows, or give a longer text (DATA=)"
        )
    if disjoint:
        chosen = random.Random(0).sample(range(available), available)[needed - count : needed]
    else:
        chosen = [*range(available)] if available == count else random.Random(seed).sample(range(available), count)
    starts = [index * step for index in sorted(chosen)]
    return starts, torch.stack([opening.window(stream, start, length) for start in starts])
