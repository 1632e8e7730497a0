"""Lesson 6: the reader's own text through the embedded checkpoint, and the error of each of its tokens by depth."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from fragility_lessons import window
from fragility_lessons.explorers import Control, Figure
from fragility_lessons.pictures import LIMIT, Picture, finish, panels
from fragility_numerics.formats import get_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from fragility_core.surrogates.monitor import Monitor

MOST = 64  # tokens: a pass over them takes a fraction of a second
START = "Return a copy of the string with all upper case letters made lower case."


def _tokenizer() -> "Tokenizer":
    from fragility_lab.inputs.checkpoints import EMBEDDED, load_tokenizer  # as in ``window``

    return load_tokenizer(EMBEDDED)


@lru_cache(maxsize=8)
def encoded(text: str) -> Tensor:
    """The first tokens (1, T) of ``text``, up to MOST + 1: the last shows that the text is longer; none for blanks."""
    if not text.strip():
        return torch.empty(1, 0, dtype=torch.int64)
    return _tokenizer()(text, truncation=True, max_length=MOST + 1, return_tensors="pt").input_ids


@lru_cache(maxsize=8)
def words(text: str) -> list[str]:
    """The first MOST tokens of ``text``, as a reader sees them."""
    tokens, tokenizer = encoded(text)[0, :MOST].tolist(), _tokenizer()
    return [window.readable(str(tokenizer.decode([token]))) for token in tokens]


@torch.no_grad()
def _states(monitor: "Monitor", tokens: Tensor) -> Tensor:
    """The hidden states (L, T, d_model) of one window after every block."""
    from fragility_core.models.paths import final_hidden
    from fragility_lab.measurement.comparison import block_outputs

    with block_outputs(monitor.model) as seen, monitor.running():
        final_hidden(monitor.model, tokens)
    return torch.stack(seen)[:, 0].float()


@lru_cache(maxsize=8)
def errors(text: str, format: str) -> np.ndarray:
    """||x~_t - x_t|| / ||x_t|| of the first MOST tokens t of ``text`` after every block, (L, T)."""
    from fragility_lessons import embedded

    tokens = encoded(text)[:, :MOST]
    reference, states = (_states(monitor, tokens) for monitor in (embedded.prepared()[0], window.monitor(format)))
    norms = torch.linalg.vector_norm
    return (norms(states - reference, dim=-1) / norms(reference, dim=-1)).numpy()


@lru_cache(maxsize=2)
def everything(text: str, format: str) -> Axes:
    """The error of all tokens after every block, drawn once for all choices of a token."""
    shares = errors(text, format)
    layers, count = shares.shape
    (axes,) = panels(4.8, height=3.8)
    edges = np.arange(count + 1) - 0.5, np.arange(layers + 1) - 0.5
    axes.pcolormesh(*edges, np.log10(shares), cmap="YlOrBr")
    ticks: dict[str, Any] = {"xticks": range(0, count, max(1, count // 6)), "yticks": range(0, layers, 2)}
    finish(axes, "token", "after block", "error of every token (dark: large)", **ticks)
    return axes


def depth(text: str, token: int, format: str) -> Picture:
    """First panel: the error of all tokens after every block. Second: that of ``token``, in the band of all tokens."""
    shares, unit, here = errors(text, format), get_format(format).unit_roundoff, words(text)[token]
    layers, count = shares.shape
    (single,) = panels(4.8, height=3.8)
    single.fill_between(range(layers), shares.min(1), shares.max(1), color="C0", alpha=0.15, label="all tokens")
    single.plot(np.median(shares, axis=1), color="0.4", label="their median")
    single.plot(shares[:, token], "o-", color="C3", markersize=5, label=f"“{here}”".replace("$", r"\$"))
    single.axhline(unit, **LIMIT | {"label": "u"})
    limits = {"ylim": (unit / 8, 512 * unit), "xticks": range(0, layers, 2)}
    finish(single, "block", "relative error", f"error of token {token}", "y", "upper left", **limits)
    rank = 1 + int((shares[-1] > shares[-1, token]).sum())
    cut = f" Only the first {MOST} tokens are read." if encoded(text).shape[1] > MOST else ""
    return [everything(text, format), single], (
        f"{format}, token {token} “{here}”: off by {shares[0, token]:.2g} after block 0 and by {shares[-1, token]:.2g} "
        f"at the end, the error of rank {rank} among {count} tokens.{cut}"
    )


def explorer(text: str = START) -> Figure:
    """The errors of a reader's text, with a button for each of its tokens. Raises ValueError if there is none."""
    if not words(text):
        raise ValueError("there is no text yet: write a few words between the quotation marks")
    tokens = [f"{place} {word}" for place, word in enumerate(words(text))]

    def draw(token: str, format: str) -> Picture:
        return depth(text, tokens.index(token), format)

    formats = Control("menu", "format", window.FORMATS, "bf16")
    return Figure(draw, {"token": Control("buttons", "token", tokens, tokens[0]), "format": formats})
